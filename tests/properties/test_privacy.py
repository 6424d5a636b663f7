"""Encryption of captured records: what was written comes back, and damaged bytes are a named error."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.privacy import Captured, Content, Level, RecordDamaged, SubjectErased, redact_text
from etude.privacy.keys import Key
from etude.privacy.records import seal, unseal
from etude.records import Version, VersionSpan

KEY = Key("0" * 32, bytes(range(32)))
RECORD = Captured(
    record_id="1" * 32,
    response_id="2" * 32,
    answer=0,
    organisation="3" * 32,
    subject="4" * 32,
    level=Level.TRAIN,
    at=1.5,
    expires=2.5,
    model="laptop",
    version="v",
    key_id=KEY.id,
)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)
contents = st.builds(
    lambda dialect, prompt, sampled, data: Content(
        dialect=dialect,
        finish="stop",
        num_prompt=len(prompt),
        num_sampled=len(sampled),
        messages=data,
        prompt_ids=np.array(prompt, np.int32),
        token_ids=np.array(sampled, np.int32),
        logprobs=np.linspace(-1, 0, len(sampled), dtype=np.float32),
        spans=(VersionSpan(Version(3, "0a1b2c3d", "ab" * 32), len(sampled)),),
    ),
    st.text(max_size=20),
    ids,
    ids,
    st.binary(max_size=200),
)


def plain(content: Content) -> list[object]:
    return [x.tolist() if isinstance(x, np.ndarray) else x for x in msgspec.structs.astuple(content)]


@given(contents)
def test_what_was_sealed_comes_back(content):
    assert plain(unseal(RECORD, seal(RECORD, content, KEY), KEY)) == plain(content)


@given(contents, st.data())
def test_a_flipped_bit_a_cut_or_an_addition_is_damage(content, data):
    sealed = seal(RECORD, content, KEY)
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    flipped = bytearray(sealed)
    flipped[bit // 8] ^= 1 << bit % 8
    cut = sealed[: data.draw(st.integers(0, len(sealed) - 1))]
    for wrong in (bytes(flipped), cut, sealed + data.draw(st.binary(min_size=1, max_size=9))):
        with pytest.raises(RecordDamaged):
            unseal(RECORD, wrong, KEY)


@given(st.binary(max_size=300))
def test_any_bytes_are_damage_and_never_another_error(data):
    with pytest.raises(RecordDamaged):
        unseal(RECORD, data, KEY)


@given(contents)
def test_two_records_never_have_equal_bytes_and_no_other_key_reads_them(content):
    sealed = seal(RECORD, content, KEY)
    assert seal(RECORD, content, KEY) != sealed
    with pytest.raises(RecordDamaged):
        unseal(RECORD, sealed, Key(KEY.id, bytes(32)))
    for key in (None, Key("f" * 32, KEY.secret)):
        with pytest.raises(SubjectErased):
            unseal(RECORD, sealed, key)


@given(st.text(), st.text())
def test_an_address_is_hidden_wherever_it_stands(before, after):
    assert "bob.smith@mail.example.org" not in redact_text(f"{before} bob.smith@mail.example.org {after}")

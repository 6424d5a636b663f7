"""The delta file against damage: a refusal or the right arrays, whatever the bytes; and a base that stays."""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import WeightsError
from etude.weights import apply, encode
from etude.weights.delta.delta_file import DIGEST_BYTES, MAGIC, read

Weights = dict[str, np.ndarray]  # type: ignore[type-arg]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
ARRAYS = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 255, shape).astype(dtype),
    st.sampled_from([np.uint8, np.uint16, np.float32, np.float16]),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.integers(0, 3),
)
SETS = st.dictionaries(NAMES, ARRAYS, max_size=5)


@given(SETS, SETS, st.booleans())
def test_any_set_of_arrays_becomes_any_other(old: Weights, new: Weights, near: bool) -> None:
    new = {**old, **new} if near else new
    made = apply(old, encode(old, new))
    assert made.keys() == new.keys()
    for name, value in new.items():
        assert (made[name].dtype, made[name].shape, made[name].tobytes()) == (
            value.dtype,
            value.shape,
            value.tobytes(),
        )


def sample() -> tuple[Weights, Weights]:
    rng = np.random.default_rng(1)
    old = {
        "gone": np.zeros(3, np.uint8),
        "kept": np.arange(5, dtype=np.float32),
        "w": rng.integers(0x3C00, 0x3E00, 300).astype(np.uint16),
        "x": np.zeros((2, 3), np.uint8),
    }
    new = {
        "kept": old["kept"],
        "new": np.ones(4, np.float16),
        "w": old["w"] + (rng.random(300) < 0.2).astype(np.uint16),
        "x": np.zeros((3, 2), np.uint8),
    }
    return old, new


def sealed(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


@given(st.data())
def test_mutated_bytes_are_refused_or_lead_to_proven_arrays_and_leave_the_base(data: st.DataObject) -> None:
    old, new = sample()
    body = bytearray(encode(old, new)[:-DIGEST_BYTES])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert", "end"])):
            case "set":
                body[at] = data.draw(st.integers(0, 255))
            case "cut":
                del body[at : at + data.draw(st.integers(1, 8))]
            case "insert":
                body[at:at] = data.draw(st.binary(max_size=8))
            case "end":
                del body[at + 1 :]
        if not body:
            break
    apply_or_refuse(sealed(bytes(body)), old)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    for bad in (data, sealed(data)):
        with pytest.raises(WeightsError):
            apply({}, bad)
    apply_or_refuse(sealed(MAGIC + struct.pack("<HH", 2, 0) + data), {})


@pytest.mark.parametrize("mutations", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_single_mutations_with_the_digest_fixed_up_give_no_wrong_bytes(mutations: int) -> None:
    old, new = sample()
    body = encode(old, new)[:-DIGEST_BYTES]
    chance = random.Random(11)
    for _ in range(mutations):
        bad = bytearray(body)
        bad[chance.randrange(len(bad))] ^= chance.randrange(1, 256)
        apply_or_refuse(sealed(bytes(bad)), old)


def test_every_flipped_bit_and_every_cut_end_is_seen_by_the_files_own_digest() -> None:
    old, new = sample()
    good = encode(old, new)
    for at in range(len(good)):
        flipped = bytearray(good)
        flipped[at] ^= 1 << (at % 8)
        for bad in (bytes(flipped), good[:at]):
            with pytest.raises(WeightsError):
                read(bad)


def test_counts_that_claim_more_than_there_is_are_refused_without_memory_for_them() -> None:
    wild = (1 << 32) - 1
    for counts in ((wild, 0, 0, 0), (0, wild, 0, 0), (0, 0, wild, 0), (0, 0, 0, wild), (1 << 22, 0, 0, 0)):
        with pytest.raises(WeightsError, match="damaged"):
            read(sealed(struct.pack("<4sHHIIII", MAGIC, 2, 0, *counts)))


def apply_or_refuse(data: bytes, old: Weights) -> None:
    """Arrays only with the digests that the file states; the base is what it was."""
    held = {name: value.tobytes() for name, value in old.items()}
    out = {name: value.copy() for name, value in old.items()}
    for target in (None, out):
        try:
            made = apply(old if target is None else out, data, out=target, limit_bytes=1 << 20)
        except WeightsError:
            assert {name: value.tobytes() for name, value in out.items()} == held
        else:
            expected = {e.name: e.new_checksum for e in read(data).entries if e.new}
            assert made.keys() == expected.keys()
    assert {name: value.tobytes() for name, value in old.items()} == held

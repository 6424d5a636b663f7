"""Mixtures: shares of sources, caps of epochs, and no document twice before its source is used up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.corpus import make

from etude.corpus.config import CorpusConfig, FimConfig
from etude.corpus.fim import Sentinels, rearranged
from etude.corpus.mixture import Supply, allotted, draw


def supply(name: str, count: int, first: int, max_epochs: float = 1.0, size: int = 10) -> Supply:
    keys = np.arange(first, first + count, dtype=np.uint64) * np.uint64(7919)
    return Supply(name, np.arange(first, first + count), np.full(count, size), keys, max_epochs, seed=0)


@pytest.fixture
def config(tmp_path) -> CorpusConfig:
    kind = {"kind": "folder", "path": str(tmp_path)}
    sources = [{"name": name, "kind": kind} for name in ("big", "small")]
    phases = [
        {"name": "one", "tokens": 400, "mix": {"big": 1, "small": 1}},
        {"name": "two", "tokens": 400, "mix": {"big": 1, "small": 3}},
    ]
    return make.config(tmp_path, sources=sources, phases=phases)


def test_phases_go_on_where_the_last_one_ended_and_a_cap_gives_its_share_to_others(config):
    one, two = draw(config, [supply("big", 100, 0), supply("small", 20, 100, max_epochs=2.0)])
    assert one.by_source["big"][:2] == (20, 200)
    assert one.by_source["small"] == (20, 200, 1.0)
    assert two.by_source["small"] == (20, 200, 2.0)  # 300 were asked for
    assert two.by_source["big"][:2] == (20, 200)
    taken = [d for d in [*one.documents_D, *two.documents_D] if d < 100]
    assert len(taken) == len(set(taken)) == 40
    assert sorted(d for d in one.documents_D if d >= 100) == list(range(100, 120))
    assert not one.missing_tokens


def test_what_all_sources_cannot_give_is_said(config):
    one, two = draw(config, [supply("big", 30, 0), supply("small", 5, 100)])
    assert (one.missing_tokens, two.missing_tokens) == (50, 400)
    assert len(two.documents_D) == 0


def test_the_documents_of_a_phase_are_shuffled_together_and_epochs_have_other_orders(config):
    one, two = draw(config, [supply("big", 20, 0, max_epochs=3.0), supply("small", 20, 100, max_epochs=3.0)])
    is_big = one.documents_D < 100
    assert (np.diff(is_big.astype(int)) != 0).sum() > 4
    assert is_big[:20].sum() not in (0, 20)
    assert sorted(one.documents_D[is_big]) == sorted(set(one.documents_D[is_big]))
    assert list(one.documents_D[~is_big]) != list(two.documents_D[two.documents_D >= 100])[:20]


def test_without_phases_every_document_comes_once(tmp_path):
    config = make.config(tmp_path, sources=[{"name": "a", "kind": {"kind": "folder", "path": "x"}, "max_epochs": 5.0}])
    (whole,) = draw(config, [supply("a", 33, 0, max_epochs=5.0)])
    assert sorted(whole.documents_D) == list(range(33))


@given(
    st.integers(0, 10**9),
    st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(0, 10**8)), min_size=1, max_size=5),
)
def test_shares_never_exceed_caps_and_only_stop_short_at_all_caps(num_tokens, drawn):
    shares = {f"s{i}": share for i, (share, _) in enumerate(drawn)}
    left = {f"s{i}": cap for i, (_, cap) in enumerate(drawn)}
    given_tokens = allotted(num_tokens, shares, left)
    assert all(0 <= given_tokens[name] <= left[name] for name in shares)
    total = sum(given_tokens.values())
    room = [name for name in shares if shares[name] > 0 and given_tokens[name] < left[name]]
    assert total <= num_tokens
    assert total == num_tokens or not room


@given(st.text(max_size=30), st.integers(), st.floats(0.0, 1.0))
def test_every_character_of_a_document_stays_once_in_fim(text, key, spm):
    parts = rearranged(text, FimConfig(rate=1.0, spm=spm), Sentinels(1, 2, 3), key=key)
    assert parts is not None
    texts = [part for part in parts if isinstance(part, str)]
    assert [part for part in parts if isinstance(part, int)] in ([1, 2, 3],)
    if parts[1] == 2:  # suffix first
        suffix, prefix, middle = texts
    else:
        prefix, suffix, middle = texts
    assert prefix + middle + suffix == text


def test_rates_are_kept_over_many_documents():
    made = [rearranged("a text", FimConfig(rate=0.3, spm=0.25), Sentinels(1, 2, 3), key=i) for i in range(4_000)]
    split = [parts for parts in made if parts is not None]
    assert abs(len(split) / 4_000 - 0.3) < 0.03
    assert abs(sum(parts[1] == 2 for parts in split) / len(split) - 0.25) < 0.05
    assert rearranged("a text", FimConfig(), Sentinels(1, 2, 3), key=0) is None

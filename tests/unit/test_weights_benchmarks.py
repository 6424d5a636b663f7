"""The benchmarks of weights run from end to end on a model of no size; no time is looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.weights import delta, delta_pairs
from benchmarks.weights import follow as weights_follow
from benchmarks.weights import stall as weights_stall
from benchmarks.weights.delta_peers import peers

from etude.weights.delta import native
from etude.weights.delta.bound import bound_bytes

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Pairs of a tiny model, trained here."""
    sizes = replace(delta_pairs.SIZES, hidden_size=64, num_layers=1, num_heads=2, head_dim=32, expert_size=32)
    monkeypatch.setattr(delta_pairs, "SIZES", sizes)
    monkeypatch.setattr(delta_pairs, "PRETRAIN_STEPS", 20)  # fewer: no byte is right, so no gradient
    monkeypatch.setattr(delta_pairs, "WARM_STEPS", 2)
    monkeypatch.setattr(delta_pairs, "ROWS", 2)
    monkeypatch.setattr(delta_pairs, "BRANCHES", {"adamw-1e-6": 1e-6, "muon-3e-6": 3e-6})
    delta_pairs.make(tmp_path)
    return tmp_path


def test_pairs_change_more_the_further_they_are_apart_and_less_the_coarser_their_format(folder):
    shares = {}
    for name in delta_pairs.names():
        pair = delta_pairs.load(name, folder)
        shares[name] = delta_pairs.changed_share(pair.old, pair.new)
    for branch in delta_pairs.BRANCHES:
        assert 0 < shares[f"bf16/{branch}/1"] < shares[f"bf16/{branch}/4"] < shares[f"bf16/{branch}/16"] < 1
        assert shares[f"bf16/{branch}/16"] > shares[f"fp8/{branch}/16"] > shares[f"fp4/{branch}/16"]
    assert len(list(delta_pairs.versions(folder))) == 17


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
@pytest.mark.parametrize("form", delta_pairs.FORMATS)
def test_a_pair_is_measured_in_both_modes_and_by_every_peer_that_is_here(folder, form):
    pair = delta_pairs.load(f"{form}/adamw-1e-6/16", folder)
    others = peers()
    row = delta.measure(pair, others, repeats=1, least_bytes=200_000)
    assert row["bound_bytes"] == round(bound_bytes(pair.new, pair.old))
    for mode in delta.MODES:
        assert 0 < row["coders"][mode]["of_bound"] < 1
    for peer in others:
        assert ("missing" in row["coders"][peer.name]) == bool(peer.why_not)
    assert delta.table([row]).row_count == 1 + len(row["coders"])


def test_a_learner_waits_for_its_weights_to_be_read(tmp_path):
    found = weights_stall.measure(weights_stall.cases()["tiny"], 2, tmp_path)
    assert 0 < found["read_s"] <= found["stall_s_max"]


@pytest.mark.parametrize("layout", weights_follow.LAYOUTS)
@pytest.mark.parametrize("way", weights_follow.WAYS)
def test_an_engine_follows_every_version_and_who_is_late_fetches_less_than_the_chain(folder, tmp_path, way, layout):
    found = weights_follow.measure(tmp_path / "store", folder, 2 if layout == "stacked" else 1, [way], layout)
    assert found["follow"][way]["list_bytes"] > 0
    assert found["catch_up"]["fetched_bytes"] < found["catch_up"]["chain_bytes"]

"""What `etude weights` says about a channel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from etude.errors import WeightsError
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Tensor, chain
from etude.weights.chain.compactor import Compactor
from etude.weights.chain.inspect import diff, find, log, repair, verify
from etude.weights.chain.manifest import Kind
from etude.weights.chain.signing import Signer, new_key

Policy = Callable[..., dict[str, Tensor]]


@pytest.fixture
def store(policy: Policy) -> MemoryStore:
    """Versions 0 to 3, then a restart at 2 that leaves the old 2 and 3 behind."""
    store = MemoryStore()
    writer, parents = Channel(store, incarnation="aaaaaaaa"), []
    for step in range(4):
        parent = parents[-1] if parents else None
        parents.append(writer.publish(policy(step), step=step, parent=parent, rollout_ids=[f"r{step}"]).version)
    Channel(store, incarnation="bbbbbbbb").publish(policy(7), step=2, parent=parents[1], rollout_ids=["r7"])
    return store


def test_the_log_has_a_row_for_each_version_with_its_bytes_and_lineage(store: MemoryStore) -> None:
    rows = log(store)
    assert [row.version.step for row in rows] == [0, 1, 2, 3, 2]
    assert [row.in_lineage for row in rows] == [True, True, False, False, True]
    assert [row.kind for row in rows[:2]] == [Kind.ANCHOR, Kind.DELTA]
    assert rows[-1].parent == rows[1].version
    assert rows[-1].rollout_ids == ("r7",)
    assert rows[1].ratio > 4
    assert 0.8 < rows[1].share_of_bound < 1.01
    assert all(row.manifest_bytes > 500 for row in rows)


def test_a_version_is_found_by_step_or_prefix_and_the_lineage_comes_first(store: MemoryStore) -> None:
    assert find(store, "2").version.incarnation == "bbbbbbbb"
    assert find(store, "v000002-aaaaaaaa").version.incarnation == "aaaaaaaa"
    assert find(store, "3").version.step == 3
    with pytest.raises(WeightsError) as caught:
        find(store, "v000009")
    assert "v00000" in caught.value.hint


def test_a_diff_counts_changes_by_tensor(store: MemoryStore) -> None:
    rows = {row.name: row for row in diff(store, "0", "1")}
    assert 600 < rows["embed"].num_changed < 1000
    assert (rows["embed"].num_elements, rows["embed"].max_step) == (4000, 1)
    assert (rows["frozen"].num_changed, rows["frozen"].max_step) == (0, 0)
    assert rows["norm"].max_step == 2


def test_a_whole_channel_verifies(store: MemoryStore) -> None:
    check = verify(store)
    assert (check.problems, check.orphans) == ((), ())
    assert check.num_versions == 5
    assert check.num_objects == len(store.list("objects/"))
    assert check.object_bytes == sum(len(store.get(key)) for key in store.list("objects/"))


def test_an_empty_store_verifies_and_has_no_log() -> None:
    assert verify(MemoryStore()).num_versions == 0
    assert log(MemoryStore()) == []


def test_damage_and_orphans_are_named(store: MemoryStore) -> None:
    delta = find(store, "1").ways[0].objects[0].key
    data = store.get(delta)
    store.delete(delta)
    store.put(delta, data[:-1] + bytes([data[-1] ^ 1]))
    store.put("objects/policy/00/stray", b"")
    check = verify(store)
    assert check.orphans == ("objects/policy/00/stray",)
    assert any("v000001" in problem and "not what was published" in problem for problem in check.problems)


def test_a_lost_manifest_is_named(store: MemoryStore) -> None:
    key = next(key for key in store.list("manifests/") if "v000001" in key)
    store.delete(key)
    assert any("v000001" in problem and "gone" in problem for problem in verify(store).problems)


def test_a_delta_lost_beside_an_anchor_is_a_notice_and_no_problem(policy: Policy) -> None:
    store, parent = MemoryStore(), None
    writer = Channel(store)
    for step in range(30):
        parent = writer.publish(policy(step), step=step, parent=parent, rollout_ids=[]).version
    both = next(m for m in chain(store, "policy")[1:] if m.anchor)
    assert both.delta is not None
    store.delete(both.delta.objects[0].key)
    check = verify(store)
    assert check.problems == ()
    (notice,) = check.notices
    assert notice.version == both.version
    assert "another way proves" in notice.what
    assert both.delta.objects[0].key in notice.facts
    assert "nothing needs to be done" in notice.hint


def test_a_lost_version_is_named_once_with_its_file_and_those_that_need_it_in_a_line_each(policy: Policy) -> None:
    store, parent = MemoryStore(), None
    writer = Channel(store)
    for step in range(30):
        parent = writer.publish(policy(step), step=step, parent=parent, rollout_ids=[]).version
    manifests = chain(store, "policy")
    anchors = [i for i, m in enumerate(manifests) if m.anchor]
    lost = manifests[anchors[1] + 1]
    assert lost.delta is not None
    store.delete(lost.delta.objects[0].key)
    found = verify(store).found
    needing = anchors[2] - anchors[1] - 2
    assert [finding.version for finding in found] == [m.version for m in manifests[anchors[1] + 1 : anchors[2]]]
    assert lost.delta.objects[0].key in found[0].hint
    assert "copy" in found[0].hint
    assert [str(lost.version) in str(f) or "it needs" in f.what for f in found[1:]] == [True] * needing
    assert len(verify(store).notices) == 1, "the delta of the next anchor, which needs one that is lost"


def test_a_row_of_the_log_says_what_its_bytes_are(policy: Policy) -> None:
    store, parent = MemoryStore(), None
    writer, compactor = Channel(store), Compactor(store)
    for step in range(30):
        parent = writer.publish(policy(step, share=0.02), step=step, parent=parent, rollout_ids=[]).version
        compactor.step()
    for row, manifest in zip(log(store), chain(store, "policy"), strict=True):
        if manifest.delta is not None:
            assert (row.kind, row.object_bytes) == (Kind.DELTA, manifest.delta.num_bytes)
        else:
            assert (row.kind, row.object_bytes) == (Kind.ANCHOR, row.anchor_bytes)
        assert row.anchor_bytes == (manifest.anchor.num_bytes if manifest.anchor else 0)
    assert any(row.kind is Kind.DELTA and row.anchor_bytes for row in log(store))
    assert any(row.later_bytes for row in log(store))


def test_a_signed_channel_is_repaired_with_its_key(store: MemoryStore) -> None:
    signer = Signer(new_key())
    store.delete("pointers/policy")
    assert repair(store, signer=signer) is not None
    assert Follower(store, public_key=signer.public_key).advance() is not None

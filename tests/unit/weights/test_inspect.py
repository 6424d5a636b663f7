"""The data that `etude weights` prints about a channel."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from etude.errors import WeightsError
from etude.records import Version
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Tensor, chain
from etude.weights.chain.branches import point
from etude.weights.chain.compactor import Compactor
from etude.weights.chain.inspect import diff, find, log, repair, verify
from etude.weights.chain.manifest import Kind
from etude.weights.chain.signing import Signer, is_signed_by, new_key

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
    assert rows[0].share_of_bound is None
    assert rows[1].share_of_bound is not None
    assert 0.8 < rows[1].share_of_bound < 1.01
    assert all(row.manifest_bytes > 500 for row in rows)


def test_a_version_is_found_by_step_or_prefix_and_the_lineage_comes_first(store: MemoryStore) -> None:
    assert find(store, "2").version.incarnation == "bbbbbbbb"
    assert find(store, "v000002-aaaaaaaa").version.incarnation == "aaaaaaaa"
    assert find(store, "3").version.step == 3
    with pytest.raises(WeightsError) as caught:
        find(store, "v000009")
    assert "v00000" in caught.value.hint


def test_a_version_that_is_unknown_is_told_the_newest_ones_and_how_many_there_are(policy: Policy) -> None:
    store = MemoryStore()
    parent = None
    for step in range(10):
        parent = Channel(store).publish(policy(step), step=step, parent=parent, rollout_ids=[]).version
    with pytest.raises(WeightsError) as caught:
        find(store, "77")
    assert f", {parent} (the newest 8 of 10; `etude weights log` lists all)" in caught.value.hint
    assert caught.value.hint.count("v00000") == 8
    with pytest.raises(WeightsError) as caught:
        find(store, f"{find(store, '0').version}x")
    assert caught.value.hint == f"did you mean '{find(store, '0').version}'?"


def test_of_several_versions_with_the_same_weights_the_newest_is_found(store: MemoryStore, policy: Policy) -> None:
    Channel(store, incarnation="cccccccc").publish(policy(7), step=2, parent=find(store, "1").version, rollout_ids=[])
    assert find(store, "2").version.incarnation == "cccccccc"
    assert find(store, "v000002-b").version.incarnation == "bbbbbbbb"


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
    assert any("v000001" in problem and "missing" in problem for problem in verify(store).problems)


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
    assert "in another way" in notice.what
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


@pytest.fixture
def signer() -> Signer:
    return Signer(new_key())


def signed_steps(store: MemoryStore, policy: Policy, steps: range, signer: Signer | None) -> list[Version]:
    """Publish steps, each trained from the one before."""
    writer, versions = Channel(store, signer=signer), list[Version]()
    for step in steps:
        parent = versions[-1] if versions else None
        versions.append(writer.publish(policy(step), step=step, parent=parent, rollout_ids=[]).version)
    return versions


@pytest.mark.parametrize("torn", [None, b"garbage"])
def test_a_signed_channel_that_lost_its_pointer_is_repaired_with_its_key_alone(
    policy: Policy, signer: Signer, torn: bytes | None
) -> None:
    store = MemoryStore()
    versions = signed_steps(store, policy, range(3), signer)
    store.delete("pointers/policy")
    if torn is not None:
        store.compare_and_swap("pointers/policy", None, torn)
    moves: list[Callable[[Signer | None], object]] = [
        lambda key: repair(store, signer=key),
        lambda key: Channel(store, signer=key).publish(policy(5), step=5, parent=versions[2], rollout_ids=[]),
    ]
    if torn is None:  # a damaged one is not moved by hand
        moves += [
            lambda key: point(store, "policy", versions[0], signer=key),
            lambda key: point(store, "policy", versions[0], branch="canary", signer=key),
        ]
    for move in moves:
        with pytest.raises(WeightsError, match="channel 'policy' is signed, and its pointer is missing") as caught:
            move(None)
        assert "of 3 versions in the store 3 are signed" in caught.value.facts
        assert str(versions[2]) in caught.value.facts
        assert "--key FILE" in caught.value.hint
        other = Signer(new_key())
        with pytest.raises(WeightsError, match="signed with another key than the one given") as caught:
            move(other)
        assert other.public_key.hex() in caught.value.facts
    assert store.list("branches/") == []
    assert (store.get("pointers/policy") if store.list("pointers/") else None) == torn
    assert repair(store, signer=signer) == versions[1], "the newest that another version builds on"
    follower = Follower(store, public_key=signer.public_key)
    assert follower.advance() is not None
    assert follower.version == versions[1]


def test_a_repair_signs_only_versions_that_its_key_has_signed(policy: Policy, signer: Signer) -> None:
    store = MemoryStore()
    (first,) = signed_steps(store, policy, range(1), None)
    mine = signed_steps(store, policy, range(1, 3), signer)
    store.delete("pointers/policy")
    forged = MemoryStore()
    signed_steps(forged, policy, range(7, 9), None)
    signed_steps(forged, policy, range(9, 11), Signer(new_key()))  # takes the channel over, and builds on it
    for key in forged.list(""):
        if not key.startswith("pointers/"):
            store.put(key, forged.get(key))
    with pytest.raises(WeightsError) as caught:
        repair(store)
    assert "of 7 versions in the store 4 are signed, 3 not at all" in caught.value.facts
    assert repair(store, signer=signer) == mine[0]
    assert first in [manifest.version for manifest in chain(store, "policy")], "a signed one builds on it"
    for item in (item for way in find(store, str(mine[0])).ways for item in way.objects):
        store.delete(item.key)
    for item in (item for way in find(store, str(first)).ways for item in way.objects):
        store.delete(item.key)
    store.delete("pointers/policy")
    with pytest.raises(WeightsError, match="no version of channel 'policy' can be pointed at") as caught:
        repair(store, signer=signer)
    said = "of 7 versions in the store 2 are signed with this key, 2 are signed with another, 3 not at all"
    assert said in caught.value.facts


def test_a_manifest_signed_for_another_channel_is_never_this_ones(policy: Policy, signer: Signer) -> None:
    store = MemoryStore()
    signed_steps(store, policy, range(2), signer)
    Channel(store, "scratch", signer=signer).publish(policy(7), step=0, parent=None, rollout_ids=[])
    (foreign,) = store.list("manifests/scratch/")
    for key in store.list("manifests/policy/"):
        store.delete(key)
    store.put(foreign.replace("scratch", "policy", 1), store.get(foreign))
    store.delete("pointers/policy")
    with pytest.raises(WeightsError, match="policy"):
        repair(store, signer=signer)


def test_a_channel_that_nobody_signed_may_be_signed_from_its_repair_on(store: MemoryStore, signer: Signer) -> None:
    store.delete("pointers/policy")
    assert repair(store, signer=signer) is not None
    assert Follower(store, public_key=signer.public_key).advance() is not None


def test_a_new_branch_of_a_signed_channel_takes_its_key(policy: Policy, signer: Signer) -> None:
    store = MemoryStore()
    (version,) = signed_steps(store, policy, range(1), signer)
    with pytest.raises(WeightsError, match="pointers/policy is signed"):
        point(store, "policy", version, branch="canary")
    point(store, "policy", version, branch="canary", signer=signer)
    assert Follower(store, branch="canary", public_key=signer.public_key).advance() is not None


def test_a_manifests_signature_is_over_every_byte_before_it(policy: Policy, signer: Signer) -> None:
    store = MemoryStore()
    signed_steps(store, policy, range(1), signer)
    signed_steps(plain := MemoryStore(), policy, range(1), None)
    data = store.get(store.list("manifests/")[0])
    assert is_signed_by(signer.public_key, data)
    assert not is_signed_by(Signer(new_key()).public_key, data)
    assert not is_signed_by(signer.public_key, plain.get(plain.list("manifests/")[0]))
    chance = random.Random(0)
    for _ in range(300):
        bad = bytearray(data)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        assert not is_signed_by(signer.public_key, bytes(bad))
    for cut in range(0, len(data), 7):
        assert not is_signed_by(signer.public_key, data[:cut])
        assert not is_signed_by(signer.public_key, data[cut + 1 :])

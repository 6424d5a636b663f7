"""Composed deltas over several versions: exact, and used by late readers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from etude.errors import WeightsError
from etude.seams import BlobStore
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Tensor, chain
from etude.weights.chain.compactor import Compactor
from etude.weights.chain.inspect import verify
from etude.weights.chain.manifest import FORMAT, Manifest, Ref, Way, later_key
from etude.weights.chain.plans import Search, later_ways
from etude.weights.shards.part_follower import PartFollower
from etude.weights.tensors import same_bits

Policy = Callable[..., dict[str, Tensor]]
SIZE, SHARE = 30_000, 0.02


def at(policy: Policy, step: int) -> dict[str, Tensor]:
    return policy(step, size=SIZE, share=SHARE)


def held_by(follower: Follower, tensors: dict[str, Tensor]) -> bool:
    return follower.tensors.keys() == tensors.keys() and all(
        same_bits(follower.tensors[name], tensor) for name, tensor in tensors.items()
    )


class Counting(MemoryStore):
    """A store that records what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.read.append(key)
        return super().get(key, start, stop)


def grown(policy: Policy, num_steps: int, store: MemoryStore | None = None) -> tuple[MemoryStore, list[Follower]]:
    """A channel with a compactor that keeps up, and a follower left behind at each version."""
    store = store or MemoryStore()
    writer, compactor, parent, behind = Channel(store), Compactor(store), None, []
    for step in range(num_steps):
        parent = writer.publish(at(policy, step), step=step, parent=parent, rollout_ids=[]).version
        compactor.step()
        behind.append(Follower(store))
        behind[-1].advance()
    return store, behind


def test_a_follower_sixteen_versions_behind_fetches_one_delta_of_less_than_half_the_chains_bytes(
    policy: Policy,
) -> None:
    store, behind = grown(policy, 20)
    chained = sum(m.delta.num_bytes for m in chain(store, "policy")[-16:] if m.delta)
    late = behind[3]
    update = late.advance()
    assert update is not None
    assert held_by(late, at(policy, 19))
    assert update.fetched_bytes < 0.7 * chained  # in this small model the share of changed weights is large
    assert verify(store).problems == ()


def test_from_anywhere_behind_the_head_is_reached_exactly_and_never_by_more_bytes_than_the_chain(
    policy: Policy,
) -> None:
    store, behind = grown(policy, 24)
    manifests = chain(store, "policy")
    for step, late in enumerate(behind[:-1]):
        chained = sum(m.delta.num_bytes for m in manifests[step + 1 :] if m.delta)
        update = late.advance()
        assert update is not None
        assert held_by(late, at(policy, 23))
        assert update.fetched_bytes <= chained


def test_a_follower_at_the_head_reads_only_pointer_manifest_and_delta(policy: Policy) -> None:
    store = Counting()
    _, behind = grown(policy, 6, store)
    last = behind[4]
    store.read.clear()
    last.advance()
    assert [key.split("/")[0] for key in store.read] == ["pointers", "manifests", "objects"]


def test_a_newcomer_looks_no_further_than_the_nearest_anchor(policy: Policy) -> None:
    store = Counting()
    grown(policy, 30, store)
    nearest = max(i for i, m in enumerate(chain(store, "policy")) if m.anchor)
    store.read.clear()
    new = Follower(store)
    new.advance()
    assert held_by(new, at(policy, 29))
    assert sum(key.startswith("manifests/") for key in store.read) <= 30 - nearest + 2, (
        "a composed delta may lead past it"
    )


def test_a_compactor_that_starts_late_or_was_away_adds_what_is_missing_at_the_head(policy: Policy) -> None:
    store = MemoryStore()
    writer, parent = Channel(store), None
    away = Compactor(store)
    for step in range(18):
        parent = writer.publish(at(policy, step), step=step, parent=parent, rollout_ids=[]).version
        if step == 2:
            assert away.step() == ()
    late = Compactor(store)
    ways = late.step()
    assert ways is not None
    assert [way.base.version.step for way in ways if way.base] == [13, 1]
    assert late.step() is None
    assert away.step() == (), "the other one was faster"
    writer.publish(at(policy, 18), step=18, parent=parent, rollout_ids=[])
    ways = away.step()
    assert ways is not None
    assert [way.base.version.step for way in ways if way.base] == [14, 2]
    assert 0 < away.undo_bytes < 16 * 2 * SHARE * SIZE * 8


def test_a_tensor_that_a_step_brought_whole_is_whole_over_all_of_them(policy: Policy) -> None:
    store = MemoryStore()
    writer, compactor, parent = Channel(store), Compactor(store, spans=(2, 3)), None
    weights = [at(policy, step) for step in range(4)]
    del weights[0]["norm"], weights[3]["frozen"]
    weights[2]["frozen"] = Tensor("u8", (4,), np.array([9, 9, 9, 9], np.uint8))
    behind = []
    for step in range(4):
        parent = writer.publish(weights[step], step=step, parent=parent, rollout_ids=[]).version
        compactor.step()
        behind.append(Follower(store))
        behind[-1].advance()
    last = chain(store, "policy")[-1]
    assert len(later_ways(store, last)) == 2
    for late in behind[:-1]:
        late.advance()
        assert held_by(late, weights[3])


def test_a_way_that_weighs_more_than_its_steps_is_not_added() -> None:
    store = MemoryStore()
    writer, compactor, parent = Channel(store), Compactor(store, spans=(2,)), None
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << 16, 4000).astype(np.uint16)
    for step in range(6):  # everything changes in every step: there is nothing to save, and nothing sparse to keep
        weights = {"w": Tensor("u16", (4000,), codes + np.uint16(step % 2))}
        parent = writer.publish(weights, step=step, parent=parent, rollout_ids=[]).version
        assert compactor.step() == ()


def test_after_a_rollback_skip_deltas_lead_along_the_new_branch(policy: Policy) -> None:
    from etude.weights.chain.branches import point

    store, _ = grown(policy, 8)
    compactor = Compactor(store)
    compactor.step()
    versions = [m.version for m in chain(store, "policy")]
    point(store, "policy", versions[2])
    Channel(store).publish(at(policy, 11), step=3, parent=versions[2], rollout_ids=[])
    compactor.step()
    late = Follower(store)
    late.advance()
    assert held_by(late, at(policy, 11))
    assert verify(store).problems == ()


def test_anchors_may_be_added_later_so_that_no_commit_waits_for_one(policy: Policy) -> None:
    store = MemoryStore()
    writer, compactor, parent = Channel(store, anchors=False), Compactor(store, anchors=True), None
    added = []
    for step in range(40):
        parent = writer.publish(policy(step), step=step, parent=parent, rollout_ids=[]).version
        added += [step for way in compactor.step() or () if way.base is None]
    manifests = chain(store, "policy")
    assert [m.anchor is not None for m in manifests] == [True] + [False] * 39
    assert len(added) > 2
    late = Follower(store)
    update = late.advance()
    assert update is not None
    assert held_by(late, policy(39))
    assert update.fetched_bytes < 2.2 * manifests[0].ways[0].num_bytes
    restarted = Channel(store, anchors=False).publish(policy(40), step=40, parent=parent, rollout_ids=[])
    assert not restarted.anchor


FORGERIES: dict[str, Callable[[MemoryStore, Manifest, Way], bytes]] = {
    "rubbish": lambda store, manifest, way: b"\xff{",
    "another version's": lambda store, manifest, way: _later(manifest, version=way.base.version, ways=(way,)),  # type: ignore[union-attr]
    "a lost object": lambda store, manifest, way: _later(manifest, ways=(_with_key(way, "objects/policy/ff/gone"),)),
    "another base": lambda store, manifest, way: _later(manifest, ways=(_from_root(store, way),)),
    "other bytes": lambda store, manifest, way: _later(manifest, ways=(_other(store, way),)),
    "a cheap lie": lambda store, manifest, way: _later(
        manifest,
        ways=(Way(way.base, tuple(msgspec.structs.replace(o, num_bytes=1, header_bytes=1) for o in way.objects)),),
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_skip_delta_does_not_change_what_followers_hold(policy: Policy, forgery: str) -> None:
    store, behind = grown(policy, 6)
    manifest = chain(store, "policy")[-1]
    (way,) = later_ways(store, manifest)
    data = FORGERIES[forgery](store, manifest, way)
    store.delete(later_key(manifest))
    store.put(later_key(manifest), data)
    for late in (behind[1], Follower(store)):
        late.advance()
        assert held_by(late, at(policy, 5))
    part = PartFollower(store, {"embed"}.__contains__)
    part.advance(exactly=chain(store, "policy")[1].version)
    part.advance()
    assert same_bits(part.tensors["embed"], at(policy, 5)["embed"])


def _later(manifest: Manifest, **changes: object) -> bytes:
    said = {"format": FORMAT, "channel": "policy", "version": manifest.version, "ways": ()} | changes
    return msgspec.json.encode(said)


def _with_key(way: Way, key: str) -> Way:
    return Way(way.base, tuple(msgspec.structs.replace(item, key=key) for item in way.objects))


def _from_root(store: BlobStore, way: Way) -> Way:
    root = chain(store, "policy")[0]
    key = f"manifests/policy/{root.stem}.json"
    return Way(Ref(root.version, key, hashlib.sha256(store.get(key)).hexdigest()), way.objects)


def _other(store: BlobStore, way: Way) -> Way:
    """An object that matches its own digest and decodes, but to other tensors."""
    other = next(m for m in chain(store, "policy") if m.delta and m.version.step == 2)
    assert other.delta is not None
    return Way(way.base, other.delta.objects)


def test_the_search_yields_ways_in_order_of_their_bytes(policy: Policy) -> None:
    store, _ = grown(policy, 10)
    manifests = chain(store, "policy")
    search = Search(store, manifests[-1])
    bytes_so_far = 0
    while (plan := search.cheapest(manifests[0].version)) is not None:
        assert plan.num_bytes >= bytes_so_far
        bytes_so_far = plan.num_bytes
        search.exclude(plan.hops[-1].way)
    assert bytes_so_far > 0


def test_spans_of_one_step_are_refused() -> None:
    with pytest.raises(WeightsError, match="spans"):
        Compactor(MemoryStore(), spans=(1, 4))

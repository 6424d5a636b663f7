"""Garbage collection: what is deleted, what is kept, and what can happen in between."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from etude.errors import WeightsError
from etude.records import Version
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Tensor, chain, lineage
from etude.weights.chain.branches import drop, point
from etude.weights.chain.compactor import Compactor
from etude.weights.chain.garbage import collect
from etude.weights.chain.garbage_records import pending_deletions
from etude.weights.chain.history import head, load, pointers, stored
from etude.weights.chain.inspect import verify
from etude.weights.chain.plans import rebuild
from etude.weights.chain.signing import Signer, new_key
from etude.weights.tensors import same_bits

Policy = Callable[..., dict[str, Tensor]]
DAY = 86400.0
SIZE = 400
STRIDES = pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.slow)])
"""Every operation of an action is a moment at which something else may happen; the quick tests take one in thirteen."""


class Hooked(MemoryStore):
    """A store that calls a function before its n-th operation from now on, once."""

    def __init__(self, blobs: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self._blobs = dict(blobs or {})
        self.left: int | None = None
        self.hook: Callable[[], None] = lambda: None

    def before(self, number: int, hook: Callable[[], None]) -> None:
        self.left, self.hook = number, hook

    def _tick(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                self.hook()

    def put(self, key: str, data: bytes) -> None:
        self._tick()
        super().put(key, data)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._tick()
        return super().get(key, start, stop)

    def list(self, prefix: str) -> list[str]:
        self._tick()
        return super().list(prefix)

    def delete(self, key: str) -> None:
        self._tick()
        super().delete(key)

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        self._tick()
        return super().compare_and_swap(key, expected, data)


def filled(
    policy: Policy, num_versions: int = 30, signer: Signer | None = None
) -> tuple[Hooked, Channel, list[Version]]:
    store = Hooked()
    writer, versions = Channel(store, signer=signer), list[Version]()
    for step in range(num_versions):
        parent = versions[-1] if versions else None
        versions.append(writer.publish(policy(step), step=step, parent=parent, rollout_ids=[f"r{step}"]).version)
    return store, writer, versions


@pytest.fixture(scope="module")
def ten(policy: Policy) -> Callable[[], tuple[Hooked, Channel, list[Version]]]:
    """Creates ten versions, the leftovers of a killed publish, and the record of a first collection."""
    small = functools.partial(policy, size=SIZE)
    store, _, versions = filled(small, 10)
    _killed_publish(store, small, versions)
    collect(store, "policy", keep_s=DAY, now=0.0)

    def again() -> tuple[Hooked, Channel, list[Version]]:
        copy = Hooked(store._blobs)
        return copy, Channel(copy), versions

    return again


Ten = Callable[[], tuple[Hooked, Channel, list[Version]]]


def rebuilds_every_pointer(store: MemoryStore) -> None:
    for pointer in pointers(store, "policy").values():
        rebuild(store, load(store, pointer.head))


def holds(follower: Follower, tensors: dict[str, Tensor]) -> bool:
    return all(same_bits(follower.tensors[name], tensor) for name, tensor in tensors.items())


def test_the_first_collection_only_looks_and_a_later_one_takes_what_was_old_by_then(policy: Policy) -> None:
    store, writer, versions = filled(policy)
    before = store.list("objects/")
    assert collect(store, "policy", keep_s=DAY, now=0.0).num_deleted == 0
    assert collect(store, "policy", keep_s=DAY, now=DAY - 1).num_deleted == 0
    assert store.list("objects/") == before
    writer.publish(policy(30), step=30, parent=versions[-1], rollout_ids=[])
    done = collect(store, "policy", keep_s=DAY, now=DAY)
    assert done.num_deleted > 20
    assert done.num_kept + done.num_old == 31
    assert len(store.list("objects/")) < len(before)
    assert len(lineage(store, "policy")) == 31, "manifests stay, for lineage and audit"
    late = Follower(store)
    late.advance()
    assert holds(late, policy(30))
    assert Follower(store).advance(exactly=versions[-1]) is not None, "it was the head a day ago"
    assert collect(store, "policy", keep_s=DAY, now=DAY).num_deleted == 0
    assert pending_deletions(store, "policy") == []


def test_fsck_distinguishes_collected_objects_from_lost_ones(policy: Policy) -> None:
    store, _, _ = filled(policy)
    for now in (0.0, DAY):
        collect(store, "policy", keep_s=DAY, now=now)
    check = verify(store)
    assert check.problems == ()
    assert check.num_collected > 10
    newest = chain(store, "policy")[-1]
    assert newest.delta is not None
    store.delete(newest.delta.objects[0].key)
    assert len(verify(store).problems) == (0 if newest.anchor else 1)


def test_a_follower_far_behind_comes_to_the_head_and_one_in_the_middle_of_it_heals(policy: Policy) -> None:
    store, _, _ = filled(policy, 5)
    behind = Follower(store)
    behind.advance()
    writer, parent = Channel(store), behind.version
    for step in range(5, 40):
        parent = writer.publish(policy(step), step=step, parent=parent, rollout_ids=[]).version
    for now in (0.0, DAY):
        collect(store, "policy", keep_s=DAY, now=now)
    behind.advance()
    assert holds(behind, policy(39))


def test_objects_and_manifest_of_a_killed_publish_are_deleted_once_old(policy: Policy) -> None:
    store, _, versions = filled(policy, 3)
    _killed_publish(store, policy, versions)
    adrift = {*store.list("objects/"), *store.list("manifests/")} - _named(store)
    assert len(adrift) >= 2
    assert collect(store, "policy", keep_s=DAY, now=0.0).num_unreachable == len(adrift)
    assert collect(store, "policy", keep_s=DAY, now=DAY).num_deleted == len(adrift)
    assert verify(store).orphans == ()
    rebuilds_every_pointer(store)


def test_without_the_key_of_a_signed_channel_nothing_adrift_is_taken(policy: Policy) -> None:
    signer = Signer(new_key())
    store, _, versions = filled(policy, 3, signer)
    _killed_publish(store, policy, versions, signer)
    num_unreachable = collect(store, "policy", keep_s=DAY, now=0.0).num_unreachable
    assert collect(store, "policy", keep_s=DAY, now=DAY).num_deleted == 0
    assert collect(store, "policy", keep_s=DAY, now=DAY, signer=signer).num_deleted == num_unreachable >= 2
    assert Follower(store, public_key=signer.public_key).advance() is not None


def test_a_publish_that_slept_through_a_collection_puts_everything_again(policy: Policy) -> None:
    store, writer, versions = filled(policy, 12)
    collect(store, "policy", keep_s=DAY, now=0.0)

    def sleep(done: str) -> None:
        if done == "manifest" and not slept:
            slept.append(done)
            for now in (DAY, 3 * DAY):
                collect(store, "policy", keep_s=DAY, now=now)

    slept: list[str] = []
    published = writer.publish(policy(12), step=12, parent=versions[-1], rollout_ids=[], after=sleep)
    late = Follower(store)
    late.advance()
    assert late.version == published.version
    assert holds(late, policy(12))
    assert verify(store).problems == ()
    again = writer.publish(policy(13), step=13, parent=published.version, rollout_ids=[])
    assert not again.anchor or again.object_bytes < again.anchor_bytes


@STRIDES
def test_a_collection_at_any_moment_of_a_publish_leaves_both_whole(policy: Policy, ten: Ten, stride: int) -> None:
    number, at_work = 0, True
    while at_work:
        store, writer, versions = ten()

        def twice(store: Hooked = store) -> None:
            for now in (DAY, 3 * DAY):
                collect(store, "policy", keep_s=DAY, now=now)

        store.before(number, twice)
        writer.publish(policy(12, size=SIZE), step=12, parent=versions[-1], rollout_ids=[])
        at_work, number = store.left is None, number + stride
        store.left = None
        late = Follower(store)
        late.advance()
        assert holds(late, policy(12, size=SIZE))
        assert verify(store).problems == ()
    assert number > 5


@STRIDES
@pytest.mark.parametrize("action", ["publish", "branch", "rollback", "follow", "compact", "collect"])
def test_garbage_collection_beside_any_other_operation_keeps_every_pointer_readable(
    policy: Policy, ten: Ten, action: str, stride: int
) -> None:
    number, at_work = 0, True
    while at_work:
        store, writer, versions = filled(policy, 12)
        _killed_publish(store, policy, versions)
        behind = Follower(store)
        behind.advance(exactly=versions[1])
        collect(store, "policy", keep_s=DAY, now=0.0)

        def act(
            store: Hooked = store, writer: Channel = writer, versions: list[Version] = versions, late: Follower = behind
        ) -> None:
            match action:
                case "publish":
                    writer.publish(policy(12, size=SIZE), step=12, parent=versions[-1], rollout_ids=[])
                case "branch" | "rollback":
                    try:
                        point(store, "policy", versions[2], branch="old" if action == "branch" else "")
                    except WeightsError as error:
                        assert "collected" in str(error)  # noqa: PT017
                case "follow":
                    late.advance()
                case "compact":
                    Compactor(store).step()
                case "collect":
                    collect(store, "policy", keep_s=DAY, now=DAY)

        store.before(number, act)
        collect(store, "policy", keep_s=DAY, now=DAY)
        at_work, number = store.left is None, number + stride
        store.left = None
        rebuilds_every_pointer(store)
        behind.advance()
        assert behind.version == head(store, "policy").head.version  # type: ignore[union-attr]
    assert number > 20


@STRIDES
def test_a_collection_killed_at_any_moment_is_harmless_and_the_next_one_finishes_it(ten: Ten, stride: int) -> None:
    number, at_work = 0, True
    while at_work:
        store, _, _ = ten()

        def die() -> None:
            raise Killed

        store.before(number, die)
        try:
            collect(store, "policy", keep_s=DAY, now=DAY)
        except Killed:
            pass
        else:
            at_work = False
        store.left, number = None, number + stride
        rebuilds_every_pointer(store)
        for now in (2 * DAY, 3 * DAY):
            collect(store, "policy", keep_s=DAY, now=now)
        rebuilds_every_pointer(store)
        check = verify(store)
        assert (check.problems, check.orphans) == ((), ())
        assert pending_deletions(store, "policy") == []
    assert number > 20


def test_every_pointer_stays_readable_when_the_clock_jumps(policy: Policy) -> None:
    store, writer, versions = filled(policy, 12)
    for now in (0.0, 1e9, 5.0, DAY, -7.0, 1e12, 2 * DAY):
        versions.append(writer.publish(policy(len(versions)), step=len(versions), parent=None, rollout_ids=[]).version)
        collect(store, "policy", keep_s=DAY, now=now)
        rebuilds_every_pointer(store)


def test_a_branch_keeps_its_version_and_a_dropped_one_lets_it_go(policy: Policy) -> None:
    store, _, versions = filled(policy, 12)
    point(store, "policy", versions[2], branch="stable")
    for now in (0.0, DAY, 2 * DAY):
        collect(store, "policy", keep_s=DAY, now=now)
    stable = Follower(store, branch="stable")
    stable.advance()
    assert holds(stable, policy(2))
    drop(store, "policy", "stable")
    for now in (3 * DAY, 4 * DAY, 5 * DAY):
        collect(store, "policy", keep_s=DAY, now=now)
    with pytest.raises(WeightsError, match="cannot build"):
        Follower(store).advance(exactly=versions[2])
    with pytest.raises(WeightsError, match="can point at"):
        point(store, "policy", versions[2], branch="stable")


def test_a_manifest_that_cannot_be_read_stops_collection_before_anything_is_deleted(policy: Policy) -> None:
    store, _, _ = filled(policy, 12)
    collect(store, "policy", keep_s=DAY, now=0.0)
    lost = next(m for m in reversed(chain(store, "policy")) if m.anchor is None)
    store.delete(f"manifests/policy/{lost.stem}.json")
    before = store.list("objects/")
    with pytest.raises(WeightsError, match="fsck"):
        collect(store, "policy", keep_s=DAY, now=DAY)
    assert store.list("objects/") == before


def test_channels_of_one_store_are_collected_apart(policy: Policy) -> None:
    store, _, _ = filled(policy, 12)
    other = Channel(store, "fp8")
    other.publish(policy(0), step=0, parent=None, rollout_ids=[])
    for now in (0.0, DAY):
        collect(store, "policy", keep_s=DAY, now=now)
    follower = Follower(store, "fp8")
    follower.advance()
    assert holds(follower, policy(0))


class Killed(BaseException):
    """An exception that no handler may catch."""


def _killed_publish(store: MemoryStore, policy: Policy, versions: list[Version], signer: Signer | None = None) -> None:
    def die(done: str) -> None:
        if done == "manifest":
            raise Killed

    with pytest.raises(Killed):
        Channel(store, signer=signer).publish(policy(50), step=50, parent=versions[-1], rollout_ids=[], after=die)


def _named(store: MemoryStore) -> set[str]:
    whole = {ref.key: manifest for ref, manifest in stored(store, "policy") if manifest.version.step < 50}
    return {*whole, *(item.key for m in whole.values() for way in m.ways for item in way.objects)}

"""Publishing and following: what readers get, and when."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from etude.errors import WeightsError
from etude.records import Version
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Tensor, chain, lineage
from etude.weights.chain.anchors import table_bytes
from etude.weights.chain.manifest import Kind
from etude.weights.delta import codec
from etude.weights.tensors import same_bits

Policy = Callable[..., dict[str, Tensor]]


def publish_steps(store: MemoryStore, policy: Policy, steps: range, writer: Channel | None = None) -> list[Version]:
    writer = writer or Channel(store)
    versions: list[Version] = []
    for step in steps:
        parent = versions[-1] if versions else None
        versions.append(writer.publish(policy(step), step=step, parent=parent, rollout_ids=[f"g{step:06d}.0"]).version)
    return versions


def holds(follower: Follower, tensors: dict[str, Tensor]) -> bool:
    return follower.tensors.keys() == tensors.keys() and all(
        same_bits(follower.tensors[name], tensor) for name, tensor in tensors.items()
    )


def test_the_first_version_is_an_anchor_and_the_next_a_delta(policy: Policy) -> None:
    writer = Channel(MemoryStore())
    first = writer.publish(policy(0), step=0, parent=None, rollout_ids=[])
    second = writer.publish(policy(1), step=1, parent=first.version, rollout_ids=["g000000.0"])
    assert first.anchor
    assert not second.anchor
    assert first.snapshot_bytes == second.snapshot_bytes == 4000 * 2 + 3 + 50 * 4
    assert (first.bound_bytes, first.changed_share) == (first.snapshot_bytes, 1.0)
    assert second.object_bytes < first.object_bytes / 4
    assert second.bound_bytes < second.object_bytes + 40
    assert 0.15 < second.changed_share < 0.25
    assert second.anchor_bytes == 0


def test_a_follower_holds_exactly_what_was_published_at_every_step(policy: Policy) -> None:
    store = MemoryStore()
    writer, follower = Channel(store), Follower(store)
    assert (follower.head_version(), follower.advance(), follower.version) == (None, None, None)
    for step in range(12):
        published = writer.publish(policy(step), step=step, parent=follower.version, rollout_ids=[])
        assert follower.head_version() == published.version
        update = follower.advance()
        assert update is not None
        assert update.version == follower.version == published.version
        assert holds(follower, policy(step))
        assert update.fetched_bytes == published.object_bytes
        assert follower.advance() is None


def test_an_update_names_the_changed_positions_and_their_new_codes(policy: Policy) -> None:
    store = MemoryStore()
    writer, follower = Channel(store), Follower(store)
    first = writer.publish(policy(0), step=0, parent=None, rollout_ids=[])
    update = follower.advance()
    assert update is not None
    assert (update.replaced.keys(), update.changed) == ({"embed", "frozen", "norm"}, {})
    writer.publish(policy(1), step=1, parent=first.version, rollout_ids=[])
    update = follower.advance()
    assert update is not None
    assert (update.changed.keys(), update.replaced, update.removed) == ({"embed", "norm"}, {}, ())
    live = {name: tensor.codes.copy() for name, tensor in policy(0).items()}
    for name, (positions, codes) in update.changed.items():
        assert positions.dtype in (np.uint32, np.int64)
        assert (np.diff(positions) > 0).all()
        live[name][positions] = codes
    assert all(np.array_equal(live[name], tensor.codes) for name, tensor in policy(1).items())


def test_tensors_that_come_go_and_change_their_shape_are_told_apart(policy: Policy) -> None:
    store = MemoryStore()
    writer, follower = Channel(store), Follower(store)
    first = writer.publish(policy(0), step=0, parent=None, rollout_ids=[])
    follower.advance()
    changed = policy(0)
    del changed["frozen"]
    changed["norm"] = Tensor("f32", (25, 2), changed["norm"].codes)
    changed["bias"] = Tensor("f16", (), np.zeros(1, np.uint16))
    writer.publish(changed, step=1, parent=first.version, rollout_ids=[])
    update = follower.advance()
    assert update is not None
    assert (update.replaced.keys(), update.removed, update.changed) == ({"norm", "bias"}, ("frozen",), {})
    assert holds(follower, changed)


def test_no_tensors_at_all_are_a_version() -> None:
    store = MemoryStore()
    version = Channel(store).publish({}, step=0, parent=None, rollout_ids=[]).version
    follower = Follower(store)
    update = follower.advance()
    assert update is not None
    assert update.version == version
    assert follower.advance() is None


def test_an_engine_that_missed_versions_catches_up_by_deltas_where_they_are_fewer_bytes(policy: Policy) -> None:
    store = MemoryStore()
    writer, follower = Channel(store), Follower(store)
    publish_steps(store, policy, range(1), writer)
    follower.advance()
    parent = follower.version
    sizes = [writer.publish(policy(s), step=s, parent=parent, rollout_ids=[]).object_bytes for s in (1, 2, 3)]
    update = follower.advance()
    assert update is not None
    assert update.fetched_bytes == sum(sizes)
    assert update.changed.keys() == {"embed", "norm"}
    assert holds(follower, policy(3))


def test_an_engine_that_missed_many_versions_takes_the_nearest_anchor(policy: Policy) -> None:
    store = MemoryStore()
    versions = publish_steps(store, policy, range(30))
    anchors = [m.version.step for m in chain(store, "policy") if m.kind is Kind.ANCHOR]
    assert len(anchors) > 2
    late = Follower(store)
    update = late.advance()
    assert update is not None
    assert update.version == versions[-1]
    assert holds(late, policy(29))
    anchor = next(m for m in chain(store, "policy") if m.version.step == anchors[-1])
    assert anchor.anchor is not None
    assert update.fetched_bytes <= 2.2 * anchor.anchor.num_bytes


def test_deltas_of_nothing_get_an_anchor_once_reading_them_costs_as_much(policy: Policy) -> None:
    store = MemoryStore()
    writer = Channel(store)
    large = policy(0, size=200_000)
    for step in range(100):
        writer.publish(large, step=step, parent=None, rollout_ids=[])
    anchors = [i for i, m in enumerate(chain(store, "policy")) if m.kind is Kind.ANCHOR]
    assert [b - a for a, b in itertools.pairwise(anchors)] == [anchors[1]] * (len(anchors) - 1)
    assert 20 < anchors[1] <= 64


def test_a_late_reader_pays_for_two_snapshots_at_most_and_anchors_weigh_no_more_than_what_lies_between(
    policy: Policy,
) -> None:
    store = MemoryStore()
    publish_steps(store, lambda step: policy(step, share=0.05, size=20_000), range(50))
    manifests = chain(store, "policy")
    debt = 0
    for manifest in manifests[1:]:
        assert manifest.delta is not None
        debt += manifest.delta.num_bytes + table_bytes(manifest) + manifest.snapshot_bytes // 64
        assert (manifest.anchor is not None) == (debt > manifests[0].ways[0].num_bytes)
        debt = 0 if manifest.anchor else debt
    assert sum(m.anchor is not None for m in manifests) > 3


def test_a_version_of_many_objects_is_one_version(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "OBJECT_ELEMENTS", 60)
    store = MemoryStore()
    follower = Follower(store)
    publish_steps(store, policy, range(3))
    follower.advance()
    assert holds(follower, policy(2))
    assert [len(way.objects) for way in chain(store, "policy")[0].ways] == [2]


def test_the_caller_may_overwrite_its_tensors_after_a_publish(policy: Policy) -> None:
    store = MemoryStore()
    writer, follower = Channel(store), Follower(store)
    codes = policy(0)["embed"].codes.copy()
    tensors = {"embed": Tensor("bf16", codes.shape, codes)}
    first = writer.publish(tensors, step=0, parent=None, rollout_ids=[])
    follower.advance()
    codes[7] += 1
    writer.publish(tensors, step=1, parent=first.version, rollout_ids=[])
    update = follower.advance()
    assert update is not None
    assert update.changed["embed"][0].tolist() == [7]


def test_a_restarted_writer_publishes_a_delta_from_the_last_published_bytes(policy: Policy) -> None:
    store = MemoryStore()
    follower = Follower(store)
    publish_steps(store, policy, range(4))
    follower.advance()
    before = follower.version
    restarted = Channel(store)
    published = restarted.publish(policy(4), step=4, parent=before, rollout_ids=["g000004.0"])
    base = chain(store, "policy")[-1].base
    assert before is not None
    assert base is not None
    assert base.version == before
    assert published.version.incarnation != before.incarnation
    update = follower.advance()
    assert update is not None
    assert update.fetched_bytes == published.object_bytes < policy(4)["embed"].num_bytes / 4
    assert holds(follower, policy(4))


def test_a_restart_from_an_older_checkpoint_keeps_lineage_and_chain_apart(policy: Policy) -> None:
    store = MemoryStore()
    versions = publish_steps(store, policy, range(5))
    again = Channel(store).publish(
        policy(9), step=3, parent=versions[2], rollout_ids=["g000009.0"]
    )  # trained from version 2; 3 and 4 are lost
    assert [m.version for m in chain(store, "policy")] == [*versions, again.version]
    assert [m.version for m in lineage(store, "policy")] == [*versions[:3], again.version]
    trained = [r for m in lineage(store, "policy") for r in m.rollout_ids]
    assert trained == ["g000000.0", "g000001.0", "g000002.0", "g000009.0"]


def test_a_parent_that_was_never_published_is_refused(policy: Policy) -> None:
    store = MemoryStore()
    writer = Channel(store)
    with pytest.raises(WeightsError, match="never published"):
        writer.publish(policy(0), step=1, parent=Version(0, "00000000", "0" * 64), rollout_ids=[])
    assert Follower(store).head_version() is None


@pytest.mark.parametrize("name", ["", "\0", "x" * 513, "\ud800"])
def test_a_tensor_name_that_no_table_may_hold_is_refused(name: str) -> None:
    with pytest.raises(WeightsError, match="not allowed"):
        Channel(MemoryStore()).publish(
            {name: Tensor("u8", (), np.zeros(1, np.uint8))}, step=0, parent=None, rollout_ids=[]
        )


@pytest.mark.parametrize(("name", "incarnation"), [("../x", None), ("", None), ("policy", "xyz"), ("policy", "A" * 8)])
def test_a_wild_channel_name_or_incarnation_is_refused(name: str, incarnation: str | None) -> None:
    with pytest.raises(WeightsError, match="not allowed"):
        Channel(MemoryStore(), name, incarnation)


def test_channels_of_one_store_do_not_touch_each_other(policy: Policy) -> None:
    store = MemoryStore()
    Channel(store, "bf16").publish(policy(0), step=0, parent=None, rollout_ids=[])
    Channel(store, "fp8").publish(policy(3), step=0, parent=None, rollout_ids=[])
    one, other = Follower(store, "bf16"), Follower(store, "fp8")
    one.advance()
    other.advance()
    assert holds(one, policy(0))
    assert holds(other, policy(3))


def test_a_version_over_the_readers_limit_is_refused_before_it_is_fetched(policy: Policy) -> None:
    store = MemoryStore()
    Channel(store).publish(policy(0), step=0, parent=None, rollout_ids=[])
    with pytest.raises(WeightsError, match="needs 8203 bytes"):
        Follower(store, limit_bytes=8000).advance()
    assert Follower(store, limit_bytes=8203).advance() is not None


def test_any_version_is_fetched_whole_by_name_and_the_newest_without(policy: Policy) -> None:
    store = MemoryStore()
    versions = publish_steps(store, policy, range(4))
    reader = Channel(store)
    for step, version in [*enumerate(versions), (3, None)]:
        tensors = reader.fetch(version)
        assert tensors.keys() == policy(step).keys()
        assert all(same_bits(tensors[name], tensor) for name, tensor in policy(step).items())
    with pytest.raises(WeightsError, match="has no v000007") as caught:
        reader.fetch(Version(7, "0" * 8, "0" * 64))
    assert str(versions[3]) in caught.value.facts
    with pytest.raises(WeightsError, match="has no version"):
        Channel(MemoryStore()).fetch()

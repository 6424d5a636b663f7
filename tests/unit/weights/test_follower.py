"""Following with conditions: undo, exact and minimum versions, pointers that move back, signatures."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from etude.errors import WeightsError
from etude.records import Version
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Tensor
from etude.weights.chain.branches import drop, list_branches, point
from etude.weights.chain.history import head
from etude.weights.chain.signing import Signer, new_key
from etude.weights.follow.head_tracker import Behind
from etude.weights.tensors import same_bits

Policy = Callable[..., dict[str, Tensor]]


def published(
    store: MemoryStore, policy: Policy, steps: range, signer: Signer | None = None
) -> tuple[Channel, list[Version]]:
    writer = Channel(store, signer=signer)
    versions: list[Version] = []
    for step in steps:
        parent = versions[-1] if versions else None
        versions.append(writer.publish(policy(step), step=step, parent=parent, rollout_ids=[]).version)
    return writer, versions


def holds(follower: Follower, tensors: dict[str, Tensor]) -> bool:
    return follower.tensors.keys() == tensors.keys() and all(
        same_bits(follower.tensors[name], tensor) for name, tensor in tensors.items()
    )


def test_an_update_is_undone_to_the_same_bits_and_its_changes_lead_an_engine_back(policy: Policy) -> None:
    store = MemoryStore()
    writer, versions = published(store, policy, range(1))
    follower = Follower(store)
    follower.advance()
    writer.publish(policy(1), step=1, parent=versions[0], rollout_ids=[])
    follower.advance()
    live = {name: tensor.codes.copy() for name, tensor in policy(1).items()}
    assert 0 < follower.undo_bytes < 8203
    update = follower.undo()
    assert update.version == follower.version == versions[0]
    assert holds(follower, policy(0))
    for name, (where, codes) in update.changed.items():
        live[name][where] = codes
    assert all(np.array_equal(live[name], tensor.codes) for name, tensor in policy(0).items())
    assert follower.advance() is not None
    assert holds(follower, policy(1))


def test_tensors_that_came_went_and_changed_their_shape_come_back(policy: Policy) -> None:
    store = MemoryStore()
    writer, versions = published(store, policy, range(1))
    follower = Follower(store)
    follower.advance()
    changed = policy(3)
    del changed["frozen"]
    changed["norm"] = Tensor("f32", (25, 2), changed["norm"].codes)
    changed["bias"] = Tensor("f16", (), np.zeros(1, np.uint16))
    writer.publish(changed, step=1, parent=versions[0], rollout_ids=[])
    follower.advance()
    update = follower.undo()
    assert (update.replaced.keys(), update.removed) == ({"norm", "frozen"}, ("bias",))
    assert holds(follower, policy(0))


def test_without_an_update_there_is_nothing_to_undo(policy: Policy) -> None:
    store = MemoryStore()
    follower = Follower(store)
    with pytest.raises(WeightsError, match="nothing to undo"):
        follower.undo()
    writer, versions = published(store, policy, range(1))
    follower.advance()
    with pytest.raises(WeightsError, match="nothing to undo"):
        follower.undo()
    writer.publish(policy(1), step=1, parent=versions[0], rollout_ids=[])
    follower.advance()
    follower.undo()
    with pytest.raises(WeightsError, match="nothing to undo"):
        follower.undo()


def test_an_exact_version_is_held_wherever_the_head_is(policy: Policy) -> None:
    store = MemoryStore()
    _, versions = published(store, policy, range(4))
    follower = Follower(store)
    for step in (1, 3, 0, 2):
        assert follower.advance(exactly=versions[step]) is not None
        assert follower.version == versions[step]
        assert holds(follower, policy(step))
        assert follower.advance(exactly=versions[step]) is None


def test_a_head_before_the_least_version_is_not_moved_to(policy: Policy) -> None:
    store, other = MemoryStore(), MemoryStore()
    _, versions = published(store, policy, range(2))
    _, later = published(other, policy, range(4))
    follower = Follower(store)
    with pytest.raises(Behind, match=f"{later[3]} is not published") as caught:
        follower.advance(at_least=later[3])
    assert str(versions[1]) in caught.value.facts
    assert follower.version is None
    assert follower.advance(at_least=versions[1]) is not None
    assert Follower(store).advance(at_least=versions[0]) is not None
    with pytest.raises(Behind, match="is not published"):
        Follower(MemoryStore()).advance(at_least=versions[0])
    with pytest.raises(Behind, match="is not published"):
        follower.advance(exactly=later[3])
    restarted = Channel(other).publish(policy(9), step=1, parent=later[0], rollout_ids=[])
    late = Follower(other)
    assert late.advance(at_least=later[3]) is not None, "published later, though its step is lower"
    assert late.version == restarted.version


def test_a_pointer_that_moves_back_is_refused_and_what_was_held_stays(policy: Policy) -> None:
    store = MemoryStore()
    writer, versions = published(store, policy, range(2))
    old = store.get("pointers/policy")
    writer.publish(policy(2), step=2, parent=versions[1], rollout_ids=[])
    follower = Follower(store)
    follower.advance()
    newest = follower.version
    assert store.compare_and_swap("pointers/policy", store.get("pointers/policy"), old)
    with pytest.raises(WeightsError, match=f"moved back to {versions[1]}") as caught:
        follower.advance()
    assert str(newest) in caught.value.facts
    assert "rollback" in caught.value.hint
    assert follower.version == newest
    assert Follower(store).advance() is not None, "who has seen nothing else knows no better"


def test_a_rollback_is_a_pointer_of_a_new_generation_and_its_writer_is_told(policy: Policy) -> None:
    store = MemoryStore()
    writer, versions = published(store, policy, range(3))
    follower = Follower(store)
    follower.advance()
    moved = point(store, "policy", versions[0])
    assert moved.generation == 1
    follower.advance()
    assert follower.version == versions[0]
    assert holds(follower, policy(0))
    with pytest.raises(WeightsError, match="another writer moved") as caught:
        writer.publish(policy(3), step=3, parent=versions[2], rollout_ids=[])
    assert str(versions[0]) in caught.value.facts
    after = Channel(store).publish(policy(4), step=1, parent=versions[0], rollout_ids=[])
    update = follower.advance()
    assert update is not None
    assert update.fetched_bytes == after.object_bytes, "the next version is a delta from the one rolled back to"
    assert holds(follower, policy(4))


def test_a_branch_stays_until_it_is_moved_and_moves_by_deltas(policy: Policy) -> None:
    store = MemoryStore()
    writer, versions = published(store, policy, range(2))
    point(store, "policy", versions[0], branch="stable")
    stable, newest = Follower(store, branch="stable"), Follower(store)
    stable.advance()
    newest.advance()
    assert (stable.version, newest.version) == (versions[0], versions[1])
    assert stable.advance() is None
    point(store, "policy", versions[1], branch="stable")
    update = stable.advance()
    assert update is not None
    assert update.fetched_bytes < 2000
    assert holds(stable, policy(1))
    writer.publish(policy(2), step=2, parent=versions[1], rollout_ids=[])
    assert {name: pointer.head.version for name, pointer in list_branches(store, "policy").items()} == {
        "stable": versions[1]
    }
    drop(store, "policy", "stable")
    assert stable.advance() is None
    assert stable.version == versions[1]


def test_a_branch_names_only_what_can_be_rebuilt(policy: Policy) -> None:
    store = MemoryStore()
    _, versions = published(store, policy, range(3))
    with pytest.raises(WeightsError, match="can point at"):
        point(store, "policy", Version(7, "0" * 8, "0" * 64), branch="stable")
    for key in store.list("objects/"):
        store.delete(key)
    with pytest.raises(WeightsError, match="can point at"):
        point(store, "policy", versions[1], branch="stable")
    assert list_branches(store, "policy") == {}
    with pytest.raises(WeightsError, match="branch name"):
        Follower(store, branch="../x").advance()


def test_a_follower_with_a_public_key_believes_its_owner_alone(policy: Policy) -> None:
    store, signer = MemoryStore(), Signer(new_key())
    _, versions = published(store, policy, range(2), signer)
    follower = Follower(store, public_key=signer.public_key)
    follower.advance()
    assert follower.version == versions[1]
    with pytest.raises(WeightsError, match="not signed with the key") as caught:
        Follower(store, public_key=Signer(new_key()).public_key).advance()
    assert str(versions[1]) in caught.value.what
    with pytest.raises(WeightsError, match="is signed"):
        point(store, "policy", versions[0])
    point(store, "policy", versions[0], signer=signer)
    follower.advance()
    assert follower.version == versions[0]
    assert Follower(store).advance() is not None, "who asks for no signature needs no key"
    point(store, "policy", versions[1], branch="stable", signer=signer)
    stolen = store.get("branches/policy/stable")
    assert store.compare_and_swap("pointers/policy", store.get("pointers/policy"), stolen)
    with pytest.raises(WeightsError, match="not signed with the key"):
        follower.advance()
    assert follower.version == versions[0]


@pytest.mark.parametrize("field", ["nonce", "generation", "sweep", "signature", "head"])
def test_nothing_a_signed_pointer_says_can_be_changed(policy: Policy, field: str) -> None:
    store, signer = MemoryStore(), Signer(new_key())
    published(store, policy, range(1), signer)
    pointer = head(store, "policy")
    assert pointer is not None
    other = {
        "nonce": "f" * 32,
        "generation": 5,
        "sweep": 1,
        "signature": "",
        "head": msgspec.structs.replace(pointer.head, sha256="0" * 64),
    }[field]
    forged = msgspec.json.encode(msgspec.structs.replace(pointer, **{field: other}))
    assert store.compare_and_swap("pointers/policy", store.get("pointers/policy"), forged)
    with pytest.raises(WeightsError, match="not signed with the key") as caught:
        Follower(store, public_key=signer.public_key).advance()
    assert "private key" in caught.value.hint


def test_a_key_of_the_wrong_length_is_named() -> None:
    with pytest.raises(WeightsError, match="32 bytes"):
        Signer(b"short")

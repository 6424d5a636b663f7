"""How tensors are verified before they are used: checksums against accidents, SHA-256 against forgery."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest

from etude.errors import WeightsError
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Manifest, Tensor, chain, tensor_digest
from etude.weights.chain.history import head
from etude.weights.chain.inspect import verify
from etude.weights.chain.manifest import (
    FORMAT,
    LaterWays,
    Ref,
    Way,
    later_key,
    read_manifest,
    write_manifest,
    write_pointer,
)
from etude.weights.chain.objects import put_objects
from etude.weights.delta.checksums import checksum
from etude.weights.follow.live_follower import LiveFollower
from etude.weights.shards.part_follower import PartFollower
from etude.weights.tensors import same_bits

UNSEEN = np.array([-26979, -33415, 30141, 35422, 1937, -24614, -11973, 2193], np.int64)
"""What the first eight words of a block may be moved by without another checksum: found by lattice reduction."""


def weights(step: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(0)
    codes = rng.integers(1 << 20, 1 << 30, 3000).astype(np.uint32)
    for _ in range(step):
        codes = codes + (rng.random(3000) < 0.05).astype(np.uint32)
    return {"w": Tensor("u32", (3000,), codes)}


def forged(tensor: Tensor) -> Tensor:
    codes = tensor.codes.astype(np.int64)
    codes[:8] += UNSEEN
    return Tensor(tensor.dtype, tensor.shape, codes.astype(np.uint32))


def published(steps: int) -> tuple[MemoryStore, list[Manifest]]:
    store, parent = MemoryStore(), None
    channel = Channel(store)
    for step in range(steps):
        parent = channel.publish(weights(step), step=step, parent=parent, rollout_ids=[]).version
    return store, chain(store, "policy")


def rewritten(store: MemoryStore, manifest: Manifest) -> None:
    """Replace the head's manifest by another one, as its writer could have."""
    ref, data = write_manifest(manifest)
    pointer = head(store, "policy")
    assert pointer is not None
    store.delete(ref.key)
    store.put(ref.key, data)
    assert store.compare_and_swap(
        "pointers/policy", write_pointer(pointer), write_pointer(msgspec.structs.replace(pointer, head=ref))
    )


def test_a_forger_can_make_another_tensor_of_the_same_checksum() -> None:
    tensor = weights(0)["w"]
    assert checksum(forged(tensor).codes) == checksum(tensor.codes)
    assert tensor_digest(forged(tensor)) != tensor_digest(tensor)


@pytest.mark.parametrize("follower", [Follower, lambda store: PartFollower(store, {"w"}.__contains__)])
def test_a_way_that_anybody_may_have_added_is_believed_by_sha_256_alone(follower) -> None:
    store, manifests = published(1)
    late = follower(store)
    late.advance()
    channel, parent = Channel(store), manifests[0].version
    for step in (1, 2):
        parent = channel.publish(weights(step), step=step, parent=parent, rollout_ids=[]).version
    first, _, target = chain(store, "policy")
    _, data = write_manifest(first)
    key = next(
        key
        for key in store.list("manifests/policy/")
        if hashlib.sha256(store.get(key)).digest() == hashlib.sha256(data).digest()
    )
    base = Ref(first.version, key, hashlib.sha256(data).hexdigest())
    objects, _ = put_objects(store, "policy", "ab" * 16, [forged(weights(2)["w"])], lambda a, b: [weights(0)["w"]])
    later = LaterWays(format=FORMAT, channel="policy", version=target.version, ways=(Way(base, objects),))
    store.put(later_key(target), msgspec.json.encode(later))
    update = late.advance()
    assert update is not None
    assert "another digest" in update.healed[0]
    assert same_bits(late.tensors["w"], weights(2)["w"])


def test_weights_from_a_disk_are_believed_by_sha_256_alone() -> None:
    store, (manifest,) = published(1)
    true = weights(0)
    wrong = {"w": forged(true["w"])}
    assert not Follower(store).start_from(manifest.version, wrong)
    assert not LiveFollower(store, wrong).start_from(manifest.version)
    assert Follower(store).start_from(manifest.version, true)
    live = LiveFollower(store, true)
    assert live.start_from(manifest.version)
    assert live.check() == []


def test_a_follower_that_starts_from_something_else_keeps_what_it_held() -> None:
    store, (manifest,) = published(1)
    follower = Follower(store)
    follower.advance()
    assert not follower.start_from(manifest.version, {"w": forged(weights(0)["w"])})
    assert follower.version == manifest.version


def test_manifests_without_checksums_are_read_and_proven_by_sha_256() -> None:
    store, (_, last) = published(2)
    (entry,) = last.tensors
    rewritten(store, msgspec.structs.replace(last, tensors=(msgspec.structs.replace(entry, checksum=""),)))
    follower = Follower(store)
    assert follower.advance() is not None
    assert same_bits(follower.tensors["w"], weights(1)["w"])
    assert verify(store).problems == ()
    wrong = msgspec.structs.replace(entry, checksum="", sha256=entry.sha256)
    assert read_manifest(write_manifest(msgspec.structs.replace(last, tensors=(wrong,)))[1]).tensors == (wrong,)


def test_a_checksum_that_is_not_the_tensors_is_found_by_followers_and_by_fsck() -> None:
    store, (_, last) = published(2)
    (entry,) = last.tensors
    rewritten(store, msgspec.structs.replace(last, tensors=(msgspec.structs.replace(entry, checksum="00" * 16),)))
    with pytest.raises(WeightsError, match="cannot build") as refused:
        Follower(store).advance()
    assert "another checksum" in refused.value.facts
    assert any("another checksum" in problem for problem in verify(store).problems)


@pytest.mark.parametrize("wrong", ["ab", "AB" * 16, "zz" * 16])
def test_a_checksum_that_is_none_is_a_damaged_manifest(wrong: str) -> None:
    _, (manifest,) = published(1)
    (entry,) = manifest.tensors
    _, data = write_manifest(
        msgspec.structs.replace(manifest, tensors=(msgspec.structs.replace(entry, checksum=wrong),))
    )
    with pytest.raises(WeightsError, match="manifest is damaged"):
        read_manifest(data)

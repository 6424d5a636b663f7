"""A directory follows a channel, over restarts, and only contains verified weights."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import msgspec
import numpy as np
import pytest

from etude.errors import InputError, StoreError, WeightsError
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Tensor, Update
from etude.weights.chain.branches import point
from etude.weights.chain.history import head, load, pointer_key
from etude.weights.chain.manifest import write_manifest
from etude.weights.chain.signing import Signer
from etude.weights.files.checkpoint import CheckpointWriter, index_of, layout, read_checkpoint
from etude.weights.files.folder import STATE, CheckpointFolder
from etude.weights.files.folder_follower import FolderFollower, list_bytes
from etude.weights.tensors import same_bits

Tensors = dict[str, Tensor]


def tensors(step: int) -> Tensors:
    rng = np.random.default_rng(1)
    codes = rng.integers(0x3C00, 0x3E00, 20_000).astype(np.uint16)
    for s in range(step):
        codes = codes + (np.random.default_rng(s).random(codes.size) < 0.01).astype(np.uint16)
    return {"w": Tensor("bf16", (100, 200), codes), "odd": Tensor("u8", (3,), np.arange(3, dtype=np.uint8))}


def publish(channel: Channel, step: int) -> None:
    channel.publish(tensors(step), step=step, parent=None, rollout_ids=[])


def assert_holds(path: Path, step: int) -> None:
    found = read_checkpoint(path).tensors
    assert all(same_bits(found[name], one) for name, one in tensors(step).items())


def test_a_directory_comes_to_each_head_and_writes_only_what_changed(tmp_path: Path) -> None:
    store = MemoryStore()
    channel = Channel(store)
    with CheckpointFolder(tmp_path) as folder:
        follower = FolderFollower(store, folder)
        assert follower.advance() is None
        for step in range(4):
            publish(channel, step)
            adopted = follower.advance()
            assert adopted is not None
            assert adopted.version == folder.version
            assert_holds(tmp_path, step)
            folder.verify()
            if step:
                assert adopted.written_bytes < 1000
                assert adopted.list_bytes == 3 * adopted.written_bytes
            assert follower.advance() is None


def test_a_restart_goes_on_from_what_the_directory_holds(tmp_path: Path) -> None:
    store = MemoryStore()
    channel = Channel(store)
    publish(channel, 0)
    with CheckpointFolder(tmp_path) as folder:
        first = FolderFollower(store, folder)
        assert not first.resumed
        anchor = first.advance()
    publish(channel, 1)
    publish(channel, 2)
    with CheckpointFolder(tmp_path) as folder:
        again = FolderFollower(store, folder)
        assert again.resumed
        adopted = again.advance()
    assert anchor is not None
    assert adopted is not None
    assert adopted.fetched_bytes < 0.1 * anchor.fetched_bytes
    assert_holds(tmp_path, 2)


@pytest.mark.parametrize("spoil", ["weights", "state", "other store"])
def test_a_directory_with_altered_weights_or_state_is_written_anew(tmp_path: Path, spoil: str) -> None:
    store = MemoryStore()
    channel = Channel(store)
    publish(channel, 0)
    with CheckpointFolder(tmp_path) as folder:
        FolderFollower(store, folder).advance()
    if spoil == "weights":
        file = tmp_path / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif spoil == "state":
        (tmp_path / STATE).unlink()
    else:
        store = MemoryStore()
        channel = Channel(store)
        publish(channel, 4)  # two versions there: its pointer is before none that was followed
    publish(channel, 5)
    with CheckpointFolder(tmp_path) as folder:
        follower = FolderFollower(store, folder)
        assert not follower.resumed
        follower.advance()
        folder.verify()
    assert_holds(tmp_path, 5)


def test_a_damaged_store_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    store = MemoryStore()
    channel = Channel(store)
    publish(channel, 0)
    with CheckpointFolder(tmp_path) as folder:
        follower = FolderFollower(store, folder)
        follower.advance()
        publish(channel, 1)
        for key in store.list("objects/"):
            store.delete(key)
        with pytest.raises(WeightsError):
            follower.advance()
        folder.verify()
    assert_holds(tmp_path, 0)


def test_a_version_refused_by_a_full_disk_is_adopted_when_there_is_room(tmp_path: Path) -> None:
    store = MemoryStore()
    channel = Channel(store)
    publish(channel, 0)
    with CheckpointFolder(tmp_path) as folder:
        follower = FolderFollower(store, folder)
        follower.advance()
        publish(channel, 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
        try:
            with pytest.raises(StoreError, match="cannot be written"):
                follower.advance()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        folder.verify()
        adopted = follower.advance()
        assert adopted is not None
        assert adopted.version.step == 1
        assert follower.advance() is None
    assert_holds(tmp_path, 1)


def test_decoded_lists_are_told_in_bytes() -> None:
    store = MemoryStore()
    channel, follower = Channel(store), Follower(store)
    publish(channel, 0)
    follower.advance()
    publish(channel, 1)
    update = follower.advance()
    assert isinstance(update, Update)
    changed = int((tensors(0)["w"].codes != tensors(1)["w"].codes).sum())
    assert list_bytes(update) == 6 * changed
    assert store.get(pointer_key("policy"))


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_pointer_that_moved_back_is_refused_after_a_restart_as_before_one(
    tmp_path: Path, is_signed: bool, is_lost: bool
) -> None:
    signer = Signer(bytes(range(32))) if is_signed else None
    public_key = signer.public_key if signer else None
    store = MemoryStore()
    channel = Channel(store, signer=signer)
    publish(channel, 0)
    old = store.get(pointer_key("policy"))
    publish(channel, 1)
    with CheckpointFolder(tmp_path) as folder:
        follower = FolderFollower(store, folder, public_key=public_key)
        follower.advance()
        assert store.compare_and_swap(pointer_key("policy"), store.get(pointer_key("policy")), old)
        with pytest.raises(WeightsError, match="moved back") as before:
            follower.advance()
    if is_lost:  # as in a restored copy: the store does not know the version that is held
        for key in store.list("manifests/"):
            if "v000001" in key:
                store.delete(key)
    with CheckpointFolder(tmp_path) as folder:
        follower = FolderFollower(store, folder, public_key=public_key)
        assert follower.resumed is not is_lost
        with pytest.raises(WeightsError, match="moved back") as after:
            follower.advance()
        assert (after.value.what, after.value.facts) == (before.value.what, before.value.facts)
        assert (f"remove {tmp_path / STATE}" in after.value.hint) is is_lost
    assert_holds(tmp_path, 1)
    if is_lost:
        (tmp_path / STATE).unlink()
        with CheckpointFolder(tmp_path) as folder:
            FolderFollower(store, folder, public_key=public_key).advance()
        assert_holds(tmp_path, 0)


@pytest.mark.parametrize("serial", [0, 1_000_000])
def test_a_manifest_beside_the_held_one_does_not_move_the_pointer(tmp_path: Path, serial: int) -> None:
    signer = Signer(bytes(range(32)))
    store = MemoryStore()
    channel = Channel(store, signer=signer)
    publish(channel, 0)
    old = store.get(pointer_key("policy"))
    publish(channel, 1)
    with CheckpointFolder(tmp_path) as folder:
        FolderFollower(store, folder, public_key=signer.public_key).advance()
        told = folder.followed
    pointer = head(store, "policy")
    assert pointer is not None
    beside = msgspec.structs.replace(load(store, pointer.head), serial=serial, nonce="0" * 32, signature="")
    ref, data = write_manifest(beside)
    store.put(ref.key, data)
    with CheckpointFolder(tmp_path) as folder:
        follower = FolderFollower(store, folder, public_key=signer.public_key)
        assert follower.resumed
        assert follower.advance() is None
        assert folder.followed == told
        newest = store.get(pointer_key("policy"))
        assert store.compare_and_swap(pointer_key("policy"), newest, old)
        with pytest.raises(WeightsError, match="moved back"):
            follower.advance()
        assert store.compare_and_swap(pointer_key("policy"), old, newest)
        publish(channel, 2)
        assert follower.advance() is not None
    assert_holds(tmp_path, 2)


def test_a_generation_that_was_seen_is_remembered_without_a_new_version(tmp_path: Path) -> None:
    store = MemoryStore()
    publish(Channel(store), 0)
    with CheckpointFolder(tmp_path) as folder:
        follower = FolderFollower(store, folder)
        follower.advance()
        first = store.get(pointer_key("policy"))
        assert folder.version is not None
        point(store, "policy", folder.version)
        assert follower.advance() is None
        assert folder.followed is not None
        assert folder.followed.generation == 1
    assert store.compare_and_swap(pointer_key("policy"), store.get(pointer_key("policy")), first)
    with CheckpointFolder(tmp_path) as folder, pytest.raises(WeightsError, match="generation went from 1 to 0"):
        FolderFollower(store, folder).advance()


def test_a_state_without_a_pointer_has_one_after_the_next_look(tmp_path: Path) -> None:
    store = MemoryStore()
    publish(Channel(store), 0)
    with CheckpointFolder(tmp_path) as folder:
        FolderFollower(store, folder).advance()
        told = folder.followed
    state = json.loads((tmp_path / STATE).read_text())
    del state["followed"]
    (tmp_path / STATE).write_text(json.dumps(state))
    with CheckpointFolder(tmp_path) as folder:
        assert folder.followed is None
        assert FolderFollower(store, folder).advance() is None
        assert folder.followed == told
    with CheckpointFolder(tmp_path) as folder:
        assert folder.followed == told


def test_a_directory_that_followed_one_channel_can_follow_another(tmp_path: Path) -> None:
    store = MemoryStore()
    publish(Channel(store, "one"), 0)
    publish(Channel(store, "one"), 1)
    publish(Channel(store, "two"), 2)
    for name, step in (("one", 1), ("two", 2)):
        with CheckpointFolder(tmp_path) as folder:
            assert FolderFollower(store, folder, name).advance() is not None
        assert_holds(tmp_path, step)


@pytest.mark.parametrize("other", ["names", "shapes", "dtypes"])
def test_a_directory_of_another_model_is_refused_and_stays_as_it_was(tmp_path: Path, other: str) -> None:
    held = {
        "names": {"v": tensors(0)["w"], "odd": tensors(0)["odd"]},
        "shapes": {"w": Tensor("bf16", (200, 100), tensors(0)["w"].codes), "odd": tensors(0)["odd"]},
        "dtypes": {"w": Tensor("f16", (100, 200), tensors(0)["w"].codes), "odd": tensors(0)["odd"]},
    }[other]
    write(tmp_path, held)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    store = MemoryStore()
    publish(Channel(store), 0)
    with CheckpointFolder(tmp_path) as folder:
        follower = FolderFollower(store, folder)
        for _ in range(2):
            with pytest.raises(InputError, match="has another checkpoint than channel 'policy'") as found:
                follower.advance()
        assert repr("v" if other == "names" else "w") in found.value.facts
    assert {file: file.read_bytes() for file in before} == before
    assert not (tmp_path / STATE).exists()


def test_a_copy_that_was_put_there_first_keeps_its_shards(tmp_path: Path) -> None:
    write(tmp_path, tensors(0), 100)
    files = {file.name for file in tmp_path.iterdir()}
    assert len(files) == 3
    store = MemoryStore()
    publish(Channel(store), 1)
    with CheckpointFolder(tmp_path) as folder:
        assert FolderFollower(store, folder).advance() is not None
    assert {file.name for file in tmp_path.glob("model*")} == files
    assert_holds(tmp_path, 1)


def write(path: Path, held: Tensors, shard_bytes: int = 1 << 30) -> None:
    headers = layout(held, shard_bytes)
    with CheckpointWriter(path, headers, index_of(headers)) as writer:
        for name, tensor in held.items():
            writer.put(name, tensor)


def test_a_file_is_no_directory_to_keep(tmp_path: Path) -> None:
    (tmp_path / "mk.py").write_text("mine")
    for path in (tmp_path / "mk.py", tmp_path / "mk.py" / "live"):
        with pytest.raises(InputError, match="is not a directory"):
            CheckpointFolder(path)
    assert (tmp_path / "mk.py").read_text() == "mine"

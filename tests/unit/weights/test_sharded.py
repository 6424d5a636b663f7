"""Several ranks publish one version, each its own shard; readers fetch all of it, or the part that they need."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.errors import StoreError, WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.stores import DirectoryStore, MemoryStore
from etude.weights import Channel, Follower, Tensor, lineage
from etude.weights.chain import history
from etude.weights.chain.compactor import Compactor
from etude.weights.chain.fsck import verify
from etude.weights.delta.layout import PAGE_BYTES
from etude.weights.files.folder import CheckpointFolder
from etude.weights.files.folder_follower import FolderFollower
from etude.weights.follow.parts import Part, assemble, part_of, split, split_pieces
from etude.weights.follow.runtime_map import Map, named, piece
from etude.weights.follow.targets import Target
from etude.weights.shards.part_follower import PartFollower
from etude.weights.shards.sharded import ShardedChannel, SingleRank
from etude.weights.tensors import same_bits

ROWS, WIDTH, EXPERTS = 512, 1024, 8


class Pipes:
    """An exchange over pipes: rank 0 has one to each other rank."""

    def __init__(self, rank: int, pipes: Sequence[Connection]) -> None:
        self.rank, self._pipes = rank, pipes

    def gather(self, data: bytes) -> Sequence[bytes]:
        if self.rank:
            self._pipes[0].send_bytes(data)
            return []
        return [data, *map(_received, self._pipes)]

    def broadcast(self, data: bytes) -> bytes:
        if self.rank:
            return _received(self._pipes[0])
        for pipe in self._pipes:
            pipe.send_bytes(data)
        return data


def _received(pipe: Connection) -> bytes:
    if not pipe.poll(30.0):
        raise TimeoutError("the other rank said nothing for 30 s")
    return pipe.recv_bytes()


def step_of(step: int, seed: int = 0) -> dict[str, Tensor]:
    """A model's tensors: two matrices and experts; each step changes a fifth of each. Quantised already."""
    rng = np.random.default_rng(seed)
    names = ["embed", "head", *(f"experts.{e}.w" for e in range(EXPERTS)), "norm"]
    shapes = {name: (ROWS, WIDTH) if name != "norm" else (WIDTH,) for name in names}
    codes = {name: rng.integers(0x3000, 0x4000, np.prod(shapes[name])).astype(np.uint16) for name in names}
    for _ in range(step):
        for name in names:
            codes[name] = codes[name] + (rng.random(codes[name].size) < 0.2).astype(np.uint16)
    return {name: Tensor("bf16", shapes[name], codes[name]) for name in names}


def shard(tensors: Mapping[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """A rank's tensors: rows of matrices, complete experts; the norm belongs to rank 0."""
    rows = ROWS // size
    names = [Part(name, rank * rows, (rank + 1) * rows).name for name in ("embed", "head")]
    names += [f"experts.{e}.w" for e in range(EXPERTS) if e * size // EXPERTS == rank]
    return split(tensors, names + (["norm"] if rank == 0 else []))


def rank_main(rank: int, folder: Path, pipe: Connection, fate: str, steps: Sequence[int]) -> None:
    """The process of a rank: publishes its shard of each step."""
    exchange = (Dying if fate == "dies" else Pipes)(rank, [pipe])
    channel = ShardedChannel(DirectoryStore(folder), exchange)
    parent = None
    for step in steps:
        tensors = shard(step_of(step), rank, 2)
        parent = channel.publish(tensors, step=step, parent=parent, rollout_ids=[f"r{step}"]).version


class Dying(Pipes):
    """The store of a rank that is killed after its objects were stored, before they were announced."""

    gathers = 0

    def gather(self, data: bytes) -> Sequence[bytes]:
        self.gathers += 1
        if self.gathers == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().gather(data)


def start_rank(
    rank: int, folder: Path, pipe: Connection, steps: Sequence[int], fate: str = ""
) -> subprocess.Popen[bytes]:
    fd = pipe.fileno()
    argv = [sys.executable, __file__, str(rank), str(folder), str(fd), fate, *map(str, steps)]
    return subprocess.Popen(argv, pass_fds=[fd])


def run_ranks(folder: Path, steps: Sequence[int]) -> None:
    one, other = multiprocessing.Pipe()
    with one, other:
        ranks = [start_rank(0, folder, one, steps), start_rank(1, folder, other, steps)]
    assert [process.wait(600.0) for process in ranks] == [0, 0]


def together(size: int, work: Callable[[int, Any], object]) -> list[object]:
    """Run ranks as threads; returns the result or the error of each."""
    ends = [multiprocessing.Pipe() for _ in range(size - 1)]
    exchanges = [Pipes(0, [a for a, _ in ends]), *(Pipes(i + 1, [b]) for i, (_, b) in enumerate(ends))]
    results: list[object] = [None] * size

    def one(rank: int) -> None:
        try:
            results[rank] = work(rank, exchanges[rank])
        except Exception as error:  # noqa: BLE001 - it is what the test asks for
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600.0)
    return results


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


class Counting:
    """A store that counts the bytes of objects read."""

    def __init__(self, store: BlobStore) -> None:
        self._store, self.num_bytes = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = self._store.get(key, start, stop)
        self.num_bytes += len(data) if key.startswith("objects/") else 0
        return data


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> DirectoryStore:
    """Steps 0 to 2, by two processes; and step 3, by two more that read back the earlier steps."""
    folder = tmp_path_factory.mktemp("weights")
    run_ranks(folder, [0, 1, 2])
    run_ranks(folder, [3])
    return DirectoryStore(folder)


def test_two_processes_publish_one_version_that_a_follower_assembles(published: DirectoryStore) -> None:
    follower = Follower(published)
    follower.advance()
    assert equal(assemble(follower.tensors), step_of(3))
    assert {part_of(name) for name in follower.tensors} >= {Part("embed", 0, 256), Part("embed", 256, 512)}
    assert verify(published).found == ()


def test_a_restart_publishes_a_delta_of_each_ranks_last_bytes(published: DirectoryStore) -> None:
    manifest = history.load(published, history.head(published, "policy").head)
    assert manifest.base is not None
    assert manifest.base.version.step == 2
    assert manifest.anchor is None
    assert manifest.delta.num_bytes < manifest.snapshot_bytes / 8
    assert len(manifest.delta.objects) == 2, "one of each rank"
    assert [entry.name for entry in manifest.tensors] == [
        name for rank in range(2) for name in sorted(shard(step_of(0), rank, 2))
    ]


def test_an_expert_parallel_reader_fetches_about_its_part(published: DirectoryStore) -> None:
    mine = {f"experts.{e}.w" for e in (2, 3)}
    _check_part(published, mine.__contains__, share=2 / 10)


def test_a_tensor_parallel_reader_fetches_about_its_rows(published: DirectoryStore) -> None:
    def wants(name: str) -> bool:
        part = part_of(name)
        return part is not None and part.start >= ROWS // 2

    tensors = _check_part(published, wants, share=1 / 10)
    assert equal(tensors, split(step_of(3), ["embed[256:512]", "head[256:512]"]))


def _check_part(published: DirectoryStore, wants: Callable[[str], bool], share: float) -> Mapping[str, Tensor]:
    """Read the chain part by part. The fetched bytes are the part's share of the objects, plus partial pages."""
    store = Counting(published)
    follower = PartFollower(store, wants)
    manifests = _chain(published)
    for manifest in manifests:
        store.num_bytes = 0
        update = follower.advance(exactly=manifest.version)
        assert update is not None
        way = manifest.delta or manifest.anchor
        objects = [item for item in way.objects if _covers(manifest, way, item, wants)]
        assert update.fetched_bytes == store.num_bytes
        assert store.num_bytes <= share * way.num_bytes + len(objects) * 3 * PAGE_BYTES
        if manifest.anchor is not None and manifest.delta is None:
            assert store.num_bytes < 1.5 * share * way.num_bytes
        wanted = [entry.name for entry in manifest.tensors if wants(entry.name)]
        assert equal(follower.tensors, split(step_of(manifest.version.step), wanted))
    return follower.tensors


def _chain(store: BlobStore) -> list[Any]:
    return history.chain(store, "policy")


def _covers(manifest: Any, way: Any, item: Any, wants: Callable[[str], bool]) -> bool:
    start = sum(one.num_tensors for one in way.objects[: way.objects.index(item)])
    return any(wants(entry.name) for entry in manifest.tensors[start : start + item.num_tensors])


def test_tensors_that_share_a_tile_come_along_and_the_part_is_exact() -> None:
    rng = np.random.default_rng(0)
    store = MemoryStore()
    channel = Channel(store)
    small = {f"t{i}": rng.integers(0, 60000, 500).astype(np.uint16) for i in range(40)}
    follower = PartFollower(store, {"t7", "t31"}.__contains__)
    parent = None
    for step in range(6):
        moved = rng.integers(0, 40, 12)
        for i in moved:
            small[f"t{i}"] = small[f"t{i}"] + (rng.random(500) < 0.1).astype(np.uint16)
        tensors = {name: Tensor("bf16", (500,), codes) for name, codes in small.items()}
        parent = channel.publish(tensors, step=step, parent=parent, rollout_ids=[]).version
        update = follower.advance()
        assert update is not None
        assert equal(follower.tensors, {name: tensors[name] for name in ("t7", "t31")})
        assert {*update.changed, *update.replaced} <= {"t7", "t31"}


def test_skip_deltas_composed_over_shards_lead_part_followers_and_whole_ones() -> None:
    store = MemoryStore()
    channel = ShardedChannel(store, SingleRank())
    part, whole, compactor = PartFollower(store, {"norm"}.__contains__), Follower(store), Compactor(store, spans=(2,))
    parent = None
    for step in range(5):
        tensors = {**shard(step_of(step), 1, 2), **shard(step_of(step), 0, 2)}
        parent = channel.publish(tensors, step=step, parent=parent, rollout_ids=[]).version
        compactor.step()
        if step in (0, 2, 4):
            assert part.advance() is not None
            assert whole.advance() is not None
    assert equal(part.tensors, {"norm": step_of(4)["norm"]})
    assert equal(assemble(whole.tensors), step_of(4))
    assert [manifest.version.step for manifest in lineage(store, "policy")] == [0, 1, 2, 3, 4]


def test_other_shards_than_before_are_published_whole_and_read() -> None:
    store = MemoryStore()
    first = together(2, lambda r, x: ShardedChannel(store, x).publish(
        shard(step_of(0), r, 2), step=0, parent=None, rollout_ids=[]))  # fmt: skip
    parent = first[0].version
    second = together(4, lambda r, x: ShardedChannel(store, x).publish(
        shard(step_of(1), r, 4), step=1, parent=parent, rollout_ids=[]))  # fmt: skip
    assert len({p.version for p in second}) == 1
    follower = Follower(store)
    follower.advance()
    assert equal(assemble(follower.tensors), step_of(1))


def test_a_rank_that_fails_makes_all_raise_and_the_next_publish_goes_on() -> None:
    class Full(Counting):
        full = False

        def put(self, key: str, data: bytes) -> None:
            if self.full:
                raise StoreError("the disk is full", hint="free space")
            self._store.put(key, data)

    store = MemoryStore()
    weak = Full(store)

    def story(rank: int, exchange: Any) -> list[object]:
        channel = ShardedChannel(store if rank == 0 else weak, exchange)
        said: list[object] = []
        parent: Version | None = None
        for step in (0, 1, 2):
            if rank == 1:
                weak.full = step == 1
            try:
                parent = channel.publish(
                    shard(step_of(step), rank, 2), step=step, parent=parent, rollout_ids=[]
                ).version
                said.append(parent.step)
            except WeightsError as error:
                said.append(error.what)
        return said

    assert together(2, story) == [[0, "rank 1 cannot publish: the disk is full", 2]] * 2
    follower = Follower(store)
    follower.advance()
    assert equal(assemble(follower.tensors), step_of(2))


@pytest.mark.parametrize(
    ("ranks", "what"),
    [
        ([["a"], ["a"]], "both publish 'a'"),
        ([["w[0:2]"], ["w[3:4]"]], "w\\[3:4\\]"),
        ([["w[2:4]"], ["b"]], "w\\[2:4\\]"),
        ([["w[0:2]"], ["w"]], "w\\[0:2\\]"),
    ],
)
def test_shards_that_make_no_whole_are_refused(ranks: list[list[str]], what: str) -> None:
    def tensor(name: str) -> Tensor:
        part = part_of(name)
        rows = part.stop - part.start if part else 2
        return Tensor("u8", (rows, 3), np.zeros(rows * 3, np.uint8))

    store = MemoryStore()
    told = together(2, lambda r, x: ShardedChannel(store, x).publish(
        {name: tensor(name) for name in ranks[r]}, step=0, parent=None, rollout_ids=[]))  # fmt: skip
    for error in told:
        with pytest.raises(WeightsError, match=what):
            raise error  # type: ignore[misc]
    assert history.head(store, "policy") is None


def test_a_rank_that_lost_its_last_bytes_makes_the_version_an_anchor(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)

    def publish(step: int, parent: Version | None) -> Any:
        return together(2, lambda r, x: ShardedChannel(store, x).publish(
            shard(step_of(step), r, 2), step=step, parent=parent, rollout_ids=[]))[0]  # fmt: skip

    first = publish(0, None)
    store.delete(_chain(store)[0].anchor.objects[1].key)
    second = publish(1, first.version)
    assert second.anchor
    follower = Follower(store)
    follower.advance()
    assert equal(assemble(follower.tensors), step_of(1))


def test_parts_go_into_the_memory_of_whole_tensors_and_of_ranks() -> None:
    old, new = step_of(0), step_of(1)
    cut = {**shard(new, 0, 2), **shard(new, 1, 2)}
    specs = {name: tensor.spec for name, tensor in cut.items()}
    live = {name: tensor.codes.reshape(tensor.shape).copy() for name, tensor in old.items()}
    rows = np.zeros((200, WIDTH), np.uint16)  # rows 200 to 399 of the embedding: of two parts
    target = Target(Map(split_pieces(named(live), specs)))
    rank = Target(Map(split_pieces({"embed": [piece("embed", rows, [(200, 400), (0, WIDTH)])]}, specs), ignored=specs))
    follower = Follower(_store_of(cut))
    update = follower.advance()
    assert update is not None
    for one in (target, rank):
        one.prepare(update, follower.tensors, undoable=False).apply()
        assert one.differing(follower.tensors) == []
    assert all(np.array_equal(live[name].reshape(-1), tensor.codes) for name, tensor in new.items())
    assert np.array_equal(rows, new["embed"].codes.reshape(ROWS, WIDTH)[200:400])


def _store_of(tensors: Mapping[str, Tensor]) -> MemoryStore:
    store = MemoryStore()
    ShardedChannel(store, SingleRank()).publish(tensors, step=0, parent=None, rollout_ids=[])
    return store


def test_a_directory_that_follows_ranks_holds_whole_tensors_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    store = MemoryStore()
    channel = ShardedChannel(store, SingleRank())
    parent = None
    for step in range(3):
        cut = {**shard(step_of(step), 0, 2), **shard(step_of(step), 1, 2)}
        parent = channel.publish(cut, step=step, parent=parent, rollout_ids=[]).version
        with CheckpointFolder(tmp_path / "mirror") as folder:
            follower = FolderFollower(store, folder)
            assert follower.resumed == (step > 0)
            adopted = follower.advance()
            assert adopted is not None
            assert equal(folder.tensors, step_of(step))
            folder.verify(cut)


def test_a_rank_killed_amid_a_publish_leaves_readers_with_the_version_before(tmp_path: Path) -> None:
    run_ranks(tmp_path, [0])
    one, other = multiprocessing.Pipe()
    victim = start_rank(1, tmp_path, other, [1], "dies")
    other.close()
    channel = ShardedChannel(DirectoryStore(tmp_path), Pipes(0, [one]))
    with pytest.raises((EOFError, OSError)):
        channel.publish(shard(step_of(1), 0, 2), step=1, parent=None, rollout_ids=[])
    assert victim.wait(300.0) == -signal.SIGKILL
    follower = Follower(DirectoryStore(tmp_path))
    update = follower.advance()
    assert update is not None
    assert update.version.step == 0
    run_ranks(tmp_path, [1])
    follower.advance()
    assert equal(assemble(follower.tensors), step_of(1))


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), Path(sys.argv[2]), Connection(int(sys.argv[3])), sys.argv[4], [*map(int, sys.argv[5:])])

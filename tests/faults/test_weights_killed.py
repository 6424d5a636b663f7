"""kill -9 in every place: of a writer in every step of publish, of a follower in every step of an update, of garbage
collection, composing, rollback. Real processes over a directory. In no cell is an unproven version held, and in none is
an acknowledged one lost.

A cell kills a process at its n-th operation on the store: before it, with half of its bytes written, with all of them
written and not yet in place, in place and not yet synced, or after it. What a process acknowledges, it writes to a
file before it does anything else.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from etude.errors import WeightsError
from etude.records import Version
from etude.stores import DirectoryStore
from etude.weights import Channel, Follower, Tensor, chain, content_digest, tensor_digest
from etude.weights.chain.branches import point
from etude.weights.chain.compactor import Compactor
from etude.weights.chain.garbage import collect
from etude.weights.chain.history import load, pointers
from etude.weights.chain.inspect import verify
from etude.weights.chain.plans import later_ways, rebuild
from etude.weights.tensors import same_bits

SIZE = 3000
STEPS = 3
WRITING = ("before", "torn", "written", "in place", "after")
READING = ("before", "after")
DEADLINE_S = 600.0
KEEP_S = 100.0

T = TypeVar("T")
fork = multiprocessing.get_context("fork")


def policy_at(step: int) -> dict[str, Tensor]:
    codes = np.random.default_rng(0).integers(0x3C00, 0x3E00, SIZE).astype(np.uint16)
    for s in range(1, step + 1):
        codes = codes + (np.random.default_rng([1, s]).random(SIZE) < 0.05).astype(np.uint16)
    return {
        "a": Tensor("bf16", (SIZE // 2,), codes[: SIZE // 2]),
        "b": Tensor("bf16", (SIZE // 2,), codes[SIZE // 2 :]),
    }


class Deadly(DirectoryStore):
    """Kills its process at its n-th operation. One that does not come that far lives."""

    def __init__(self, root: Path, number: int, place: str) -> None:
        super().__init__(root)
        self.left, self.place = number, place

    def put(self, key: str, data: bytes) -> None:
        self._do(lambda: super(Deadly, self).put(key, data))

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._do(lambda: super(Deadly, self).get(key, start, stop))

    def list(self, prefix: str) -> list[str]:
        return self._do(lambda: super(Deadly, self).list(prefix))

    def delete(self, key: str) -> None:
        self._do(lambda: super(Deadly, self).delete(key))

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        return self._do(lambda: super(Deadly, self).compare_and_swap(key, expected, data))

    def _do(self, operation: Callable[[], T]) -> T:
        self.left -= 1
        if self.left != -1:
            return operation()
        match self.place:
            case "before":
                die()
            case "torn":
                write = os.write
                os.write = lambda fd, view: die(write(fd, view[: len(view) // 2]))
            case "written":
                os.rename = die
            case "in place":
                rename = os.rename
                os.rename = lambda *paths, **at: die(rename(*paths, **at))
        result = operation()
        die()
        return result


def die(*_: object, **__: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


ALL = pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
"""The long tests run all cells, the quick ones a quarter: others for each place."""


def cells(places: tuple[str, ...], stride: int, run: Callable[[int, str], bool]) -> int:
    """Run the cells: `run(number, place)` says whether its process was killed. How many operations there were."""
    count = 0
    for offset, place in enumerate(places):
        number = offset % stride
        while run(number, place):
            number += stride
        count += number
    return count


def killed(work: Callable[[], None]) -> bool:
    """Run it in a process; whether that was killed. Anything but a kill or a clean end fails."""
    process = fork.Process(target=work)
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[], Path]:
    """Copies of a store: versions 0 to 5, ways added by a compactor, a first collection, and a killed publish."""
    store = DirectoryStore(tmp_path / "whole")
    writer, compactor, parent = Channel(store), Compactor(store, spans=(2, 4)), None
    for step in range(6):
        parent = writer.publish(policy_at(step), step=step, parent=parent, rollout_ids=[f"r{step}"]).version
        if step < 5:
            compactor.step()
    killed(lambda: Channel(store).publish(policy_at(9), step=9, parent=parent, rollout_ids=[], after=_die_at_manifest))
    collect(store, "policy", keep_s=KEEP_S, now=0.0)

    def copied() -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        (tmp_path / "acknowledged").unlink(missing_ok=True)
        return Path(shutil.copytree(tmp_path / "whole", tmp_path / "copy"))

    return copied


def _die_at_manifest(done: str) -> None:
    if done == "manifest":
        die()


def versions_of(root: Path) -> list[Version]:
    return [manifest.version for manifest in chain(DirectoryStore(root), "policy")]


def acknowledge(root: Path, what: object) -> None:
    with open(root.parent / "acknowledged", "a") as file:
        file.write(f"{what}\n")


def acknowledged(root: Path) -> list[str]:
    path = root.parent / "acknowledged"
    return path.read_text().split() if path.exists() else []


def held_exactly(follower: Follower) -> bool:
    assert follower.version is not None
    expected = policy_at(follower.version.step)
    return all(same_bits(follower.tensors[name], tensor) for name, tensor in expected.items())


def everything_is_whole(root: Path) -> None:
    store = DirectoryStore(root)
    for pointer in pointers(store, "policy").values():
        rebuild(store, load(store, pointer.head))
    assert verify(store).problems == ()


@ALL
def test_a_writer_killed_anywhere_loses_nothing_it_acknowledged_and_shows_nothing_unproven(
    fresh: Callable[[], Path], stride: int
) -> None:
    def run(number: int, place: str) -> bool:
        root = fresh()
        early = Follower(DirectoryStore(root))
        early.advance()

        def work() -> None:
            writer, parent = Channel(Deadly(root, number, place)), early.version
            for step in range(6, 6 + STEPS):
                parent = writer.publish(policy_at(step), step=step, parent=parent, rollout_ids=[f"r{step}"]).version
                acknowledge(root, parent)

        was_killed = killed(work)
        store = DirectoryStore(root)
        late = Follower(store)
        for follower in (early, late):
            follower.advance()
            assert held_exactly(follower)
        known = [str(version) for version in versions_of(root)]
        said = acknowledged(root)
        assert known[6 : 6 + len(said)] == said
        assert len(known) - 6 - len(said) in (0, 1), "at most the one that died between its commit and its word"
        after = Channel(store).publish(policy_at(20), step=20, parent=late.version, rollout_ids=[])
        for follower in (early, late):
            follower.advance()
            assert follower.version == after.version
            assert held_exactly(follower)
        everything_is_whole(root)
        return was_killed

    assert cells(WRITING, stride, run) > 80


@ALL
def test_a_follower_killed_anywhere_held_nothing_unproven_and_its_successor_comes_to_the_head(
    fresh: Callable[[], Path], stride: int
) -> None:
    def run(number: int, place: str) -> bool:
        root = fresh()
        versions = versions_of(root)

        def work() -> None:
            store = Deadly(root, number, place)
            follower = Follower(store)
            for version in (versions[1], versions[3], None):
                follower.advance(exactly=version)
                acknowledge(root, f"{follower.version}={_digest(follower)}")
            follower.undo()
            acknowledge(root, f"{follower.version}={_digest(follower)}")
            follower.advance()
            acknowledge(root, f"{follower.version}={_digest(follower)}")

        was_killed = killed(work)
        digests = {str(version): version.digest for version in versions}
        for line in acknowledged(root):
            version, _, digest = line.partition("=")
            assert digests[version] == digest
        successor = Follower(DirectoryStore(root))
        successor.advance()
        assert successor.version == versions[-1]
        assert held_exactly(successor)
        return was_killed

    assert cells(READING, stride, run) > 20


@ALL
def test_a_collection_killed_anywhere_leaves_every_pointer_whole_and_the_next_one_ends_it(
    fresh: Callable[[], Path], stride: int
) -> None:
    def run(number: int, place: str) -> bool:
        root = fresh()
        was_killed = killed(lambda: _collect(Deadly(root, number, place), KEEP_S))
        everything_is_whole(root)
        store = DirectoryStore(root)
        for now in (2 * KEEP_S, 3 * KEEP_S):
            _collect(store, now)
        check = verify(store)
        assert (check.problems, check.orphans) == ((), ())
        follower = Follower(store)
        follower.advance()
        assert held_exactly(follower)
        return was_killed

    assert cells(("before", "torn", "in place"), stride, run) > 50


@ALL
def test_a_compactor_killed_anywhere_leaves_ways_that_are_whole_or_none(fresh: Callable[[], Path], stride: int) -> None:
    def run(number: int, place: str) -> bool:
        root = fresh()
        store = DirectoryStore(root)
        behind = Follower(store)
        behind.advance(exactly=versions_of(root)[1])
        was_killed = killed(lambda: _compose(Deadly(root, number, place)))
        everything_is_whole(root)
        Compactor(store, spans=(2, 4)).step()
        assert later_ways(store, chain(store, "policy")[-1])
        behind.advance()
        assert held_exactly(behind)
        everything_is_whole(root)
        return was_killed

    assert cells(WRITING, stride, run) > 50


@ALL
def test_a_rollback_killed_anywhere_has_happened_or_not(fresh: Callable[[], Path], stride: int) -> None:
    def run(number: int, place: str) -> bool:
        root = fresh()
        versions = versions_of(root)
        follower = Follower(DirectoryStore(root))
        follower.advance()

        def work() -> None:
            point(Deadly(root, number, place), "policy", versions[4])
            acknowledge(root, versions[4])

        was_killed = killed(work)
        follower.advance()
        assert follower.version in ((versions[4],) if acknowledged(root) else (versions[4], versions[5]))
        assert held_exactly(follower)
        everything_is_whole(root)
        return was_killed

    assert cells(WRITING, stride, run) > 20


def test_of_concurrent_writer_processes_one_publishes_each_version_and_the_others_fail(
    fresh: Callable[[], Path],
) -> None:
    root = fresh()
    before = versions_of(root)
    start = fork.Barrier(4)

    def work(number: int) -> None:
        writer, parent = Channel(DirectoryStore(root)), before[-1]

        def together(done: str) -> None:
            if done == "manifest" and parent == before[-1]:
                start.wait(DEADLINE_S)

        for step in range(6, 10):
            try:
                parent = writer.publish(
                    policy_at(step), step=step, parent=parent, rollout_ids=[str(number)], after=together
                ).version
            except WeightsError as error:
                acknowledge(root, "told" if "another writer moved" in error.what else error.what)
                return
            acknowledge(root, parent)

    processes = [fork.Process(target=work, args=(number,)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
        assert process.exitcode == 0
    said = acknowledged(root)
    assert sorted(said) == sorted(["told"] * 3 + [str(version) for version in versions_of(root)[6:]])
    assert len(said) == 7
    everything_is_whole(root)


def _digest(follower: Follower) -> str:
    return content_digest({name: tensor_digest(tensor) for name, tensor in follower.tensors.items()})


def _collect(store: DirectoryStore, now: float) -> None:
    collect(store, "policy", keep_s=KEEP_S, now=now)


def _compose(store: DirectoryStore) -> None:
    Compactor(store, spans=(2, 4)).step()

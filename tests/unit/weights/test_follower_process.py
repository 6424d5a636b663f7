"""A follower in a child process: the same results, whatever happens to the process."""

from __future__ import annotations

import errno
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from etude.errors import WeightsError
from etude.records import Version
from etude.stores import DirectoryStore
from etude.weights import Channel, FollowerProcess, Tensor, chain
from etude.weights.chain.branches import point
from etude.weights.chain.signing import Signer
from etude.weights.delta import native
from etude.weights.follow import follower_child
from etude.weights.follow.follower import Follower
from etude.weights.follow.follower_process import FollowerArgs, Request
from etude.weights.tensors import same_bits

SIZE = 4000


def policy_at(step: int) -> dict[str, Tensor]:
    """Three tensors: one that changes little from step to step, one that changes much, one that does not change."""
    codes = np.random.default_rng(0).integers(0x3C00, 0x3E00, (3, SIZE)).astype(np.uint16)
    for s in range(1, step + 1):
        codes[0] += np.random.default_rng([1, s]).random(SIZE) < 0.02
        codes[1] += np.random.default_rng([2, s]).random(SIZE) < 0.8
    return {name: Tensor("bf16", (SIZE,), row) for name, row in zip(("few", "many", "none"), codes, strict=True)}


class World:
    """A store, its writer, and a follower in another process."""

    def __init__(self, folder: Path) -> None:
        self.store = DirectoryStore(folder)
        self.channel = Channel(self.store)
        self.last: Version | None = None
        self.follower = FollowerProcess(self.store, poll_s=0.01, wait_s=0.0)

    def publish(self, step: int) -> None:
        self.last = self.channel.publish(policy_at(step), step=step, parent=self.last, rollout_ids=[]).version

    def holds(self, step: int) -> bool:
        held = self.follower.tensors
        return self.follower.version == self.last and all(same_bits(held[n], t) for n, t in policy_at(step).items())

    def damage_delta(self) -> None:
        delta = chain(self.store, "policy")[-1].delta
        assert delta is not None
        key = delta.objects[0].key
        data = self.store.get(key)
        self.store.delete(key)
        self.store.put(key, data[:-3])


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    with world.follower:
        yield world


def test_a_follower_process_returns_the_updates_of_a_follower(world: World) -> None:
    assert world.follower.advance() is None
    assert world.follower.version is None
    world.publish(0)
    update = world.follower.advance()
    assert update is not None
    assert update.replaced.keys() == policy_at(0).keys()
    assert world.holds(0)
    assert world.follower.advance() is None
    for step in (1, 2):
        world.publish(step)
        update = world.follower.advance()
        assert update is not None
        assert (update.version, world.holds(step)) == (world.last, True)
        places, codes = update.changed["few"]
        before, after = policy_at(step - 1)["few"].codes, policy_at(step)["few"].codes
        assert np.array_equal(places, np.flatnonzero(before != after))
        assert np.array_equal(codes, after[places])
        assert update.replaced.keys() == {"many"}


def test_a_late_follower_process_advances_to_the_head_at_once(world: World) -> None:
    world.publish(0)
    world.follower.advance()
    for step in (1, 2, 3):
        world.publish(step)
    update = world.follower.advance()
    assert update is not None
    assert update.version.step == 3
    assert world.holds(3)


def test_a_killed_child_is_told_and_the_next_one_catches_up(world: World) -> None:
    world.publish(0)
    world.follower.advance()
    for step in (1, 2):
        pid = world.follower.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WeightsError, match=r"(?s)follower's process ended.*-9.*started again"):
            world.follower.advance()
        assert world.holds(step - 1)
        assert world.follower.advance() is None, "it holds the head, wherever its child begins"
        world.publish(step)
        update = world.follower.advance()
        assert update is not None
        assert update.replaced.keys() == policy_at(step).keys()
        assert world.holds(step)


def kill(process: int) -> None:
    """Kill the process of a descriptor, if it still exists."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    os.close(process)


def test_a_child_killed_at_random_moments_never_gives_anything_wrong(world: World) -> None:
    rng, ends = random.Random(0), []
    for step in range(12):
        world.publish(step)
        while world.follower.version != world.last:
            killer = None
            if world.follower.pid is not None and len(ends) <= step:
                killer = threading.Timer(rng.uniform(0.0, 0.02), kill, (os.pidfd_open(world.follower.pid),))
                killer.start()
            try:
                world.follower.advance()
            except WeightsError as error:
                ends.append(error.what)
            if killer is not None:
                killer.join()
        assert world.holds(step)
    assert set(ends) == {"the follower's process ended"}


def test_a_torn_delta_without_an_anchor_is_refused_by_name_and_what_was_held_stays(world: World) -> None:
    world.publish(0)
    world.follower.advance()
    held = world.last
    world.publish(1)
    world.damage_delta()
    for _ in range(2):
        with pytest.raises(WeightsError, match=r"(?s)cannot build v000001.*is not what was published.*hint:"):
            world.follower.advance()
    assert world.follower.version == held
    world.channel, world.last = Channel(world.store), None  # the pointer's target cannot be rebuilt: an anchor
    world.publish(2)
    update = world.follower.advance()
    assert update is not None
    assert world.holds(2)


def test_a_torn_delta_heals_from_the_anchor_beside_it(world: World) -> None:
    step = 0
    while True:
        world.publish(step)
        newest = chain(world.store, "policy")[-1]
        if step and newest.anchor is not None:
            break
        world.follower.advance()
        step += 1
    world.damage_delta()
    update = world.follower.advance()
    assert update is not None
    assert "is not what was published" in update.healed[0]
    assert world.holds(step)


def test_a_child_that_gives_no_answer_is_killed_at_the_deadline(tmp_path: Path) -> None:
    with FollowerProcess(DirectoryStore(tmp_path), wait_s=0.0, deadline_s=60.0) as follower:
        assert follower.advance() is None
        assert follower.pid is not None
        os.kill(follower.pid, signal.SIGSTOP)
        follower._deadline_s = 0.05
        with pytest.raises(WeightsError, match=r"no answer within 0.05 s"):
            follower.advance()
        assert follower.pid is None
        follower._deadline_s = 60.0
        assert follower.advance() is None


def test_a_closed_follower_process_raises_and_its_child_has_ended(world: World) -> None:
    pid = world.follower.pid
    world.follower.close()
    world.follower.close()
    with pytest.raises(WeightsError, match="closed"):
        world.follower.advance()
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_child_ends_with_its_parent_however_that_ends_and_loads_no_torch(tmp_path: Path) -> None:
    code = f"""
from etude.stores import DirectoryStore
from etude.weights import FollowerProcess
follower = FollowerProcess(DirectoryStore({str(tmp_path)!r}), wait_s=0.0)
follower.advance()
print(follower.pid, flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(pid := int(parent.stdout.readline()))
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        parent.kill()
        assert select.select([child], [], [], 30)[0], f"child {pid} outlived its parent"
        os.close(child)


def older_pointer(world: World) -> bytes:
    """The pointer to the version before the head, as in a stale copy of the store."""
    key = "pointers/policy"
    world.publish(0)
    world.follower.advance()
    stale = world.store.get(key)
    world.publish(1)
    assert world.follower.advance() is not None
    assert world.store.compare_and_swap(key, world.store.get(key), stale)
    return stale


def test_a_child_that_is_started_anew_still_refuses_a_pointer_that_moved_back(world: World) -> None:
    older_pointer(world)
    held = world.follower.version
    with pytest.raises(WeightsError, match="moved back"):
        world.follower.advance()
    assert world.follower.pid is not None
    os.kill(world.follower.pid, signal.SIGKILL)
    with pytest.raises(WeightsError, match="the follower's process ended"):
        world.follower.advance()
    with pytest.raises(WeightsError, match="moved back") as refused:
        world.follower.advance()
    assert str(held) in refused.value.facts
    assert "etude weights point" in refused.value.hint
    assert world.follower.version == held
    assert world.holds(1)


def test_only_what_the_owner_of_the_public_key_signed_is_followed(tmp_path: Path) -> None:
    signer, other = Signer(bytes(range(32))), Signer(bytes(32))
    store = DirectoryStore(tmp_path / "signed")
    with FollowerProcess(store, public_key=signer.public_key, poll_s=0.01, wait_s=0.0) as follower:
        Channel(store).publish(policy_at(0), step=0, parent=None, rollout_ids=[])
        with pytest.raises(WeightsError, match="is not signed with the key that this reader trusts") as refused:
            follower.advance()
        assert refused.value.facts == "it has no signature"
        assert "give the writer the private key" in refused.value.hint
        channel = Channel(store, signer=signer)
        second = channel.publish(policy_at(1), step=1, parent=None, rollout_ids=[])
        assert follower.advance() is not None
        assert follower.version == second.version
    wrong = DirectoryStore(tmp_path / "wrong")
    with FollowerProcess(wrong, public_key=signer.public_key, poll_s=0.01, wait_s=0.0) as follower:
        Channel(wrong, signer=other).publish(policy_at(0), step=0, parent=None, rollout_ids=[])
        with pytest.raises(WeightsError, match="is not signed with the key") as refused:
            follower.advance()
        assert refused.value.facts == "it is signed with another key"


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
@pytest.mark.parametrize("threads", [1, 3])
def test_a_child_decodes_with_as_many_threads_as_it_was_told(tmp_path: Path, threads: int) -> None:
    ours, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = (
        "import sys; from etude.weights.delta.codec import KERNELS\n"
        "from etude.weights.follow import follower_child as child\n"
        "child._end_with = lambda connection: None\n"
        "child.main(sys.argv); print(KERNELS.threads)"
    )
    with child_end:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(child_end.fileno())],
            pass_fds=[child_end.fileno()],
            stdout=subprocess.PIPE,
        )
    with ours:
        ours.send(pickle.dumps(FollowerArgs(DirectoryStore(tmp_path), "policy", 1 << 30, 0.01, None, None, threads)))
    told, _ = process.communicate(timeout=300)
    assert told.strip() == str(threads).encode()


def test_a_branch_is_followed_where_it_is_moved(world: World) -> None:
    versions = []
    for step in range(2):
        world.publish(step)
        versions.append(world.last)
    assert versions[0] is not None
    assert versions[1] is not None
    point(world.store, "policy", versions[0], branch="canary")
    with FollowerProcess(world.store, branch="canary", poll_s=0.01, wait_s=0.0) as follower:
        assert follower.advance() is not None
        assert follower.version == versions[0]
        point(world.store, "policy", versions[1], branch="canary")
        assert follower.advance() is not None
        assert follower.version == versions[1]
        point(world.store, "policy", versions[0], branch="canary")  # a rollback
        assert follower.advance() is not None
        assert follower.version == versions[0]


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (MemoryError(), "not enough memory for new weights"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "not enough memory for new weights"),
        (OSError(errno.ENOSPC, "No space left on device"), "not enough memory for new weights"),
        (OSError(errno.EMFILE, "Too many open files"), "new weights cannot be fetched or handed to the engine"),
    ],
)
def test_an_error_of_the_system_is_told_as_what_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch, error: OSError | MemoryError, what: str
) -> None:
    def failing(*_: object) -> tuple[int, int]:
        raise error

    world.publish(0)
    monkeypatch.setattr(follower_child, "write_image", failing)
    response, fds = follower_child.reply(Follower(world.store), Request(held=None, wait_s=0.0), 0.01)
    assert fds == []
    assert response.error is not None
    assert response.error[0] == what
    assert str(error) in response.error[1]

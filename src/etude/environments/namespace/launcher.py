"""The host's side of the launcher and runner processes: starts them, has machines made and killed and commands run, and
notices when they die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from etude.environments.config import MachineLimits
from etude.environments.namespace import starting
from etude.environments.namespace.guest.packets import (
    BEGUN,
    BEGUN_FACTS,
    END_ONE,
    ENDED,
    ENDED_FACTS,
    FAILED,
    GONE,
    HEAD,
    KILL,
    MADE,
    MADE_FACTS,
    RUN,
    RUN_FACTS,
    SIGNALLED,
    SPAWN,
    STARTED,
    TELL_PID,
)
from etude.errors import MachineError
from etude.records.command import Started, Tell

T = TypeVar("T")
_START_DEADLINE_S = 20.0
_HINT = (
    "machines need user namespaces: allow them (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces>0), run as root with CAP_SYS_ADMIN "
    "(a container: --privileged, or --cap-add SYS_ADMIN with seccomp and apparmor unconfined), or use a remote backend"
)


class Made(NamedTuple):
    """A new machine, as the launcher made it. Its receiver must `close` it; int fields without another note are open
    file descriptors."""

    number: int  # the launcher's name for it
    slot: int  # unique among the machines that are alive
    init_pid: int  # its PID 1, as the launcher sees it
    work: int  # its open work folder
    init: int  # pidfd of its PID 1
    agent: int = -1  # the channel to its PID 1, where that is an agent; closed by the `Channel` that is opened on it
    upper: int = -1  # of a machine made from an image: the overlay's upper folder, with what it changed; and its root
    root: int = -1

    def close(self) -> None:
        for fd in (self.work, self.init, self.upper, self.root):
            if fd >= 0:
                os.close(fd)


class Ended(NamedTuple):
    """How a command ended. `exit_code` is 128 + signal when killed."""

    exit_code: int
    timed_out: bool
    lost: bool  # its machine is dead


Blank = asyncio.Future[Made]  # a machine that is being made


def abandon_blank(blank: Blank) -> None:
    """Close the descriptors of a machine that will not be used; its launcher has ended or is ending."""
    if blank.done() and not blank.cancelled() and blank.exception() is None:
        made = blank.result()
        made.close()
        if made.agent >= 0:
            os.close(made.agent)


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


class LauncherProcess:
    """A started launcher. Raises `MachineError` when machines cannot be made here.

    It lives as long as this process, or any fork of it that never execs, holds the other end of its sockets.
    """

    def __init__(
        self,
        limits: MachineLimits,
        *,
        max_machines: int,
        python: str,
        prefix: str,
        agent: str = "",
        image: Mapping[str, Any] | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise MachineError("machines need Linux", sys.platform, hint="use the container recipe or a remote backend")
        self.failure: str | None = None
        self.image = image  # what its machines are made from: see `namespace.images`
        self._waiting: deque[Blank] = deque()
        self._dying: dict[int, asyncio.Future[None]] = {}
        self._running: dict[int, asyncio.Future[Ended]] = {}  # by number of the command, as is `_to_tell`
        self._to_tell: dict[int, Tell] = {}
        self._asked = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._commands, commands = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life, self._life = os.pipe()
        try:
            fds = {"control": control.fileno(), "commands": commands.fileno(), "life": life}
            settings = {
                "max_machines": max_machines,
                "python": python,
                "prefix": prefix,
                "agent": agent,
                "image": image,
            }
            self._process = starting.start(python, starting.config(limits, settings | fds), tuple(fds.values()))
        except BaseException:
            self.hang_up()
            raise
        finally:
            control.close()
            commands.close()
            os.close(life)
        try:
            self.pid, self.facts = self._wait_until_started()
            self.runner_pid = starting.child_of(self.pid)
        except BaseException:
            self.wait()
            raise
        self._control.setblocking(False)
        self._commands.setblocking(False)

    def _wait_until_started(self) -> tuple[int, dict[str, Any]]:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        packet = self._control.recv(4096) if poller.poll(_START_DEADLINE_S * 1000) else b""
        if not packet:
            facts = f"it sent nothing within {_START_DEADLINE_S:g} s, or it ended; its standard error may say why"
            raise MachineError("the machine launcher did not start", facts, hint=_HINT)
        kind, _ = HEAD.unpack_from(packet)
        text = packet[HEAD.size :].decode(errors="replace")
        if kind != STARTED:
            raise MachineError("machines cannot be made here", text, hint=_HINT)
        return starting.child_of(self._process.pid), json.loads(text)

    def spawn(self, count: int) -> list[Blank]:
        """Ask for `count` machines. Each future raises `MachineError` when its machine cannot be made."""
        loop = self._listen()
        blanks: list[Blank] = [loop.create_future() for _ in range(count)]
        for blank in blanks:
            blank.add_done_callback(_retrieve)
        self._send(SPAWN, count)
        self._waiting.extend(blanks)
        return blanks

    def discard(self, number: int) -> None:
        """Have a machine killed without waiting for its end."""
        with contextlib.suppress(MachineError):
            self._send(KILL, number)

    async def kill(self, number: int, *, deadline_s: float = 10.0) -> None:
        """Have a machine killed and wait until every process in it is gone. Raises `MachineError`."""
        if self.failure is not None:
            return
        loop = self._listen()
        gone = self._dying.get(number)
        if gone is None:
            gone = self._dying[number] = loop.create_future()
            self._send(KILL, number)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(gone)
        except TimeoutError:
            facts = f"{deadline_s:g} s after it was killed"
            hint = "a process in it hangs in the kernel, probably: ps shows it in state D"
            raise MachineError(f"machine {number} is still there", facts, hint=hint) from None
        self._dying.pop(number, None)

    def run(
        self,
        made: Made,
        streams: list[int],
        deadline_s: float,
        *,
        flags: int = 0,
        tell: Tell | None = None,
    ) -> asyncio.Future[Ended]:
        """Run a command in a machine. `streams`: descriptors of its request and its output, then those that `flags`
        name. `tell` is called with its `Started` (the PID) once it runs. The future raises `MachineError` when launcher
        or runner dies."""
        if tell is not None:
            flags |= TELL_PID
            self._to_tell[self._asked + 1] = tell
        return self._order(RUN, made, streams, deadline_s, flags)

    @property
    def last(self) -> int:
        """The number of the last command (a `run` or `signal_all`)."""
        return self._asked

    def end_one(self, number: int) -> None:
        """Kill a command whose deadline is over; it ends as timed out. Does nothing where it has ended."""
        if number in self._running and self.failure is None:
            self._give(self._commands, HEAD.pack(END_ONE, number), [])

    def signal_all(self, made: Made, kind: bytes) -> asyncio.Future[Ended]:
        """End, stop or continue everything in a machine: END_ALL, STOP_ALL, CONTINUE_ALL."""
        return self._order(kind, made, [], 0.0, 0)

    def _order(
        self, kind: bytes, made: Made, streams: list[int], deadline_s: float, flags: int
    ) -> asyncio.Future[Ended]:
        self._asked += 1
        done: asyncio.Future[Ended] = self._listen().create_future()
        done.add_done_callback(_retrieve)
        self._running[self._asked] = done
        packet = HEAD.pack(kind, self._asked) + RUN_FACTS.pack(deadline_s, made.slot, made.init_pid, flags)
        self._give(self._commands, packet, [made.init, *streams])
        return done

    def _send(self, kind: bytes, number: int) -> None:
        self._give(self._control, HEAD.pack(kind, number), [])

    def _give(self, to: socket.socket, packet: bytes, fds: list[int]) -> None:
        if self.failure is None:
            try:
                socket.send_fds(to, [packet], fds)
            except OSError as error:
                self._fail(f"its socket: {error}")
        if self.failure is not None:
            raise _gone(self.failure)

    def _listen(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._deafen()
            self._loop = loop
            for end in (self._control, self._commands):
                loop.add_reader(end, self._hear, end)
        return loop

    def _deafen(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            for end in (self._control, self._commands):
                self._loop.remove_reader(end)

    def _hear(self, end: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.failure is None:
                try:
                    packet, fds, _, _ = socket.recv_fds(end, 4096, 5)
                except ConnectionError as error:
                    self._fail(str(error))
                    return
                if not packet:
                    self._fail(f"it ended{starting.exit_status(self._process)}")
                    return
                kind, number = HEAD.unpack_from(packet)
                self._heard(kind, number, packet[HEAD.size :], fds)

    def _heard(self, kind: bytes, number: int, facts: bytes, fds: list[int]) -> None:
        if kind in (ENDED, SIGNALLED):
            self._to_tell.pop(number, None)
            _settle(self._running.pop(number), Ended(*ENDED_FACTS.unpack(facts)))
        elif kind == BEGUN:
            self._to_tell.pop(number)(Started(*BEGUN_FACTS.unpack(facts)))
        elif kind == GONE:
            _settle(self._dying.setdefault(number, asyncio.get_running_loop().create_future()), None)
        elif kind == MADE:
            self._made(number, facts, fds)
        elif kind == FAILED:
            future = self._waiting.popleft()
            if not future.done():
                reason = facts.decode(errors="replace")
                future.set_exception(MachineError("a machine could not be made", reason, hint="see the host's limits"))

    def _made(self, number: int, facts: bytes, fds: list[int]) -> None:
        future = self._waiting.popleft()
        num_folders = 1 if self.image is None else 3
        if len(fds) == 1 + num_folders + self.facts["agent"]:
            slot, init_pid = MADE_FACTS.unpack(facts)
            work, init, *more = fds
            agent = more.pop() if self.facts["agent"] else -1
            made = Made(number, slot, init_pid, work, init, agent, *more)
            if _settle(future, made):
                return
        for fd in fds:
            os.close(fd)
        self.discard(number)
        if not future.done():
            hint = "raise the limit of open files (ulimit -n): a machine needs three, one of an image five"
            future.set_exception(MachineError("a machine could not be taken over", "too many open files", hint=hint))

    def is_gone(self, number: int) -> bool:
        """Whether a machine has died without a call to `kill` or `discard`."""
        return number in self._dying and self._dying[number].done()

    def _fail(self, why: str) -> None:
        self.failure = why
        self._deafen()
        futures: list[asyncio.Future[Any]] = [*self._waiting, *self._running.values()]
        for future in futures:
            if not future.done():
                future.set_exception(_gone(why))
        for gone in self._dying.values():
            _settle(gone, None)
        self._waiting.clear()
        self._running.clear()
        self._to_tell.clear()

    def hang_up(self) -> None:
        """End every machine. Idempotent."""
        if self._life >= 0:
            if self.failure is None:
                self._fail("closed")
            self._control.close()
            self._commands.close()
            os.close(self._life)
            self._life = -1

    def wait(self, *, deadline_s: float = 20.0) -> None:
        """Hang up and block until no process and no control group is left. Idempotent."""
        self.hang_up()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def cpu_s(self) -> float:
        """CPU seconds of launcher and runner, and of everything in machines that has ended, so far."""
        try:
            stats = [Path(f"/proc/{pid}/stat").read_text() for pid in (self.pid, self.runner_pid)]
        except OSError:
            return 0.0
        ticks = sum(sum(map(int, stat.rpartition(")")[2].split()[11:15])) for stat in stats)
        return ticks / float(os.sysconf("SC_CLK_TCK"))


def _gone(why: str) -> MachineError:
    return MachineError("the machine launcher is gone", why, hint="fork again: a new one is started")


def _settle(future: asyncio.Future[T], result: T) -> bool:
    """Give a future its result. False when it is done already."""
    if future.done():
        return False
    future.set_result(result)
    return True

"""The runner's work: start commands in machines, end them and everything they started, say how they ended.

A command is a fork of this process into a machine's namespaces. When its first process has ended, or at its deadline,
nothing it started is left: between two commands there is no process in a machine but its sleeping PID 1, so what is
read then cannot change. After each fork the runner pays for every page of memory that it touches again, so what it does
for a command is as little as will do. It sees no argument, input or output: they go past it as descriptors.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import time
from functools import partial
from typing import NoReturn

from . import confine, tools
from . import syscalls as sys_
from .packets import ENDED, ENDED_FACTS, HEAD, RUN_FACTS
from .roles import Become

_KILLED = 9  # a wait status
_KILL_AGAIN_S = 0.001
_FDS_SPACE = socket.CMSG_SPACE(4 * 4)


class _Command:
    """One that runs. `sweeping`: its first process is gone, with status `status`, and the rest is being killed."""

    __slots__ = ("end", "init", "init_pid", "number", "pid", "status", "sweeping", "timed_out")

    def __init__(self, number: int, init: int, init_pid: int, end: float) -> None:
        self.number, self.init, self.init_pid = number, init, init_pid  # its machine; its machine's PID 1
        self.end = end  # on the monotonic clock
        self.pid, self.status = 0, _KILLED  # of its first process, then of the sweeper; a wait status
        self.timed_out = self.sweeping = False


def serve(control: int, confinement: confine.Confinement) -> None:
    """Until the host hangs up."""
    sys_.prctl(sys_.PR_SET_PDEATHSIG, 9)
    sys_.prctl(sys_.PR_SET_DUMPABLE, 0)
    channel = socket.socket(fileno=control)
    _Runner(channel, confinement).serve()


class _Runner:
    def __init__(self, channel: socket.socket, confinement: confine.Confinement) -> None:
        self._channel, self._confinement = channel, confinement
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._running: dict[int, _Command] = {}  # by the pidfd of its process
        self._poller = select.poll()

    def serve(self) -> None:
        self._poller.register(self._channel, select.POLLIN)
        while True:
            for fd, _ in self._poller.poll(self._patience_ms()):
                if fd in self._running:
                    self._ended(fd)
                elif not self._answer():
                    return
            self._end_the_late()

    def _patience_ms(self) -> float | None:
        soonest = None
        for command in self._running.values():
            if not (command.timed_out or command.sweeping) and (soonest is None or command.end < soonest):
                soonest = command.end
        return None if soonest is None else max(0.0, soonest - time.monotonic()) * 1000 + 1

    def _end_the_late(self) -> None:
        now = time.monotonic()
        for command in self._running.values():
            if command.end <= now and not (command.timed_out or command.sweeping):
                command.timed_out = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(command.pid, signal.SIGKILL)

    def _answer(self) -> bool:
        packet, ancillary, _, _ = self._channel.recvmsg(64, _FDS_SPACE)
        if not packet:
            return False
        _, number = HEAD.unpack_from(packet)  # the only kind there is: RUN
        deadline_s, slot, init_pid = RUN_FACTS.unpack_from(packet, HEAD.size)
        data = ancillary[0][2]
        init, *streams = struct.unpack(f"{len(data) // 4}i", data)
        command = _Command(number, init, init_pid, time.monotonic() + deadline_s)
        with contextlib.suppress(OSError):  # the command will tell
            for hierarchy in self._confinement.hierarchies:
                hierarchy.entrance(slot)
        if self._fork(command):
            role = partial(tools.start, init, streams, slot, deadline_s, self._confinement)
            self._channel.detach()  # closed with the rest; a socket that is let go of open warns, at length
            raise Become(role)
        for fd in streams:
            os.close(fd)
        return True

    def _fork(self, command: _Command) -> bool:
        """Fork into the machine's PID namespace; true in the child."""
        try:
            sys_.setns(command.init, sys_.CLONE_NEWPID)
            pid = os.fork()
        except OSError:  # its PID 1 is dead, and with it everything
            sys_.setns(self._own_pids, sys_.CLONE_NEWPID)
            self._done(command, lost=True)
            return False
        if pid == 0:
            return True
        sys_.setns(self._own_pids, sys_.CLONE_NEWPID)
        command.pid = pid
        fd = os.pidfd_open(pid)
        self._running[fd] = command
        self._poller.register(fd, select.POLLIN)
        return False

    def _ended(self, fd: int) -> None:
        command = self._running.pop(fd)
        self._poller.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(command.pid, 0)
        if command.sweeping:
            self._done(command, lost=status != 0)
            return
        command.sweeping, command.status = True, status
        if status == _KILLED or _has_children(command.init_pid):  # killed by whom? if by its machine's end, so is this
            if self._fork(command):
                self._channel.detach()
                raise Become(_sweep)
        else:
            self._done(command, lost=False)

    def _done(self, command: _Command, *, lost: bool) -> None:
        os.close(command.init)
        code = os.waitstatus_to_exitcode(command.status)
        facts = ENDED_FACTS.pack((code if code >= 0 else 128 - code) & 0xFF, command.timed_out, lost)
        self._channel.send(HEAD.pack(ENDED, command.number) + facts)


def _has_children(init_pid: int) -> bool:
    """Whether anything is left in a machine: what lost its parent is a child of PID 1."""
    try:
        fd = os.open(f"/proc/{init_pid}/task/{init_pid}/children", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # a kernel without that file, or a dead machine: the sweep finds out
        return True
    try:
        return bool(os.read(fd, 1))
    finally:
        os.close(fd)


def _sweep() -> NoReturn:
    """Kill every process of this PID namespace but PID 1 until none is left. One round is enough for what still
    forks: a process with SIGKILL pending cannot; the others wait for the dead to be reaped."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(-1, signal.SIGKILL)
            time.sleep(_KILL_AGAIN_S)
    os._exit(0)

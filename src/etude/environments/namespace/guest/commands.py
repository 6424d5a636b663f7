"""The runner's work: start commands in machines, end them and everything they started, say how they ended.

A command is a fork of this process into a machine's namespaces. When its first process has ended, or at its deadline,
nothing it started is left: between two commands there is no process in a machine but its sleeping PID 1, so what is
read then cannot change. The runner sees no argument, input or output: they go past it as descriptors.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from functools import partial
from typing import NamedTuple, NoReturn

from . import confine, tools
from . import syscalls as sys_
from .packets import ENDED, ENDED_FACTS, HEAD, RUN, RUN_FACTS
from .roles import Become

_KILLED = 9  # a wait status
_KILL_AGAIN_S = 0.001


class _Command(NamedTuple):
    """One that runs. `sweeping`: its first process is gone, with status `status`, and the rest is being killed."""

    number: int  # of its machine
    pid: int  # of its first process, or of the sweeper
    init: int  # pidfd of the machine's PID 1
    init_pid: int
    end: float  # on the monotonic clock
    timed_out: bool
    sweeping: bool
    status: int


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
        ends = [c.end for c in self._running.values() if not (c.timed_out or c.sweeping)]
        return max(0.0, min(ends) - time.monotonic()) * 1000 + 1 if ends else None

    def _end_the_late(self) -> None:
        now = time.monotonic()
        for fd, command in self._running.items():
            if command.end <= now and not (command.timed_out or command.sweeping):
                self._running[fd] = command._replace(timed_out=True)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(command.pid, signal.SIGKILL)

    def _answer(self) -> bool:
        packet, fds, _, _ = socket.recv_fds(self._channel, 128, 4)
        if not packet:
            return False
        kind, number = HEAD.unpack_from(packet)
        if kind == RUN:
            deadline_s, slot, init_pid = RUN_FACTS.unpack_from(packet, HEAD.size)
            init, *streams = fds
            command = _Command(number, 0, init, init_pid, time.monotonic() + deadline_s, False, False, _KILLED)
            self._start(command, partial(tools.start, init, streams, slot, deadline_s, self._confinement))
            for fd in streams:
                os.close(fd)
        return True

    def _start(self, command: _Command, role: partial[NoReturn]) -> None:
        """Fork a process that is in the machine's PID namespace and has `role`."""
        try:
            sys_.setns(command.init, sys_.CLONE_NEWPID)
            pid = os.fork()
        except OSError:  # its PID 1 is dead, and with it everything
            sys_.setns(self._own_pids, sys_.CLONE_NEWPID)
            self._done(command, lost=True)
            return
        if pid == 0:
            self._channel.detach()  # closed with the rest; a socket that is let go of open warns, at length
            raise Become(role)
        sys_.setns(self._own_pids, sys_.CLONE_NEWPID)
        fd = os.pidfd_open(pid)
        self._running[fd] = command._replace(pid=pid)
        self._poller.register(fd, select.POLLIN)

    def _ended(self, fd: int) -> None:
        command = self._running.pop(fd)
        self._poller.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(command.pid, 0)
        if command.sweeping:
            self._done(command, lost=status != 0)
            return
        command = command._replace(sweeping=True, status=status)
        if status == _KILLED or _has_children(command.init_pid):  # killed by whom? if by its machine's end, so is this
            self._start(command, partial(_sweep))
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
        with open(f"/proc/{init_pid}/task/{init_pid}/children", "rb", buffering=0) as file:
            return bool(file.read(1))
    except FileNotFoundError:  # a kernel without that file, or a dead machine: the sweep finds out
        return True


def _sweep() -> NoReturn:
    """Kill every process of this PID namespace but PID 1 until none is left. One round is enough for what still
    forks: a process with SIGKILL pending cannot; the others wait for the dead to be reaped."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(-1, signal.SIGKILL)
            time.sleep(_KILL_AGAIN_S)
    os._exit(0)

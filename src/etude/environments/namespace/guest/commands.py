"""The runner: a process that starts commands in machines, kills those past their deadline, and reports how they ended.

A command is a fork of this process into a machine's namespaces. It ends with its first process; other processes that it
started continue until the machine is frozen or closed. After each fork the runner copies every memory page that it
writes, so it does as little as possible for a command, and leaves slow work to forks. Arguments, input and output
bypass it as descriptors.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from . import confine, processes, tools
from . import syscalls as sys_
from .packets import (
    BEGUN,
    BEGUN_FACTS,
    CONTINUE_ALL,
    END_ALL,
    END_ONE,
    ENDED,
    ENDED_FACTS,
    HEAD,
    REPORT_PID,
    RUN,
    RUN_FACTS,
    SIGNALLED,
    STOP_ALL,
)
from .processes import Become

_KILLED = 9  # a wait status
_FDS_SPACE = socket.CMSG_SPACE(5 * 4)


class _Process:
    """A process that the runner has forked. `command`: False for one that only signals other processes of its
    machine."""

    __slots__ = ("command", "end", "init", "init_pid", "number", "pid", "status", "timed_out")

    def __init__(self, number: int, init: int, init_pid: int, end: float, *, command: bool) -> None:
        self.number = number  # the host's number of it
        self.init, self.init_pid = init, init_pid  # pidfd and PID of its machine's PID 1
        self.end, self.command = end, command  # `end` on the monotonic clock
        self.pid, self.status = 0, _KILLED  # a wait status
        self.timed_out = False


def serve(control: int, confinement: confine.Confinement) -> None:
    """Serve requests on the socket `control` (a descriptor) until the host closes it."""
    sys_.prctl(sys_.PR_SET_PDEATHSIG, 9)
    sys_.prctl(sys_.PR_SET_DUMPABLE, 0)
    channel = socket.socket(fileno=control)
    _Runner(channel, confinement).serve()


class _Runner:
    def __init__(self, channel: socket.socket, confinement: confine.Confinement) -> None:
        self._channel, self._confinement = channel, confinement
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._running: dict[int, _Process] = {}  # by the pidfd of its process
        self._poller = select.poll()

    def serve(self) -> None:
        self._poller.register(self._channel, select.POLLIN)
        while True:
            for fd, _ in self._poller.poll(self._poll_timeout_ms()):
                if fd in self._running:
                    self._reap(fd)
                elif not self._handle_request():
                    return
            self._kill_late()

    def _poll_timeout_ms(self) -> float | None:
        soonest = None
        for process in self._running.values():
            if process.command and not process.timed_out and (soonest is None or process.end < soonest):
                soonest = process.end
        return None if soonest is None else max(0.0, soonest - time.monotonic()) * 1000 + 1

    def _kill_late(self) -> None:
        now = time.monotonic()
        for process in [p for p in self._running.values() if p.command and p.end <= now and not p.timed_out]:
            process.timed_out = True
            ender = _Process(0, os.dup(process.init), process.init_pid, now, command=False)
            self._fork(ender, partial(_run_and_exit, partial(processes.end_tree, process.pid)), [], inside=False)

    def _handle_request(self) -> bool:
        packet, ancillary, _, _ = self._channel.recvmsg(64, _FDS_SPACE)
        if not packet:
            return False
        kind, number = HEAD.unpack_from(packet)
        if kind == END_ONE:
            for running in self._running.values():
                if running.command and running.number == number:
                    running.end = time.monotonic()
            return True
        deadline_s, slot, init_pid, flags = RUN_FACTS.unpack_from(packet, HEAD.size)
        data = ancillary[0][2]
        init, *streams = struct.unpack(f"{len(data) // 4}i", data)
        process = _Process(number, init, init_pid, time.monotonic() + deadline_s, command=kind == RUN)
        role: Callable[[], object]
        if kind == RUN:
            with contextlib.suppress(OSError):  # the command itself will report it
                for hierarchy in self._confinement.hierarchies:
                    hierarchy.entrance(slot)
            role = partial(tools.start, init, streams, flags, slot, deadline_s, self._confinement)
        else:
            roots = [init_pid, *(p.pid for p in self._running.values() if p.command and p.init_pid == init_pid)]
            role = partial(_run_and_exit, _SIGNALS[kind](roots))
        if self._fork(process, role, streams) and flags & REPORT_PID:
            self._channel.send(HEAD.pack(BEGUN, number) + BEGUN_FACTS.pack(processes.pid_in_namespace(process.pid)))
        return True

    def _fork(self, process: _Process, role: Callable[[], object], streams: list[int], *, inside: bool = True) -> bool:
        """Fork into the machine's PID namespace (or not, with `inside` False) and run `role` there. False if the
        machine is dead."""
        pid = -1
        try:
            if inside:
                sys_.setns(process.init, sys_.CLONE_NEWPID)
            pid = os.fork()
        except OSError:  # its PID 1 has died, and with it the whole machine
            sys_.setns(self._own_pids, sys_.CLONE_NEWPID)
        if pid == 0:
            self._channel.detach()  # closed with the other descriptors; a socket object would warn
            raise Become(role)
        for fd in streams:
            os.close(fd)
        if pid < 0:
            self._report_end(process, lost=True)
            return False
        if inside:
            sys_.setns(self._own_pids, sys_.CLONE_NEWPID)
        process.pid = pid
        fd = os.pidfd_open(pid)
        self._running[fd] = process
        self._poller.register(fd, select.POLLIN)
        return True

    def _reap(self, fd: int) -> None:
        process = self._running.pop(fd)
        self._poller.unregister(fd)
        os.close(fd)
        _, process.status = os.waitpid(process.pid, 0)
        self._report_end(process, lost=process.status == _KILLED and not self._is_machine_alive(process.init))

    def _is_machine_alive(self, init: int) -> bool:
        """Whether new processes can start in a machine. Distinguishes a killed command from the end of its machine."""
        pid = -1
        with contextlib.suppress(OSError):
            sys_.setns(init, sys_.CLONE_NEWPID)
            pid = os.fork()
        if pid == 0:
            os._exit(0)
        sys_.setns(self._own_pids, sys_.CLONE_NEWPID)
        return pid > 0 and os.waitpid(pid, 0)[1] == 0

    def _report_end(self, process: _Process, *, lost: bool) -> None:
        os.close(process.init)
        code = os.waitstatus_to_exitcode(process.status)
        facts = ENDED_FACTS.pack((code if code >= 0 else 128 - code) & 0xFF, process.timed_out, lost)
        if process.command:
            self._channel.send(HEAD.pack(ENDED, process.number) + facts)
        elif process.number:
            self._channel.send(HEAD.pack(SIGNALLED, process.number) + facts)


def _run_and_exit(work: Callable[[], None]) -> NoReturn:
    work()
    os._exit(0)


_SIGNALS: dict[bytes, Callable[[list[int]], Callable[[], None]]] = {
    END_ALL: lambda roots: processes.end_all,
    STOP_ALL: lambda roots: partial(processes.stop_all, roots),
    CONTINUE_ALL: lambda roots: processes.continue_all,
}

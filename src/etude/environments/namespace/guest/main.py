"""The processes behind a runtime: steward, launcher, machines. Each begins in `main`, with nothing on its stack.

- The **steward** is what the host started. It outlives the launcher to remove control groups, also when the host was
  killed: it sees its end of the `life` pipe close.
- The **launcher** is PID 1 of a PID namespace, so that its death is every machine's. It forks machines, maps their
  users, hands their sockets to the host, kills and reaps them. It never reads a byte from a machine's agent code.
- A **machine** is PID 1 of its own namespaces below that (`confine`, `agent`).

Messages between host and launcher are packets: ``kind byte, u32 number, text``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import site
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from . import agent, cgroups, confine, root, seccomp, tools, wire
from . import syscalls as sys_

HEAD = struct.Struct("<cI")
SPAWN, KILL = b"S", b"K"  # host to launcher: number of machines; the machine to kill
STARTED, MACHINE, GONE, FAILED = b"R", b"M", b"G", b"F"  # launcher to host
_USER_BASE = 1_900_000_000  # outer user ids, two a machine; above what distributions and systemd hand out


def main(config_json: str) -> None:
    """Be the steward, and in forked processes whatever they become. Never returns."""
    role: Callable[[], object] = partial(_steward, json.loads(config_json))
    while True:
        try:
            role()
            os._exit(0)
        except tools.Become as change:
            role = change.role
        except BaseException:  # noqa: BLE001 - the outermost frame: say why on stderr and end
            sys.excepthook(*sys.exc_info())
            os._exit(70)


def _steward(config: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)  # the program came through it
    control = socket.socket(fileno=config["control"])
    step = "finding control groups"
    try:
        hierarchies = cgroups.claim_all(config["name"], _text_of("/proc/self/cgroup"))
        base = _first_user(config["max_machines"])
        if base is None:
            step = "making a user namespace"
            _enter_user_namespace()
        step = "making a PID namespace"
        sys_.unshare(sys_.CLONE_NEWPID)
    except OSError as error:
        control.send(HEAD.pack(FAILED, error.errno or 0) + f"{step}: {error}".encode())
        os._exit(1)
    pid = os.fork()
    if pid == 0:
        os.close(config["life"])
        raise tools.Become(partial(_launcher, config, control.detach(), hierarchies, base))
    control.close()
    _wait_for_end(config["life"], os.pidfd_open(pid))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    cgroups.remove_all(hierarchies)


def _wait_for_end(life: int, launcher: int) -> None:
    """Until the host has closed its end of `life`, or the launcher is dead."""
    poller = select.poll()
    poller.register(life, select.POLLIN)
    poller.register(launcher, select.POLLIN)
    poller.poll()


def _first_user(max_machines: int) -> int | None:
    """The first of two outer user ids a machine; None when this process may not hand any out (rootless)."""
    effective = int(_text_of("/proc/self/status").partition("CapEff:")[2].split()[0], 16)
    needed = (sys_.CAP_SYS_ADMIN, sys_.CAP_SETUID, sys_.CAP_SETGID)
    if os.geteuid() != 0 or not all(effective >> c & 1 for c in needed):
        return None
    inside, _, count = max(list(map(int, line.split())) for line in _text_of("/proc/self/uid_map").splitlines())
    base = min(_USER_BASE, inside + count - 2 * max_machines - 1024)
    return base if base > 1024 else None


def _enter_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    sys_.unshare(sys_.CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {uid} 1")
    _write("/proc/self/gid_map", f"0 {gid} 1")


def _launcher(config: dict[str, Any], control: int, hierarchies: list[cgroups.Hierarchy], base: int | None) -> None:
    channel = socket.socket(fileno=control)
    try:
        sys_.prctl(sys_.PR_SET_PDEATHSIG, 9)
        for name in config["preload"]:
            importlib.import_module(name)
        _prepare_interpreter(config["folder"])
        os.environ.clear()
        os.environ.update(tools.ENVIRONMENT)
        sys.orig_argv = [config["python"]]
        root.enter(config["python"], config["prefix"])
        filter_ = seccomp.build()
    except (OSError, ImportError, KeyError) as error:
        channel.send(HEAD.pack(FAILED, getattr(error, "errno", 0) or 0) + f"building the root: {error}".encode())
        os._exit(1)
    gc.collect()
    gc.freeze()
    gc.disable()
    bounded = {c: h.version for h in hierarchies for c in h.controllers}
    facts = {"privileged": base is not None, "cgroups": bounded}
    channel.send(HEAD.pack(STARTED, os.getpid()) + json.dumps(facts).encode())
    Launcher(channel, hierarchies, base, confine.Limits(*config["limits"]), config["max_machines"], filter_).serve()


def _prepare_interpreter(folder: str) -> None:
    """Make this process what a tool's interpreter is at its start, once, here, not in each of its forks.

    As `site` does it, but without running .pth files: they are somebody's code, and this process has privileges.
    Standard input gets a stream that was never read from; this process was fed its program through the old one.
    """
    for step in (site.setquit, site.setcopyright, site.sethelper):
        step()
    sys.path += [p for p in site.getsitepackages() if os.path.isdir(p)]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the life of the process
    setattr(sys, "__stdin__", sys.stdin)  # noqa: B010 - a Final name to type checkers
    sys.path.remove(folder)
    for name in [n for n in sys.modules if n.partition(".")[0] == __package__]:
        del sys.modules[name]


class Launcher:
    """Forks machines on request and reaps them. One slot (users, control groups) a live machine, reused."""

    def __init__(
        self,
        channel: socket.socket,
        hierarchies: list[cgroups.Hierarchy],
        base: int | None,
        limits: confine.Limits,
        max_machines: int,
        filter_: ctypes.Structure,
    ) -> None:
        self._channel, self._hierarchies, self._base = channel, hierarchies, base
        self._limits, self._filter = limits, filter_
        self._free = list(range(max_machines, 0, -1))
        self._machines: dict[int, tuple[int, int, int]] = {}  # pidfd -> pid, machine number, slot
        self._pids: dict[int, int] = {}  # machine number -> pid
        self._groups: dict[int, list[int]] = {}  # slot -> open cgroup.procs
        self._mapping: dict[int, tuple[int, int]] = {}  # our end of a socket -> pid that waits on it, slot
        self._next = 0
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._poller = select.poll()

    def serve(self) -> None:
        """Until the host hangs up."""
        self._poller.register(self._channel, select.POLLIN)
        while True:
            for fd, _ in self._poller.poll():
                if fd in self._machines:
                    self._reap(fd)
                elif fd in self._mapping:
                    self._map_users(fd)
                elif not self._answer():
                    return

    def _answer(self) -> bool:
        packet = self._channel.recv(64)
        if not packet:
            return False
        kind, number = HEAD.unpack(packet)
        if kind == SPAWN:
            for _ in range(number):
                self._spawn()
        elif number in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[number], signal.SIGKILL)
        return True

    def _spawn(self) -> None:
        self._next += 1
        host, inside = (end.detach() for end in socket.socketpair())
        ours, theirs = (end.detach() for end in socket.socketpair())
        slot = self._free.pop()
        identity = self._identity(slot)
        try:
            groups = self._enterable(slot)
            sys_.setns(self._own_pids, sys_.CLONE_NEWPID)
            sys_.unshare(sys_.CLONE_NEWPID)
            pid = os.fork()
        except OSError as error:
            self._free.append(slot)
            self._channel.send(HEAD.pack(FAILED, self._next) + str(error).encode())
            _close(host, inside, ours, theirs)
            return
        if pid == 0:
            self._channel.close()
            raise tools.Become(partial(_machine, inside, theirs, self._limits, identity, groups, self._filter))
        pidfd = os.pidfd_open(pid)
        self._machines[pidfd], self._pids[self._next] = (pid, self._next, slot), pid
        self._mapping[ours] = pid, slot
        self._poller.register(pidfd, select.POLLIN)
        self._poller.register(ours, select.POLLIN)
        socket.send_fds(self._channel, [HEAD.pack(MACHINE, self._next)], [host])
        _close(host, inside, theirs)

    def _identity(self, slot: int) -> confine.Identity:
        if self._base is None:
            return confine.Identity(agent=0, tools=0, privileged=False)
        return confine.Identity(agent=self._base + 2 * slot, tools=self._base + 2 * slot + 1, privileged=True)

    def _enterable(self, slot: int) -> list[int]:
        if slot not in self._groups:
            limits = self._limits
            self._groups[slot] = [
                h.slot(slot, limits.memory_bytes, limits.processes + 1, limits.cpus) for h in self._hierarchies
            ]
        return self._groups[slot]

    def _map_users(self, fd: int) -> None:
        pid, slot = self._mapping.pop(fd)
        self._poller.unregister(fd)
        with contextlib.suppress(OSError):  # the machine died: the host sees its socket close
            if os.read(fd, 1):
                maps = self._identity(slot).maps
                _write(f"/proc/{pid}/uid_map", maps)
                _write(f"/proc/{pid}/gid_map", maps)
                os.write(fd, b"m")
        os.close(fd)

    def _reap(self, pidfd: int) -> None:
        pid, number, slot = self._machines.pop(pidfd)
        self._poller.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)
        self._free.append(slot)
        del self._pids[number]
        self._channel.send(HEAD.pack(GONE, number))


def _machine(
    fd: int,
    launcher: int,
    limits: confine.Limits,
    identity: confine.Identity,
    groups: list[int],
    filter_: ctypes.Structure,
) -> None:
    try:
        confine.enter(limits, identity, groups, launcher, filter_)
    except OSError as error:
        agent.send(fd, wire.BROKEN, str(error).encode())
        os._exit(1)
    os.dup2(fd, 3)
    os.closerange(4, 1 << 20)
    agent.serve(3, limits, identity)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _text_of(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)

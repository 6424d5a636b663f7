"""The launcher: a process that creates machines, each made of namespaces, two small file systems and a PID 1.

PID 1 is the machine agent where it was built (`agents`). Otherwise no program of etude is in the machine: PID 1 is a
copy of this process without its memory (`MADV_DONTFORK`) that only calls pause(2). It holds the namespaces, its death
is the machine's end, and orphans vanish because it ignores SIGCHLD. It costs a tenth of an interpreter. Namespaces
belong to the launcher's user namespace and a machine's processes to a child of it, so they have no privileges over
them.

The host gets descriptors: the work folder, PID 1, and the channel to the agent; for a machine of an image (`overlay`)
also the folder of its changes and its root. It needs nothing else to use a machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import socket

from . import agents, cgroups, confine, overlay
from . import syscalls as sys_
from .packets import FAILED, GONE, HEAD, KILL, MADE, MADE_FACTS, SPAWN
from .root import WORK, Frame

_OWN = sys_.CLONE_NEWNS | sys_.CLONE_NEWNET | sys_.CLONE_NEWIPC | sys_.CLONE_NEWUTS
_HOME = {"mnt": sys_.CLONE_NEWNS, "net": sys_.CLONE_NEWNET, "ipc": sys_.CLONE_NEWIPC, "uts": sys_.CLONE_NEWUTS}
_STACK_BYTES = 65_536
_LEAST_BYTES = 128 << 10  # smaller mappings may stay in PID 1


class Machines:
    """Creates machines when the host requests them, and removes those that have ended. The launcher process has one
    such object.

    - `channel`: the socket to the host
    - `base`: first host id of machines; None without privilege
    - `runner`: PID of the runner process
    - `program`: descriptor of the agent's program; None: machines have no agent
    - `root`: makes the roots of machines: `overlay.Roots` for an image, else a `root.Frame`
    """

    def __init__(
        self,
        channel: socket.socket,
        hierarchies: list[cgroups.Hierarchy],
        base: int | None,
        limits: confine.Limits,
        max_machines: int,
        runner: int,
        program: int | None,
        filter_: bytes,
        command_user: confine.CommandUser,
        root: overlay.Roots | Frame,
    ) -> None:
        self._frame = root if isinstance(root, Frame) and root.overlays else None
        self._roots = None if isinstance(root, Frame) else root
        self._bases: dict[int, int] = {}  # by slot: mount namespace that its machines copy
        self._channel, self._hierarchies, self._base, self._limits = channel, hierarchies, base, limits
        self._free = list(range(max_machines, 0, -1))
        self._prepared: set[int] = set()  # slots whose control groups exist
        self._alive: dict[int, tuple[int, int, int]] = {}  # pidfd -> pid, machine number, slot
        self._pids: dict[int, int] = {}  # machine number -> pid
        self._next = 0
        self._pid_namespace = _namespace("pid")
        self._home = [(_namespace(name), kind) for name, kind in _HOME.items()]
        self._helpers = [os.pidfd_open(runner)]  # processes that must live
        self._sleeper = Sleeper()
        self._agents: agents.Agents | None = None
        if program is not None:
            agent_id = agents.AGENT if self._roots is None else overlay.AGENT
            users = self._user_namespace if self._roots is None else self._kept_user_namespace
            self._agents = agents.Agents(program, base, limits, hierarchies, filter_, users, command_user, agent_id)
            self._helpers.append(self._agents.template)
        self._poller = select.poll()
        if base is not None:  # rootless, id maps could not be written then
            sys_.prctl(sys_.PR_SET_DUMPABLE, 0)

    def serve(self) -> None:
        """Serve requests until the host closes the channel or a helper process (runner, agent template) dies."""
        for awaited in (self._channel.fileno(), *self._helpers):
            self._poller.register(awaited, select.POLLIN)
        while True:
            for fd, _ in self._poller.poll():
                if fd in self._alive:
                    self._reap(fd)
                elif fd in self._helpers or not self._handle_request():
                    return

    def _handle_request(self) -> bool:
        packet = self._channel.recv(64)
        if not packet:
            return False
        kind, number = HEAD.unpack(packet)
        if kind == SPAWN:
            for _ in range(number):
                self._spawn()
        elif kind == KILL and number in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[number], signal.SIGKILL)
        return True

    def _spawn(self) -> None:
        self._next += 1
        slot = self._free.pop()
        fds: list[int] = []
        try:
            self._prepare(slot)
            pid = self._make(slot, fds)
            pidfd = os.pidfd_open(pid)
            self._alive[pidfd], self._pids[self._next] = (pid, self._next, slot), pid
            self._poller.register(pidfd, select.POLLIN)
            facts = HEAD.pack(MADE, self._next) + MADE_FACTS.pack(slot, pid)
            socket.send_fds(self._channel, [facts], [fds[0], pidfd, *fds[1:]])
        except OSError as error:
            self._free.append(slot)
            self._channel.send(HEAD.pack(FAILED, self._next) + str(error).encode())
        finally:
            for fd in fds:
                os.close(fd)

    def _make(self, slot: int, fds: list[int]) -> int:
        """Create a machine; returns the PID of its PID 1. Appends descriptors to `fds`: its work folder, what
        `overlay` opens for an image, and the channel to its agent, if any."""
        if slot in self._bases:
            sys_.setns(self._bases[slot], sys_.CLONE_NEWNS)
        try:
            sys_.unshare(_OWN)
            sys_.set_hostname("machine")
            if self._roots is not None:
                fds += self._roots.make(slot)
            else:
                confine.mount_private(self._limits, confine.user_of(self._base, slot))
                fds.append(os.open(WORK, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            if self._agents is None:
                sys_.setns(self._pid_namespace, sys_.CLONE_NEWPID)
                sys_.unshare(sys_.CLONE_NEWPID)
                pid = self._sleeper.clone(sys_.CLONE_NEWUSER)
            else:
                pid, channel = self._agents.start(slot)
                fds.append(channel)
        finally:
            self._return_home()
        if self._agents is None:
            self._map_users(pid, slot)
        return pid

    def _return_home(self) -> None:
        for fd, kind in self._home:
            sys_.setns(fd, kind)

    def _base_of(self, frame: Frame) -> int:
        """A mount namespace with its own root. The machines of a slot, no two of which live at once, get copies of
        it: nothing in it is writable, and locks and watches end with their processes."""
        sys_.unshare(sys_.CLONE_NEWNS)
        try:
            frame.make()
            return _namespace("mnt")
        finally:
            self._return_home()

    def _map_users(self, pid: int, slot: int) -> None:
        try:
            agents.write_maps(pid, self._id_map(slot))
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def _id_map(self, slot: int) -> str:
        return agents.id_map(self._base, slot) if self._roots is None else self._roots.maps(slot)

    def _user_namespace(self, slot: int) -> int:
        """A slot's user namespace, created with a short-lived child."""
        sys_.setns(self._pid_namespace, sys_.CLONE_NEWPID)
        pid = self._sleeper.clone(sys_.CLONE_NEWUSER)
        try:
            agents.write_maps(pid, self._id_map(slot))
            return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _kept_user_namespace(self, slot: int) -> int:
        """The same for machines of images, created once, also used for the owners of the image's files."""
        assert self._roots is not None
        return self._roots.prepare(slot, self._user_namespace)

    def _prepare(self, slot: int) -> None:
        if slot not in self._prepared:
            for hierarchy in self._hierarchies:
                num_processes = self._limits.processes + 1  # with PID 1
                hierarchy.make(slot, self._limits.memory_bytes, num_processes, self._limits.cpus)
            if self._frame is not None:
                self._bases[slot] = self._base_of(self._frame)
            if self._roots is not None:
                self._kept_user_namespace(slot)
            if self._agents is not None:
                self._agents.prepare(slot)
            self._prepared.add(slot)

    def _reap(self, pidfd: int) -> None:
        pid, number, slot = self._alive.pop(pidfd)
        self._poller.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(ChildProcessError):  # reaped while another machine was created
            os.waitpid(pid, 0)
        self._free.append(slot)
        del self._pids[number]
        self._channel.send(HEAD.pack(GONE, number))


class Sleeper:
    """Creates children of this process that have none of its large mappings and only sleep."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        self._pause = ctypes.cast(self._libc.pause, ctypes.c_void_p).value
        self._stack = mmap.mmap(-1, _STACK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._top = ctypes.addressof(ctypes.c_char.from_buffer(self._stack)) + _STACK_BYTES - 64
        large = self._large_mappings()
        self._keep_from_forks(large, True)
        if not self._survives():
            self._keep_from_forks(large, False)

    def clone(self, flags: int = 0) -> int:
        """Create a child that only sleeps, and return its PID. `flags`: of clone(2), for new namespaces.

        The child must ignore SIGCHLD from its start, so this process ignores it for a moment. Raises `OSError`.
        """
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            pid: int = self._libc.clone(self._pause, self._top, flags | signal.SIGCHLD, None)
        finally:
            signal.signal(signal.SIGCHLD, before)
        if pid < 0:
            raise OSError(ctypes.get_errno(), f"clone: {os.strerror(ctypes.get_errno())}")
        return pid

    def _large_mappings(self) -> list[tuple[int, int]]:
        """Private writable memory that pause(2) does not need: all but the stack, thread-local storage and libc's
        data."""
        errno_location = self._libc["__errno_location"]
        errno_location.restype = ctypes.c_void_p
        single = ctypes.addressof(ctypes.c_char.in_dll(self._libc, "__libc_single_threaded"))
        needed = (self._top, errno_location(), single)
        found = []
        with open("/proc/self/maps", encoding="utf-8") as maps:
            for line in maps:
                span, mode = line.split()[:2]
                start, end = (int(part, 16) for part in span.split("-"))
                large = end - start >= _LEAST_BYTES and mode == "rw-p" and "[stack]" not in line
                if large and not any(start <= address < end for address in needed):
                    found.append((start, end - start))
        return found

    def _keep_from_forks(self, mappings: list[tuple[int, int]], keep: bool) -> None:
        for start, size in mappings:
            sys_.advise(start, size, sys_.MADV_DONTFORK if keep else sys_.MADV_DOFORK)

    def _survives(self) -> bool:
        """Whether such a child really sleeps; with a C library that needs more of its memory it would crash."""
        pid = self.clone()
        try:
            while True:
                with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                    state = file.read().rpartition(")")[2].split()[0]
                if state in "SZX":
                    return state == "S"
                os.sched_yield()
        finally:
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _namespace(name: str) -> int:
    return os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)

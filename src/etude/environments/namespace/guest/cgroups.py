"""Control groups: one small group for each machine slot, reused, below this process's own group.

They limit memory, number of processes and CPU time where the kernel allows it. In version 1 of control groups each
resource has a hierarchy of its own; in version 2 an ancestor group must delegate the controllers. All limits of the
outer groups stay in force. A lock (flock) on the folder shows that its owner lives; the next start removes folders
without an owner.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time

ROOT = "/sys/fs/cgroup"
CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")
_PREFIX = "etude-"
_PERIOD_US = 100_000
_CLAIM_S = 5.0  # a sweep holds a lock for milliseconds


class Hierarchy:
    """This process's folder in one mounted control-group hierarchy, with the controllers that it may use there.

    `path`: the folder, created by the constructor. `version`: 1 or 2. It has a group for each machine slot, whose
    number is the `index` of the methods.
    """

    def __init__(self, path: str, controllers: tuple[str, ...], version: int) -> None:
        self.path, self.controllers, self.version = path, controllers, version
        self.fd = _claim(path)
        self._entrances: dict[int, int] = {}

    def make(self, index: int, memory_bytes: int, processes: int, cpus: float) -> None:
        """Create the control group of the machine slot `index`, and set its limits of memory, processes and CPUs."""
        name = str(index)
        os.mkdir(name, 0o755, dir_fd=self.fd)
        values = _LIMITS[self.version]
        for controller in self.controllers:
            for file, template in values[controller]:
                quota_us = int(cpus * _PERIOD_US)
                text = template.format(memory=memory_bytes, processes=processes, quota=quota_us, period=_PERIOD_US)
                with contextlib.suppress(FileNotFoundError):  # swap accounting is optional in the kernel
                    self._write(f"{name}/{file}", text)

    def enter(self, index: int) -> None:
        """Move this process, which must have one thread, into the group of a machine slot."""
        os.write(self.entrance(index), b"0")

    def entrance(self, index: int) -> int:
        """Return a descriptor of a slot's group; a process that writes "0" to it enters the group.

        It is opened once for this process and its forks.
        """
        fd = self._entrances.get(index)
        if fd is None:
            name = f"{index}/{_ENTRANCE[self.version]}"
            fd = self._entrances[index] = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.fd)
        return fd

    def entrance_path(self, index: int) -> str:
        """Return the path of the file that `entrance` opens."""
        return f"{self.path}/{index}/{_ENTRANCE[self.version]}"

    @property
    def accounts(self) -> tuple[str, str]:
        """Paths of the files with a slot's CPU time and with its list of threads, with ``{slot}`` for its number.

        Both are "" if this hierarchy does not count CPU time.
        """
        files = {1: ("cpuacct", "cpuacct.usage", "tasks"), 2: ("cpu", "cpu.stat", "cgroup.threads")}
        controller, usage, threads = files[self.version]
        if controller not in self.controllers:
            return "", ""
        return f"{self.path}/{{slot}}/{usage}", f"{self.path}/{{slot}}/{threads}"

    def close(self) -> None:
        """Release the lock on the folder: the next start may remove what is left."""
        for fd in (*self._entrances.values(), self.fd):
            os.close(fd)
        self._entrances = {}

    def _write(self, path: str, text: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


_LIMITS: dict[int, dict[str, tuple[tuple[str, str], ...]]] = {
    1: {
        "memory": (("memory.limit_in_bytes", "{memory}"), ("memory.memsw.limit_in_bytes", "{memory}")),
        "pids": (("pids.max", "{processes}"),),
        "cpu": (("cpu.cfs_quota_us", "{quota}"),),
        "cpuacct": (),  # only counts
    },
    2: {
        "memory": (("memory.max", "{memory}"), ("memory.swap.max", "0")),
        "pids": (("pids.max", "{processes}"),),
        "cpu": (("cpu.max", "{quota} {period}"),),
    },
}


_ENTRANCE = {1: "tasks", 2: "cgroup.procs"}  # "tasks": moving a thread avoids a lock that blocks all forks on the host


def claim_all(name: str, membership: str, root: str = ROOT, *, of: tuple[str, ...] = CONTROLLERS) -> list[Hierarchy]:
    """Create a folder in each hierarchy that offers one of the controllers `of` and is writable.

    `name`: the folder's name. `membership`: the text of /proc/self/cgroup. `root`: where hierarchies are mounted.
    Returns [] if there is no such hierarchy.
    """
    found: list[Hierarchy] = []
    taken: set[str] = set()
    for line in membership.splitlines():
        _, names, own = line.split(":", 2)
        wanted = tuple(c for c in names.split(",") if c in of)
        for parent, controllers, version in _candidates(root, names, own, wanted):
            controllers = tuple(c for c in controllers if c in of and c not in taken)
            if not controllers:
                continue
            _sweep(parent)
            try:
                hierarchy = Hierarchy(f"{parent}/{_PREFIX}{name}", controllers, version)
                if version == 2:
                    hierarchy._write("cgroup.subtree_control", " ".join(f"+{c}" for c in controllers))
            except OSError:
                _remove(f"{parent}/{_PREFIX}{name}")
                continue
            found.append(hierarchy)
            taken.update(controllers)
            break
    return found


def _candidates(root: str, names: str, own: str, wanted: tuple[str, ...]) -> list[tuple[str, tuple[str, ...], int]]:
    """(parent folder, controllers, version). Version 1: only this process's group; version 2: ancestors that
    delegate, nearest first."""
    if names:
        return [(f"{root}/{names}{own}".rstrip("/"), wanted, 1)] if wanted else []
    out, at = [], own.rstrip("/")
    while True:
        folder = f"{root}{at}"
        with contextlib.suppress(OSError), open(f"{folder}/cgroup.subtree_control") as file:
            handed_down = tuple(c for c in file.read().split() if c in CONTROLLERS)
            out.append((folder, handed_down, 2))
        if not at:
            return out
        at = at.rpartition("/")[0]


def _claim(path: str) -> int:
    """Create the folder `path` and return a descriptor that holds its lock.

    A sweep of another start may hold the lock for a moment, or remove the folder before it is locked: try again.
    Raises `BlockingIOError` if another process holds the lock for `_CLAIM_S` seconds.
    """
    end = time.monotonic() + _CLAIM_S
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o755)
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if _locked_in_place(fd, path):
                return fd
            os.close(fd)
            if time.monotonic() > end:
                raise BlockingIOError(errno.EAGAIN, "another process holds the lock of this control group", path)
            time.sleep(0.001)


def _locked_in_place(fd: int, path: str) -> bool:
    """Whether the lock was free and the locked folder is still the one at `path`."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.stat(path).st_ino == os.fstat(fd).st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


def _sweep(parent: str) -> None:
    """Remove folders whose owner has ended."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(_PREFIX):
                _remove_if_unheld(f"{parent}/{name}")


def _remove_if_unheld(path: str) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
        finally:
            os.close(fd)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            if os.path.isdir(f"{path}/{name}"):
                os.rmdir(f"{path}/{name}")
        os.rmdir(path)


def remove_all(hierarchies: list[Hierarchy], deadline_s: float = 5.0) -> None:
    """Remove the folders of hierarchies once their processes have ended; give up after `deadline_s` seconds.

    The kernel needs a moment after the last exit.
    """
    end = time.monotonic() + deadline_s
    for hierarchy in hierarchies:
        while os.path.isdir(hierarchy.path):
            _remove(hierarchy.path)
            if time.monotonic() > end:
                return
            if os.path.isdir(hierarchy.path):
                time.sleep(0.005)

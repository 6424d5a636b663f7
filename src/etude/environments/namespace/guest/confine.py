"""Confine a fork of the runner in a machine: namespaces, user, capabilities, system-call filter, limits.

A machine's namespaces belong to the launcher's user namespace. Its processes enter a child user namespace, so they have
no privileges over the machine's namespaces. The order of steps in `enter` matters.
"""

from __future__ import annotations

import ctypes
import os
import resource
from typing import NamedTuple

from . import syscalls as sys_
from .cgroups import Hierarchy
from .root import WORK

USER = 1000  # uid and gid of tools inside a machine
IDS = 3  # per slot: user, root and agent, consecutive
_SHARED = sys_.CLONE_NEWNS | sys_.CLONE_NEWNET | sys_.CLONE_NEWIPC | sys_.CLONE_NEWUTS


class Limits(NamedTuple):
    """The resource limits of one machine, with the fields of `MachineLimits`. The host sends them as JSON."""

    memory_bytes: int
    processes: int
    cpus: float
    work_bytes: int
    tmp_bytes: int
    inodes: int
    open_files: int
    address_bytes: int


class CommandUser(NamedTuple):
    """The default user of commands as the machine sees it.

    `work`: the folder where commands start. `path`: the variable PATH of commands; "": the agent's default.
    """

    uid: int = USER
    gid: int = USER
    work: str = WORK
    name: str = "user"
    path: str = ""


class Confinement(NamedTuple):
    """Settings for all commands of all machines.

    - `base`: the first host id of machines; None without privilege
    - `filter_`: the system-call filter
    - `outer_proc`: device number of the /proc that machines must not see
    - `own_root`: whether machines have this process's root, and so its interpreter
    """

    limits: Limits
    base: int | None
    hierarchies: list[Hierarchy]
    filter_: ctypes.Structure
    outer_proc: int
    command_user: CommandUser
    own_root: bool


def user_of(base: int | None, slot: int) -> int:
    """Return uid and gid (one number) of the user of a slot's machines, as the launcher sees them.

    `base`: the first host id of machines; None without privilege: then all machines have one user.
    """
    return 0 if base is None else base + IDS * slot


def mount_private(limits: Limits, owner: int) -> None:
    """Mount the file systems of a new machine, from inside its mount namespace. Its first command mounts /proc.

    `owner`: uid and gid of the working directory.
    """
    flags = sys_.MS_NOSUID | sys_.MS_NODEV
    own = f"nr_inodes={limits.inodes},uid={owner},gid={owner}"
    sys_.mount("tmpfs", WORK, "tmpfs", flags, f"size={limits.work_bytes},mode=755,{own}")
    sys_.mount("tmpfs", "/tmp", "tmpfs", flags, f"size={limits.tmp_bytes},mode=1777,{own}")


def enter(init: int, slot: int, cpu_s: int, to: Confinement) -> None:
    """Confine this process, which the runner has forked, in a machine.

    It must be in the PID namespace of the machine. `init`: a pidfd of the machine's PID 1. `cpu_s`: limit of CPU
    seconds. `to`: the settings.
    """
    for hierarchy in to.hierarchies:
        hierarchy.enter(slot)
    sys_.unshare(sys_.CLONE_NEWCGROUP)
    sys_.setns(init, _SHARED)
    if os.stat("/proc").st_dev == to.outer_proc:
        sys_.mount("proc", "/proc", "proc", sys_.MS_NOSUID | sys_.MS_NODEV | sys_.MS_NOEXEC)
    if to.base is not None:
        os.setgroups([])
    sys_.setns(init, sys_.CLONE_NEWUSER)
    os.closerange(3, 1 << 20)
    uid, gid, work, *_ = to.command_user
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    sys_.prctl(sys_.PR_SET_NO_NEW_PRIVS, 1)
    sys_.drop_capabilities()
    sys_.prctl(sys_.PR_SET_PDEATHSIG, 9)
    sys_.prctl(sys_.PR_SET_DUMPABLE, 1)
    sys_.prctl(sys_.PR_SET_CHILD_SUBREAPER, 1)
    sys_.set_seccomp(to.filter_)
    _limit(to.limits, cpu_s)
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, b"1000")
    os.close(fd)
    os.chdir(work)


def rlimits(limits: Limits) -> dict[str, int]:
    """Return the resource limits of each process that are equal for all commands: name in lower case to value."""
    return {
        "as": limits.address_bytes,
        "nproc": limits.processes,
        "fsize": limits.work_bytes,
        "nofile": limits.open_files,
        "core": 0,
        "memlock": 0,
        "msgqueue": 0,
    }


def _limit(limits: Limits, cpu_s: int) -> None:
    for name, value in {**rlimits(limits), "cpu": cpu_s}.items():
        kind = getattr(resource, f"RLIMIT_{name.upper()}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def write(path: str, text: str) -> None:
    """Write a text to a file of the kernel."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)

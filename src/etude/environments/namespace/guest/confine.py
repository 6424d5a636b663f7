"""From a fork of the launcher to a confined machine: namespaces, mounts, identities, capabilities, filter, limits.

The namespaces belong to the launcher's user namespace and the machine then moves into one of its own, so nothing in a
machine, its PID 1 included, has any privilege over them. Order matters and is the order of `enter`.
"""

from __future__ import annotations

import ctypes
import os
import resource
from typing import NamedTuple

from . import syscalls as sys_
from .root import WORK

USER = 1000  # uid and gid of tools inside a machine


class Limits(NamedTuple):
    """What one machine may use. Sent by the host as JSON."""

    memory_bytes: int
    processes: int
    cpus: float
    work_bytes: int
    tmp_bytes: int
    inodes: int
    open_files: int
    address_bytes: int


class Identity(NamedTuple):
    """The uids, as the launcher sees them, that a machine is mapped to. Without privilege there is only one."""

    agent: int
    tools: int
    privileged: bool

    @property
    def maps(self) -> str:
        """What /proc/PID/uid_map and gid_map of the machine hold."""
        return f"0 {self.agent} 1\n{USER} {self.tools} 1\n" if self.privileged else f"{USER} {self.tools} 1\n"


def enter(limits: Limits, identity: Identity, groups: list[int], launcher: int, filter_: ctypes.Structure) -> None:
    """Confine this process, PID 1 of a new PID namespace. `groups` are open cgroup.procs files; `launcher` is told
    once the user namespace exists and answers once it is mapped."""
    sys_.prctl(sys_.PR_SET_PDEATHSIG, 9)
    for fd in groups:
        os.write(fd, b"0")
    kinds = sys_.CLONE_NEWNS | sys_.CLONE_NEWNET | sys_.CLONE_NEWIPC | sys_.CLONE_NEWUTS | sys_.CLONE_NEWCGROUP
    sys_.unshare(kinds)
    sys_.set_hostname("machine")
    _mount_private(limits, identity.tools)
    if identity.privileged:
        os.setgroups([])
    sys_.unshare(sys_.CLONE_NEWUSER)
    os.write(launcher, b"u")
    if os.read(launcher, 1) != b"m":
        os._exit(1)
    agent = 0 if identity.privileged else USER
    os.setresgid(agent, agent, agent)
    os.setresuid(agent, agent, agent)
    sys_.act_on_files_as(USER, USER)
    sys_.prctl(sys_.PR_SET_NO_NEW_PRIVS, 1)
    sys_.drop_capabilities((sys_.CAP_KILL, sys_.CAP_SETGID, sys_.CAP_SETUID) if identity.privileged else ())
    sys_.prctl(sys_.PR_SET_PDEATHSIG, 9)  # changing identity cleared it
    sys_.prctl(sys_.PR_SET_DUMPABLE, 0)
    sys_.set_seccomp(filter_)
    _limit(limits)
    os.chdir(WORK)


def _mount_private(limits: Limits, owner: int) -> None:
    flags = sys_.MS_NOSUID | sys_.MS_NODEV
    own = f"nr_inodes={limits.inodes},uid={owner},gid={owner}"
    sys_.mount("tmpfs", WORK, "tmpfs", flags, f"size={limits.work_bytes},mode=755,{own}")
    sys_.mount("tmpfs", "/tmp", "tmpfs", flags, f"size={limits.tmp_bytes},mode=1777,{own}")
    sys_.mount("proc", "/proc", "proc", flags | sys_.MS_NOEXEC)


def _limit(limits: Limits) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, limits.address_bytes),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_FSIZE, limits.work_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def become_tool(identity: Identity, cpu_s: int) -> None:
    """In a child of PID 1: give up the rest and be an ordinary, killable, first-to-go process."""
    if identity.privileged:
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    sys_.prctl(sys_.PR_SET_DUMPABLE, 1)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, b"1000")
    os.close(fd)

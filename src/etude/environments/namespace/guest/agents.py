"""Start the machine agent as PID 1 of a machine, with its own identity there.

A machine's user namespace has three ids, each mapped to an own id of the host: its user's, its root's and the agent's.
The namespace belongs to a slot, not to a machine: it is only an id map, so it is created once. Agents are clones of one
process, the template, because starting a program costs more than all other processes of a machine. A clone starts with
this process's privileges, in the namespaces that this process has just created, and drops them itself; its channel
reports whether that worked.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence

from . import confine
from .cgroups import Hierarchy

USER, ROOT, AGENT = confine.USER, 0, 900  # ids inside a machine; consecutive on the host
_CLONE_S = 10.0  # for a clone to start
_ROOT_CAPABILITIES = 0xFB  # CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID: of the machine's own files only


def id_map(base: int | None, slot: int) -> str:
    """Return the content of /proc/PID/uid_map and gid_map for a machine in the slot (number) `slot`.

    `base`: the first host id of machines. None without privilege: then there is one id for all.
    """
    first = confine.user_of(base, slot)
    ids = (USER,) if base is None else (USER, ROOT, AGENT)
    return "".join(f"{inside} {first + i} 1\n" for i, inside in enumerate(ids))


class Agents:
    """Starts agents as clones of a template process.

    - `program`: descriptor of the agent's program
    - `base`: first host id of machines; None without privilege
    - `hierarchies`: the control groups that machines enter
    - `filter_`: the system-call filter of commands, as bytes
    - `users_of`: returns a descriptor of a slot's user namespace
    - `command_user`: the default user of commands
    - `agent_id`: the agent's user id in the machine
    """

    def __init__(
        self,
        program: int,
        base: int | None,
        limits: confine.Limits,
        hierarchies: Sequence[Hierarchy],
        filter_: bytes,
        users_of: Callable[[int], int],
        command_user: confine.CommandUser,
        agent_id: int,
    ) -> None:
        self._hierarchies, self._users_of = hierarchies, users_of
        self._slot_fds: dict[int, list[int]] = {}  # descriptors for every agent of a slot
        self._template, agent_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._template.settimeout(_CLONE_S)
        filter_fd, maker = os.memfd_create("filter", os.MFD_CLOEXEC), os.pidfd_open(os.getpid())
        os.write(filter_fd, filter_)
        args = ["--template", str(agent_end.fileno()), str(maker), str(command_user.uid if base is None else agent_id)]
        args += ["--work", command_user.work, "--user", command_user.name, "--cpus", str(os.cpu_count() or 1)]
        args += ["--path", command_user.path] if command_user.path else []
        args += ["--root-capabilities", f"{_ROOT_CAPABILITIES:x}", "--filter-fd", str(filter_fd)]
        for name, value in confine.rlimits(limits).items():
            args += ["--limit", f"{name}={value}"]
        inherited = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in (agent_end.fileno(), maker, filter_fd)]
        path, env = f"/proc/self/fd/{program}", {"AGENT": "\n".join(args)}
        self.template = os.pidfd_open(os.posix_spawn(path, ["init"], env, file_actions=inherited))
        for fd in (agent_end.detach(), maker, filter_fd):
            os.close(fd)

    def start(self, slot: int) -> tuple[int, int]:
        """Start an agent in the current namespaces, as PID 1 of a machine in the slot `slot`. Call `prepare` before.

        Returns (its PID as this process sees it, descriptor of the host's end of its channel).
        """
        host_end, agent_end = socket.socketpair()
        with host_end, agent_end:
            socket.send_fds(self._template, [b"\0"], [agent_end.fileno(), *self._slot_fds[slot]])
            pid = int.from_bytes(self._template.recv(4), sys.byteorder, signed=True)
            if pid <= 0:
                raise OSError(-pid, f"cloning an agent: {os.strerror(-pid) if pid else 'the template has ended'}")
            return pid, host_end.detach()

    def prepare(self, slot: int) -> None:
        """Open the descriptors that every agent of a machine slot receives. Call it once per slot."""
        self._slot_fds[slot] = [self._users_of(slot), *(hierarchy.entrance(slot) for hierarchy in self._hierarchies)]


def write_maps(pid: int, ids: str) -> None:
    """Write the text `ids` (see `id_map`) as both id maps of a process's user namespace."""
    for name in ("uid_map", "gid_map"):
        confine.write(f"/proc/{pid}/{name}", ids)

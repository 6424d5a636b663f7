"""Control groups of sandboxes: each sandbox has a group that limits its memory and CPU time in total.

runsc runs with --ignore-cgroups, since its caller may lack rights over the hierarchy. Instead, a sandbox's processes
start inside a group that this process has created below its own.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from etude.environments.config import MachineLimits
from etude.environments.namespace.guest.cgroups import Hierarchy, claim_all, remove_all

SENTRY_BYTES = 96 << 20  # memory that gVisor itself needs for one sandbox: its kernel and its file server
_ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'


class SandboxCgroups:
    """The control groups of a runtime's sandboxes: at most `count`, which are numbered.

    On a host without usable control groups its methods do nothing, and sandboxes are not limited.
    """

    def __init__(self, limits: MachineLimits, count: int) -> None:
        self._limits = limits
        self._free = list(range(count, 0, -1))
        self._made: set[int] = set()
        membership = Path("/proc/self/cgroup").read_text() if os.path.exists("/proc/self/cgroup") else ""
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        # The number of processes is not limited: threads of gVisor's own kernel would count.
        self._hierarchies: list[Hierarchy] = claim_all(name, membership, of=("memory", "cpu"))

    @property
    def controllers(self) -> tuple[str, ...]:
        """The resources that the groups limit: "memory" and "cpu"; empty on a host without usable control groups."""
        return tuple(c for hierarchy in self._hierarchies for c in hierarchy.controllers)

    def take(self) -> int:
        """Reserve a free group and return its number. It is created on first use.

        Raises `OSError` if the kernel refuses to create it, `IndexError` if no group is free.
        """
        slot = self._free.pop()
        try:
            if slot not in self._made:
                for hierarchy in self._hierarchies:
                    num_bytes = self._limits.memory_bytes + SENTRY_BYTES
                    hierarchy.make(slot, num_bytes, self._limits.processes, self._limits.cpus)
                self._made.add(slot)
        except OSError:
            self._free.append(slot)
            raise
        return slot

    def give_back(self, slot: int) -> None:
        """Free the group with the number `slot` for another sandbox. Call it when nothing runs in the group any
        more."""
        self._free.append(slot)

    def inside(self, slot: int, command: Sequence[str]) -> list[str]:
        """Return the command line that enters the group with the number `slot` and then executes `command`."""
        entrances = [hierarchy.entrance_path(slot) for hierarchy in self._hierarchies]
        return ["sh", "-c", _ENTER, "sh", *entrances, "--", *command]

    def close(self) -> None:
        """Remove the groups. Call it when nothing runs in them any more. Blocks for some milliseconds."""
        remove_all(self._hierarchies)
        for hierarchy in self._hierarchies:
            hierarchy.close()
        self._hierarchies = []

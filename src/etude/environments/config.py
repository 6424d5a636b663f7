"""Settings of machines: the limits of one machine, and the `[machines]` section of a run's config. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from etude.config import ranged
from etude.errors import MachineError

MIB = 1 << 20


@dataclass(frozen=True)
class MachineLimits:
    """Resource limits of one machine. `NamespaceRuntime.limits` reports the mechanism that enforces each limit on this
    host.

    - `memory_bytes`: memory of all processes and of files kept in memory, together
    - `address_bytes`: address space of one process
    - `processes`, `cpus`: number of processes; CPU time in cores
    - `work_bytes`, `tmp_bytes`: content of the working directory and of /tmp
    - `inodes`: files and folders, in the working directory and in /tmp each
    - `open_files`: open files of one process
    - `require_memory_bound`: raise `MachineError` on a host where no control group limits `memory_bytes`

    The defaults fit small repositories and their tests. A toolchain such as a compiler needs more of each.
    """

    memory_bytes: int = ranged(256 * MIB, low=32 * MIB)  # all processes and what they write, together
    address_bytes: int = ranged(1024 * MIB, low=64 * MIB)  # address space of one process
    processes: int = ranged(64, low=2)
    cpus: float = ranged(1.0, low=0.05)  # cores' worth of time
    work_bytes: int = ranged(64 * MIB, low=MIB)  # files in the working directory
    tmp_bytes: int = ranged(32 * MIB, low=MIB)
    inodes: int = ranged(8192, low=64)  # files and folders, in the working directory and in /tmp each
    open_files: int = ranged(256, low=16)  # of one process
    require_memory_bound: bool = False  # refuse to start where no control group bounds `memory_bytes` of a machine


@dataclass(frozen=True)
class MachinesConfig(MachineLimits):
    """The `[machines]` section of a run's config: the backend and the limits of one machine.

    `backend`: "namespace", "microvm", "gvisor" or "remote". `images`: folder of the image store; "": no task uses an
    image. `require_memory_bound`: False allows hosts that can limit only the address space of each process.
    """

    backend: str = "namespace"  # or "microvm", "gvisor", "remote": see `environments.backends`
    require_memory_bound: bool = True  # false: start anyway; only the address space of each process is bounded
    images: str = ""  # folder of the image store; "": no task uses an image


def check_memory_bound(limits: MachineLimits, controllers: Collection[str]) -> None:
    """Raise `MachineError` if `limits` require a limit on a machine's memory and this process cannot set one.

    `controllers`: the control-group controllers that this process may use, such as "memory". Only control groups can
    limit a machine's memory. Measuring its processes is not enough: their sum does not contain socket buffers and
    unmapped files in memory, and a process can allocate gigabytes between two measurements.
    """
    if limits.require_memory_bound and "memory" not in controllers:
        raise MachineError(
            "the memory of a machine cannot be bounded here",
            "this process may not create memory cgroups, so a machine could use all memory of the host",
            hint="run it where one is delegated (systemd-run --user --scope -p Delegate=yes ...), use backend microvm, "
            "or accept it: [machines] require_memory_bound = false in a config, --unbounded-memory of a command",
        )

"""The ranks of a learner as device meshes, with deadlines for every collective.

| mesh | ranks | divides |
| --- | --- | --- |
| dense | all | rows of every parameter outside experts |
| expert × expert_fsdp | neighbours × ranks with equal remainder | experts; then each rank's part of them |
| data × context | ranks with equal remainder × neighbours | samples; then the tokens of each |

All three consist of the same ranks, so no parameter and no token is stored twice. CPUs use gloo; GPUs use NCCL, with
gloo beside it for control messages.

Collectives are not authenticated, and torch's object collectives are pickles: whoever reaches the ports of gloo or NCCL
can run code in a rank. The ranks need their own network (docs/guides/sharded-learner.md)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from etude.errors import ConfigError
from etude.numerics.device import device_for
from etude.numerics.parallel import Parallel, Split
from etude.training.config import LearnerConfig

DEADLINE_S = 300.0
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Mesh:
    """One rank's place in the device meshes of a learner. `join` makes one.

    - `dense`: all ranks. `experts`: [expert_parallel, ranks / expert_parallel]. `expert_fsdp`: this rank's column of
      `experts`.
    - `expert`: this rank's row of `experts`, for the model's collectives.
    - `context`: the `context_size` ranks that share each text; this rank is number `context_rank` of them.
    - `control`: a process group of all ranks on CPUs. `publishing`: another such group, for the thread that publishes.
    - `store`: a key-value store, hosted by rank 0.
    - `hosts`: the address of each rank's machine."""

    rank: int
    size: int
    device: torch.device
    deadline_s: float
    dense: DeviceMesh
    experts: DeviceMesh
    expert_fsdp: DeviceMesh
    expert: Parallel
    context: distributed.ProcessGroup
    context_rank: int
    context_size: int
    control: distributed.ProcessGroup
    publishing: distributed.ProcessGroup
    store: Store
    hosts: tuple[str, ...]

    def describe_rank(self, rank: int) -> str:
        """Return a rank's number as text, with its host where there are several hosts."""
        return f"{rank} (on {self.hosts[rank]})" if len(set(self.hosts)) > 1 else str(rank)


def join(
    config: LearnerConfig, *, store: TCPStore | None = None, rank: int = 0, deadline_s: float = DEADLINE_S
) -> Mesh:
    """Connect to the other ranks of the learner, and create the meshes. A collective call.

    With `store` (of `host_store` or `connect_store`), this process is rank `rank`. Without `store`, ranks find each
    other by the environment variables of torchrun, unless a default process group is initialised already. `deadline_s`:
    the most seconds for each collective call. Raises `ConfigError` where the number of ranks does not match."""
    met, first = distributed.is_initialized(), os.environ.get("MASTER_ADDR", LOOPBACK) if store is None else store.host
    if met:
        rank, size = distributed.get_rank(), distributed.get_world_size()
    elif store is not None:
        size = config.ranks
    else:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size != config.ranks:
        raise ConfigError(
            f"the number of ranks does not match: {size} instead of {config.ranks}",
            f"learner.ranks = {config.ranks}, and the launcher started {size}",
            hint="start learner.ranks processes: torchrun --nproc-per-node",
        )
    device, backend = _device(config.device, rank)
    deadline = timedelta(seconds=deadline_s)
    address, interface = route_to(first)
    one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size  # set by torchrun
    if interface and (one_machine or interface != "lo"):  # whatever the machine's name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface and interface != "lo":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    if not met:
        how: dict[str, Any] = {"init_method": "env://"} if store is None else {"store": store}
        distributed.init_process_group(backend, rank=rank, world_size=size, timeout=deadline, **how)
    groups = partial(distributed.new_subgroups_by_enumeration, timeout=deadline)
    numbers = torch.arange(size)
    by_expert, by_context = numbers.view(-1, config.expert_parallel), numbers.view(-1, config.context_parallel)
    expert, _ = groups(by_expert.tolist())
    expert_fsdp, _ = groups(by_expert.t().tolist())
    context, _ = groups(by_context.tolist())
    control, publishing = (distributed.new_group(backend="gloo", timeout=deadline) for _ in range(2))
    hosts: list[str] = [""] * size
    distributed.all_gather_object(hosts, address, group=control)
    everybody = distributed.group.WORLD
    assert everybody is not None, "initialised above"
    kind = device.type
    return Mesh(
        rank=rank,
        size=size,
        device=device,
        deadline_s=deadline_s,
        dense=DeviceMesh.from_group(everybody, kind, mesh_dim_names=("dense",)),
        experts=DeviceMesh.from_group(
            [expert, expert_fsdp], kind, mesh=by_expert.t().contiguous(), mesh_dim_names=("expert", "expert_fsdp")
        ),
        expert_fsdp=DeviceMesh.from_group(expert_fsdp, kind, mesh_dim_names=("expert_fsdp",)),
        expert=_expert(config.expert_parallel, rank, expert, deadline_s),
        context=context,
        context_rank=rank % config.context_parallel,
        context_size=config.context_parallel,
        control=control,
        publishing=publishing,
        store=store or _store(rank, first, control, deadline_s),
        hosts=tuple(hosts),
    )


def _expert(degree: int, rank: int, group: distributed.ProcessGroup, deadline_s: float) -> Parallel:
    if degree == 1:
        return Parallel()
    return Parallel(degree, rank % degree, Split.EXPERT, group, deadline_s)


def _device(name: str, rank: int) -> tuple[torch.device, str]:
    """Return this rank's device, and the backend for it.

    On one machine, torchrun's LOCAL_RANK or the rank numbers the GPUs."""
    device = device_for(name)
    if device.type == "cpu":
        return device, "gloo"
    device = device_for(f"cuda:{os.environ.get('LOCAL_RANK', rank)}")
    torch.cuda.set_device(device)
    return device, "cpu:gloo,cuda:nccl"


def host_store(host: str, deadline_s: float = DEADLINE_S) -> TCPStore:
    """Open a torch `TCPStore` on a free port, to which other ranks connect by `connect_store`.

    `host`: the address of this machine to bind; "": all addresses. `deadline_s`: timeout of its operations, in seconds.
    Raises `OSError` if the address cannot be bound."""
    bound = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port, deadline = bound.getsockname()[1], timedelta(seconds=deadline_s)
    return TCPStore(
        host or LOOPBACK, port, None, True, deadline, wait_for_workers=False, master_listen_fd=bound.detach()
    )


def connect_store(host: str, port: int, deadline_s: float = DEADLINE_S) -> TCPStore:
    """Connect to the torch `TCPStore` that `host_store` opened, on this machine or another one.

    `deadline_s`: timeout of the connection and of operations, in seconds. Raises `RuntimeError` if the connection
    fails."""
    return TCPStore(host, port, None, False, timedelta(seconds=deadline_s), wait_for_workers=False)


def _store(rank: int, host: str, control: distributed.ProcessGroup, deadline_s: float) -> Store:
    """Return etude's own store on rank 0: torch's has no public name, and torchrun's outlives the ranks."""
    mine = host_store(LOOPBACK if host in (LOOPBACK, "localhost") else "", deadline_s) if rank == 0 else None
    where = [mine.port if mine is not None else None]
    distributed.broadcast_object_list(where, src=0, group=control)
    assert where[0] is not None, "sent by rank 0"

    return connect_store(host, where[0], deadline_s) if mine is None else mine


def route_to(host: str) -> tuple[str, str]:
    """Return (address, network interface) of this machine from which it reaches a host; "" where unknown.

    >>> route_to("127.0.0.1")
    ('127.0.0.1', 'lo')
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:
        return "", ""
    if ":" in address:
        return address, _interface6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                raw = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(raw[20:24]) == address:
                    return address, name
    return address, ""


def _interface6(address: str) -> str:
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    return next((row[5] for row in rows if row[0] == packed), "")

"""The ranks of a learner as meshes: which of them share what, and how they wait for each other.

| mesh | ranks | shares |
| --- | --- | --- |
| dense | all | rows of every parameter that is no expert's |
| expert × expert_fsdp | neighbours × every so manieth | whole experts; then what a rank has of them |
| data × context | every so manieth × neighbours | samples; then the tokens of each |

The same ranks lie in all three, so no parameter and no token is anywhere twice. gloo on CPUs; NCCL on GPUs, with gloo
beside it for what is said rather than computed. Every collective has a deadline.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
from torch import distributed
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from etude.errors import ConfigError
from etude.numerics.device import device_for
from etude.numerics.parallel import Parallel, Split
from etude.training.config import LearnerConfig

DEADLINE_S = 300.0


@dataclass(frozen=True)
class Mesh:
    """One rank's place in every mesh."""

    rank: int
    size: int
    device: torch.device
    deadline_s: float
    dense: DeviceMesh  # [ranks]
    experts: DeviceMesh  # [expert_parallel, ranks / expert_parallel]
    expert_fsdp: DeviceMesh  # this rank's column of it
    expert: Parallel  # this rank's row of it
    context: distributed.ProcessGroup
    context_rank: int
    context_size: int
    control: distributed.ProcessGroup  # of all ranks, on CPUs
    publishing: distributed.ProcessGroup  # the same, for another thread
    store: Store  # on rank 0


def join(config: LearnerConfig, *, at: str = "env://", rank: int | None = None, deadline_s: float = DEADLINE_S) -> Mesh:
    """Meet the other ranks of `config.ranks`, at `tcp://host:port` or by the environment variables that torchrun sets;
    or those that this process has met already. Collective. Raises `ConfigError` where their number does not fill the
    mesh."""
    met = distributed.is_initialized()
    if met:
        rank, size = distributed.get_rank(), distributed.get_world_size()
    else:
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        size = int(os.environ.get("WORLD_SIZE", "1")) if at == "env://" else config.ranks
    if size != config.ranks:
        raise ConfigError(
            f"{size} ranks do not fill a mesh of {config.ranks}",
            f"learner.ranks = {config.ranks}; whoever started this one says that there are {size}",
            hint="start as many as learner.ranks says: torchrun --nproc-per-node",
        )
    device, backend = _device(config.device, rank)
    deadline = timedelta(seconds=deadline_s)
    if device.type == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one machine; its name need not resolve
    if not met:
        distributed.init_process_group(backend, init_method=at, rank=rank, world_size=size, timeout=deadline)
    groups = partial(distributed.new_subgroups_by_enumeration, timeout=deadline)
    numbers = torch.arange(size)
    by_expert, by_context = numbers.view(-1, config.expert_parallel), numbers.view(-1, config.context_parallel)
    expert, _ = groups(by_expert.tolist())
    expert_fsdp, _ = groups(by_expert.t().tolist())
    context, _ = groups(by_context.tolist())
    control, publishing = (distributed.new_group(backend="gloo", timeout=deadline) for _ in range(2))
    everybody = distributed.group.WORLD
    assert everybody is not None, "it was just made"
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
        store=_store(rank, size, control, deadline),
    )


def _expert(degree: int, rank: int, group: distributed.ProcessGroup, deadline_s: float) -> Parallel:
    if degree == 1:
        return Parallel()
    return Parallel(degree, rank % degree, Split.EXPERT, group, deadline_s)


def _device(name: str, rank: int) -> tuple[torch.device, str]:
    """This rank's, and what ranks of such devices talk by. Ranks of a machine are numbered by torchrun, or are all."""
    device = device_for(name)
    if device.type == "cpu":
        return device, "gloo"
    device = device_for(f"cuda:{os.environ.get('LOCAL_RANK', rank)}")
    torch.cuda.set_device(device)
    return device, "cpu:gloo,cuda:nccl"


def _store(rank: int, size: int, control: distributed.ProcessGroup, deadline: timedelta) -> Store:
    """A store of our own: torch's has no public name, and torchrun's outlives the ranks."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    make: Callable[..., TCPStore] = partial(TCPStore, timeout=deadline, wait_for_workers=False)
    mine = make(host if rank == 0 else "127.0.0.1", 0, is_master=True) if rank == 0 else None
    where = [(host, mine.port) if mine is not None else None]
    distributed.broadcast_object_list(where, src=0, group=control)
    assert where[0] is not None, "rank 0 has said"
    found: Store = make(*where[0], is_master=False) if mine is None else mine
    return found


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])

"""Ranks of a learner that meet trouble: importable by name in spawned ones."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import torch
from benchmarks.learner.sharded_ranks import Job, Trained, learner_of, steps

from etude import progress
from etude.errors import ParityError
from etude.models.lora import local_part
from etude.numerics.config import NumericsConfig, Quantise
from etude.numerics.factory import operators_for
from etude.numerics.parallel import RankLost
from etude.stores import DirectoryStore
from etude.training import LearnerConfig, TorchLearner
from etude.training.data_parallel import RankGroup
from etude.training.sharded import ShardedProcessGroup, join, lora
from etude.training.sharded.mesh import LOOPBACK, connect_store, host_store
from etude.training.trainable import LoadRequest


def troubled(ranks: RankGroup, job: Job) -> tuple[str, Trained]:
    """A batch that one rank refuses, then the job: what each was told, and how it went."""
    group = ShardedProcessGroup(join(job.config, deadline_s=600.0))
    channel = group.channel(DirectoryStore(job.store))
    learner = TorchLearner(job.config, channel=channel, numerics=job.numerics, group=group)
    learner.load(job.start)
    batch = job.batches[0]
    bad = batch.samples[-1]
    logprobs = bad.path.logprobs - bad.path.mask.astype(np.float32)
    path = msgspec.structs.replace(bad.path, logprobs=logprobs)
    samples = (*batch.samples[:-1], msgspec.structs.replace(bad, path=path))
    said = ""
    try:
        learner.forward_backward(msgspec.structs.replace(batch, samples=samples))
    except ParityError as error:
        said = str(error)
    progress.tick()
    return said, steps(learner, job)


def lose_one(job: Job, folder: Path, way: str) -> str:
    """Two ranks, of which the second ends or stops in the middle of a step; what the first says."""
    context = multiprocessing.get_context("spawn")
    store = host_store(LOOPBACK)
    ranks = [context.Process(target=_lose, args=(rank, job, store.port, folder, way), daemon=True) for rank in range(2)]
    for one in ranks:
        one.start()
    ranks[0].join(100.0)
    for one in ranks:
        one.kill()
        one.join()
    return (folder / "said").read_text() if (folder / "said").exists() else "nothing"


def _lose(rank: int, job: Job, port: int, folder: Path, way: str) -> None:
    torch.set_num_threads(1)
    mesh = join(job.config, store=connect_store(LOOPBACK, port), rank=rank, deadline_s=4.0 if way == "hung" else 600.0)
    learner = TorchLearner(job.config, numerics=job.numerics, refuse_mismatch=False, group=ShardedProcessGroup(mesh))
    learner.load(job.start)
    learner.forward_backward(job.batches[0])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if way == "killed" else signal.SIGSTOP)
    try:
        learner.optim_step()
    except RankLost as error:
        (folder / "said").write_text(str(error))
    os._exit(0)  # the group is of no use any more, and waits for its other rank as it is taken down


def loaded_bytes(ranks: RankGroup, starts: list[tuple[Path, LearnerConfig]]) -> list[int]:
    """By how much a rank's memory grew at most while it loaded each model, pages of files among it. Of the digest of a
    base others hear after each tensor."""
    found = []
    lora.SILENT_BYTES = 1
    for start, config in starts:
        group = ShardedProcessGroup(join(config, deadline_s=600.0))
        operators = operators_for(NumericsConfig(), torch.float32)
        loading = LoadRequest(start, config, operators, group.mesh.device, Quantise.NONE, seed=0, resumed=False)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is taken anew
        before = _status_bytes("VmRSS")
        trained = group.load(loading)
        found.append(_status_bytes("VmHWM") - before)
        assert sum(view.numel() for view in trained.views().values()) > 0
    return found


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def kept_bytes(ranks: RankGroup, jobs: list[Job]) -> list[float]:
    """Bytes of each of a rank's numbers that it keeps between forward and backward passes: after a backward pass."""
    found = []
    for job in jobs:
        learner = learner_of(job, None, ShardedProcessGroup(join(job.config, deadline_s=600.0)))
        learner.load(job.start)
        learner.forward_backward(job.batches[0])
        optimizer = learner.optimizer
        own = [local_part(p) for p in learner.model.parameters()]
        left = [local_part(p.grad) for p in learner.model.parameters() if p.grad is not None]
        storages = [t.untyped_storage() for t in [*own, *left, optimizer.grad, *optimizer.state().values()]]
        num_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        found.append(num_bytes / sum(map(torch.numel, own)))
        progress.tick()
    return found

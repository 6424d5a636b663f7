"""A learner's steps, by one process and by ranks: importable by name in spawned ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from etude import progress
from etude.models import ModelConfig, load_model
from etude.models.attention import Packed
from etude.numerics.config import NumericsConfig
from etude.numerics.factory import operators_for
from etude.records import Batch, Sample
from etude.records.rollout import Path as TokenPath
from etude.stores import DirectoryStore
from etude.training import LearnerConfig, TorchLearner
from etude.training.data_parallel import RankGroup
from etude.training.process_group import SINGLE_PROCESS, ProcessGroup
from etude.training.reference import Reference
from etude.training.sharded import ShardedProcessGroup, join
from etude.weights import Channel
from etude.weights.chain.publisher import Writer


@dataclass(frozen=True)
class Job:
    """A learner's settings and its steps. `save`: a directory that it leaves a checkpoint in after the steps."""

    start: Path
    store: Path
    config: LearnerConfig
    batches: tuple[Batch, ...]
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    save: Path | None = None
    publish: bool = True


@dataclass(frozen=True)
class Trained:
    """What a rank was told, step by step."""

    losses: list[float]
    norms: list[float]
    digests: list[str]
    fresh: list[float | None]
    probe: list[float]


def paths(config: ModelConfig, lengths: list[int], seed: int) -> list[TokenPath]:
    """Texts with a prompt of a third and sampled tokens after it, without log-probabilities."""
    generator = np.random.default_rng(seed)
    found = []
    for length in lengths:
        mask = np.zeros(length, bool)
        mask[length // 3 + 1 :] = True
        found.append(
            TokenPath(
                token_ids=generator.integers(0, config.vocab_size, length).astype(np.int32),
                mask=mask,
                logprobs=np.zeros(length, np.float32),
                steps=np.where(mask, 0, -1).astype(np.int32),
                kv_epochs=np.zeros(length, np.int32),
                routes=np.zeros((0, config.num_moe_layers, config.top_k), np.uint8),
            )
        )
    return found


@torch.no_grad()
def batches(
    start: Path, lengths: list[int], *, steps: int, numerics: NumericsConfig, dtype: str = "float32"
) -> tuple[Batch, ...]:
    """Samples that the weights of `start` say themselves: on them the first step's ratio is 1."""
    model = load_model(start, operators=operators_for(numerics, getattr(torch, dtype)), weight_dtype=torch.float32)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    found = []
    for step in range(steps):
        samples = []
        for n, path in enumerate(paths(model.config, lengths, seed=step)):
            tokens = torch.from_numpy(path.token_ids).long()
            logits = model.train().run(tokens[:-1], Packed([len(tokens) - 1], model.operators)).logits
            said = model.operators.log_softmax(logits).gather(1, tokens[1:, None])[:, 0].numpy()
            path.logprobs[1:] = np.where(path.mask[1:], said, 0)
            samples.append(Sample.uniform(f"g{step:06d}.{n}", path, 1.0 - 2.0 * (n % 2)))
        found.append(
            Batch(
                batch_id=f"b{step + 1:06d}",
                step=step + 1,
                samples=tuple(samples),
                rollout_ids=tuple(s.rollout_id for s in samples),
                num_loss_tokens=sum(int(s.path.mask.sum()) for s in samples),
            )
        )
    return tuple(found)


def steps(learner: TorchLearner, job: Job) -> Trained:
    """Load, take the steps, publish after each."""
    learner.load(job.start)
    losses, norms, digests, fresh = [], [], [], []
    for batch in job.batches:
        report = learner.forward_backward(batch)
        norms.append(learner.optim_step()["grad_norm"])
        losses.append(report.loss)
        fresh.append(report.fresh_ratio_max)
        if job.publish:
            digests.append(learner.publish(batch.rollout_ids).version.digest)
    probe = learner.probe(job.batches[0].samples[0].path.token_ids.tolist())
    if job.save is not None:
        learner.save(job.save)
    learner.close()
    return Trained(losses, norms, digests, fresh, probe)


def learner_of(job: Job, channel: Writer | None, group: ProcessGroup = SINGLE_PROCESS) -> TorchLearner:
    """The learner of a job, or one rank of it; the job's start is the reference where its loss has one."""
    reference = Reference(job.start) if job.config.has_reference else None
    settings: dict[str, Any] = {"numerics": job.numerics, "refuse_mismatch": False, "reference": reference}
    return TorchLearner(job.config, channel=channel, group=group, **settings)


def alone(job: Job) -> Trained:
    """One process, whatever the settings' ranks."""
    return steps(learner_of(job, Channel(DirectoryStore(job.store)) if job.publish else None), job)


def together(ranks: RankGroup, jobs: list[Job]) -> list[Trained]:
    """One rank of each job's."""
    found = []
    for job in jobs:
        group = ShardedProcessGroup(join(job.config, deadline_s=60.0))
        channel = group.channel(DirectoryStore(job.store)) if job.publish else None
        found.append(steps(learner_of(job, channel, group), job))
        progress.tick()
    return found

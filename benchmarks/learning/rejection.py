"""Rejection sampling and fine-tuning, the strong control: sample, keep what the hidden tests pass, imitate it, again.

Sampling is the real thing: engines, workers and graders of a run, on the training tasks that RL sees, by the rollout
code of RL; between rounds the new weights travel through the weight chain. Fine-tuning is the learner's optimiser on
the cross-entropy of the tokens that successful rollouts sampled, each different rollout once, drawn over all rounds so
far; its rate is constant, then linear to a tenth over the last 40 % of a round. A round spends its share of the CPU
budget half on sampling and half on training. CPU of every process counts, from when the engines are up.
A user does this with the document source `rollouts` and a phase with `loss = "said"`; here the budget is divided by
time, so rounds have neither a ledger nor traces.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from etude.config import to_toml
from etude.experience.packing import paths
from etude.loop.checkpoints import copy_start_checkpoint
from etude.loop.config import RunConfig, open_tasks
from etude.loop.processes import Supervisor
from etude.loop.rollout_result import RolloutResult
from etude.loop.rollout_scheduler import grade_rollout, siblings
from etude.loop.run_processes import RunProcesses, open_processes
from etude.loop.usage import Processes
from etude.models import Packed, Transformer, load_model, save_model
from etude.records import Graded, Outcome, RolloutSpec, Sample
from etude.records.task import Split
from etude.run import RunFolder
from etude.seams import TaskSource
from etude.stores import DirectoryStore
from etude.telemetry import Telemetry
from etude.training.config import LiveWeights
from etude.training.exports import export
from etude.training.flat_batch import flatten_samples
from etude.training.optimizer import AdamW
from etude.training.schedule import lr_multiplier
from etude.weights import Channel

BATCH_SAMPLES, DECAY_FROM, FINAL, ADOPT_S = 24, 0.6, 0.1, 60.0
Spent = Callable[[], float]


@dataclass(frozen=True)
class Recipe:
    """What is tuned on validation tasks."""

    rounds: int
    lr: float


class Tuner:
    """The model, and how it learns from samples."""

    def __init__(self, start: Path, seed: int) -> None:
        self.model: Transformer = load_model(start).train()
        self.optimizer = AdamW(self.model, weights=LiveWeights.F32)
        self.rng = np.random.default_rng(seed)

    def imitate(self, samples: Sequence[Sample], *, lr: float, budget_s: float) -> None:
        """Train until the budget is spent, in CPU seconds of this process, which alone works meanwhile."""
        began = time.process_time()
        while (share := (time.process_time() - began) / budget_s) < 1:
            chosen = self.rng.choice(len(samples), min(BATCH_SAMPLES, len(samples)), replace=False)
            rows = flatten_samples([samples[int(i)] for i in chosen])
            logits = self.model.run(rows.tokens_N, Packed(rows.lengths, self.model.operators), None, rows.rows_R).logits
            F.cross_entropy(logits, rows.targets_R).backward()  # type: ignore[no-untyped-call]
            step = int(1000 * share)
            self.optimizer.step(lr * lr_multiplier(step, 1000, warmup_steps=0, decay_from=DECAY_FROM, final=FINAL))


class Successes:
    """Samples a policy and keeps each different rollout that solved its task."""

    def __init__(self, members: RunProcesses, config: RunConfig, source: TaskSource) -> None:
        self.members, self.config, self.source = members, config, source
        self.cursor, self.sampled = 0, 0
        self.samples: dict[bytes, Sample] = {}

    async def gather(self, *, step: int, budget_s: float, spent: Spent) -> None:
        """Sample batches as large as RL's from version `step`, on tasks that come next, until the budget is spent."""
        began = spent()
        while spent() - began < budget_s:
            await self._batch(step)

    async def _batch(self, step: int) -> None:
        experience = self.config.experience
        specs = [
            spec
            for index in range(self.cursor, self.cursor + experience.groups_per_step)
            for spec in siblings(
                f"g{index:06d}",
                self.source.task(Split.TRAIN, index),
                experience.group_size,
                seed=self.config.seed,
                temperature=self.config.rl.temperature,
                min_step=step,
            )
        ]
        self.cursor += experience.groups_per_step
        self.sampled += len(specs)
        files = self.members.files
        for played, outcome in await asyncio.gather(*(self._one(spec) for spec in specs)):
            if isinstance(outcome, Graded) and outcome.grade == 1.0:
                for path in paths(files.read(played.summary).trace):
                    sample = Sample.uniform(played.summary.rollout_id, path, 1.0)
                    self.samples.setdefault(path.token_ids.tobytes(), sample)
            files.drop(played.summary)

    async def _one(self, spec: RolloutSpec) -> tuple[RolloutResult, Outcome]:
        played = await self.members.rollout(spec, kept=False)
        return played, await grade_rollout(self.members, played)


def meter(supervisor: Supervisor) -> Spent:
    """CPU seconds of this process and of the run's processes since now. The clients' part is in this process."""

    def total() -> float:
        processes = Processes()
        return time.process_time() + sum(processes.cpu_s(pid) for pid in supervisor.pids().values())

    began = total()
    return lambda: total() - began


async def fine_tune(folder: Path, config: RunConfig, recipe: Recipe, *, budget_s: float, out: Path) -> dict[str, Any]:
    """Spend the CPU budget on the recipe from `config.start`; the result is a checkpoint at `out`."""
    assert config.start is not None, "fine-tuning begins from a checkpoint"
    torch.set_num_threads(1)
    run = RunFolder.create(folder, config_toml=to_toml(config), seed=config.seed)
    copy_start_checkpoint(config.start, run)
    telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
    supervisor = Supervisor(telemetry)
    tuner, channel = Tuner(config.start, config.seed), Channel(DirectoryStore(run / "weights"))
    async with open_processes(run, config, telemetry, supervisor) as members:
        await members.start_sampling()
        found, spent = Successes(members, config, open_tasks(config)), meter(supervisor)
        share_s, version = budget_s / recipe.rounds / 2, None
        for step in range(recipe.rounds):
            tensors = export(tuner.model, LiveWeights.BF16)
            version = channel.publish(tensors, step=step, parent=version, rollout_ids=()).version
            await asyncio.gather(*(engine.adopt(step, deadline_s=ADOPT_S) for engine in members.engines.values()))
            await found.gather(step=step, budget_s=share_s, spent=spent)
            if found.samples:
                samples = list(found.samples.values())
                await asyncio.to_thread(tuner.imitate, samples, lr=recipe.lr, budget_s=share_s)
        used = spent()
    save_model(tuner.model, out, dtype="f32", assets=config.start)
    return {
        "rounds": recipe.rounds,
        "lr": recipe.lr,
        "cpu_s": round(used, 1),
        "rollouts": found.sampled,
        "successes": len(found.samples),
        "updates": tuner.optimizer.num_steps,
    }

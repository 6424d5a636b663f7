"""What a step of a config can weigh at most, against what there is: before anything starts. Imports no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from etude.errors import ConfigError
from etude.experience.admission import FILL
from etude.loop.config import RunConfig
from etude.loop.wire import MAX_FRAME_BYTES
from etude.models.config import ModelConfig

TOKEN_BYTES = 17  # of a path: id, log-probability, version step and epoch of four bytes each, and a mask's one
PLANNED_BYTES = 1024  # of a rollout in its step's plan: ids, counts, outcome and its reason; measured: 500 to 700
WIDE_ROUTES = 255  # experts above which a route takes two bytes


@dataclass(frozen=True)
class Weight:
    """The most that a step can be, where each rollout is one path that fills the context, and where a step that looks
    for signal takes as many groups as it may."""

    rollouts: int
    tokens: int
    num_bytes: int

    @classmethod
    def of(cls, config: RunConfig, model: ModelConfig) -> Weight:
        """With the model that the run trains."""
        groups = config.experience.groups_per_step * (FILL if config.experience.signal_groups else 1)
        rollouts = groups * config.experience.group_size
        tokens = rollouts * config.harness.context_tokens
        routes = model.num_moe_layers * model.top_k * (2 if model.num_experts > WIDE_ROUTES else 1)
        a_token = TOKEN_BYTES + (routes if config.wants_routes else 0)
        return cls(rollouts, tokens, tokens * a_token)


def check_step(
    config: RunConfig,
    model: ModelConfig,
    said: Callable[[str], None],
    *,
    memory_bytes: int | None = None,
    disk_bytes: int | None = None,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> None:
    """Raises `ConfigError` where a step's plan fits into no call. `said` is told where the largest step does not fit
    into this machine's memory, or the rollouts that are kept at once onto the disk of this folder (None: measured).
    Few rollouts fill their context, so that is no error."""
    weight = Weight.of(config, model)
    shown = f"a step has at most {weight.tokens:,} tokens, {_gb(weight.num_bytes)}: {weight.rollouts} rollouts of "
    shown += f"harness.context_tokens = {config.harness.context_tokens}"
    searched = f" * {FILL} (signal_groups)" if config.experience.signal_groups else ""
    if weight.rollouts * PLANNED_BYTES > max_frame_bytes:
        raise ConfigError(
            f"experience.groups_per_step * experience.group_size{searched} = {weight.rollouts} rollouts a step",
            f"their plan takes about {weight.rollouts * PLANNED_BYTES} bytes without a token, a call {max_frame_bytes}",
            hint="make steps smaller",
        )
    ranks = config.learner.ranks - config.fleet.ranks_away
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if memory_bytes is None else memory_bytes
    if ranks * weight.num_bytes > memory:
        each = f"each of {ranks} ranks" if ranks > 1 else "the learner"
        said(f"{shown}; {each} holds a step, and this machine has {_gb(memory)} of memory")
    steps = config.experience.max_lag + 1 + 2 * config.rl.checkpoint_every  # until two checkpoints lie behind them
    disk = shutil.disk_usage(Path.cwd()).free if disk_bytes is None else disk_bytes
    if steps * weight.num_bytes > disk:
        said(f"{shown}; rollouts of up to {steps} steps lie in the run folder, and {_gb(disk)} of disk are free here")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"

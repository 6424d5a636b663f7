"""Compares the largest step of a config with this machine's memory and disk, before a run starts. Imports no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from etude.errors import ConfigError
from etude.loop.config import RunConfig
from etude.loop.wire import MAX_FRAME_BYTES
from etude.models.config import ModelConfig

TOKEN_BYTES = 17  # per token of a path: id, log-probability, version step and epoch of four bytes each, one of mask
PLANNED_BYTES = 1024  # per rollout in its step's plan: ids, counts, outcome and its reason; measured: 500 to 700
WIDE_ROUTES = 255  # experts above which a route takes two bytes


@dataclass(frozen=True)
class Weight:
    """The largest that a step can be: each rollout is one path that fills the context, and a step that looks for signal
    takes as many groups as it may. `num_bytes` is the batch's."""

    rollouts: int
    tokens: int
    num_bytes: int

    @classmethod
    def of(cls, config: RunConfig, model: ModelConfig) -> Weight:
        """The largest step of a config with the model that it trains."""
        rollouts = config.experience.window.most * config.experience.group_size
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
    """Compare a config's largest step with this machine. Raises `ConfigError` where a step's plan is larger than one
    call between processes may be.

    `said` is called with a warning where the largest step does not fit into `memory_bytes`, or the rollouts that are
    kept at once do not fit into `disk_bytes` (None: this machine's memory; the free disk of the working directory). It
    is no error, since few rollouts fill their context."""
    weight = Weight.of(config, model)
    shown = f"a step has at most {weight.tokens:,} tokens, {_gb(weight.num_bytes)}: {weight.rollouts} rollouts of "
    shown += f"harness.context_tokens = {config.harness.context_tokens}"
    if weight.rollouts * PLANNED_BYTES > max_frame_bytes:
        raise ConfigError(
            f"a step takes up to {config.experience.window.most} groups of {config.experience.group_size}: "
            f"{weight.rollouts} rollouts",
            f"their plan takes about {weight.rollouts * PLANNED_BYTES} bytes, without tokens; one call holds "
            f"{max_frame_bytes}",
            hint="make experience.groups_per_step or experience.group_size smaller"
            + (", or leave experience.signal_groups out" if config.experience.signal_groups else ""),
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

"""The input of a plan: rollouts and their tokens, and the ranks and engines that compute them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The rollouts of a step: averages, per rollout unless stated otherwise.

    >>> shape = Shape(groups=8, group_size=8, turns=5.0, prompt_tokens=60.0, sampled_tokens=40.0, tool_tokens=20.0)
    >>> shape.rollouts, shape.context, shape.prefill_tokens
    (64, 120.0, 80.0)
    """

    groups: float  # per step; an average with experience.signal_groups
    group_size: int
    turns: float
    prompt_tokens: float  # before the first turn
    sampled_tokens: float
    tool_tokens: float  # tokens of tool outputs
    tool_s: float = 0.0  # seconds that a turn waits for its tool
    signal_share: float = 1.0  # share of rollouts that are trained on: groups with different rewards
    solved_share: float = 0.5  # rollouts of a group that solve the task are graded once

    @property
    def rollouts(self) -> float:
        return self.groups * self.group_size

    @property
    def fresh_grades(self) -> float:
        """Share of the rollouts of a group that must be graded: equal exports are graded once. Assumes that all
        solutions of a task are equal, and all failures different.

        >>> Shape(1, 8, 1.0, 1.0, 1.0, 1.0, solved_share=0.75).fresh_grades
        0.375
        """
        return (min(1.0, self.solved_share * self.group_size) / self.group_size) + 1.0 - self.solved_share

    @property
    def context(self) -> float:
        """Tokens of a finished rollout; all of them are trained on."""
        return self.prompt_tokens + self.sampled_tokens + self.tool_tokens

    @property
    def prefill_tokens(self) -> float:
        """Tokens of a rollout that an engine computes without sampling them: prompt and tool tokens. Tokens of earlier
        turns are in the KV cache and are not computed again."""
        return self.prompt_tokens + self.tool_tokens


@dataclass(frozen=True)
class Training:
    """What the learner trains, and with which optimiser and memory settings."""

    lora_rank: int = 0  # 0: all weights are trained; else the rank of LoRA adapters
    lora_on: str = "all"  # or "attention", "mlp"
    muon: bool = False  # one moment per matrix; AdamW has two for all weights
    masters: bool = True  # float32 copies of rounded live weights
    recompute: bool = False  # recompute the activations of a layer in the backward pass
    dtype_bytes: int = 4  # per activation
    gathered_bytes: int = 4  # per weight when ranks exchange weights
    expert_parallel: int = 1  # number of ranks that share the experts


@dataclass(frozen=True)
class Region:
    """Engines in one location, and the network connection to it."""

    name: str
    engines: int
    bytes_s: float = 1.25e9  # from the learner's store: 10 Gbit/s
    round_trip_s: float = 0.0


@dataclass(frozen=True)
class Layout:
    """The learner's ranks, the engines, and the network between them."""

    learner_ranks: int = 1
    engines: int = 2
    engine_ranks: int = 1  # devices per engine (tensor parallelism)
    max_sequences: int = 64  # per engine
    kv_tokens: int = 64 * 1024  # size of the KV cache of an engine
    max_lag: int = 2
    max_running: int = 96
    budget_tokens: int = 8192  # per forward pass of a learner rank
    regions: tuple[Region, ...] = ()  # of the engines; (): one region over 10 Gbit/s
    changed_share: float = 0.05  # of the weights per version
    evaluated: float = 0.0  # rollouts of evaluations per step
    dtype_bytes: int = 2  # of the weights and cache of an engine
    matrix_bytes: float = 2.0  # per number in attention and MLP matrices of an engine: 17/16 for MXFP8
    training: Training = Training()

    @property
    def places(self) -> tuple[Region, ...]:
        """The regions; if none are given, one region with all engines."""
        return self.regions or (Region("here", self.engines),)

"""The shape of a run for planning: its rollouts and their tokens, and the ranks and engines that compute them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The rollouts of a step. Means, of one rollout where nothing else is said.

    >>> shape = Shape(groups=8, group_size=8, turns=5.0, prompt_tokens=60.0, sampled_tokens=40.0, tool_tokens=20.0)
    >>> shape.rollouts, shape.context, shape.prefill_tokens
    (64, 120.0, 80.0)
    """

    groups: float  # a mean, where steps go on until some groups have a signal
    group_size: int
    turns: float
    prompt_tokens: float  # before the first turn
    sampled_tokens: float
    tool_tokens: float  # what tools answered
    tool_s: float = 0.0  # a turn waits for its tool
    signal_share: float = 1.0  # of the rollouts whose group teaches something: the others are not trained on
    solved_share: float = 0.5  # siblings that solve a task hand in the same, and it is graded once

    @property
    def rollouts(self) -> float:
        return self.groups * self.group_size

    @property
    def fresh_grades(self) -> float:
        """Share of rollouts of a group whose exports differ from all others': one of those that solve the task, and all
        that do not.

        >>> Shape(1, 8, 1.0, 1.0, 1.0, 1.0, solved_share=0.75).fresh_grades
        0.375
        """
        return (min(1.0, self.solved_share * self.group_size) / self.group_size) + 1.0 - self.solved_share

    @property
    def context(self) -> float:
        """Tokens at its end: what is trained on of it."""
        return self.prompt_tokens + self.sampled_tokens + self.tool_tokens

    @property
    def prefill_tokens(self) -> float:
        """Tokens of a rollout that an engine computes without sampling them: prompt and tool tokens. Tokens of earlier
        turns are in the KV cache and are not computed again."""
        return self.prompt_tokens + self.tool_tokens


@dataclass(frozen=True)
class Training:
    """What the learner trains, and with which optimiser and memory settings."""

    lora_rank: int = 0  # 0: all weights; else adapters of so many rows, on a frozen base
    lora_on: str = "all"  # or "attention", "mlp"
    muon: bool = False  # matrices have one moment; by AdamW all weights have two
    masters: bool = True  # beside live weights that are rounded
    recompute: bool = False  # of a layer nothing is kept for the backward pass
    dtype_bytes: int = 4  # of an activation
    gathered_bytes: int = 4  # of a weight that ranks send each other
    expert_parallel: int = 1  # so many ranks share the experts


@dataclass(frozen=True)
class Region:
    """Engines that share a place, and the line to it."""

    name: str
    engines: int
    bytes_s: float = 1.25e9  # from the learner's store: 10 Gbit/s
    round_trip_s: float = 0.0


@dataclass(frozen=True)
class Layout:
    """The learner's ranks, the engines, and the network between them."""

    learner_ranks: int = 1
    engines: int = 2
    engine_ranks: int = 1  # devices that share one engine's weights
    max_sequences: int = 64  # of an engine
    kv_tokens: int = 64 * 1024  # whose keys and values an engine has room for
    max_lag: int = 2
    max_running: int = 96
    budget_tokens: int = 8192  # of one forward of a learner's rank
    regions: tuple[Region, ...] = ()  # of the engines; none: one place, over 10 Gbit/s
    changed_share: float = 0.05  # of the weights, a version
    evaluated: float = 0.0  # rollouts of evaluations beside each step
    dtype_bytes: int = 2  # of an engine's weights and cache
    matrix_bytes: float = 2.0  # of a number in an engine's attention and MLP matrices: 17/16 in MXFP8
    training: Training = Training()

    @property
    def places(self) -> tuple[Region, ...]:
        """The regions, or the one that all engines are in."""
        return self.regions or (Region("here", self.engines),)

"""The input of a plan: rollouts and their tokens, and the ranks and engines that compute them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The rollouts of a training step. Numbers are averages per rollout unless stated otherwise.

    `groups` is the number of groups per step; the `group_size` rollouts of a group try the same task. `turns` is the
    number of requests to the model. `prompt_tokens` is the number of tokens before the first turn, `sampled_tokens`
    that of all turns, and `tool_tokens` that of tool outputs. `tool_s` is the seconds that a turn waits for its tool.
    `signal_share` is the share of rollouts that are trained on: those of groups with different rewards. `solved_share`
    is the share that solve their task.

    >>> shape = Shape(groups=8, group_size=8, turns=5.0, prompt_tokens=60.0, sampled_tokens=40.0, tool_tokens=20.0)
    >>> shape.rollouts, shape.context, shape.prefill_tokens
    (64, 120.0, 80.0)
    """

    groups: float
    group_size: int
    turns: float
    prompt_tokens: float
    sampled_tokens: float
    tool_tokens: float
    tool_s: float = 0.0
    signal_share: float = 1.0
    solved_share: float = 0.5

    @property
    def rollouts(self) -> float:
        """Rollouts of a step."""
        return self.groups * self.group_size

    @property
    def fresh_grades(self) -> float:
        """Share of the rollouts of a group that must be graded, since equal files are graded once.

        It assumes that all solutions of a task are equal, and all failures different.

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
        """Tokens of a rollout that an engine computes without sampling them: those of prompts and tool outputs.

        Tokens of earlier turns are in the KV cache and are not computed again."""
        return self.prompt_tokens + self.tool_tokens


@dataclass(frozen=True)
class Training:
    """What the learner trains, and with which optimiser and memory settings.

    - `lora_rank`: the rank of the LoRA adapters; 0: all weights are trained. `lora_on`: "all", "attention" or "mlp".
    - `muon`: whether matrices are trained with Muon, which has one moment per weight; AdamW has two.
    - `masters`: whether the optimiser keeps float32 copies of weights that are rounded to bf16.
    - `bf16_masters`: whether the optimiser adds its updates to the bf16 weights instead.
    - `moment_bytes`: bytes per number of a moment: 4, or `arithmetic.CODE_BYTES` for 8-bit codes.
    - `offload`: whether moments and separate masters are in host memory.
    - `recompute`: whether the backward pass recomputes the activations of a layer.
    - `quantised`: whether products round their matrices to a format (`numerics.quantise`).
    - `dtype_bytes`: bytes of an activation; `gathered_bytes`: bytes of a weight when ranks exchange weights.
    - `expert_parallel`: number of ranks among which the experts are divided."""

    lora_rank: int = 0
    lora_on: str = "all"
    muon: bool = False
    masters: bool = True
    bf16_masters: bool = False
    moment_bytes: float = 4.0
    offload: bool = False
    recompute: bool = False
    quantised: bool = False
    dtype_bytes: int = 4
    gathered_bytes: int = 4
    expert_parallel: int = 1


@dataclass(frozen=True)
class Region:
    """Engines in one location, and the network connection from the learner's store to them.

    `bytes_s` is its bandwidth (default: 10 Gbit/s), and `round_trip_s` its latency."""

    name: str
    engines: int
    bytes_s: float = 1.25e9
    round_trip_s: float = 0.0


@dataclass(frozen=True)
class Layout:
    """The learner's ranks, the engines, and the network between them.

    - `engine_ranks`: devices per engine (tensor parallelism).
    - `max_sequences`, `kv_tokens`: how many sequences an engine decodes together, and the size of its KV cache in
      tokens.
    - `max_lag`: by how many steps the weights that sample a rollout may be older than those that train on it.
    - `max_running`: concurrent rollouts on all engines.
    - `budget_tokens`: tokens per forward pass of a learner rank.
    - `regions`: where the engines are; (): in one region over 10 Gbit/s.
    - `changed_share`: share of the weights that change in a step.
    - `evaluated`: rollouts of evaluations per step.
    - `dtype_bytes`: per number of an engine's weights and cache, but `matrix_bytes` in attention and MLP matrices
      (17/16 for MXFP8)."""

    learner_ranks: int = 1
    engines: int = 2
    engine_ranks: int = 1
    max_sequences: int = 64
    kv_tokens: int = 64 * 1024
    max_lag: int = 2
    max_running: int = 96
    budget_tokens: int = 8192
    regions: tuple[Region, ...] = ()
    changed_share: float = 0.05
    evaluated: float = 0.0
    dtype_bytes: int = 2
    matrix_bytes: float = 2.0
    training: Training = Training()

    @property
    def places(self) -> tuple[Region, ...]:
        """`regions`; if that is empty, one region with all engines."""
        return self.regions or (Region("here", self.engines),)

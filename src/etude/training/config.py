"""The `[learner]` and `[mid_training]` sections of the config. Torch-free."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from etude.config import Plugin, ranged
from etude.numerics.config import ComputeDtype, Mode, check_device


class LiveWeights(enum.StrEnum):
    """Precision of the learner's live weights. They are always stored as float32 tensors."""

    BF16 = "bf16"  # the optimiser's float32 master weights rounded to bf16: exactly the published bytes
    F32 = "f32"


class OptimizerKind(enum.StrEnum):
    """The built-in optimisers."""

    ADAMW = "adamw"
    MUON = "muon"  # for matrices; AdamW for embedding, head, norms, routers (`training.muon`)


class PolicyLossKind(enum.StrEnum):
    """The built-in policy losses, described in `training.losses`."""

    PPO = "ppo"
    CISPO = "cispo"


class CorrectionKind(enum.StrEnum):
    """The built-in corrections of importance ratios for engines that are not exact, described in
    `training.corrections`."""

    NONE = "none"
    TRUNCATED = "truncated"
    TRUNCATED_SEQUENCES = "truncated-sequences"
    MASKED = "masked"
    MASKED_SEQUENCES = "masked-sequences"


class LoraOn(enum.StrEnum):
    """Which matrices have LoRA adapters. The router, embedding, head and norms never have."""

    ALL = "all"  # attention and MLP: fewer matrices learn less (Thinking Machines, "LoRA Without Regret", 2025)
    ATTENTION = "attention"
    MLP = "mlp"  # experts, shared experts, and dense layers


_BOUNDS: dict[
    CorrectionKind | Plugin, tuple[float, float]
] = {  # (low, high) as published; of sequences: for 0.01 nats per token
    CorrectionKind.NONE: (0.0, math.inf),
    CorrectionKind.TRUNCATED: (0.0, 2.0),
    CorrectionKind.TRUNCATED_SEQUENCES: (0.0, 2.0),
    CorrectionKind.MASKED: (0.5, 5.0),
    CorrectionKind.MASKED_SEQUENCES: (0.99, 1.01),
}


@dataclass(frozen=True)
class LearnerConfig:
    """The `[learner]` section. The defaults are the laptop example's, chosen on validation tasks."""

    lr: float = ranged(5e-4, low=0.0)  # constant, then linear decay to a tenth over the last 40 % of the steps
    warmup_steps: int = ranged(0, low=0)
    grad_clip: float = ranged(1.0, low=0.0)  # largest norm of the full gradient
    policy_loss: PolicyLossKind | Plugin = PolicyLossKind.PPO  # cispo collapsed at lag 4: docs/lab/LOG.md
    ratio_cap: float | None = ranged(
        None, low=1.0
    )  # largest importance ratio of a token; none: 2 for cispo, 3 for others
    clip_low: float = ranged(0.8, low=0.0, high=1.0)  # ppo
    clip_high: float = ranged(1.28, low=1.0)  # ppo
    budget_tokens: int = ranged(8192, low=1)  # tokens of one forward pass; bounds memory, changes nothing else
    replay_routes: bool | None = None  # none: in native mode only; in exact mode both sides choose the same experts
    replay_max_lag: int = ranged(1, low=0)  # routes of older versions are not replayed
    replay_plausible: float = ranged(0.5, low=0.0, high=1.0)  # lowest score of a replayed expert over the live k-th's
    balance: float = ranged(0.0, low=0.0)  # coefficient of the routers' load-balancing loss, per forward pass
    balance_bias: float = ranged(0.0, low=0.0)  # update step of the router bias, in families with one (published: 1e-3)
    kl: float = ranged(0.0, low=0.0)  # coefficient of k2 to the starting checkpoint in the loss (experience.kl: reward)
    correction: CorrectionKind | Plugin = CorrectionKind.NONE  # for engines that are not exact
    correction_low: float | None = ranged(None, low=0.0, high=1.0)  # none: the correction's default
    correction_high: float | None = ranged(None, low=1.0)  # none: the correction's default; also the cap of truncation
    weights: LiveWeights = LiveWeights.BF16
    dtype: ComputeDtype = ComputeDtype.FLOAT32  # of activations; gradients accumulate in float32
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    ranks: int = ranged(1, low=1, high=65_536)  # processes that share the weights and the work
    expert_parallel: int = ranged(1, low=1)  # neighbouring ranks that share the experts
    context_parallel: int = ranged(1, low=1)  # neighbouring ranks that share each text
    device: str = "auto"  # of weights and computation; each rank of several GPUs has one
    recompute: bool = False  # activation checkpointing: less memory, a third more compute
    lora_rank: int = ranged(0, low=0, high=4096)  # 0: train all weights; else adapters, at 4 to 10 times the lr
    lora_alpha: float = ranged(32.0, low=1e-3, high=1e6)  # the adapter's output is multiplied by alpha / rank
    lora_on: LoraOn = LoraOn.ALL

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.policy_loss is PolicyLossKind.PPO and self.ratio_bound < self.clip_high:
            raise ValueError(
                f"ratio_cap = {self.ratio_cap} is below clip_high = {self.clip_high}: it must be at least as large"
            )
        for name in ("expert_parallel", "context_parallel"):
            if self.ranks % getattr(self, name):
                raise ValueError(f"ranks = {self.ranks} is not a multiple of {name} = {getattr(self, name)}")
        if self.kl and self.context_parallel > 1:
            raise ValueError("kl with context_parallel is not possible: set experience.kl instead")
        if self.lora_rank and self.balance_bias:
            raise ValueError(
                f"lora_rank = {self.lora_rank} with balance_bias = {self.balance_bias}: with LoRA routers do not change"
            )
        if self.lora_rank and self.optimizer is OptimizerKind.MUON:
            raise ValueError(f"lora_rank = {self.lora_rank} with optimizer = {str(self.optimizer)!r}: LoRA needs adamw")

    @property
    def shares(self) -> int:
        """Number of parts of a batch that are trained at the same time: the data-parallel ranks.

        >>> LearnerConfig(ranks=4, context_parallel=2).shares
        2
        """
        return self.ranks // self.context_parallel

    @property
    def ratio_bound(self) -> float:
        """Largest importance ratio of a token in the policy loss and in the loss of `kl`.

        >>> LearnerConfig().ratio_bound, LearnerConfig(policy_loss=PolicyLossKind.CISPO).ratio_bound
        (3.0, 2.0)
        """
        if self.ratio_cap is not None:
            return self.ratio_cap
        return 2.0 if self.policy_loss is PolicyLossKind.CISPO else max(3.0, self.clip_high)

    def replays(self, mode: Mode) -> bool:
        """Whether the learner replays the engines' routes, so that engines must return them.

        >>> LearnerConfig().replays(Mode.EXACT), LearnerConfig().replays(Mode.NATIVE)
        (False, True)
        """
        return mode is Mode.NATIVE if self.replay_routes is None else self.replay_routes

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Bounds (low, high) of the built-in correction.

        >>> LearnerConfig(correction=CorrectionKind.MASKED, correction_high=2.0).correction_bounds
        (0.5, 2.0)
        """
        low, high = _BOUNDS.get(self.correction, (0.0, math.inf))  # a plug-in has its own settings
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )


@dataclass(frozen=True)
class MidTrainingConfig:
    """The `[mid_training]` section. Mid-training runs in float32 on the CPU, one rank per core."""

    num_tokens: int = ranged(2_100_000, low=1)  # to train on; the corpus is repeated and reshuffled as needed
    batch_tokens: int = ranged(2048, low=1)  # of one optimiser step, over all ranks
    document_tokens: int = ranged(512, low=2)  # longer documents are split
    lr: float = ranged(3e-3, low=0.0)  # warm-up, constant, then linear decay to 3 % from 60 % of the steps on
    warmup_steps: int = ranged(20, low=0)
    weight_decay: float = ranged(0.01, low=0.0)
    grad_clip: float = ranged(1.0, low=0.0)
    balance: float = ranged(0.03, low=0.0)
    balance_bias: float = ranged(1e-3, low=0.0)  # update step of the router bias, in families with one
    eval_every: int = ranged(200, low=1)  # steps between held-out losses and copy probes
    checkpoint_every: int = ranged(200, low=1)  # steps; a killed run loses at most this many

"""Settings of reinforcement learning and of mid-training. Torch-free."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from etude.config import Plugin, ranged
from etude.numerics.config import ComputeDtype, Mode, check_device


class LiveWeights(enum.StrEnum):
    """The precision of the learner's live weights, which are kept in float32 memory."""

    BF16 = "bf16"  # the optimiser's float32 masters rounded to bf16: exactly the bytes that are published
    F32 = "f32"


class OptimizerKind(enum.StrEnum):
    """The optimisers, by name."""

    ADAMW = "adamw"
    MUON = "muon"  # matrices; AdamW for embedding, head, norms, routers: `training.muon`


class PolicyLossKind(enum.StrEnum):
    """The loss of sampled tokens; `training.losses` has each one with its source."""

    PPO = "ppo"
    CISPO = "cispo"


class CorrectionKind(enum.StrEnum):
    """How a token's importance ratio is corrected where a sampler is not exact. `training.corrections` describes
    each."""

    NONE = "none"
    TRUNCATED = "truncated"
    TRUNCATED_SEQUENCES = "truncated-sequences"
    MASKED = "masked"
    MASKED_SEQUENCES = "masked-sequences"


class LoraOn(enum.StrEnum):
    """Which matrices have adapters. Never the router, the embedding, the head, or norms."""

    ALL = "all"  # attention's, and MLP's: less of them learns less (Thinking Machines, "LoRA Without Regret", 2025)
    ATTENTION = "attention"
    MLP = "mlp"  # of experts, shared experts, and layers without a router


_BOUNDS: dict[CorrectionKind | Plugin, tuple[float, float]] = {  # as published; of sequences: for 0.01 nats a token
    CorrectionKind.NONE: (0.0, math.inf),
    CorrectionKind.TRUNCATED: (0.0, 2.0),
    CorrectionKind.TRUNCATED_SEQUENCES: (0.0, 2.0),
    CorrectionKind.MASKED: (0.5, 5.0),
    CorrectionKind.MASKED_SEQUENCES: (0.99, 1.01),
}


@dataclass(frozen=True)
class LearnerConfig:
    """The `[learner]` section. Defaults are the laptop example's, chosen on validation tasks."""

    lr: float = ranged(5e-4, low=0.0)  # constant, then linear to a tenth over the last 40 % of the steps
    warmup_steps: int = ranged(0, low=0)
    grad_clip: float = ranged(1.0, low=0.0)  # largest norm of the whole gradient
    policy_loss: PolicyLossKind | Plugin = PolicyLossKind.PPO  # cispo collapsed at lag 4: docs/lab/LOG.md
    ratio_cap: float | None = ranged(None, low=1.0)  # the most that a token's ratio weighs; none: cispo 2, others 3
    clip_low: float = ranged(0.8, low=0.0, high=1.0)  # ppo
    clip_high: float = ranged(1.28, low=1.0)  # ppo
    budget_tokens: int = ranged(8192, low=1)  # of one forward; bounds memory, changes nothing else
    replay_routes: bool | None = None  # none: in native mode; in exact mode both sides choose the same by themselves
    replay_max_lag: int = ranged(1, low=0)  # what versions further back computed is routed anew
    replay_plausible: float = ranged(0.5, low=0.0, high=1.0)  # least score of a replayed expert to the live k-th's
    balance: float = ranged(0.0, low=0.0)  # coefficient of the routers' load-balancing loss, taken over each forward
    balance_bias: float = ranged(0.0, low=0.0)  # a step of an expert's bias, in families that have one (as made: 1e-3)
    kl: float = ranged(
        0.0, low=0.0
    )  # of k2 to the starting checkpoint, in the loss; `experience.kl`: k1, in the reward
    correction: CorrectionKind | Plugin = CorrectionKind.NONE  # for engines that are not exact
    correction_low: float | None = ranged(None, low=0.0, high=1.0)  # none: the correction's own
    correction_high: float | None = ranged(None, low=1.0)  # none: the correction's own; the cap of one that truncates
    weights: LiveWeights = LiveWeights.BF16
    dtype: ComputeDtype = ComputeDtype.FLOAT32  # of activations; gradients add up in float32
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    ranks: int = ranged(1, low=1, high=65_536)  # processes that share the weights and the work
    expert_parallel: int = ranged(1, low=1)  # of them, so many neighbours share the experts
    context_parallel: int = ranged(1, low=1)  # and so many each text
    device: str = "auto"  # of the weights and all that is computed with them; ranks of GPUs have one each
    recompute: bool = False  # forward each layer again in the backward pass: less memory, a third more work
    lora_rank: int = ranged(0, low=0, high=4096)  # 0: all weights train; else adapters do, at 4 to 10 times lr
    lora_alpha: float = ranged(32.0, low=1e-3, high=1e6)  # an adapter's product is multiplied by alpha / rank
    lora_on: LoraOn = LoraOn.ALL

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.policy_loss is PolicyLossKind.PPO and self.ratio_bound < self.clip_high:
            raise ValueError(
                f"ratio_cap = {self.ratio_cap} is below clip_high = {self.clip_high}: it bounds what the clip leaves"
            )
        for name in ("expert_parallel", "context_parallel"):
            if self.ranks % getattr(self, name):
                raise ValueError(
                    f"ranks = {self.ranks} do not fill a mesh of {name} = {getattr(self, name)}: it must divide them"
                )

        if self.kl and self.context_parallel > 1:
            raise ValueError("kl with context_parallel: the reference computes whole texts; set experience.kl instead")
        if self.lora_rank and self.balance_bias:
            raise ValueError(
                f"lora_rank = {self.lora_rank} and balance_bias = {self.balance_bias}: adapters leave routers alone"
            )
        if self.lora_rank and self.optimizer is OptimizerKind.MUON:
            raise ValueError(
                f"lora_rank = {self.lora_rank} with optimizer = {str(self.optimizer)!r}: adapters train by adamw"
            )

    @property
    def shares(self) -> int:
        """In how many parts a batch is trained on at the same time: those of the ranks that have texts of their own.

        >>> LearnerConfig(ranks=4, context_parallel=2).shares
        2
        """
        return self.ranks // self.context_parallel

    @property
    def ratio_bound(self) -> float:
        """The most that a token's ratio weighs in the policy loss, and in the loss of `kl`.

        >>> LearnerConfig().ratio_bound, LearnerConfig(policy_loss=PolicyLossKind.CISPO).ratio_bound
        (3.0, 2.0)
        """
        if self.ratio_cap is not None:
            return self.ratio_cap
        return 2.0 if self.policy_loss is PolicyLossKind.CISPO else max(3.0, self.clip_high)

    def replays(self, mode: Mode) -> bool:
        """Whether routes are replayed, and so whether engines need send them.

        >>> LearnerConfig().replays(Mode.EXACT), LearnerConfig().replays(Mode.NATIVE)
        (False, True)
        """
        return mode is Mode.NATIVE if self.replay_routes is None else self.replay_routes

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Low and high, as a built-in correction takes them.

        >>> LearnerConfig(correction=CorrectionKind.MASKED, correction_high=2.0).correction_bounds
        (0.5, 2.0)
        """
        low, high = _BOUNDS.get(self.correction, (0.0, math.inf))  # a plug-in has settings of its own
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )


@dataclass(frozen=True)
class MidTrainingConfig:
    """The `[mid_training]` section: the same learner pieces over a corpus, in float32 on the CPU, one rank a core."""

    num_tokens: int = ranged(2_100_000, low=1)  # to train on; the corpus is repeated, newly shuffled, as needed
    batch_tokens: int = ranged(2048, low=1)  # of one optimiser step, over all ranks
    document_tokens: int = ranged(512, low=2)  # a longer document is cut into pieces
    lr: float = ranged(3e-3, low=0.0)  # warmed up, constant, then linear to 3 % from 60 % of the steps on
    warmup_steps: int = ranged(20, low=0)
    weight_decay: float = ranged(0.01, low=0.0)
    grad_clip: float = ranged(1.0, low=0.0)
    balance: float = ranged(0.03, low=0.0)
    balance_bias: float = ranged(1e-3, low=0.0)  # a step of an expert's bias, in families that have one
    eval_every: int = ranged(200, low=1)  # steps between held-out losses and copy probes
    checkpoint_every: int = ranged(200, low=1)  # steps; a killed run loses at most so many

"""The `[learner]` and `[mid_training]` sections of the config. Imports no torch."""

from __future__ import annotations

import enum
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

from etude.config import Plugin, ranged
from etude.models.config import ModelConfig
from etude.models.config_json import MAX_MTP_HEADS
from etude.numerics.config import ComputeDtype, Mode, check_device


class LiveWeights(enum.StrEnum):
    """The precision of the weights with which the learner computes. In both cases the tensors are float32.

    F32: the optimiser's float32 weights. BF16: these weights rounded to bf16; the published weights are exactly the
    rounded numbers."""

    BF16 = "bf16"
    F32 = "f32"


class Masters(enum.StrEnum):
    """The precision of the weights to which the optimiser adds its updates.

    F32: float32 masters, beside the live weights if these are rounded. BF16: the live weights are the masters; updates
    are rounded stochastically (`training.rounding`), and what is published is exactly what the optimiser has."""

    F32 = "f32"
    BF16 = "bf16"


class Moments(enum.StrEnum):
    """How the optimiser stores its moments. F32: as float32. INT8: as 8-bit codes with a scale for each block
    (`training.moments`)."""

    F32 = "f32"
    INT8 = "8bit"


class OptimizerKind(enum.StrEnum):
    """The built-in optimisers.

    MUON updates matrices; embedding, head, norms and routers still use AdamW (`training.muon`)."""

    ADAMW = "adamw"
    MUON = "muon"


class PolicyLossKind(enum.StrEnum):
    """The built-in policy losses, described in `training.losses`.

    DPO is a loss of preference pairs (`training.pair_loss`), which the credit scheme `experience.credit` forms."""

    PPO = "ppo"
    CISPO = "cispo"
    DPO = "dpo"


class DpoReference(enum.StrEnum):
    """The reference policy of the DPO loss.

    START: the starting checkpoint. SAMPLER: for each token, the version that sampled it."""

    START = "start"
    SAMPLER = "sampler"


class CorrectionKind(enum.StrEnum):
    """The built-in corrections of importance ratios for engines that are not exact (`training.corrections`)."""

    NONE = "none"
    TRUNCATED = "truncated"
    TRUNCATED_SEQUENCES = "truncated-sequences"
    MASKED = "masked"
    MASKED_SEQUENCES = "masked-sequences"


class LoraOn(enum.StrEnum):
    """Which matrices have LoRA adapters. The router, embedding, head and norms never have adapters.

    MLP: experts, shared experts, and dense layers. ALL: these and attention, since fewer matrices learn less (Thinking
    Machines, "LoRA Without Regret", 2025)."""

    ALL = "all"
    ATTENTION = "attention"
    MLP = "mlp"


class MtpLoss(enum.StrEnum):
    """What multi-token prediction heads learn (`training.mtp`). The trunk does not change by it.

    DISTILL: the distribution of the model itself at the next position. TOKENS: the tokens of the text. OFF: nothing."""

    DISTILL = "distill"
    TOKENS = "tokens"
    OFF = "off"


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
    """The `[learner]` section of a run's config.

    The defaults are those of the laptop example, chosen on validation tasks.

    - `lr`: constant after `warmup_steps` of linear increase, then linear decay to a tenth over the last 40 % of the
      steps.
    - `grad_clip`: the largest norm of the full gradient.
    - `dpo_beta`: β of the DPO loss; a higher one keeps the policy closer to the reference policy, `dpo_reference`.
    - `ratio_cap`: the largest importance ratio of a token; None: 2 for cispo, 3 for others.
    - `clip_low`, `clip_high`: the range of the ratio in PPO.
    - `budget_tokens`: the most tokens of one forward pass; it limits memory and does not change the results.
    - `replay_routes`: use the experts that engines recorded; None: in native mode only, since in exact mode both sides
      choose the same experts. Not replayed are routes that are more than `replay_max_lag` versions old, and experts
      whose score is below `replay_plausible` times the lowest score of the experts that the router itself would choose.
    - `balance`: the coefficient of the routers' load-balancing loss. `balance_bias`: the update step of the router
      bias, in model families that have one (their papers use 1e-3).
    - `kl`: the coefficient of the KL to the starting checkpoint (its k2 estimate) in the loss. `experience.kl` puts it
      into the reward instead.
    - `correction`: how importance ratios are corrected for engines that are not exact, with the bounds `correction_low`
      and `correction_high`; None: the defaults of the correction.
    - `dtype`: the dtype of activations. Gradients accumulate in float32.
    - `masters`, `moments`: "bf16" and "8bit" take 8 to 12 bytes a parameter less than "f32" (docs/guides/memory.md).
    - `offload`: keep moments and separate masters in the memory of the host. On a CPU they are there anyway.
    - `ranks`: processes that share the weights and the work. Of these, `expert_parallel` neighbours share the experts,
      and `context_parallel` neighbours share each text.
    - `recompute`: activation checkpointing, which takes less memory and a third more compute.
    - `mtp`: what MTP heads learn, in models that have them: "distill", "tokens" or "off". With LoRA they do not learn.
    - `lora_rank`: the rank of LoRA adapters; 0: train all weights. `lora_alpha` / rank is the factor of an adapter's
      output. Adapters need 4 to 10 times the lr of all weights."""

    lr: float = ranged(5e-4, low=0.0)
    warmup_steps: int = ranged(0, low=0)
    grad_clip: float = ranged(1.0, low=0.0)
    policy_loss: PolicyLossKind | Plugin = PolicyLossKind.PPO  # cispo collapsed at lag 4: docs/lab/LOG.md
    dpo_beta: float = ranged(0.1, low=1e-6)
    dpo_reference: DpoReference = DpoReference.START
    ratio_cap: float | None = ranged(None, low=1.0)
    clip_low: float = ranged(0.8, low=0.0, high=1.0)
    clip_high: float = ranged(1.28, low=1.0)
    budget_tokens: int = ranged(8192, low=1)
    replay_routes: bool | None = None
    replay_max_lag: int = ranged(1, low=0)
    replay_plausible: float = ranged(0.5, low=0.0, high=1.0)
    balance: float = ranged(0.0, low=0.0)
    balance_bias: float = ranged(0.0, low=0.0)
    kl: float = ranged(0.0, low=0.0)
    correction: CorrectionKind | Plugin = CorrectionKind.NONE
    correction_low: float | None = ranged(None, low=0.0, high=1.0)
    correction_high: float | None = ranged(None, low=1.0)
    weights: LiveWeights = LiveWeights.BF16
    dtype: ComputeDtype = ComputeDtype.FLOAT32
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    masters: Masters = Masters.F32
    moments: Moments = Moments.F32
    offload: bool = False
    ranks: int = ranged(1, low=1, high=65_536)
    expert_parallel: int = ranged(1, low=1)
    context_parallel: int = ranged(1, low=1)
    device: str = "auto"  # of weights and computation; each rank of several GPUs has one
    recompute: bool = False
    mtp: MtpLoss = MtpLoss.DISTILL
    lora_rank: int = ranged(0, low=0, high=4096)
    lora_alpha: float = ranged(32.0, low=1e-3, high=1e6)
    lora_on: LoraOn = LoraOn.ALL

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.policy_loss is PolicyLossKind.PPO and self.ratio_bound < self.clip_high:
            raise ValueError(
                f"ratio_cap = {self.ratio_cap} is below clip_high = {self.clip_high}: it must be at least as large"
            )
        if self.masters is Masters.BF16 and self.weights is LiveWeights.F32:
            raise ValueError(
                "weights = 'f32' cannot be combined with masters = 'bf16', which keeps no float32 weights to publish: "
                "set weights = 'bf16' or masters = 'f32'"
            )
        for name in ("expert_parallel", "context_parallel"):
            if self.ranks % getattr(self, name):
                raise ValueError(
                    f"ranks = {self.ranks} is not a multiple of {name} = {getattr(self, name)}: change one of them"
                )
        if self.policy_loss is PolicyLossKind.DPO:
            self._check_dpo()
        if self.kl and self.context_parallel > 1:
            raise ValueError(
                f"kl = {self.kl} cannot be combined with context_parallel = {self.context_parallel}: set kl = 0, and "
                f"experience.kl for a penalty in the reward"
            )
        if self.lora_rank and self.balance_bias:
            raise ValueError(
                f"lora_rank = {self.lora_rank} cannot be combined with balance_bias = {self.balance_bias}: LoRA does "
                f"not change routers; set balance_bias = 0"
            )
        if self.lora_rank and self.optimizer is OptimizerKind.MUON:
            raise ValueError(
                f"lora_rank = {self.lora_rank} cannot be combined with optimizer = {str(self.optimizer)!r}: set "
                f"optimizer = 'adamw'"
            )

    def _check_dpo(self) -> None:
        start = self.dpo_reference is DpoReference.START
        if self.correction is not CorrectionKind.NONE:
            raise ValueError(
                f"correction = {str(self.correction)!r} cannot be combined with policy_loss = 'dpo', which has no "
                "importance weights: set correction = 'none'"
            )
        if self.kl and start:
            raise ValueError(
                f"kl = {self.kl} cannot be combined with policy_loss = 'dpo' and dpo_reference = 'start': this loss "
                "already limits the distance to the starting checkpoint; set kl = 0 and a higher dpo_beta, or "
                "dpo_reference = 'sampler'"
            )
        if self.context_parallel > 1 and start:
            raise ValueError(
                f"dpo_reference = 'start' cannot be combined with context_parallel = {self.context_parallel}: set "
                f"dpo_reference = 'sampler'"
            )

    @property
    def has_reference(self) -> bool:
        """Whether the loss needs the starting checkpoint, so that the learner keeps it in memory."""
        return bool(self.kl) or (self.policy_loss is PolicyLossKind.DPO and self.dpo_reference is DpoReference.START)

    @property
    def shares(self) -> int:
        """The number of parts of a batch that are trained at the same time: the data-parallel ranks.

        >>> LearnerConfig(ranks=4, context_parallel=2).shares
        2
        """
        return self.ranks // self.context_parallel

    @property
    def ratio_bound(self) -> float:
        """The largest importance ratio of a token in the policy loss and in the loss of `kl`.

        >>> LearnerConfig().ratio_bound, LearnerConfig(policy_loss=PolicyLossKind.CISPO).ratio_bound
        (3.0, 2.0)
        """
        if self.ratio_cap is not None:
            return self.ratio_cap
        return 2.0 if self.policy_loss is PolicyLossKind.CISPO else max(3.0, self.clip_high)

    def replays(self, mode: Mode) -> bool:
        """Return whether the learner replays the engines' routes, so that engines must return them.

        >>> LearnerConfig().replays(Mode.EXACT), LearnerConfig().replays(Mode.NATIVE)
        (False, True)
        """
        return mode is Mode.NATIVE if self.replay_routes is None else self.replay_routes

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Bounds (low, high) of the built-in correction: the settings, or else its defaults.

        >>> LearnerConfig(correction=CorrectionKind.MASKED, correction_high=2.0).correction_bounds
        (0.5, 2.0)
        """
        low, high = _BOUNDS.get(self.correction, (0.0, math.inf))  # a plug-in has its own settings
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )


class LossTokens(enum.StrEnum):
    """Which tokens of a phase of mid-training have loss. ALL: all tokens. SAID: the tokens of the assistant's answers
    in chats."""

    ALL = "all"
    SAID = "said"


@dataclass(frozen=True)
class MidTrainingPhase:
    """A `[[mid_training.phases]]` table. A setting that is None has the value of `[mid_training]`.

    - `name`: the name of the phase. If the corpus has several phases, its phase with this name is read.
    - `corpus`: a folder of `etude corpus build`.
    - `num_tokens`: tokens to train on; None: every document once.
    - `batch_tokens`, `document_tokens`, `warmup_steps`: as in `[mid_training]`.
    - `lr`: the learning rate of this phase. After the warm-up it is constant until the share `decay_from` of the
      phase's steps, and then decays linearly to `final_lr` times `lr`. With `decay_from` = 1 it never decays.
    - `rope_factor`: the factor by which the context becomes longer than the model's own, with YaRN (arXiv 2309.00071).
      It also applies to later phases, and is written to the config.json of the result.
    - `loss`: "all": all tokens have loss. "said": only the assistant's answers in chats have loss (supervised
      fine-tuning); documents that are not chats are left out."""

    name: str
    corpus: Path | None = None
    num_tokens: int | None = ranged(None, low=1)
    batch_tokens: int | None = ranged(None, low=1)
    document_tokens: int | None = ranged(None, low=2)
    lr: float | None = ranged(None, low=0.0)
    warmup_steps: int | None = ranged(None, low=0)
    decay_from: float = ranged(0.6, low=0.0, high=1.0)
    final_lr: float = ranged(0.03, low=0.0, high=1.0)
    rope_factor: float | None = ranged(None, low=1.0, high=1024.0)
    loss: LossTokens = LossTokens.ALL


@dataclass(frozen=True)
class PhaseSettings:
    """The settings of one phase of mid-training, with missing ones taken from `[mid_training]`.

    The fields are those of `MidTrainingPhase`. `rope_factor`: that of the phase, or else of the last earlier phase that
    has one; 1 if there is none."""

    name: str
    corpus: Path | None
    num_tokens: int | None
    batch_tokens: int
    document_tokens: int
    lr: float
    warmup_steps: int
    decay_from: float
    final_lr: float
    rope_factor: float
    loss: LossTokens


@dataclass(frozen=True)
class MidTrainingConfig:
    """The `[mid_training]` section of a run's config.

    Ranks, device, dtype of activations, `budget_tokens`, `recompute`, and the scale and matrices of adapters are those
    of `[learner]` (`training.mid_training.default_ranks`).

    - `corpus`: a folder of `etude corpus build`, for a run with a starting checkpoint (`start`). None: a run without
      `start` uses its own corpus (`[corpus]`), and a run with `start` has no mid-training.
    - `heldout_documents`: how many documents of such corpora are never trained on, so that the held-out loss can be
      measured on them; at most a twentieth of all.
    - `num_tokens`: tokens to train on; the corpus is repeated and reshuffled as needed.
    - `batch_tokens`: tokens of one optimiser step, over all ranks.
    - `document_tokens`: documents longer than this or than `batch_tokens` are split.
    - `lr`: warm-up, constant, then linear decay to 3 % from 60 % of the steps on.
    - `optimizer`: "muon" learns more from each token and takes more time for a step; the ranks share this extra work.
    - `lora_rank`: the rank of LoRA adapters of a starting checkpoint, which are merged into the result; 0: train all
      weights, in float32 unless `learner.masters` is bf16. Adapters leave the router biases as they are.
    - `balance`: the coefficient of the load-balancing loss. `balance_bias`: the update step of the router bias, in
      model families that have one.
    - `mtp`: what MTP heads learn: "distill", "tokens" or "off".
    - `mtp_heads`: how many MTP heads the result has; None: as many as the model. New heads begin with random weights.
    - `eval_every`, `checkpoint_every`: numbers of steps. A killed run loses at most `checkpoint_every` steps.
    - `phases`: parts of mid-training with settings of their own, in order; `num_tokens` is then set in each. Empty: one
      phase."""

    corpus: Path | None = None
    heldout_documents: int = ranged(64, low=0)
    num_tokens: int = ranged(2_100_000, low=1)
    batch_tokens: int = ranged(2048, low=1)
    document_tokens: int = ranged(512, low=2)
    lr: float = ranged(3e-3, low=0.0)
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    lora_rank: int = ranged(0, low=0, high=4096)
    warmup_steps: int = ranged(20, low=0)
    weight_decay: float = ranged(0.01, low=0.0)
    grad_clip: float = ranged(1.0, low=0.0)
    balance: float = ranged(0.03, low=0.0)
    balance_bias: float = ranged(1e-3, low=0.0)
    mtp: MtpLoss = MtpLoss.DISTILL
    mtp_heads: int | None = ranged(None, low=0, high=MAX_MTP_HEADS)
    eval_every: int = ranged(200, low=1)
    checkpoint_every: int = ranged(200, low=1)
    phases: tuple[MidTrainingPhase, ...] = ()

    def __post_init__(self) -> None:
        if self.lora_rank and self.optimizer is OptimizerKind.MUON:
            raise ValueError(f"mid_training.lora_rank = {self.lora_rank} needs mid_training.optimizer = 'adamw'")
        names = [phase.name for phase in self.phases]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"{names.count(name)} of mid_training.phases are called {name!r}: names must be unique"
                )
        factors = [(phase.rope_factor, phase.name) for phase in self.phases if phase.rope_factor is not None]
        for (before, earlier), (factor, name) in itertools.pairwise(factors):
            if factor < before:
                raise ValueError(
                    f"phase {name!r} of mid_training has rope_factor = {factor:g} after {before:g} of phase "
                    f"{earlier!r}: the result would have the shorter context, so give at least {before:g}"
                )

    def learner(self, learner: LearnerConfig, *, ranks: int) -> LearnerConfig:
        """Return the settings with which `ranks` ranks train, from those of `[learner]` that do not belong to RL.

        Raises `ValueError` for a number of ranks that cannot share experts or texts."""
        return LearnerConfig(
            grad_clip=self.grad_clip,
            budget_tokens=learner.budget_tokens,
            balance=self.balance,
            balance_bias=0.0 if self.lora_rank else self.balance_bias,
            weights=learner.weights if self.lora_rank or learner.masters is Masters.BF16 else LiveWeights.F32,
            dtype=learner.dtype,
            optimizer=self.optimizer,
            masters=learner.masters,
            moments=learner.moments,
            offload=learner.offload,
            ranks=ranks,
            expert_parallel=learner.expert_parallel,
            context_parallel=learner.context_parallel,
            device=learner.device,
            recompute=learner.recompute,
            mtp=self.mtp,
            lora_rank=self.lora_rank,
            lora_alpha=learner.lora_alpha,
            lora_on=learner.lora_on,
        )

    def settings(self) -> tuple[PhaseSettings, ...]:
        """Return the settings of each phase. If `phases` is empty, there is one phase without a name.

        >>> MidTrainingConfig(lr=0.1, phases=(MidTrainingPhase("main"),)).settings()[0].lr
        0.1
        """
        own = ("corpus", "batch_tokens", "document_tokens", "lr", "warmup_steps")
        found, rope_factor = list[PhaseSettings](), 1.0
        for phase in self.phases or (MidTrainingPhase("", num_tokens=self.num_tokens),):
            rope_factor = rope_factor if phase.rope_factor is None else phase.rope_factor
            filled = {name: getattr(self, name) for name in own if getattr(phase, name) is None}
            found.append(PhaseSettings(**{**vars(phase), **filled, "rope_factor": rope_factor}))
        return tuple(found)

    def models(self, model: ModelConfig) -> tuple[ModelConfig, ...]:
        """Return the model's config in each phase; the last one is also the config of the result.

        Raises `ConfigError` for settings that do not fit the model."""
        if self.mtp_heads is not None:
            model = model.with_mtp_heads(self.mtp_heads)
        return tuple(model.extended(phase.rope_factor) for phase in self.settings())

    @property
    def uses_corpus(self) -> bool:
        """Whether a phase reads a corpus of `etude corpus build`."""
        return any(phase.corpus is not None for phase in self.settings())

    def longest(self, context_tokens: int) -> int:
        """Return the largest number of tokens of a document that is not split in any phase, for a model with this
        context."""
        return min(
            min(phase.document_tokens, phase.batch_tokens, int(context_tokens * phase.rope_factor))
            for phase in self.settings()
        )

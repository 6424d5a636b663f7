"""Training samples: paths of traces with advantages, and batches of them."""

from __future__ import annotations

import enum

import msgspec
import numpy as np

from etude.records.completion import Version
from etude.records.rollout import UNKNOWN, Path
from etude.records.wire import F32


class Origin(enum.StrEnum):
    """Where the path of a sample comes from."""

    ROLLOUT = "rollout"  # an attempt at a task
    PRODUCTION = "production"  # a user's request


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One training sample: a path, with an advantage for each of its S tokens with loss (`path.mask`). Raises
    `ValueError` when `advantages` or `temperatures` do not have S elements."""

    rollout_id: str
    path: Path
    advantages: F32  # [S]
    temperatures: F32 | None = None  # [S] sampling temperature of each token with loss; None: the run's for all
    origin: Origin = Origin.ROLLOUT

    def __post_init__(self) -> None:
        num_sampled = int(self.path.mask.sum())
        for name, values in (("advantages", self.advantages), ("temperatures", self.temperatures)):
            if values is not None and values.shape != (num_sampled,):
                facts = f"{name} of shape {values.shape} for {num_sampled} tokens with loss"
                raise ValueError(f"the sample of rollout {self.rollout_id} has {facts}")

    @staticmethod
    def uniform(rollout_id: str, path: Path, advantage: float, temperatures: F32 | None = None) -> Sample:
        """Make a sample whose tokens all have the same advantage."""
        advantages = np.full(int(path.mask.sum()), advantage, np.float32)
        return Sample(rollout_id=rollout_id, path=path, advantages=advantages, temperatures=temperatures)

    @property
    def oldest_step(self) -> int:
        """The oldest version step that a token with loss depends on. The lag of the sample is the learner's step minus
        this."""
        return int(self.path.oldest_steps[self.path.mask].min())

    @property
    def single_version(self) -> bool:
        """Whether one version read and sampled all tokens. On the weights of that version all ratios must be 1."""
        steps = self.path.steps[self.path.mask | (self.path.steps != UNKNOWN)]
        return bool((steps == steps[0]).all()) and not self.path.kv_epochs.any()


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one optimiser step, in order of rollout id, so that a repeated step has the same batch.

    `rollout_ids` lists every rollout that the step consumes, including those without a sample (no signal, or invalid).
    The manifest of the version that the step publishes lists them as trained.
    """

    batch_id: str  # "b000007"
    step: int  # version step that training on this batch produces
    samples: tuple[Sample, ...]
    rollout_ids: tuple[str, ...]
    num_loss_tokens: int  # divisor of the loss: sampled tokens of all valid rollouts, also of those without signal
    lr_share: float = 1.0  # factor of the learning rate, 0 to 1: below 1 when few groups have a sample

    @property
    def sampled(self) -> frozenset[str]:
        """Ids of the rollouts with a sample."""
        return frozenset(sample.rollout_id for sample in self.samples)


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of one `Learner.forward_backward`. r is the trainer's probability of a sampled token over the
    sampler's."""

    num_tokens: int  # all tokens forwarded
    num_sampled: int  # tokens with loss
    loss: float
    entropy: float  # nats, mean over sampled tokens
    clip_share: float  # share of sampled tokens whose ratio was clipped
    ratio_max: float  # max |r - 1|
    ratio_p99: float  # 99th percentile of |r - 1|
    k1: float  # mean of -log r
    k3: float  # mean of r - 1 - log r
    fresh_ratio_max: float | None  # max |r - 1| over samples of the learner's current version only
    flipped_share: float  # share of replayed (token, layer) pairs whose own top-k differs from the recorded experts
    balance_loss: float
    cpu_s: float
    replayed_share: float = 0.0  # share of tokens whose recorded routes were replayed; others are too stale
    replaced_share: float = 0.0  # share of recorded experts that were replaced by the live choice as not plausible
    live_k3: float | None = None  # k3 of a few tokens without replay; None when nothing was replayed
    live_ratio_max: float | None = None  # max |r - 1| of the same tokens
    cut_share: float = 0.0  # share of the sum of importance weights that the correction removes
    dropped_share: float = 0.0  # share of sampled tokens whose weight the correction sets to 0
    effective_share: float = 1.0  # effective sample size of the corrected weights over the number of sampled tokens


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `Learner.publish`."""

    version: Version
    anchor: bool  # whether a full snapshot was written, alone (the first version) or beside the delta
    object_bytes: int  # bytes that an engine with the previous version fetches: of the delta, or of the first anchor
    snapshot_bytes: int  # bytes of a full snapshot of this version
    bound_bytes: float  # information-theoretic lower bound of this delta's bytes; `snapshot_bytes` for an anchor
    changed_share: float  # share of the parameters whose published value changed
    encode_s: float
    anchor_bytes: int = 0  # bytes of the written snapshot; only new or late engines fetch it

"""Training rows: paths of traces with their advantages, and batches of them."""

from __future__ import annotations

import enum

import msgspec
import numpy as np

from etude.records.completion import Version
from etude.records.rollout import UNKNOWN, Path
from etude.records.wire import F32


class Origin(enum.StrEnum):
    """Where the path of a sample comes from."""

    ROLLOUT = "rollout"  # one try at a task
    PRODUCTION = "production"  # a user's request


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One training row: a path with an advantage for each of its S tokens with loss (`path.mask`). Made by experience/,
    read by the learner. Raises `ValueError` where a number of advantages or temperatures is not S."""

    rollout_id: str
    path: Path
    advantages: F32  # [S]
    temperatures: F32 | None = None  # [S] of the distribution that `path.logprobs` are of; None: the run's for all
    origin: Origin = Origin.ROLLOUT

    def __post_init__(self) -> None:
        num_sampled = int(self.path.mask.sum())
        for name, values in (("advantages", self.advantages), ("temperatures", self.temperatures)):
            if values is not None and values.shape != (num_sampled,):
                facts = f"{name} of shape {values.shape} for {num_sampled} tokens with loss"
                raise ValueError(f"the sample of rollout {self.rollout_id} has {facts}")

    @staticmethod
    def uniform(rollout_id: str, path: Path, advantage: float, temperatures: F32 | None = None) -> Sample:
        """A sample whose tokens all have the same advantage."""
        advantages = np.full(int(path.mask.sum()), advantage, np.float32)
        return Sample(rollout_id=rollout_id, path=path, advantages=advantages, temperatures=temperatures)

    @property
    def oldest_step(self) -> int:
        """The step of the oldest version that computed a token with loss or a key that it attended to. Lag is the
        learner's step minus this."""
        return int(self.path.oldest_steps[self.path.mask].min())

    @property
    def single_version(self) -> bool:
        """Whether one version computed and sampled all tokens, so that the ratio must be 1 on its weights."""
        steps = self.path.steps[self.path.mask | (self.path.steps != UNKNOWN)]
        return bool((steps == steps[0]).all()) and not self.path.kv_epochs.any()


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimiser step trains on. Samples are in order of rollout id, so that a repeat makes the same batch.

    `rollout_ids` lists every rollout that the step consumes, those without a sample (no signal, invalid) included. The
    manifest of the version that the step publishes lists them as trained.
    """

    batch_id: str  # "b000007"
    step: int  # the version step this batch will produce
    samples: tuple[Sample, ...]
    rollout_ids: tuple[str, ...]
    num_loss_tokens: int  # the loss's constant normaliser: sampled tokens of all valid rollouts, zero-signal included
    lr_share: float = 1.0  # of the learning rate that this step takes, 0 to 1: below 1 where few groups have a sample

    @property
    def sampled(self) -> frozenset[str]:
        """Ids of the rollouts with a sample."""
        return frozenset(sample.rollout_id for sample in self.samples)


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one `Learner.forward_backward`. Ratios r are trainer over sampler probability, per sampled token."""

    num_tokens: int  # all tokens forwarded
    num_sampled: int  # tokens with loss
    loss: float
    entropy: float  # nats, mean over sampled tokens
    clip_share: float
    ratio_max: float  # max |r - 1|
    ratio_p99: float  # 99th percentile of |r - 1|
    k1: float  # mean of -log r
    k3: float  # mean of r - 1 - log r
    fresh_ratio_max: float | None  # max |r - 1| over samples whose whole context is the learner's own version
    flipped_share: float  # share of replayed token-layers where the live top-k differs from the recorded experts
    balance_loss: float
    cpu_s: float
    replayed_share: float = 0.0  # share of the tokens whose recorded routes were replayed: the others' are too stale
    replaced_share: float = 0.0  # share of replayed experts that were not plausible, and so the live choice instead
    live_k3: float | None = None  # k3 of a few tokens without replay; None where nothing was replayed
    live_ratio_max: float | None = None  # max |r - 1| of the same
    cut_share: float = 0.0  # share of the sum of importance weights that the correction cuts off
    dropped_share: float = 0.0  # share of sampled tokens whose weight the correction sets to 0
    effective_share: float = 1.0  # effective sample size of the corrected weights over the number of sampled tokens


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `Learner.publish`."""

    version: Version
    anchor: bool  # whether a whole snapshot was written, alone (the first version) or beside the delta
    object_bytes: int  # bytes that an engine of the previous version fetches: the delta's, or the first anchor's
    snapshot_bytes: int  # bytes of the whole target
    bound_bytes: float  # the information-theoretic bound for this delta; snapshot_bytes for an anchor
    changed_share: float
    encode_s: float
    anchor_bytes: int = 0  # bytes of the snapshot that was written; only late or healing engines fetch it

"""Training samples: paths of traces with advantages, and batches of them."""

from __future__ import annotations

import enum

import msgspec
import numpy as np

from etude.records.completion import Version
from etude.records.rollout import UNKNOWN, Path
from etude.records.wire import F32, I32


class Origin(enum.StrEnum):
    """Where the tokens of a sample come from: ROLLOUT is an attempt at a task, PRODUCTION a user's request."""

    ROLLOUT = "rollout"
    PRODUCTION = "production"


class PlacedHint(msgspec.Struct, frozen=True, kw_only=True):
    """A hint for one turn of a path, as the tokens to insert into the context of the turn.

    `token_ids`: [H] int32, to insert before position `at` of the path. `stop`: position after the turn's last token.
    `weight`: the learner adds `weight` times the change of a token's log-probability by the hint to the advantage of
    each token with loss in `at:stop`."""

    at: int
    stop: int
    token_ids: I32
    weight: float


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One training sample: a path of tokens, with an advantage for each of its S tokens with loss (`path.mask`).

    - `advantages`: [S] float32. The learner adds the part that comes from `hints`, with its current weights.
    - `temperatures`: [S] float32, sampling temperature of each token with loss; None: that of the run for all.

    Raises `ValueError` when one of these does not have S elements, or when a hint has no token with loss."""

    rollout_id: str
    path: Path
    advantages: F32
    temperatures: F32 | None = None
    origin: Origin = Origin.ROLLOUT
    hints: tuple[PlacedHint, ...] = ()

    def __post_init__(self) -> None:
        num_sampled = int(self.path.mask.sum())
        for name, values in (("advantages", self.advantages), ("temperatures", self.temperatures)):
            if values is not None and values.shape != (num_sampled,):
                facts = f"{name} of shape {values.shape}, expected ({num_sampled},): one for each token with loss"
                raise ValueError(f"the sample of rollout {self.rollout_id} has {facts}")
        for hint in self.hints:
            if not (0 < hint.at <= hint.stop and self.path.mask[hint.at : hint.stop].any()):
                facts = f"no token with loss in positions {hint.at} to {hint.stop}"
                raise ValueError(f"a hint of the sample of rollout {self.rollout_id} has {facts}")

    @staticmethod
    def uniform(rollout_id: str, path: Path, advantage: float, temperatures: F32 | None = None) -> Sample:
        """Make a sample in which all tokens with loss have the same advantage."""
        advantages = np.full(int(path.mask.sum()), advantage, np.float32)
        return Sample(rollout_id=rollout_id, path=path, advantages=advantages, temperatures=temperatures)

    @property
    def oldest_step(self) -> int:
        """The oldest version step that a token with loss depends on. The learner's step minus this is the lag."""
        return int(self.path.oldest_steps[self.path.mask].min())

    @property
    def single_version(self) -> bool:
        """Whether one version of the weights computed all tokens. For that version all probability ratios are 1."""
        steps = self.path.steps[self.path.mask | (self.path.steps != UNKNOWN)]
        return bool((steps == steps[0]).all()) and not self.path.kv_epochs.any()


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one optimiser step, in order of rollout id, so that a repeated step has the same batch.

    `batch_id`: such as "b000007". `step`: the step of the version that training on this batch produces. `rollout_ids`:
    every rollout that the step consumes, including those without a sample (no signal, or invalid). `num_loss_tokens`:
    the divisor of the loss: sampled tokens of all valid rollouts, including those without signal. `lr_share`: a factor
    of the learning rate; below 1 when few groups have a sample. `pairs`: preference pairs (better, worse)
    for the DPO loss, as ids of rollouts with a sample; empty unless the credit scheme forms pairs."""

    batch_id: str
    step: int
    samples: tuple[Sample, ...]
    rollout_ids: tuple[str, ...]
    num_loss_tokens: int
    lr_share: float = 1.0
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def sampled(self) -> frozenset[str]:
        """Ids of the rollouts with a sample."""
        return frozenset(sample.rollout_id for sample in self.samples)


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of one `Learner.forward_backward`. r is the trainer's probability of a sampled token divided by the
    sampler's.

    - `num_tokens`, `num_sampled`: all tokens of paths, and those with loss.
    - `num_forwarded`: tokens that the model computed; a beginning that several paths share may be computed once.
    - `forwarded_per_unique`: `num_forwarded` over the number of tokens when each shared one counts once.
    - `entropy`: in nats, the mean over sampled tokens.
    - `clip_share`: the share of sampled tokens whose ratio was clipped.
    - `ratio_max`, `ratio_p99`: maximum and 99th percentile of |r - 1|. `k1`: mean of -log r. `k3`: mean of r - 1 - log
      r.
    - `fresh_ratio_max`: maximum of |r - 1| over samples of the learner's current version only; None without such
      samples.
    - `flipped_share`: the share of replayed (token, layer) pairs for which the learner's router would choose other
      experts than those recorded.
    - `replayed_share`: the share of tokens whose recorded routes (chosen experts) were replayed. The routes of the
      other tokens are too old.
    - `replaced_share`: the share of recorded experts that were implausible, and were replaced by the router's own
      choice.
    - `live_k3`, `live_ratio_max`: k3 and maximum of |r - 1| of a few tokens without replay; None if nothing was
      replayed.
    - `cut_share`: the share of the sum of importance weights that the off-policy correction removes.
    - `dropped_share`: the share of sampled tokens whose weight the correction sets to 0.
    - `effective_share`: the effective sample size of the corrected weights over the number of sampled tokens.
    - `num_pairs`: the number of preference pairs of the DPO loss.
    - `pair_accuracy`: the share of pairs in which the better rollout has the higher log-ratio to the reference; equal
      ones count half. `pair_margin`: the mean of beta times the difference of these log-ratios. None without pairs.
    - `hint_kl`: in nats, the mean of log p(token | context) - log p(token | context with the hint) over the tokens of
      turns with a hint, an estimate of the reverse KL divergence. `hint_clip_share`: the share of these tokens whose
      difference is clipped in their credit (`training.hints`). None without hints."""

    num_tokens: int
    num_sampled: int
    loss: float
    entropy: float
    clip_share: float
    ratio_max: float
    ratio_p99: float
    k1: float
    k3: float
    fresh_ratio_max: float | None
    flipped_share: float
    balance_loss: float
    cpu_s: float
    replayed_share: float = 0.0
    replaced_share: float = 0.0
    live_k3: float | None = None
    live_ratio_max: float | None = None
    cut_share: float = 0.0
    dropped_share: float = 0.0
    effective_share: float = 1.0
    num_forwarded: int = 0
    forwarded_per_unique: float = 1.0
    num_pairs: int = 0
    pair_accuracy: float | None = None
    pair_margin: float | None = None
    hint_kl: float | None = None
    hint_clip_share: float | None = None


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `Learner.publish`, which writes the weights of a new version for the engines.

    `anchor`: whether a full snapshot was written, alone (for the first version) or beside the delta to the version
    before. `object_bytes`: the bytes that an engine with the previous version fetches: those of the delta, or of the
    first snapshot. `snapshot_bytes`: the size of a full snapshot of this version. `bound_bytes`: the
    information-theoretic lower bound of this delta's size; `snapshot_bytes` for a snapshot. `changed_share`: the share
    of the parameters whose published value changed. `encode_s`: seconds of encoding. `anchor_bytes`: the size of the
    written snapshot, which only new or late engines fetch."""

    version: Version
    anchor: bool
    object_bytes: int
    snapshot_bytes: int
    bound_bytes: float
    changed_share: float
    encode_s: float
    anchor_bytes: int = 0

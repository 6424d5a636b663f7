"""The RL learner: has the weights, trains them, and saves and publishes them.

For each batch it reports the importance ratio (learner over sampler probability) of all tokens. For a path sampled
entirely by the live weights the ratio must be 1 in exact mode; otherwise the step is refused. For paths of older
versions, and of a version that is still being published, the ratio is only reported. Routes recorded by engines are
replayed. Training has no randomness, so there is no random state to save.

The learner knows nothing of rollouts, rewards or engines: it reads `Batch`es and passes tensors to a channel."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from etude import progress
from etude.config import Plugin
from etude.errors import CheckpointError, DeadlineExceeded, InputError, ParityError, WeightsError
from etude.file_checksums import verify_files
from etude.models.headers import read_json
from etude.models.transformer import Forward, Transformer
from etude.numerics.config import Mode, NumericsConfig
from etude.numerics.factory import operators_for
from etude.records import Batch, Sample, Version
from etude.records.sample import Published, StepReport
from etude.training.batch_metrics import BatchMetrics, merge_metrics
from etude.training.config import (
    CorrectionKind,
    DpoReference,
    LearnerConfig,
    Masters,
    Moments,
    OptimizerKind,
    PolicyLossKind,
)
from etude.training.core import TrainingCore
from etude.training.corrections import Corrected, correct, decoupled
from etude.training.flat_batch import FlatBatch, path_rows
from etude.training.forward_passes import ForwardPasses, PackedSamples
from etude.training.hints import with_hint_credit
from etude.training.learner_plugins import LearnerPlugins
from etude.training.losses import PolicyLoss, SampledTokens, cispo_loss, entropy, k2_loss, ppo_loss
from etude.training.nan_check import check_loss
from etude.training.optimizer import AdamW
from etude.training.pair_loss import PairLoss, pair_loss, weighted_tokens_loss
from etude.training.process_group import SINGLE_PROCESS, ProcessGroup
from etude.training.reference import Reference
from etude.training.routes import RouteReplay
from etude.training.schedule import rl_lr_multiplier
from etude.training.trainable import LoadRequest, Trainable
from etude.weights.chain.publisher import Publisher, Writer
from etude.weights.tensors import Tensor

METADATA_FORMAT = 1
METADATA = "learner.json"  # beside the weights of a learner's checkpoint


class TorchLearner:
    """The RL learner on torch, which implements `seams.Learner`. Call `load` first.

    A version is one state of the weights that engines can fetch.

    - `channel`: where versions are published.
    - `num_steps`: length of the run, for the learning-rate decay (None: no decay).
    - `temperature`: the run's sampling temperature, at which probabilities are compared. Samples may have their own
      (`Sample.temperatures`).
    - `reference`: the reference policy of `config.kl` and of the DPO loss; used if `config.has_reference`.
    - `numerics`: the same as the engines'. In low precision, published weights are packed (`models.packed_weights`).
    - `refuse_mismatch`: whether to raise `ParityError`, in exact mode, if the importance ratio of a token that the live
      weights sampled is not 1. False: the ratio is only reported.
    - `seed`: random seed of the initial LoRA adapters.
    - `group`: the ranks that share the work. Each has its own learner, and all make the same calls
      (`training.sharded`). Without a group, one process computes the parts of `config.shares` data-parallel ranks in
      turn."""

    step: int
    """Version step of the live weights: optimiser steps since the starting checkpoint."""
    version: Version | None
    """The last published version in the lineage of the live weights."""
    share_prefixes: bool
    """Whether forward passes may compute tokens that several paths share once (`training.prefix_tree`). `load` sets it:
    True on CPUs without context parallelism. It changes the order of sums in the gradient."""

    def __init__(
        self,
        config: LearnerConfig,
        *,
        channel: Writer | None = None,
        num_steps: int | None = None,
        temperature: float = 1.0,
        reference: Reference | None = None,
        numerics: NumericsConfig = NumericsConfig(),  # noqa: B008  frozen
        refuse_mismatch: bool = True,
        seed: int = 0,
        group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self._group = group
        self.numerics, self._refuse_mismatch = numerics, refuse_mismatch and numerics.mode is Mode.EXACT
        self.config, self.step, self.version, self._seed = config, 0, None, seed
        self._reference = reference if config.has_reference else None
        self._channel, self._num_steps, self._temperature = channel, num_steps, temperature
        self._publisher: Publisher | None = None
        self._plugins = LearnerPlugins()
        self._offered: int | None = None  # step of the version that is being published
        self._lr_share = 1.0  # of the batch with the accumulated gradient
        self._core: TrainingCore | None = None

    @property
    def core(self) -> TrainingCore:
        """The live weights and their optimiser. Raises `CheckpointError` before `load`."""
        if self._core is None:
            raise CheckpointError("the learner has no weights", hint="load a checkpoint first")
        return self._core

    @property
    def model(self) -> Transformer:
        """The live model. Raises `CheckpointError` before `load`."""
        return self.core.model

    @property
    def trainable(self) -> Trainable:
        """The live model, and the part of it that is trained. Raises `CheckpointError` before `load`."""
        return self.core.trainable

    @property
    def optimizer(self) -> AdamW:
        """The optimiser. Raises `CheckpointError` before `load`."""
        return self.core.optimizer

    @property
    def parity(self) -> str:
        """The parity class: an engine of this class with the same weights computes bit-identical log-probabilities."""
        return self.model.parity

    @property
    def passes(self) -> ForwardPasses:
        """The forward passes of the live weights."""
        sizes, replay = self.model.config, None
        if self.config.replays(self.numerics.mode) and sizes.num_moe_layers:
            replay = RouteReplay(sizes, step=self.step, max_lag=self.config.replay_max_lag)
        return ForwardPasses(
            self.core,
            self.config,
            temperature=self._temperature,
            replay=replay,
            step=self.step,
            share_prefixes=self.share_prefixes,
        )

    # training

    def forward_backward(self, batch: Batch) -> StepReport:
        """Accumulate the gradient of the batch's loss, and return the batch's metrics.

        Raises `ParityError` when a ratio that must be 1 is not, or a route is missing, and `NotFinite` for NaN or
        infinity. After any error the accumulated gradient is discarded, since it may contain a part of this batch."""
        began = time.process_time()
        shares, self._lr_share = self.config.shares, batch.lr_share
        metrics = [BatchMetrics() for _ in self._group.own_shares(shares)]
        pairs: PairLoss | None = None
        try:
            passes, bound = self.passes, math.log(self.model.config.vocab_size)
            hints = with_hint_credit(batch.samples, passes.score, bound=bound)
            packed = passes.pack(hints.samples)
            if self.config.policy_loss is PolicyLossKind.DPO:
                log_ratios = passes.log_ratios(packed, self._dpo_reference)
                pairs = pair_loss(batch.pairs, log_ratios, beta=self.config.dpo_beta)
                packed = replace(packed, samples=pairs.weighted(packed.samples))

            def backward(number: int, members: list[int]) -> None:
                samples = [packed.samples[i] for i in members]
                self._share(passes, samples, packed, batch.num_loss_tokens, metrics[number])

            self.core.accumulate(packed.rows, backward)
            total = merge_metrics([share for rank in self._group.all_gather(metrics) for share in rank])
            if total.num_replayed:
                total.live += passes.unreplayed_log_ratios(batch)
        except Exception:
            self.core.clear()
            raise
        cpu_s = sum(self._group.all_gather(time.process_time() - began))
        report = hints.added_to(total.report(cpu_s=cpu_s, num_unique=packed.num_unique))
        return report if pairs is None else pairs.added_to(report)

    def _share(
        self,
        passes: ForwardPasses,
        samples: Sequence[Sample],
        packed: PackedSamples,
        normaliser: float,
        share_metrics: BatchMetrics,
    ) -> None:
        """Run the forward and backward pass of one share of the samples `packed`.

        `normaliser`: number of sampled tokens in the batch."""
        group, step = self._group, self.step + 1
        rows = passes.flatten(samples, packed)
        with group.collective("forward pass"):
            done = passes.run(rows)
        with group.propagate_errors("forward pass"):
            passes.check_logits(done, samples, rows)
            logprobs_RV = passes.logprobs(done.logits, rows)
            logprobs_R = logprobs_RV.gather(1, rows.targets_R[:, None])[:, 0]
            log_ratio_R = logprobs_R.detach() - rows.sampler_logprobs_R
            fresh_R = rows.per_row([self._is_fresh(sample) for sample in samples])
            fresh = self._fresh_ratio(samples, rows, log_ratio_R, fresh_R)
            policy, corrected = self._policy_loss(logprobs_R, rows, fresh_R, normaliser)
            loss = policy.loss
            if self.config.kl and self._reference is not None:
                anchor_R = self._reference.logprobs(rows)
                weight_R = corrected.weight_R.clamp(max=self.config.ratio_bound)
                loss = loss + self.config.kl * k2_loss(logprobs_R, anchor_R, weight_R, normaliser=normaliser)
            if self.config.balance and done.balance is not None:
                loss = loss + self.config.balance * done.balance * (rows.num_tokens / packed.num_tokens)
            check_loss(policy, loss, samples, rows, log_ratio_R, step=step)
        with group.collective("backward pass"):
            loss.backward()  # type: ignore[no-untyped-call]
        if samples and self.core.mtp.optimizer is not None:
            paths = rows.by_path(done.stream), rows.by_path(rows.tokens_N), rows.lengths
            places_R = path_rows(samples).to(self.core.device)
            share = rows.num_tokens / packed.num_tokens
            self.core.mtp.add(*paths, places_R, done.logits, rows.targets_R, normaliser=normaliser, share=share)
        if rows.num_tokens:
            self.core.balance.count(rows.by_path(done.live))
        with torch.no_grad():
            share_metrics.add(rows, done, policy, corrected, log_ratio_R, entropy(logprobs_RV), loss, fresh)
        progress.tick()

    def _dpo_reference(self, rows: FlatBatch) -> torch.Tensor:
        """Return the log-probability of each sampled token under the reference of the DPO loss, float32 [R]."""
        if self.config.dpo_reference is DpoReference.SAMPLER:
            return rows.sampler_logprobs_R
        if self._reference is None:
            raise InputError(
                "the DPO loss has no reference policy",
                "dpo_reference = 'start', and the argument reference is None",
                hint="pass a Reference to TorchLearner, or set dpo_reference = 'sampler'",
            )
        return self._reference.logprobs(rows)

    def _policy_loss(
        self, logprobs_R: torch.Tensor, rows: FlatBatch, fresh_R: torch.Tensor, normaliser: float
    ) -> tuple[PolicyLoss, Corrected]:
        """Return the policy loss, and each token's importance weight before the loss clips it."""
        sampler_R, advantages_R = rows.sampler_logprobs_R, rows.advantages_R
        kind, (low, high) = self.config.correction, self.config.correction_bounds
        log_ratio_R = logprobs_R.detach() - sampler_R
        if isinstance(kind, Plugin):
            corrected = self._plugins.corrected(kind, log_ratio_R, rows.sample_R)
        else:
            corrected = correct(kind, log_ratio_R, rows.sample_R, low=low, high=high)
        if kind is CorrectionKind.NONE:
            return self._loss(SampledTokens(logprobs_R, sampler_R, advantages_R, rows.sample_R, normaliser)), corrected
        anchor_R, factor_R = decoupled(corrected.weight_R, logprobs_R, sampler_R, fresh_R)
        tokens = SampledTokens(logprobs_R, anchor_R, advantages_R * factor_R, rows.sample_R, normaliser)
        return self._loss(tokens), corrected

    def _loss(self, tokens: SampledTokens) -> PolicyLoss:
        config, cap, normaliser = self.config, self.config.ratio_bound, tokens.normaliser
        rows = (tokens.logprobs_R, tokens.sampler_logprobs_R, tokens.advantages_R)
        match config.policy_loss:
            case Plugin():
                return self._plugins.loss(config.policy_loss, tokens)
            case PolicyLossKind.DPO:
                return weighted_tokens_loss(*rows)
            case PolicyLossKind.CISPO:
                return cispo_loss(*rows, normaliser=normaliser, cap=cap)
            case PolicyLossKind.PPO:
                low, high = config.clip_low, config.clip_high
                return ppo_loss(*rows, normaliser=normaliser, clip_low=low, clip_high=high, cap=cap)

    def _fresh_ratio(
        self, samples: Sequence[Sample], rows: FlatBatch, log_ratio_R: torch.Tensor, fresh_R: torch.Tensor
    ) -> float | None:
        """Return max |r - 1| over the samples that the live weights sampled; None without such samples."""
        if not bool(fresh_R.any()):
            return None
        off = torch.where(fresh_R, torch.expm1(log_ratio_R).abs(), 0.0)
        worst = float(off.max())
        if worst > 0.0 and self._refuse_mismatch:
            rollout = samples[int(rows.sample_R[int(off.argmax())])].rollout_id
            raise ParityError(
                f"the importance ratio on the learner's own weights is off by {worst:.3g} in rollout {rollout}",
                f"in exact mode it must be 1 to the bit; step {self.step}, parity class {self.parity}",
                hint="an engine has other weights or computes other numbers: etude parity finds the operator",
            )
        return worst

    def _is_fresh(self, sample: Sample) -> bool:
        """Return whether the live weights sampled all of a path.

        The step alone does not decide it: a restarted learner may have other bytes at the same step, and an engine
        serves its starting weights until it updates. After publishing, the digest decides; while a version is being
        published, no sample counts."""
        if not sample.single_version or sample.oldest_step != self.step or self.step == self._offered:
            return False
        if self.version is None or self.version.step != self.step:
            return True
        return sample.path.digest == self.version.digest

    def defend(self, *, truncate: bool) -> None:
        """Change the settings to continue with engines whose probabilities differ from the learner's.

        From now on the learner replays the engines' routes (chosen experts), and an importance ratio other than 1 on
        the live weights is reported and no longer an error. With `truncate` it also truncates importance weights,
        except with DPO, which has none."""
        self._refuse_mismatch = False
        correction, weighted = self.config.correction, self.config.policy_loss is not PolicyLossKind.DPO
        if truncate and weighted and correction is CorrectionKind.NONE:
            correction = CorrectionKind.TRUNCATED
        self.config = replace(self.config, replay_routes=True, correction=correction)

    def optim_step(self) -> dict[str, float]:
        """Apply and clear the gradient, and increment `step`. Returns `grad_norm` (before clipping) and `lr`, and
        `mtp_loss` where MTP heads are trained.

        `lr` is the scheduled rate times the batch's `lr_share`. With a zero gradient the weights do not change, but
        `step` increases, and the same weights are published again.

        Raises `NotFinite` for a gradient that is not finite, before anything has changed, and for new weights that are
        not finite: then these can be neither saved nor published."""
        lr = self._lr_share * self.config.lr
        lr *= rl_lr_multiplier(self.step, self._num_steps, warmup_steps=self.config.warmup_steps)
        norm = self.core.step(lr=lr, step=self.step + 1)
        self.step += 1
        heads = {} if self.core.mtp.optimizer is None else {"mtp_loss": self.core.mtp_loss}
        return {"grad_norm": norm, "lr": lr, **heads}

    @torch.no_grad()
    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of a text but the first, under the live weights.

        The temperature is 1."""
        tokens = torch.tensor(token_ids, device=self.core.device)
        done: Forward = self.model.eval().run(tokens[:-1])
        logprobs_RV = self.model.operators.log_softmax(done.logits)
        return logprobs_RV.gather(1, tokens[1:, None])[:, 0].tolist()

    # weights in and out

    def exported(self) -> dict[str, Tensor]:
        """Return the live weights by name, as they are published.

        The tensors may be views of live memory: copy those that you keep."""
        return self.trainable.exported()

    def publish(self, rollout_ids: Sequence[str]) -> Published:
        """Publish the live weights as the version of this step, and wait until engines can fetch it.

        `rollout_ids`: the rollouts that the step was trained on, for the version's manifest. Raises `WeightsError` and
        `StoreError`."""
        self.offer(rollout_ids)
        return self.published()

    def offer(self, rollout_ids: Sequence[str]) -> None:
        """Start publishing the live weights in the background, as the version of this step.

        `rollout_ids`: the rollouts that the step was trained on, for the version's manifest. The weights are copied
        before this call returns, so training can continue. One version is published at a time: this call first waits
        for the previous one. Raises the same errors as `published`."""
        if self._channel is None:
            raise WeightsError("the learner has no channel to publish to", hint="pass a channel to TorchLearner")
        if self._offered is not None:
            self.published()
        if self._publisher is None:
            self._publisher = Publisher(self._channel, parent=self.version)
        self._publisher.offer(self.exported(), step=self.step, rollout_ids=rollout_ids)
        self._offered = self.step

    def published(self) -> Published:
        """Wait until engines can fetch the version of the last `offer`, and return facts about it.

        This is the only method that may be called in another thread during training. Raises `WeightsError` or
        `StoreError` where publishing failed; then call `offer` again."""
        publisher = self._publisher
        if publisher is None or self._offered is None:
            raise WeightsError("no version is being published", hint="call `offer` first")
        try:
            published = publisher.wait()
        except DeadlineExceeded:  # publishing continues
            raise
        except Exception:
            self._offered = None
            raise
        assert published is not None, "a version was offered"
        self.version, self._offered = published.version, None  # in this order: see _is_fresh
        return published

    @property
    def is_publishing(self) -> bool:
        """Whether a version is being published, or has failed with an error that has not been raised yet."""
        return self._offered is not None

    def close(self) -> None:
        """Wait for the current publish, and stop publishing. If it fails, `published` raises its error, and this method
        does not."""
        if self._publisher is not None:
            try:
                self._publisher.close()
            except Exception as error:  # raised by `published`
                if isinstance(error, DeadlineExceeded):  # still writing: the store would refuse a second writer
                    raise
        self._publisher, self._offered = None, None

    def save(self, path: Path | str) -> None:
        """Write a Hugging Face directory with the optimiser state beside it, all or nothing.

        An accumulated gradient is not saved. Raises `CheckpointError`, and `NotFinite` where the weights are not
        finite."""
        metadata = _metadata_text(self.config, self.step, self.version)
        self.core.save(Path(path), {METADATA: metadata}, when=f"at step {self.step}")

    def load(self, path: Path | str) -> None:
        """Continue from a directory written by `save`, or start at step 0 from any Hugging Face directory.

        Raises `CheckpointError`; then the learner keeps its state."""
        with self._group.propagate_errors("plug-ins"):
            self._plugins.load(self.config)
        path = Path(path)
        resumed, step, version = (path / METADATA).is_file(), 0, None
        if resumed:
            step, version = _read_metadata(path / METADATA, self.config)
        device = self._group.device(self.config.device)
        operators = operators_for(self.numerics, getattr(torch, self.config.dtype), device=device)
        request = LoadRequest(path, self.config, operators, device, self.numerics.quantise, self._seed, resumed)
        core = TrainingCore(request, group=self._group)
        self.close()
        self._core = core
        self.share_prefixes = device.type == "cpu" and self.config.context_parallel == 1
        self.step, self.version = step, version


def _metadata_text(config: LearnerConfig, step: int, version: Version | None) -> str:
    """Return the content of `learner.json`."""
    metadata = {
        "format": METADATA_FORMAT,
        "step": step,
        "version": None if version is None else [version.step, version.incarnation, version.digest],
        "weights": str(config.weights),
        "optimizer": str(config.optimizer),
        "masters": str(config.masters),
        "moments": str(config.moments),
    }
    return json.dumps(metadata) + "\n"


def _read_metadata(path: Path, config: LearnerConfig) -> tuple[int, Version | None]:
    """Read step and last published version of a learner's checkpoint.

    Raises `CheckpointError` when it is damaged or was saved with another precision or optimiser."""
    metadata = read_json(path)
    step, version = metadata.get("step"), metadata.get("version")
    is_version = isinstance(version, list) and [type(v) for v in version] == [int, str, str]
    if metadata.get("format") != METADATA_FORMAT:
        raise CheckpointError(
            f"{path} has format {str(metadata.get('format'))[:20]}",
            f"this version of etude reads format {METADATA_FORMAT}",
            hint="use the etude version that wrote it, or start a run from its weights: --set start=CHECKPOINT",
        )
    if not isinstance(step, int) or not (version is None or is_version):
        raise CheckpointError(
            f"{path} is damaged",
            f"it contains {metadata}",
            hint=f"delete {path.parent}: a resumed run continues from the checkpoint before it",
        )
    before = {"optimizer": OptimizerKind.ADAMW, "masters": Masters.F32, "moments": Moments.F32} | metadata
    for name in ("weights", "optimizer", "masters", "moments"):
        expected = getattr(config, name)
        if before.get(name) != expected:
            raise CheckpointError(
                f"{path} was saved with learner.{name} = {str(before.get(name))!r}",
                f"the setting is now {str(expected)!r}",
                hint=f"set learner.{name} to the checkpoint's value",
            )
    verify_files(path.parent, [path.name], kind=CheckpointError)
    return step, Version(*version) if isinstance(version, list) else None

"""The learner of RL: holds the weights, trains them, saves and publishes them.

For every batch it reports the ratio of trainer to sampler probability over all tokens. Where the version that holds the
learner's own bytes sampled a whole path, the ratio must be 1, else the step is refused. For paths of earlier versions,
and of a version that is still being published, the ratio is only reported. Routes that engines recorded are replayed.
Nothing here is random, so there is no random state to save.

Knows nothing of rollouts, rewards or engines: it reads `Batch`es and hands tensors to a channel.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from etude import progress
from etude.config import Plugin
from etude.errors import CheckpointError, DeadlineExceeded, ParityError, WeightsError
from etude.models.transformer import Forward, Transformer
from etude.models.watch import Watch, unwatched
from etude.numerics.choosing import operators_for
from etude.numerics.config import Mode, NumericsConfig
from etude.records import Batch, Sample, Version
from etude.records.sample import Published, StepReport
from etude.training.about import ABOUT, described, read_about
from etude.training.balance import Balance
from etude.training.config import CorrectionKind, LearnerConfig, OptimizerKind, PolicyLossKind
from etude.training.corrections import Corrected, correct, decoupled
from etude.training.group import ONE, Group
from etude.training.guard import check_logits, check_loss, check_sampled, check_weights, place_in, stepped
from etude.training.losses import PolicyLoss, SampledTokens, cispo_loss, entropy, k2_loss, ppo_loss
from etude.training.muon import Muon
from etude.training.optimizer import AdamW
from etude.training.packing import Cost, pack
from etude.training.plugged import Plugged
from etude.training.reference import Reference
from etude.training.report import Tally, merged
from etude.training.routes import Replay
from etude.training.rows import Rows, forwarded, lay_flat, microbatches
from etude.training.schedule import rate
from etude.training.trained import Loading, Trained
from etude.weights.chain.publisher import Publisher, Writer
from etude.weights.tensors import Tensor

SAMPLED_ANEW = 64


class TorchLearner:
    """`seams.Learner` on torch. `load` comes first.

    `num_steps` is the run's length, for the learning rate's tail (None: no tail); `temperature` is the run's, since the
    ratio is of the distribution sampled from; a sample may have others (`Sample.temperatures`). `reference` is what
    `config.kl` is taken to. `numerics` is what the engines have, too: in exact mode the ratio on the learner's own
    weights must be 1, to the bit, or the step is refused (`refuse_mismatch` False, and native mode: it is reported);
    in low precision what is published is packed (`models.packed`). `seed` keys what adapters begin with. `group`: the
    ranks that share the work, each with a learner of its own that is called alike (`training.sharded`); without one,
    `config.ranks` are computed in turn.
    """

    step: int
    """Version step of the live weights: optimiser steps since the starting checkpoint."""
    version: Version | None
    """The last version published in the lineage of these weights."""
    _balance: Balance

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
        group: Group = ONE,
    ) -> None:
        self._group = group
        self.numerics, self._held_to_one = numerics, refuse_mismatch and numerics.mode is Mode.EXACT
        self.config, self.step, self.version, self._seed = config, 0, None, seed
        self._reference = reference if config.kl else None
        self._channel, self._num_steps, self._temperature = channel, num_steps, temperature
        self._publisher: Publisher | None = None
        self._plugged = Plugged()
        self._offered: int | None = None  # the step of the version that is on its way
        self._lr_share = 1.0  # of the batch whose gradient is accumulated
        self._device = torch.device("cpu")
        self._trained: Trained | None = None
        self._optimizer: AdamW | None = None

    @property
    def model(self) -> Transformer:
        """The live model. Raises `CheckpointError` before `load`."""
        return self.trained.model

    @property
    def trained(self) -> Trained:
        """The live model, and what of it trains. Raises `CheckpointError` before `load`."""
        if self._trained is None:
            raise CheckpointError("the learner holds no weights", hint="load a checkpoint first")
        return self._trained

    @property
    def optimizer(self) -> AdamW:
        """The live optimiser. Raises `CheckpointError` before `load`."""
        if self._optimizer is None:
            raise CheckpointError("the learner holds no weights", hint="load a checkpoint first")
        return self._optimizer

    @property
    def parity(self) -> str:
        """The parity class: with the same weights, an engine of this class computes bit-identical log-probabilities."""
        return self.model.parity

    # training

    def forward_backward(self, batch: Batch) -> StepReport:
        """Accumulate the gradient of the batch's loss.

        Raises `ParityError` when a ratio that must be 1 is not, or a route is missing, and `NotFinite`. After any error
        the accumulated gradient is forgotten, since a part of this batch may be in it.
        """
        began = time.process_time()
        shares, self._lr_share = self.config.shares, batch.lr_share
        tallies = [Tally() for _ in self._group.own(shares)]
        try:
            num_tokens = sum(forwarded(sample) for sample in batch.samples)
            for row in self._packed(batch.samples, shares):
                self._row(row, batch.num_loss_tokens, num_tokens, tallies)
            tally = merged([one for of in self._group.gathered(tallies) for one in of])
            if tally.num_replayed:
                tally.live += self._live(batch)
        except Exception:
            self._group.reset(self.model)
            self.optimizer.clear()
            self._balance.clear()
            raise
        return tally.report(cpu_s=sum(self._group.gathered(time.process_time() - began)))

    def _packed(self, samples: Sequence[Sample], shares: int) -> list[list[list[Sample]]]:
        """Rows of what each share forwards at once."""
        lengths, cost = [forwarded(sample) for sample in samples], Cost.by(self.model.config)
        rows = pack(lengths, shares=shares, budget_tokens=self.config.budget_tokens, cost=cost)
        return [[[samples[i] for i in one] for one in row] for row in rows]

    def _row(self, row: list[list[Sample]], normaliser: float, num_tokens: int, tallies: list[Tally]) -> None:
        """One forward and backward pass of each share."""
        own = self._group.own(len(row))
        summed = self._group.summed(self.optimizer, len(own))
        for share, tally in zip(own, tallies, strict=True):
            self._one(row[share], normaliser, num_tokens, tally)
            if summed is not None:
                summed.take()
        if summed is not None:
            summed.end()

    def _one(self, samples: Sequence[Sample], normaliser: float, num_tokens: int, tally: Tally) -> None:
        group, step = self._group, self.step + 1
        with group.agreed("samples"):
            whole = lay_flat(samples, self._replay())
            check_sampled(samples, whole, step=step)
        rows = group.part(whole).to(self._device)
        with group.waited("forward pass"):
            done = self._run(rows)
        with group.agreed("forward pass"):
            again = functools.partial(self._run, rows) if group.size == 1 else None
            place = functools.partial(place_in, samples, rows)
            check_logits(done.logits, again, rows.rows_R, step=step, place=place)
            logprobs_RV = self._logprobs(done.logits, rows)
            logprobs_R = logprobs_RV.gather(1, rows.targets_R[:, None])[:, 0]
            log_ratio_R = logprobs_R.detach() - rows.sampler_logprobs_R
            own_R = rows.picked([self._is_fresh(sample) for sample in samples])
            fresh = self._fresh_ratio(samples, rows, log_ratio_R, own_R)
            policy, corrected = self._policy_loss(logprobs_R, rows, own_R, normaliser)
            loss = policy.loss
            if self._reference is not None:
                anchor_R = self._reference.logprobs(rows)
                weight_R = corrected.weight_R.clamp(max=self.config.ratio_bound)
                loss = loss + self.config.kl * k2_loss(logprobs_R, anchor_R, weight_R, normaliser=normaliser)
            if self.config.balance and done.balance is not None:
                loss = loss + self.config.balance * done.balance * (rows.num_tokens / num_tokens)
            check_loss(policy, loss, samples, rows, log_ratio_R, step=step)
        with group.waited("backward pass"):
            loss.backward()  # type: ignore[no-untyped-call]
        if rows.num_tokens:
            self._balance.count(done.live)
        with torch.no_grad():
            tally.add(rows, done, policy, corrected, log_ratio_R, entropy(logprobs_RV), loss, fresh)
        progress.tick()

    def _replay(self) -> Replay | None:
        if not (self.config.replays(self.numerics.mode) and self.model.config.num_moe_layers):
            return None
        return Replay(self.model.config, step=self.step, max_lag=self.config.replay_max_lag)

    def _run(self, rows: Rows, watch: Watch = unwatched) -> Forward:
        return self.model.train().run(
            rows.tokens_N,
            self._group.cache(rows, self.model.operators),
            rows.routes_NLK,
            rows.rows_R,
            plausible=self.config.replay_plausible,
            watch=watch,
        )

    @torch.no_grad()
    def _live(self, batch: Batch) -> list[torch.Tensor]:
        """Log-ratios of a few of the batch's tokens without replay: one sample in `SAMPLED_ANEW`, others each step, at
        least one. About a third of their training's cost, so half a hundredth of the step's."""
        few = batch.samples[batch.step % SAMPLED_ANEW :: SAMPLED_ANEW] or batch.samples[:1]
        found = []
        for samples in microbatches(few, budget_tokens=self.config.budget_tokens):
            rows = self._group.part(lay_flat(samples)).to(self._device)
            logprobs_RV = self._logprobs(self._run(rows).logits, rows)
            found.append(logprobs_RV.gather(1, rows.targets_R[:, None])[:, 0] - rows.sampler_logprobs_R)
        return [one.cpu() for one in found]

    def _policy_loss(
        self, logprobs_R: torch.Tensor, rows: Rows, own_R: torch.Tensor, normaliser: float
    ) -> tuple[PolicyLoss, Corrected]:
        """The loss, and what each token weighs in it before the loss's own clip."""
        sampler_R, advantages_R = rows.sampler_logprobs_R, rows.advantages_R
        kind, (low, high) = self.config.correction, self.config.correction_bounds
        log_ratio_R = logprobs_R.detach() - sampler_R
        if isinstance(kind, Plugin):
            corrected = self._plugged.corrected(kind, log_ratio_R, rows.sample_R)
        else:
            corrected = correct(kind, log_ratio_R, rows.sample_R, low=low, high=high)
        if kind is CorrectionKind.NONE:
            return self._loss(SampledTokens(logprobs_R, sampler_R, advantages_R, rows.sample_R, normaliser)), corrected
        anchor_R, factor_R = decoupled(corrected.weight_R, logprobs_R, sampler_R, own_R)
        tokens = SampledTokens(logprobs_R, anchor_R, advantages_R * factor_R, rows.sample_R, normaliser)
        return self._loss(tokens), corrected

    def _loss(self, tokens: SampledTokens) -> PolicyLoss:
        config, cap, normaliser = self.config, self.config.ratio_bound, tokens.normaliser
        rows = (tokens.logprobs_R, tokens.sampler_logprobs_R, tokens.advantages_R)
        match config.policy_loss:
            case Plugin():
                return self._plugged.loss(config.policy_loss, tokens)
            case PolicyLossKind.CISPO:
                return cispo_loss(*rows, normaliser=normaliser, cap=cap)
            case PolicyLossKind.PPO:
                low, high = config.clip_low, config.clip_high
                return ppo_loss(*rows, normaliser=normaliser, clip_low=low, clip_high=high, cap=cap)

    def _logprobs(self, logits_RV: torch.Tensor, rows: Rows) -> torch.Tensor:
        return self.model.operators.log_softmax(logits_RV, rows.temperature(self._temperature))

    def _fresh_ratio(
        self, samples: Sequence[Sample], rows: Rows, log_ratio_R: torch.Tensor, own_R: torch.Tensor
    ) -> float | None:
        """max |r - 1| over the samples that the live weights themselves produced; None when there are none."""
        if not bool(own_R.any()):
            return None
        off = torch.where(own_R, torch.expm1(log_ratio_R).abs(), 0.0)
        worst = float(off.max())
        if worst > 0.0 and self._held_to_one:
            rollout = samples[int(rows.sample_R[int(off.argmax())])].rollout_id
            raise ParityError(
                f"the ratio on the learner's own weights is off by {worst:.3g} in rollout {rollout}",
                f"in exact mode it is 1 to the bit; step {self.step}, parity class {self.parity}",
                hint="an engine holds other bytes or computes otherwise: etude parity finds the operator",
            )
        return worst

    def _is_fresh(self, sample: Sample) -> bool:
        """Whether the live weights sampled all of it. A step's number does not tell: a restarted learner may have other
        bytes under it, and an engine serves what it started with until it adopts. Once published, the digest does;
        while they are on their way, no sample counts as theirs."""
        if not sample.single_version or sample.oldest_step != self.step or self.step == self._offered:
            return False
        if self.version is None or self.version.step != self.step:
            return True
        return sample.path.digest == self.version.digest

    def defend(self, *, truncate: bool) -> None:
        """Go on with engines that compute other numbers: their routes are replayed, the ratio on the live weights is
        reported and no longer held to 1, and with `truncate` importance weights are truncated."""
        self._held_to_one = False
        correction = self.config.correction
        if truncate and correction is CorrectionKind.NONE:
            correction = CorrectionKind.TRUNCATED
        self.config = replace(self.config, replay_routes=True, correction=correction)

    def optim_step(self) -> dict[str, float]:
        """Apply and clear the gradient; the step counts up by one. Returns `grad_norm` (before clipping) and `lr`, the
        schedule's times the batch's `lr_share`. Where there is no gradient (`grad_norm` 0) the weights stay as they
        are, and are published so under a new step.

        Raises `NotFinite`: of a gradient, and then nothing has changed; of the new weights, and then nothing saves or
        publishes them."""
        lr = self._lr_share * self.config.lr
        lr *= rate(self.step, self._num_steps, warmup_steps=self.config.warmup_steps, decay_from=0.6, final=0.1)
        with self._group.waited("optimiser step"):
            norm = stepped(self.optimizer, self.trained.views, lr=lr, step=self.step + 1, agreed=self._group.agreed)
        self.trained.settle()
        self._group.add(self._balance.load_LE)
        self._balance.move()
        self.step += 1
        return {"grad_norm": norm, "lr": lr}

    @torch.no_grad()
    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities at temperature 1 that the live weights give a text's tokens, all but the first."""
        tokens = torch.tensor(token_ids, device=self._device)
        done: Forward = self.model.eval().run(tokens[:-1])
        logprobs_RV = self.model.operators.log_softmax(done.logits)
        return logprobs_RV.gather(1, tokens[1:, None])[:, 0].tolist()

    # weights in and out

    def exported(self) -> dict[str, Tensor]:
        """The live weights as they are published. Views of them may be among it: copy what is kept."""
        return self.trained.exported()

    def publish(self, rollout_ids: Sequence[str]) -> Published:
        """Hand the live weights to the channel as the version of this step. Raises `WeightsError`, `StoreError`."""
        self.offer(rollout_ids)
        return self.published()

    def offer(self, rollout_ids: Sequence[str]) -> None:
        """Begin to publish the live weights. They are copied before this returns, so training may go on.

        One version is published at a time: this waits first for the version that was offered before. Raises as
        `published` does.
        """
        if self._channel is None:
            raise WeightsError("the learner has no channel to publish to", hint="give TorchLearner a channel")
        if self._offered is not None:
            self.published()
        if self._publisher is None:
            self._publisher = Publisher(self._channel, parent=self.version)
        self._publisher.offer(self.exported(), step=self.step, rollout_ids=rollout_ids)
        self._offered = self.step

    def published(self) -> Published:
        """Wait until readers can fetch the version that was offered. The only call that may be made in another thread
        while the learner trains. Raises `WeightsError` or `StoreError` where publishing failed: offer it again then."""
        publisher = self._publisher
        if publisher is None or self._offered is None:
            raise WeightsError("nothing is being published", hint="call offer first")
        try:
            published = publisher.wait()
        except DeadlineExceeded:  # it goes on
            raise
        except Exception:
            self._offered = None
            raise
        assert published is not None, "it was offered"
        self.version, self._offered = published.version, None  # in this order: see _is_fresh
        return published

    @property
    def is_publishing(self) -> bool:
        """Whether a version is being published, or has failed and its error was not raised yet."""
        return self._offered is not None

    def close(self) -> None:
        """Wait until the publish under way has succeeded or failed, and end publishing. Its error is raised by
        `published`, not here."""
        if self._publisher is not None:
            try:
                self._publisher.close()
            except Exception as error:  # raised where `published` waits
                if isinstance(error, DeadlineExceeded):  # it still writes: another writer beside it would be refused
                    raise
        self._publisher, self._offered = None, None

    def save(self, path: Path | str) -> None:
        """Write a Hugging Face directory with the optimiser's state beside it; it appears whole or not at all. An
        accumulated gradient is not saved. Raises `CheckpointError`, and `NotFinite` where the weights are not
        finite."""
        with self._group.agreed("weights"):
            check_weights(self.trained.views(), f"at step {self.step}")
        about = described(self.config, self.step, self.version)
        with self._group.directory(Path(path)) as folder:
            self.trained.write(folder)
            self._group.keep(folder, self.optimizer)
            if self._group.rank == 0:
                (folder / ABOUT).write_text(about)

    def load(self, path: Path | str) -> None:
        """Go on from what `save` left, or begin at step 0 from any Hugging Face directory. Raises `CheckpointError`,
        and then the learner holds what it held."""
        with self._group.agreed("plug-ins"):
            self._plugged.load(self.config)
        path = Path(path)
        resumed, step, version = (path / ABOUT).is_file(), 0, None
        if resumed:
            step, version = read_about(path / ABOUT, self.config)
        device = self._group.device(self.config.device)
        operators = operators_for(self.numerics, getattr(torch, self.config.dtype), device=device)
        loading = Loading(path, self.config, operators, device, self.numerics.quantise, self._seed, resumed)
        trained = self._group.load(loading)
        optimizer = self._optimizer_of(trained)
        if resumed:
            self._group.restore(path, optimizer)
        trained.settle()
        self.close()
        self._trained, self._optimizer, self._device = trained, optimizer, device
        self._balance = Balance(trained.model, speed=self.config.balance_bias)
        self.step, self.version = step, version

    def _optimizer_of(self, trained: Trained) -> AdamW:
        make = functools.partial(Muon, between=self._group) if self.config.optimizer is OptimizerKind.MUON else AdamW
        settings = self.config
        return make(
            trained.parameters_of, weights=settings.weights, grad_clip=settings.grad_clip, norm=self._group.norm
        )

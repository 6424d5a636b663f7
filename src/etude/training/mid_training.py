"""Trains a model on a corpus (mid-training), on any number of ranks, and resumable at any moment.

A step's batch does not depend on the number of ranks. It is trained by the same code as a batch of RL
(`training.core`): by one process or by several, with weights that each of them holds or with shards of them. Only the
texts of a batch and their loss are decided here. Checkpoints are in ``<out>.partial/step-NNNNNN`` until the result is
complete. A killed run resumes from the last one and ends with the same bytes as a run without interruption."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from etude import progress
from etude.config import to_plain
from etude.corpus.shards import MANIFEST
from etude.errors import CheckpointError, ConfigError, RunError
from etude.file_checksums import SUMS, file_digest, files_in, verify_files
from etude.models.checkpoint import copy_assets, save_model
from etude.models.config import ModelConfig
from etude.models.headers import read_json
from etude.models.transformer import Forward, Transformer
from etude.numerics.config import NumericsConfig, Quantise
from etude.numerics.device import device_for
from etude.numerics.factory import operators_for
from etude.telemetry import Telemetry
from etude.training.batches import plan_batches, split_documents
from etude.training.config import LearnerConfig, Masters, MidTrainingConfig, Moments
from etude.training.core import Row, TrainingCore
from etude.training.corpus import Spans, TokenizedDocuments
from etude.training.data_parallel import RankGroup, run_ranks
from etude.training.losses import text_loss
from etude.training.mid_training_phases import PhasePlan, open_documents, plan_phases, verify_corpora
from etude.training.mid_training_progress import checkpoint_path, newest_checkpoint, progress_folder
from etude.training.nan_check import check_logits
from etude.training.packing import Cost, pack
from etude.training.process_group import SINGLE_PROCESS, ProcessGroup
from etude.training.schedule import lr_multiplier
from etude.training.token_batch import TokenBatch, flatten_texts
from etude.training.trainable import LoadRequest
from etude.weights.tensors import content_digest, tensor_digest

FORMAT = 2
RESULT, PROGRESS, NEW = "mid_training.json", "progress.json", "new"
REPLICATED_BYTES = 1 << 30
"""Several ranks hold the full model each where its weights, gradients and optimiser state take at most this much."""
BYTES_PER_PARAMETER = 16

Probe = Callable[[Transformer], float]
"""Measures a skill of the model as one number, for the event `mid.eval`. Every rank calls it with its model, on the
model's device. It must be a module-level function or a partial of one, since the ranks are separate processes."""


@dataclass(frozen=True)
class MidTrained:
    """The result of mid-training; also written to `mid_training.json`.

    `loss`: the loss of the last step, in nats per token. `heldout_loss`: None if the corpus has no held-out documents.
    `copy_probe`: the last value of the `copy_probe` given to `mid_train`; None without one. `digest`: SHA-256 of the
    trained tensors, the same for any sharding."""

    num_steps: int
    num_tokens: int
    loss: float
    heldout_loss: float | None
    copy_probe: float | None
    digest: str


@dataclass(frozen=True)
class Job:
    """What `mid_train` is called with, for each rank. `learner` are the settings of `[learner]`."""

    config: MidTrainingConfig
    model: ModelConfig
    out: Path
    corpus: Path | None = None
    ranks: int = 1
    seed: int = 0
    start: Path | None = None
    assets: Path | None = None
    telemetry: tuple[Path, str] | None = None
    probe: Probe | None = None
    learner: LearnerConfig = LearnerConfig()  # noqa: RUF009  frozen
    numerics: NumericsConfig = NumericsConfig()  # noqa: RUF009  frozen
    replicated: bool | None = None

    @functools.cached_property
    def settings(self) -> LearnerConfig:
        """The settings with which this job trains. Raises `ConfigError` for settings that do not fit together."""
        if self.config.lora_rank and self.start is None:
            hint = "set mid_training.lora_rank = 0, or start from a checkpoint"
            raise ConfigError(
                f"mid_training.lora_rank = {self.config.lora_rank} trains adapters of a new model", hint=hint
            )
        try:
            return self.config.learner(self.learner, ranks=self.ranks)
        except ValueError as error:
            raise ConfigError(
                "mid-training cannot use these settings of [learner]", str(error), hint="change them"
            ) from None

    @property
    def is_replicated(self) -> bool:
        """Whether each rank holds the full model."""
        if self.replicated is None:
            small = BYTES_PER_PARAMETER * self.model.num_parameters <= REPLICATED_BYTES
            return small and self.learner.expert_parallel == 1
        return self.replicated

    @property
    def partial(self) -> Path:
        """The folder of checkpoints."""
        return progress_folder(self.out)

    @property
    def plans(self) -> tuple[PhasePlan, ...]:
        """The phases, without their documents. Raises errors of the settings and of corpora."""
        return plan_phases(self.config, self.corpus, model=self.model, tokenizer=self.assets)

    @property
    def identity(self) -> str:
        """The digest of everything that must be equal to resume from a checkpoint."""
        corpora: dict[str, dict[str, str]] = {}
        for plan in self.plans:  # a manifest has the digests of the shards
            names = files_in(plan.folder) if plan.built is None else [MANIFEST]
            corpora[str(plan.folder)] = {name: file_digest(plan.folder / name) for name in names}
        start = str(self.start)
        if self.start is not None and (self.start / SUMS).is_file():
            start = file_digest(self.start / SUMS)
        used, mode = self.settings, self.numerics.mode
        computed = [used.dtype, used.weights, used.lora_alpha, used.lora_on, mode]
        if used.masters is Masters.BF16 or used.moments is Moments.INT8:
            computed += [used.masters, used.moments]
        plain = [to_plain(self.config), to_plain(self.model), self.seed, start, list(corpora.values()), computed]
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def default_ranks(learner: LearnerConfig) -> int:
    """Return the number of ranks of mid-training for these settings of `[learner]`.

    It is `learner.ranks`. Where that is 1, on a CPU, it is the number of cores: each rank computes in one thread."""
    if learner.ranks > 1 or device_for(learner.device).type != "cpu":
        return learner.ranks
    return len(os.sched_getaffinity(0))


def mid_train(
    config: MidTrainingConfig,
    corpus_dir: Path | str | None,
    out_dir: Path | str,
    *,
    model: ModelConfig,
    ranks: int = 2,
    seed: int = 0,
    start: Path | str | None = None,
    assets: Path | str | None = None,
    telemetry: Telemetry | None = None,
    copy_probe: Probe | None = None,
    learner: LearnerConfig = LearnerConfig(),  # noqa: B008  frozen
    numerics: NumericsConfig = NumericsConfig(),  # noqa: B008  frozen
    replicated: bool | None = None,
    alone: bool = False,
) -> MidTrained:
    """Train a new model, or the one in the checkpoint directory `start`, on a corpus, in one phase or several.

    `corpus_dir`: a folder of `write_corpus`, for phases without a corpus of `etude corpus build` (`config.corpus`);
    None where all have one. `out_dir` becomes a Hugging Face directory: in float32, or in the dtype of
    `learner.weights` where adapters were trained. It returns at once when `out_dir` has the result of these settings.

    - `model`: its sizes, those of `start` if that is given.
    - `ranks`: the number of processes on this machine. The bytes of the result depend on it; in exact mode not on how
      the ranks share the weights.
    - `assets`: a directory whose tokeniser files are copied. It must be the tokeniser of the corpora.
    - `copy_probe`: measures copying from the context, for the event `mid.eval`.
    - `learner`: the settings of `[learner]`, of which mid-training uses some (`MidTrainingConfig.learner`).
    - `replicated`: whether each rank holds the full model; None: if it is small (`REPLICATED_BYTES`).
    - `alone`: compute the parts of all ranks in this process, in turn; in exact mode the bytes are the same.

    Raises `RunError` when a rank dies or a checkpoint was made with other settings, `ConfigError` for settings that do
    not fit together, `TaskError`, `InputError` or `CorpusError` for a missing or damaged corpus, `CheckpointError` for
    disk errors, and `DeadlineExceeded` when the ranks make no progress."""
    job = Job(
        config,
        model,
        Path(out_dir),
        corpus=None if corpus_dir is None else Path(corpus_dir),
        ranks=ranks,
        seed=seed,
        start=None if start is None else Path(start),
        assets=None if assets is None else Path(assets),
        telemetry=None if telemetry is None else (telemetry.path, telemetry.process),
        probe=copy_probe,
        learner=learner,
        numerics=numerics,
        replicated=replicated,
    )
    return run_job(job, alone=alone)


def run_job(job: Job, *, alone: bool = False) -> MidTrained:
    """Train with ranks on this machine, or `alone`, as `mid_train` does. Returns the result, or that of before."""
    return begin(job) or end(job, run_ranks(_train_rank, job, ranks=1 if alone else job.ranks)[0])


def begin(job: Job) -> MidTrained | None:
    """Verify the corpora, and write the initial weights of a new model. Call it in one process, before `train`.

    Returns the result if there is one already."""
    device_for(job.settings.device)  # reports errors of settings before ranks start, as the next line those of corpora
    verify_corpora(job.plans, model=job.model)
    if (job.out / RESULT).is_file():
        shutil.rmtree(job.partial, ignore_errors=True)
        return _finished(job)
    if job.start is None and newest_checkpoint(job.out) is None:
        save_model(Transformer(job.model, seed=job.seed), job.partial / NEW, dtype="f32", assets=job.assets)
    return None


def end(job: Job, result: MidTrained) -> MidTrained:
    """Delete the checkpoints of a job whose ranks have returned a result. Returns the result."""
    shutil.rmtree(job.partial, ignore_errors=True)
    return result


def _finished(job: Job) -> MidTrained:
    metadata = read_json(job.out / RESULT)
    if metadata.pop("identity", None) != job.identity:
        hint = "give another output directory, or delete this one"
        raise RunError(f"{job.out} was trained with other settings", hint=hint)
    try:
        return MidTrained(**metadata)  # type: ignore[arg-type]
    except TypeError as error:
        raise CheckpointError(f"{job.out / RESULT} is damaged", str(error), hint="delete the directory") from None


def _train_rank(ranks: RankGroup, job: Job) -> MidTrained:
    if ranks.size == 1:
        return train(job, SINGLE_PROCESS)
    from etude.training.sharded import ShardedProcessGroup, join  # which need torch.distributed

    return train(job, ShardedProcessGroup(join(job.settings)))


def train(job: Job, group: ProcessGroup) -> MidTrained:
    """Train as one rank of `group`, from the last checkpoint on, and write the result. All ranks make this call."""
    run = TextTraining(job, group)
    for step in range(run.step, len(run.batches)):
        run.train_step()
        done = step + 1
        if done % job.config.eval_every == 0 or done == len(run.batches):
            run.evaluate()
        if done % job.config.checkpoint_every == 0 and done < len(run.batches):
            run.checkpoint()
    return run.finish()


class TextTraining:
    """One rank's state of mid-training. All calls are collective.

    `step`: the number of steps that are done. `batches`: the pieces of documents of each step. `phase`: the number of
    the phase of the last step. `first_steps`: how many steps are before each phase."""

    def __init__(self, job: Job, group: ProcessGroup) -> None:
        """Open the documents, and load the last checkpoint or the starting one.

        Raises `RunError` for a checkpoint of other settings, and the errors of `mid_train`."""
        self.job, self.group, config = job, group, job.config
        with group.propagate_errors("corpora"):
            self.identity, self.plans = job.identity, job.plans
            self.documents = open_documents(self.plans, model=job.model, heldout_documents=config.heldout_documents)
            self.batches: list[Spans] = []
            self.first_steps: list[int] = []
            for number, (plan, documents) in enumerate(zip(self.plans, self.documents.train, strict=True)):
                self.first_steps.append(len(self.batches))
                self.batches += plan_batches(
                    documents,
                    num_tokens=plan.settings.num_tokens,
                    batch_tokens=plan.settings.batch_tokens,
                    document_tokens=plan.longest,
                    seed=job.seed,
                    phase=number,
                )
        self.phase = self.step = self.num_tokens = 0
        with group.propagate_errors("checkpoint"):
            saved = newest_checkpoint(job.out)
            if saved is not None:
                self._read_progress(saved)
        path = saved or job.start or job.partial / NEW
        device, numerics = group.device(job.settings.device), dataclasses.replace(job.numerics, quantise=Quantise.NONE)
        self.core = TrainingCore(
            LoadRequest(
                path=path,
                config=job.settings,
                operators=operators_for(numerics, getattr(torch, job.settings.dtype), device=device),
                device=device,
                quantise=Quantise.NONE,
                seed=job.seed,
                resumed=saved is not None,
                replicated=job.is_replicated,
            ),
            group=group,
            weight_decay=config.weight_decay,
            mtp_heads=self.plans[0].model.mtp_heads,
        )
        self.telemetry = None
        if job.telemetry is not None and group.rank == 0:
            self.telemetry = Telemetry(job.telemetry[0], process=job.telemetry[1])
        self.loss = float("nan")
        self.heldout_loss: float | None = None
        self.copy_probe: float | None = None
        self._cost = Cost.for_model(job.model)
        self._reported = (time.monotonic(), self.num_tokens)

    def train_step(self) -> None:
        """Take one optimiser step."""
        self._enter_phase()
        documents, spans = self.documents.train[self.phase], self.batches[self.step]
        settings, number = self.plans[self.phase].settings, self.step + 1
        num_targets, num_inputs = int(documents.num_targets(spans).sum()), _num_tokens(spans) - len(spans)
        losses: list[tuple[float, float]] = []

        def backward(_: int, pieces: list[int]) -> None:
            losses.append(self._share(documents, spans[pieces], num_targets=num_targets, num_inputs=num_inputs))

        self.core.accumulate(self._packed(spans), backward)
        first, *ends = [*self.first_steps[self.phase :], len(self.batches)]
        lr = settings.lr * lr_multiplier(
            self.step - first,
            ends[0] - first,
            warmup_steps=settings.warmup_steps,
            decay_from=settings.decay_from,
            final=settings.final_lr,
        )
        norm = self.core.step(lr=lr, step=number)
        self.loss, balance_loss = self._sums(losses)
        self.num_tokens += _num_tokens(spans)
        self.step = number
        heads = {} if self.core.mtp.optimizer is None else {"mtp_loss": self.core.mtp_loss}
        self._report(balance_loss=balance_loss, lr=lr, grad_norm=norm, **heads)

    def _share(
        self, documents: TokenizedDocuments, pieces: Spans, *, num_targets: int, num_inputs: int
    ) -> tuple[float, float]:
        """Run the forward and backward pass of one share of a batch. Returns its parts of (loss, balance loss).

        `num_targets`, `num_inputs`: the numbers of tokens with a loss, and of tokens, in the full batch."""
        rows = self._rows(documents, pieces)
        done = self._forward(rows)
        loss = text_loss(done.logits, rows.targets_R, normaliser=num_targets)
        balance = loss.new_zeros(()) if done.balance is None else done.balance
        balance = balance * (rows.num_tokens / num_inputs)
        with self.group.collective("backward pass"):
            (loss + self.job.config.balance * balance).backward()  # type: ignore[no-untyped-call]
        if rows.lengths:
            share = rows.num_tokens / num_inputs
            of_rows = rows.rows_R, done.logits, rows.targets_R
            self.core.mtp.add(done.stream, rows.tokens_N, rows.lengths, *of_rows, normaliser=num_targets, share=share)
        if rows.num_tokens:
            self.core.balance.count(done.live)
        progress.tick()
        return float(loss.detach()), float(balance.detach())

    def _enter_phase(self) -> None:
        """Use the phase of this step, and its RoPE."""
        self.phase = bisect.bisect_right(self.first_steps, self.step) - 1
        if self.core.model.config != self.plans[self.phase].model:
            self.core.model.extend_context(self.plans[self.phase].model)

    def _packed(self, spans: Spans) -> list[Row]:
        """Distribute pieces of documents over forward passes and ranks. Returns their indices."""
        used, lengths = self.job.settings, (spans[:, 1] - spans[:, 0]).tolist()
        return list(pack(lengths, shares=used.shares, budget_tokens=used.budget_tokens, cost=self._cost))

    def _rows(self, documents: TokenizedDocuments, pieces: Spans) -> TokenBatch:
        """Return this rank's part of the tokens of one forward pass, on its device."""
        with self.group.propagate_errors("documents"):
            flat = flatten_texts(documents, pieces)
        return self.group.local_tokens(flat).to(self.core.device)

    def _forward(self, rows: TokenBatch) -> Forward:
        with self.group.collective("forward pass"):
            done = self.core.forward(rows)
        with self.group.propagate_errors("logits"):
            again = (lambda hook: self.core.forward(rows, hook=hook)) if self.group.size == 1 else None
            place = "token {} of a batch".format
            check_logits(done.logits, again, rows.rows_R, step=self.step + 1, place=place)
        return done

    def _sums(self, parts: list[tuple[float, float]]) -> tuple[float, float]:
        """Return both sums over the parts of all ranks, rounded once."""
        every = [one for rank in self.group.all_gather(parts) for one in rank]
        return math.fsum(one for one, _ in every), math.fsum(one for _, one in every)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Compute the held-out loss and the copy probe."""
        parts: list[tuple[float, float]] = []
        for documents in self.documents.heldout:
            spans = split_documents(documents, document_tokens=self.plans[self.phase].longest)
            for row in self._packed(spans):
                for share in self.group.own_shares(len(row)):
                    rows = self._rows(documents, spans[row[share]])
                    loss = text_loss(self._forward(rows).logits, rows.targets_R, normaliser=1.0)
                    parts.append((float(loss), float(len(rows.targets_R))))
                    progress.tick()
        loss_sum, count = self._sums(parts)
        self.heldout_loss = loss_sum / count if count else None
        if self.job.probe is not None:
            with self.group.collective("copy probe"):
                self.copy_probe = self.job.probe(self.core.model.eval())
        if self.telemetry is not None:
            self.telemetry.event(
                "mid.eval",
                step=self.step,
                tokens=self.num_tokens,
                heldout_loss=self.heldout_loss,
                copy_probe=self.copy_probe,
            )

    def checkpoint(self) -> None:
        """Write a checkpoint, and delete the one before."""
        metadata = {"format": FORMAT, "identity": self.identity, "step": self.step, "num_tokens": self.num_tokens}
        path = checkpoint_path(self.job.out, self.step)
        self.core.save(path, {PROGRESS: json.dumps(metadata) + "\n"}, when=f"at step {self.step}")
        if self.group.rank == 0:
            for other in self.job.partial.iterdir():
                if other != path:
                    shutil.rmtree(other, ignore_errors=True)

    def _read_progress(self, saved: Path) -> None:
        metadata = read_json(saved / PROGRESS)
        step, tokens, hint = metadata.get("step"), metadata.get("num_tokens"), f"delete {self.job.partial}"
        if metadata.get("format") != FORMAT:
            raise RunError(f"{saved} is a checkpoint of another version of etude", hint=f"{hint} to start again")
        if metadata.get("identity") != self.identity or not isinstance(step, int) or not isinstance(tokens, int):
            hint = f"use the same settings, or {hint} to start again"
            raise RunError(f"{saved} is a checkpoint that was made with other settings", hint=hint)
        verify_files(saved, [PROGRESS], kind=CheckpointError)
        self.step, self.num_tokens = step, tokens

    def finish(self) -> MidTrained:
        """Write the result."""
        group, trainable = self.group, self.core.trainable
        exported = {name: tensor_digest(one) for name, one in trainable.exported().items()}
        digests = {name: one for rank in group.all_gather(exported) for name, one in rank.items()}
        result = MidTrained(
            num_steps=len(self.batches),
            num_tokens=self.num_tokens,
            loss=self.loss,
            heldout_loss=self.heldout_loss,
            copy_probe=self.copy_probe,
            digest=content_digest(digests),
        )
        with group.checkpoint_directory(self.job.out) as folder:
            trainable.write_model(folder)
            if group.rank == 0:
                if self.job.assets is not None:
                    copy_assets(self.job.assets, folder)
                metadata = {**dataclasses.asdict(result), "identity": self.identity}
                (folder / RESULT).write_text(json.dumps(metadata) + "\n")
        return result

    def _report(self, **values: float) -> None:
        now, (since, tokens) = time.monotonic(), self._reported
        if self.telemetry is None or (now - since < 1.0 and self.step < len(self.batches)):
            return
        self._reported = now, self.num_tokens
        name = self.plans[self.phase].settings.name
        self.telemetry.event(
            "mid.step",
            step=self.step,
            num_steps=len(self.batches),
            tokens=self.num_tokens,
            loss=self.loss,
            tokens_per_s=(self.num_tokens - tokens) / max(now - since, 1e-9),
            **({"phase": name} if name else {}),
            **values,
        )


def _num_tokens(spans: Spans) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum())

"""Trains a model on a corpus (mid-training), data-parallel and resumable at any moment.

A step's batch does not depend on the number of ranks. Each rank computes its part, gradients are summed as one buffer,
and every rank takes the same optimiser step, so their weights stay equal to the bit (checked at the end). Checkpoints
are in ``<out>.partial/step-NNNNNN`` until the result is complete. A killed run resumes from the last one and ends with
the same bytes as a run without interruption."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from etude.config import to_plain
from etude.corpus.shards import MANIFEST
from etude.errors import CheckpointError, ParityError, RunError
from etude.file_checksums import SUMS, file_digest, files_in, verify_files
from etude.models.attention import Packed
from etude.models.checkpoint import load_model, write_model
from etude.models.checkpoint_files import atomic_directory, load_tensors, save_tensors
from etude.models.config import ModelConfig
from etude.models.headers import read_json
from etude.models.hooks import ForwardHook, no_hook
from etude.models.mtp import trunk_of
from etude.models.transformer import Forward, Transformer, resize_heads
from etude.models.weight_views import hf_biases, hf_views
from etude.telemetry import Telemetry
from etude.training.balance import ExpertBalancer
from etude.training.batches import group_by_budget, plan_batches, rank_share, split_documents
from etude.training.config import LiveWeights, MidTrainingConfig, OptimizerKind
from etude.training.corpus import Spans, TokenizedDocuments
from etude.training.data_parallel import RankGroup, run_ranks
from etude.training.mid_training_phases import PhasePlan, open_documents, plan_phases, verify_corpora
from etude.training.mid_training_progress import checkpoint_path, newest_checkpoint, progress_folder
from etude.training.mtp import MtpTrainer
from etude.training.muon import Muon
from etude.training.nan_check import check_logits, checked_step
from etude.training.optimizer import AdamW
from etude.training.schedule import lr_multiplier

FORMAT = 1
FORWARD_TOKENS = 4096  # of one forward pass; bounds memory, changes nothing else
NOT_LEARNED = -100  # the target of a token without loss: cross_entropy's `ignore_index`
RESULT, PROGRESS, STATE = "mid_training.json", "progress.json", "optimizer.state"
MTP_STATE = "heads.state"  # of the optimiser of MTP heads

Probe = Callable[[Transformer], float]
"""Measures a skill of the model as one number, for the event `mid.eval`. It must be a module-level function or a
partial of one, since the ranks are separate processes."""


@dataclass(frozen=True)
class MidTrained:
    """The result of mid-training; also written to `mid_training.json`.

    `loss`: the loss of the last step, in nats per token. `heldout_loss`: None if the corpus has no held-out documents.
    `copy_probe`: the last value of the `copy_probe` given to `mid_train`; None without one. `digest`: SHA-256 of the
    weights' bytes, the same in every rank."""

    num_steps: int
    num_tokens: int
    loss: float
    heldout_loss: float | None
    copy_probe: float | None
    digest: str


@dataclass(frozen=True)
class _Job:
    config: MidTrainingConfig
    model: ModelConfig
    corpus: Path | None
    out: Path
    start: Path | None
    assets: Path | None
    seed: int
    probe: Probe | None
    telemetry: tuple[Path, str] | None

    @property
    def partial(self) -> Path:
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
        plain = [to_plain(self.config), to_plain(self.model), self.seed, start, list(corpora.values())]
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


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
) -> MidTrained:
    """Train a new model, or the one in the checkpoint directory `start`, on a corpus, in one phase or several.

    `corpus_dir`: a folder of `write_corpus`, for phases without a corpus of `etude corpus build` (`config.corpus`);
    None where all have one. `out_dir` becomes a Hugging Face directory in float32. It returns at once when `out_dir`
    has the result of the same settings.

    - `model`: its sizes, those of `start` if that is given.
    - `ranks`: the number of data-parallel processes.
    - `assets`: a directory whose tokeniser files are copied. It must be the tokeniser of the corpora.
    - `copy_probe`: measures copying from the context, for the event `mid.eval`.

    Raises `RunError` when a rank dies or a checkpoint was made with other settings, `ConfigError` for settings that do
    not fit together, `TaskError`, `InputError` or `CorpusError` for a missing or damaged corpus, `CheckpointError` for
    disk errors, and `DeadlineExceeded` when the ranks make no progress."""
    where = None if telemetry is None else (telemetry.path, telemetry.process)
    job = _Job(
        config,
        model,
        None if corpus_dir is None else Path(corpus_dir),
        Path(out_dir),
        None if start is None else Path(start),
        None if assets is None else Path(assets),
        seed,
        copy_probe,
        where,
    )
    verify_corpora(job.plans, model=model)  # report errors of the corpora before ranks start
    if (job.out / RESULT).is_file():
        shutil.rmtree(job.partial, ignore_errors=True)
        return _finished(job)
    results = run_ranks(_train, job, ranks=ranks)
    if any(result.digest != results[0].digest for result in results):
        digests = ", ".join(result.digest[:12] for result in results)
        raise ParityError(
            "the ranks ended with different weights",
            f"digests by rank: {digests}",
            hint="this is a bug in etude: report it with the settings of the run",
        )
    shutil.rmtree(job.partial, ignore_errors=True)
    return results[0]


def _finished(job: _Job) -> MidTrained:
    metadata = read_json(job.out / RESULT)
    if metadata.pop("identity", None) != job.identity:
        hint = "give another output directory, or delete this one"
        raise RunError(f"{job.out} was trained with other settings", hint=hint)
    try:
        return MidTrained(**metadata)  # type: ignore[arg-type]
    except TypeError as error:
        raise CheckpointError(f"{job.out / RESULT} is damaged", str(error), hint="delete the directory") from None


def _train(ranks: RankGroup, job: _Job) -> MidTrained:
    run = _Run(ranks, job)
    for step in range(run.optimizer.num_steps, len(run.batches)):
        ranks.heartbeat()
        run.train_step(step)
        done = step + 1
        if done % job.config.eval_every == 0 or done == len(run.batches):
            run.evaluate()
        if done % job.config.checkpoint_every == 0 and done < len(run.batches):
            run.checkpoint()
    return run.finish()


class _Shares:
    """The ranks' shares of Muon's work: each orthogonalises some of the parameters, which all ranks have in full."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def gather(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mine = sorted(rows, key=lambda name: (rows[name].numel(), name))[self._ranks.rank :: self._ranks.size]
        return {name: rows[name] for name in mine}

    def shard(
        self, full_tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        names = sorted(like)
        parts = [full_tensors.get(name, torch.zeros_like(like[name])).reshape(-1) for name in names]
        together = torch.cat(parts)
        self._ranks.all_reduce(together)  # a sum with zeros: the bits of the rank that computed it
        split = torch.split(together, [len(part) for part in parts])
        return {name: part.view(like[name].shape) for name, part in zip(names, split, strict=True)}


class _Run:
    """The state of one rank."""

    def __init__(self, ranks: RankGroup, job: _Job) -> None:
        config = job.config
        self.ranks, self.job, self.identity = ranks, job, job.identity
        self.plans = job.plans
        self.documents = open_documents(self.plans, model=job.model, heldout_documents=config.heldout_documents)
        self.batches: list[Spans] = []
        self._first_steps: list[int] = []  # of each phase
        for number, (plan, documents) in enumerate(zip(self.plans, self.documents.train, strict=True)):
            self._first_steps.append(len(self.batches))
            self.batches += plan_batches(
                documents,
                num_tokens=plan.settings.num_tokens,
                batch_tokens=plan.settings.batch_tokens,
                document_tokens=plan.longest,
                seed=job.seed,
                phase=number,
            )
        self.phase = 0
        self.model = (Transformer(job.model, seed=job.seed) if job.start is None else load_model(job.start)).train()
        resize_heads(self.model, self.plans[0].model.mtp_heads, seed=job.seed)
        muon = functools.partial(Muon, exchange=_Shares(ranks))
        make_optimizer = functools.partial(
            muon if config.optimizer is OptimizerKind.MUON else AdamW,
            weights=LiveWeights.F32,
            weight_decay=config.weight_decay,
            grad_clip=config.grad_clip,
        )
        self.optimizer = make_optimizer(trunk_of(self.model))
        self.mtp = MtpTrainer(self.model, config.mtp, make_optimizer, balance=config.balance)
        self.telemetry = None
        if job.telemetry is not None and ranks.rank == 0:
            self.telemetry = Telemetry(job.telemetry[0], process=job.telemetry[1])
        self.balance = ExpertBalancer(self.model, speed=config.balance_bias)
        self.num_tokens, self.loss = 0, float("nan")
        self.heldout_loss: float | None = None
        self.copy_probe: float | None = None
        self._resume()
        self._reported = (time.monotonic(), self.num_tokens)

    def train_step(self, step: int) -> None:
        """Take one optimiser step."""
        self._enter_phase(step)
        spans, settings = self.batches[step], self.plans[self.phase].settings
        first, *ends = [*self._first_steps[self.phase :], len(self.batches)]
        sums = self._accumulate(spans)
        self.ranks.all_reduce(self.optimizer.grad)
        self.ranks.all_reduce(sums)
        lr = settings.lr * lr_multiplier(
            step - first,
            ends[0] - first,
            warmup_steps=settings.warmup_steps,
            decay_from=settings.decay_from,
            final=settings.final_lr,
        )
        norm = checked_step(self.optimizer, functools.partial(hf_views, self.model), lr=lr, step=step + 1)
        mtp_loss = self._step_heads(lr, step + 1)
        self.ranks.all_reduce(self.balance.load_LE)
        self.balance.update()
        self.loss = float(sums[0])
        self.num_tokens += _num_tokens(spans)
        self._report(step + 1, balance_loss=float(sums[1]), lr=lr, grad_norm=norm, **mtp_loss)

    def _step_heads(self, lr: float, step: int) -> dict[str, float]:
        """Take an optimiser step of the MTP heads, if there are any. Returns their loss as `mtp_loss`."""
        if self.mtp.optimizer is None:
            return {}
        self.ranks.all_reduce(self.mtp.optimizer.grad)
        loss = torch.tensor([self.mtp.step(lr, step=step)])
        self.ranks.all_reduce(loss)
        return {"mtp_loss": float(loss)}

    def _enter_phase(self, step: int) -> None:
        """Use the phase of this step, and its RoPE."""
        self.phase = bisect.bisect_right(self._first_steps, step) - 1
        if self.model.config != self.plans[self.phase].model:
            self.model.extend_context(self.plans[self.phase].model)

    def _accumulate(self, spans: Spans) -> torch.Tensor:
        """Accumulate this rank's part of the gradient, and return its part of (mean loss, balance loss)."""
        documents = self.documents.train[self.phase]
        num_targets, num_inputs = int(documents.num_targets(spans).sum()), _num_tokens(spans)
        sums = torch.zeros(2)
        for inputs, targets, lengths in _forwards(documents, rank_share(spans, self.ranks.rank, self.ranks.size)):
            self.ranks.heartbeat()
            done = self._forward(inputs, lengths)
            again = functools.partial(self._forward, inputs, lengths)
            place = "token {} of a batch".format
            check_logits(done.logits, again, step=self.optimizer.num_steps + 1, place=place)
            loss = F.cross_entropy(done.logits, targets, reduction="sum") / num_targets
            balance = torch.zeros(()) if done.balance is None else done.balance
            share = (len(inputs) + len(lengths)) / num_inputs
            balance = balance * share
            (loss + self.job.config.balance * balance).backward()  # type: ignore[no-untyped-call]
            self.balance.count(done.live)
            rows = (targets != NOT_LEARNED).nonzero()[:, 0]
            of_rows = rows, done.logits[rows], targets[rows]
            self.mtp.add(done.stream, inputs, lengths, *of_rows, normaliser=num_targets, share=share)
            sums += torch.stack([loss.detach(), balance.detach()])
        return sums

    def _forward(self, inputs: torch.Tensor, lengths: list[int], hook: ForwardHook = no_hook) -> Forward:
        return self.model.run(inputs, Packed(lengths, self.model.operators), hook=hook)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Compute the held-out loss over all ranks, and the copy probe on the first rank."""
        self.model.eval()
        sums = torch.zeros(2)
        for docs in self.documents.heldout:
            every = split_documents(docs, document_tokens=self.plans[self.phase].longest)
            for inputs, targets, lengths in _forwards(docs, rank_share(every, self.ranks.rank, self.ranks.size)):
                self.ranks.heartbeat()
                logits, _ = self.model(inputs, Packed(lengths, self.model.operators))
                loss = F.cross_entropy(logits, targets, reduction="sum")
                sums += torch.tensor([float(loss), float((targets != NOT_LEARNED).sum())])
        self.ranks.all_reduce(sums)
        self.heldout_loss = float(sums[0] / sums[1]) if sums[1] else None
        if self.job.probe is not None and self.ranks.rank == 0:
            self.copy_probe = self.job.probe(self.model)
        self.model.train()
        if self.telemetry is not None:
            self.telemetry.event(
                "mid.eval",
                step=self.optimizer.num_steps,
                tokens=self.num_tokens,
                heldout_loss=self.heldout_loss,
                copy_probe=self.copy_probe,
            )

    def checkpoint(self) -> None:
        """Write a checkpoint, on the first rank."""
        self.ranks.heartbeat()
        if self.ranks.rank:
            return
        metadata = {"format": FORMAT, "identity": self.identity, "num_tokens": self.num_tokens}
        path = checkpoint_path(self.job.out, self.optimizer.num_steps)
        with atomic_directory(path) as folder:
            save_tensors({**self.optimizer.state(), **hf_biases(self.model)}, folder / STATE)
            if self.mtp.optimizer is not None:
                save_tensors(self.mtp.optimizer.state(), folder / MTP_STATE)
            (folder / PROGRESS).write_text(json.dumps(metadata) + "\n")
        for other in self.job.partial.iterdir():
            if other != path:
                shutil.rmtree(other, ignore_errors=True)

    def _resume(self) -> None:
        """Resume from the last complete checkpoint, if there is one. Raises `RunError` when it has other settings."""
        found = newest_checkpoint(self.job.out)
        if found is None:
            return
        metadata = read_json(found / PROGRESS)
        tokens = metadata.get("num_tokens")
        if metadata.get("identity") != self.identity or not isinstance(tokens, int):
            raise RunError(
                f"{found} is a checkpoint that was made with other settings",
                hint=f"use the same settings, or delete {self.job.partial} to start again",
            )
        verify_files(found, [PROGRESS], kind=CheckpointError)
        state, biases = load_tensors(found / STATE), hf_biases(self.model)
        if not biases.keys() <= state.keys():
            raise RunError(
                f"{found} is a checkpoint of an older version of etude",
                "it does not have the router biases",
                hint=f"delete {self.job.partial} to start again",
            )
        self.optimizer.restore(state, live=False)
        if self.mtp.optimizer is not None:
            self.mtp.optimizer.restore(load_tensors(found / MTP_STATE), live=False)
        for name, bias in biases.items():
            bias.copy_(state[name])
        self.num_tokens = tokens

    def finish(self) -> MidTrained:
        """Write the result, on the first rank."""
        trunk, heads = (None if o is None else o.live.numpy().tobytes() for o in (self.optimizer, self.mtp.optimizer))
        digest = hashlib.sha256(trunk + (heads or b"")).hexdigest()
        result = MidTrained(
            num_steps=len(self.batches),
            num_tokens=self.num_tokens,
            loss=self.loss,
            heldout_loss=self.heldout_loss,
            copy_probe=self.copy_probe,
            digest=digest,
        )
        if self.ranks.rank == 0:
            with atomic_directory(self.job.out) as folder:
                write_model(self.model, folder, dtype="f32", assets=self.job.assets)
                metadata = {**dataclasses.asdict(result), "identity": self.identity}
                (folder / RESULT).write_text(json.dumps(metadata) + "\n")
        return result

    def _report(self, step: int, **values: float) -> None:
        now, (since, tokens) = time.monotonic(), self._reported
        if self.telemetry is None or (now - since < 1.0 and step < len(self.batches)):
            return
        self._reported = now, self.num_tokens
        name = self.plans[self.phase].settings.name
        self.telemetry.event(
            "mid.step",
            step=step,
            num_steps=len(self.batches),
            tokens=self.num_tokens,
            loss=self.loss,
            tokens_per_s=(self.num_tokens - tokens) / max(now - since, 1e-9),
            **({"phase": name} if name else {}),
            **values,
        )


def _num_tokens(spans: Spans) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum())


def _forwards(documents: TokenizedDocuments, spans: Spans) -> list[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """Return (inputs, targets, lengths) of each forward pass over some documents.

    The last token of a document is a target and no input. Targets without loss are `NOT_LEARNED`."""
    batches = []
    for part in group_by_budget((spans[:, 1] - spans[:, 0]).tolist(), FORWARD_TOKENS):
        pieces = [documents.read(int(start), int(stop)) for start, stop in spans[part]]
        docs = [torch.from_numpy(tokens) for tokens, _ in pieces]
        lengths = [len(doc) - 1 for doc in docs]
        learned = torch.cat([torch.from_numpy(learned[1:]) for _, learned in pieces])
        targets = torch.cat([d[1:] for d in docs]).masked_fill(~learned, NOT_LEARNED)
        batches.append((torch.cat([d[:-1] for d in docs]), targets, lengths))
    return batches

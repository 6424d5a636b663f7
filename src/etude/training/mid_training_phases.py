"""The phases of mid-training with their documents: settings checked, corpora opened, some documents held out of all.

Imports no torch. A phase reads shards of `etude corpus build` (`etude.corpus`), which stay in memory-mapped files, or
the run's own corpus (`training.corpus`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from etude.corpus.shards import Corpus as BuiltCorpus
from etude.corpus.shards import PhaseFacts, PhaseTokens, check_corpus
from etude.errors import ConfigError, CorpusError, nearest
from etude.file_checksums import file_digest
from etude.models.config import ModelConfig
from etude.training.config import LossTokens, MidTrainingConfig, PhaseSettings
from etude.training.corpus import Documents, Spans, TokenizedDocuments, read_corpus

HELD_OUT_SHARE = 20  # at most one document in so many is held out


@dataclass(frozen=True)
class BuiltPhase:
    """A phase of a corpus of `etude corpus build`."""

    corpus: BuiltCorpus
    facts: PhaseFacts


@dataclass(frozen=True)
class PhasePlan:
    """The plan of one phase: its settings, model and corpus, before the documents are read.

    `model`: the model's config in this phase. `folder`: the folder of its corpus. `built`: its part of a corpus of
    `etude corpus build`; None for the run's own corpus."""

    settings: PhaseSettings
    model: ModelConfig
    folder: Path
    built: BuiltPhase | None

    @property
    def place(self) -> tuple[Path, str, LossTokens]:
        """A key of the documents and their loss: phases with equal keys read the same documents with the same loss."""
        return self.folder, "" if self.built is None else self.built.facts.name, self.settings.loss

    @property
    def longest(self) -> int:
        """The largest number of tokens of a document that is not split."""
        return min(self.settings.document_tokens, self.model.context_tokens)


@dataclass(frozen=True)
class ShardDocuments:
    """Documents of `etude corpus build` over memory-mapped shards. `loss`: which of their tokens have loss."""

    phase: PhaseTokens
    spans: Spans
    loss: LossTokens

    def num_targets(self, spans: Spans) -> npt.NDArray[np.int64]:
        """Return for each piece (start, stop) of a document the number of its tokens with loss, without the first
        token."""
        if self.loss is LossTokens.SAID:
            counts = [np.count_nonzero(self.phase.said(start, stop)[1:]) for start, stop in spans.tolist()]
            return np.array(counts, np.int64)
        targets: npt.NDArray[np.int64] = np.maximum(spans[:, 1] - spans[:, 0] - 1, 0)
        return targets

    def read(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the token ids from `start` to `stop`, all of one document, and whether each has loss: [stop - start]
        each."""
        tokens = self.phase.tokens(start, stop).astype(np.int64)
        is_all = self.loss is LossTokens.ALL
        return tokens, np.ones(stop - start, np.bool_) if is_all else self.phase.said(start, stop)


@dataclass(frozen=True)
class PhaseDocuments:
    """The documents of each phase, and all documents that are held out."""

    train: tuple[TokenizedDocuments, ...]
    heldout: tuple[Documents, ...]


def plan_phases(
    config: MidTrainingConfig, corpus_dir: Path | None, *, model: ModelConfig, tokenizer: Path | None
) -> tuple[PhasePlan, ...]:
    """Check the settings of all phases against the model and the corpora, reading nothing but manifests.

    `corpus_dir`: the corpus of phases that name none. `tokenizer`: the folder with the model's tokenizer.json. Raises
    `ConfigError`, and `InputError` or `CorpusError` for a corpus that is missing, unfinished, damaged, or of another
    tokenizer."""
    plans = []
    for phase, settings, extended in zip(config.phases or [None], config.settings(), config.models(model), strict=True):
        if phase is not None and phase.document_tokens is not None:
            _check_length(settings, extended)
        folder = settings.corpus or corpus_dir
        if folder is None:
            hint = "set mid_training.corpus to a folder of `etude corpus build`"
            raise ConfigError(f"{_called(settings)} has no corpus", hint=hint)
        if settings.corpus is None and settings.loss is LossTokens.SAID:
            hint = "set mid_training.corpus to a folder of `etude corpus build` with a source of chats"
            raise ConfigError(f'{_called(settings)} has loss = "said", and no corpus of chats', hint=hint)
        built = None
        if settings.corpus is not None:
            corpus = BuiltCorpus.open(folder)
            built = BuiltPhase(corpus, _phase_of(corpus, settings.name))
            _check_vocabulary(corpus, model, tokenizer)
            _check_said(settings, built)
        plans.append(PhasePlan(settings, extended, folder, built))
    return tuple(plans)


def verify_corpora(plans: tuple[PhasePlan, ...], *, model: ModelConfig) -> None:
    """Verify every byte of the documents of these phases. Raises `CorpusError` or `TaskError`."""
    for folder in dict.fromkeys(plan.folder for plan in plans if plan.built is None):
        read_corpus(folder, vocab_size=model.vocab_size)
    built = {(plan.folder, plan.built.facts.name): plan.built for plan in plans if plan.built is not None}
    for one in built.values():
        for _ in check_corpus(one.corpus, one.facts.name):
            pass


def open_documents(plans: tuple[PhasePlan, ...], *, model: ModelConfig, heldout_documents: int) -> PhaseDocuments:
    """Open the documents of all phases.

    `heldout_documents` documents of corpora of `etude corpus build`, at most a twentieth of all, are held out from all
    phases: those with the smallest hashes of source and id. They are shortened to the largest `PhasePlan.longest`: to
    their first tokens, or, for chats with loss on answers only, to tokens around the first answer."""
    own = {plan.folder: read_corpus(plan.folder, vocab_size=model.vocab_size) for plan in plans if plan.built is None}
    opened = {plan.place: _Opened.of(plan, plan.built) for plan in plans if plan.built is not None}
    keys = np.unique(np.concatenate([np.zeros(0, np.uint64), *(one.keys_D for one in opened.values())]))
    held = keys[: min(heldout_documents, len(keys) // HELD_OUT_SHARE)]
    kept = {
        place: ShardDocuments(one.phase, one.spans_D2[~np.isin(one.keys_D, held)], one.loss)
        for place, one in opened.items()
    }
    train = tuple(own[plan.folder].train if plan.built is None else kept[plan.place] for plan in plans)
    heldout = [corpus.heldout for corpus in own.values()]
    if len(held):
        heldout.append(_first_of_each(list(opened.values()), held, most=max(plan.longest for plan in plans)))
    return PhaseDocuments(train, tuple(heldout))


@dataclass(frozen=True)
class _Opened:
    """The documents of a phase that have tokens with loss: `PhaseTokens.spans_D2` and `keys_D` of these."""

    phase: PhaseTokens
    spans_D2: Spans
    keys_D: npt.NDArray[np.uint64]
    loss: LossTokens

    @classmethod
    def of(cls, plan: PhasePlan, built: BuiltPhase) -> _Opened:
        phase, loss = PhaseTokens(built.corpus, built.facts.name), plan.settings.loss
        if loss is LossTokens.ALL:
            return cls(phase, phase.spans_D2, phase.keys_D, loss)
        has_loss_D = ShardDocuments(phase, phase.spans_D2, loss).num_targets(phase.spans_D2) > 0
        return cls(phase, phase.spans_D2[has_loss_D], phase.keys_D[has_loss_D], loss)


def _first_of_each(phases: list[_Opened], held: npt.NDArray[np.uint64], *, most: int) -> Documents:
    """Return at most `most` tokens of one document for each of these keys, and which have loss.

    They are the first ones. Where these have no loss, since an answer comes later, half of them come before it. If
    phases with both kinds of loss read a document, its loss is on what is said."""
    texts: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]] = {}
    for one in sorted(phases, key=lambda one: one.loss is LossTokens.ALL):
        documents = ShardDocuments(one.phase, one.spans_D2, one.loss)
        for index in np.flatnonzero(np.isin(one.keys_D, held)):
            start, stop = map(int, documents.spans[index])
            tokens, learned = documents.read(start, stop)
            first = int(np.flatnonzero(learned[1:])[0]) + 1 if learned[1:].any() else 0
            at = 0 if first < most else first - most // 2
            texts.setdefault(int(one.keys_D[index]), (tokens[at : at + most], learned[at : at + most]))
    offsets = np.cumsum([0, *(len(tokens) for tokens, _ in texts.values())], dtype=np.int64)
    tokens, learned = (np.concatenate(parts) for parts in zip(*texts.values(), strict=True))
    return Documents(tokens.astype(np.uint32), offsets, said=learned)


def _phase_of(corpus: BuiltCorpus, name: str) -> PhaseFacts:
    """Return the corpus's phase of this name, or its only one."""
    phases = {phase.name: phase for phase in corpus.manifest.phases}
    if len(phases) == 1:
        return next(iter(phases.values()))
    if name not in phases:
        facts = f"its phases are {', '.join(phases)}"
        hint = "write a [[mid_training.phases]] table for each, with its name"
        if name:
            hint = f"{nearest(name, list(phases))}; or {hint}"
        raise ConfigError(
            f"{corpus.folder} has no phase {name!r}" if name else f"{corpus.folder} has several phases",
            facts,
            hint=hint,
        )
    return phases[name]


def _check_vocabulary(corpus: BuiltCorpus, model: ModelConfig, tokenizer: Path | None) -> None:
    path = None if tokenizer is None else tokenizer / "tokenizer.json"
    if path is None or not path.is_file():
        facts = f"there is no {path}, to compare it with that of the corpus" if path else "the model has no tokenizer"
        hint = "give a checkpoint folder with tokenizer.json"
        raise ConfigError(f"a model without tokenizer cannot be trained on {corpus.folder}", facts, hint=hint)
    corpus.check_tokenizer(file_digest(path), path)
    if corpus.manifest.tokenizer.vocab_size > model.vocab_size:
        facts = f"{corpus.manifest.tokenizer.vocab_size:,} tokens, the model has {model.vocab_size:,}"
        hint = "use the tokenizer of the model, or a model with more rows in its embedding"
        raise CorpusError(f"the vocabulary of {corpus.folder} is larger than that of the model", facts, hint=hint)


def _check_said(settings: PhaseSettings, built: BuiltPhase) -> None:
    if settings.loss is LossTokens.SAID and not any(shard.said_tokens for shard in built.facts.shards):
        facts = f"phase {built.facts.name!r} of {built.corpus.folder} has no token that an assistant said"
        hint = 'build it from a source of the kind "chats", or set loss = "all"'
        raise ConfigError(f'{_called(settings)} has loss = "said"', facts, hint=hint)


def _check_length(settings: PhaseSettings, model: ModelConfig) -> None:
    wanted = settings.document_tokens
    if wanted > model.context_tokens:
        facts = f"the model has positions for {model.context_tokens} tokens"
        hint = "set rope_factor for a longer context, or lower document_tokens"
    elif wanted > settings.batch_tokens:
        facts = f"a batch has batch_tokens = {settings.batch_tokens}"
        hint = "raise batch_tokens of the phase, or lower document_tokens"
    else:
        return
    raise ConfigError(f"{_called(settings)} has document_tokens = {wanted}", facts, hint=hint)


def _called(settings: PhaseSettings) -> str:
    return f"phase {settings.name!r} of mid_training" if settings.name else "mid_training"

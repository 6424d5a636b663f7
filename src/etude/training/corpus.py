"""Reads and writes a corpus on disk: token ids of all documents, and the offset of each document. Imports no torch.

All numbers are little-endian:

- ``tokens.bin``: token ids, uint16.
- ``documents.bin``: the offset of each document in ``tokens.bin``, and the total number of tokens at the end, int64.
- ``context.bin``: for each document the number of its leading tokens that have no loss, int64.

``heldout.*.bin`` hold the documents that are never trained on. ``corpus.json`` has the counts. It is written last:
without it the corpus is incomplete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from etude.errors import TaskError
from etude.file_checksums import SUMS, verify_files, write_sums
from etude.records.wire import I32

FORMAT = 2
_HINT = "delete the corpus directory: the run then creates it again"


@dataclass(frozen=True)
class Answered:
    """A document of which only the end has loss, such as a prompt with its answer.

    `token_ids`: [T] int32; the first `num_context` of them have no loss."""

    token_ids: I32
    num_context: int


Spans = npt.NDArray[np.int64]
"""[pieces, 2]: the first token of each piece of a document, and the one after its last."""


class TokenizedDocuments(Protocol):
    """Documents as token ids that mid-training can read. Tokens are numbered through all documents."""

    @property
    def spans(self) -> Spans:
        """[documents, 2] The first token of each document, and the one after its last."""

    def num_targets(self, spans: Spans) -> npt.NDArray[np.int64]:
        """Return for each piece (start, stop) of a document the number of its tokens with loss, without the first
        token."""

    def read(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the token ids from `start` to `stop`, all of one document, and whether each has loss: [stop - start]
        each."""


@dataclass(frozen=True)
class Documents:
    """Many documents as token ids in arrays.

    `tokens`: [T], uint16 or uint32, of all documents, one after another. `offsets`: [documents + 1] the start of each
    document, and T. `num_context`: [documents] the number of leading tokens of each document that have no loss; None: 0
    for all. `said`: [T] bool, whether a token may have loss; None: all may.

    >>> docs = Documents(tokens=np.array([5, 6, 7], np.uint16), offsets=np.array([0, 2, 3]))
    >>> len(docs), docs[0].tolist(), docs.lengths.tolist()
    (2, [5, 6], [2, 1])
    """

    tokens: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]
    num_context: npt.NDArray[np.int64] | None = None
    said: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> npt.NDArray[np.uint16] | npt.NDArray[np.uint32]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[documents] The number of tokens of each document."""
        return np.diff(self.offsets)

    @cached_property
    def learned(self) -> npt.NDArray[np.bool_]:
        """[T] Whether a token has loss. The first token of a document has none, since nothing comes before it."""
        found = np.ones(len(self.tokens), np.bool_) if self.said is None else self.said.copy()
        num_context = np.zeros(len(self), np.int64) if self.num_context is None else self.num_context
        for start, stop, count in zip(self.offsets[:-1], self.offsets[1:], np.maximum(num_context, 1), strict=True):
            found[start : min(start + count, stop)] = False
        return found

    @cached_property
    def num_learned_before(self) -> npt.NDArray[np.int64]:
        """[T + 1] For each token the number of tokens with loss before it; at the end, their total number."""
        return np.concatenate([[0], np.cumsum(self.learned)])

    @property
    def spans(self) -> Spans:
        """[documents, 2] The first token of each document, and the one after its last."""
        return np.stack([self.offsets[:-1], self.offsets[1:]], 1)

    def num_targets(self, spans: Spans) -> npt.NDArray[np.int64]:
        """Return for each piece (start, stop) of a document the number of its tokens with loss, without the first
        token."""
        before = self.num_learned_before
        return before[spans[:, 1]] - before[np.minimum(spans[:, 0] + 1, spans[:, 1])]

    def read(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the token ids from `start` to `stop`, all of one document, and whether each has loss: [stop - start]
        each."""
        return self.tokens[start:stop].astype(np.int64), self.learned[start:stop]


@dataclass(frozen=True)
class Corpus:
    """The training documents and the held-out documents of a corpus."""

    train: Documents
    heldout: Documents


def write_corpus(
    folder: Path | str, documents: Sequence[I32 | Answered], *, heldout: Sequence[I32 | Answered] = ()
) -> None:
    """Write a corpus directory, in place of an existing one. `documents` and `heldout`: the token ids of each document.

    Raises `TaskError` for a token id that does not fit 16 bits."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.json").unlink(missing_ok=True)
    (folder / SUMS).unlink(missing_ok=True)
    counts = {}
    for name, prefix, docs in (("train", "", documents), ("heldout", "heldout.", heldout)):
        packed = _pack(docs)
        packed.tokens.astype("<u2").tofile(folder / f"{prefix}tokens.bin")
        packed.offsets.astype("<i8").tofile(folder / f"{prefix}documents.bin")
        num_context = np.array([doc.num_context if isinstance(doc, Answered) else 0 for doc in docs], "<i8")
        num_context.tofile(folder / f"{prefix}context.bin")
        counts[name] = {"num_documents": len(packed), "num_tokens": len(packed.tokens)}
    (folder / "corpus.json").write_text(json.dumps({"format": FORMAT, **counts}) + "\n")
    write_sums(folder)


def _pack(given: Iterable[I32 | Answered]) -> Documents:
    documents = [doc.token_ids if isinstance(doc, Answered) else doc for doc in given]
    tokens = np.concatenate([np.zeros(0, np.int32), *documents])
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < 1 << 16:
        facts = f"token ids from {tokens.min()} to {tokens.max()} do not fit 16 bits"
        raise TaskError("the corpus cannot be written", facts, hint="use a tokeniser with at most 65,536 tokens")
    return Documents(tokens.astype(np.uint16), np.cumsum([0, *(len(d) for d in documents)], dtype=np.int64))


def read_corpus(folder: Path | str, *, vocab_size: int) -> Corpus:
    """Read a corpus directory.

    Raises `TaskError` when it is missing, damaged, empty, or has tokens beyond the vocabulary."""
    folder = Path(folder)
    try:
        metadata = json.loads((folder / "corpus.json").read_bytes())
        if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
            raise ValueError(f"corpus.json does not have format version {FORMAT}")
        corpus = Corpus(train=_read(folder, ""), heldout=_read(folder, "heldout."))
    except (OSError, ValueError) as error:
        raise TaskError(f"{folder} has no corpus that can be read", str(error), hint=_HINT) from None
    verify_files(folder, kind=TaskError)
    if not len(corpus.train):
        hint = "raise the numbers of documents in the section [corpus]"
        raise TaskError(f"the corpus in {folder} has no documents", hint=hint)
    for docs in (corpus.train, corpus.heldout):
        if len(docs.tokens) and docs.tokens.max() >= vocab_size:
            raise TaskError(
                f"the corpus in {folder} has token id {docs.tokens.max()}",
                f"the model's vocabulary has {vocab_size} tokens",
                hint="set model.vocab_size to the tokeniser's size",
            )
    return corpus


def _read(folder: Path, prefix: str) -> Documents:
    tokens = np.fromfile(folder / f"{prefix}tokens.bin", "<u2").astype(np.uint16, copy=False)
    offsets = np.fromfile(folder / f"{prefix}documents.bin", "<i8").astype(np.int64, copy=False)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 0).any():
        raise ValueError(f"the offsets in {prefix}documents.bin do not match {prefix}tokens.bin")
    num_context = np.fromfile(folder / f"{prefix}context.bin", "<i8").astype(np.int64, copy=False)
    if len(num_context) != len(offsets) - 1 or (num_context < 0).any() or (num_context > np.diff(offsets)).any():
        raise ValueError(f"the numbers in {prefix}context.bin do not match {prefix}documents.bin")
    return Documents(tokens, offsets, num_context)

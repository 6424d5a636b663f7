"""The passes over one piece of a corpus: read and filter it, then encode what is kept. Each can be done again.

A finished piece is a folder that is renamed into place, so after a kill it is complete or missing. Its files are arrays
and texts that are only appended to, so memory does not grow with the piece:

- `text.bin`: the texts, one after another. `provenance.bin`: a JSON object for each document.
- `said.bin`: of chats, the first and the last + 1 character of each answer, int64 [S, 2]; of rollouts, the tokens.
- `recorded.bin`: of rollouts, the token ids, uint32.
- `index.bin`: for each document the ends of all four, int64 [N, 4].
- `exact.bin`: SHA-256 of the normalised text, shortened to 128 bits, uint64 [N, 2].
- `signatures.bin`: MinHash signatures, uint32 [N, 128]. `counts.json`: counts and examples of drops."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from etude import progress
from etude.corpus.config import CorpusConfig
from etude.corpus.contamination import HeldOutIndex
from etude.corpus.documents import MAX_BYTES, DividedSource, Document, DocumentSource, Dropped, OfTokenizer
from etude.corpus.encoding import Encoder, read_tokenizer
from etude.corpus.filters import filtered
from etude.corpus.near import NUM_HASHES, shingles_of, signature
from etude.corpus.tokens import Tokens
from etude.plugins import Kind, bounded, called, make, unusable

WORK_FORMAT = 5
"""The format of the files in `work`, and the filters that they passed: a build does not continue with those of another
one."""
EXAMPLES = 5
"""Number of examples of each reason that are kept."""
NEXT_S = 600.0
"""Deadline for one document of a plug-in."""
_ROWS = 4_096  # signatures that are read at a time


class Counts(msgspec.Struct, kw_only=True):
    """Counts of the documents of one piece. `bytes`: the size of the kept texts in UTF-8.

    `licences`, `dropped` and `redacted` map a licence, a reason or a kind of secret to the number of documents.
    `other_licences` has the licences of the documents that were dropped for theirs.
    `examples` maps a reason to some of the documents that were dropped for it."""

    documents: int = 0
    bytes: int = 0
    licences: dict[str, int] = msgspec.field(default_factory=dict)
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    redacted: dict[str, int] = msgspec.field(default_factory=dict)
    other_licences: dict[str, int] = msgspec.field(default_factory=dict)
    examples: dict[str, list[str]] = msgspec.field(default_factory=dict)

    def drop(self, reason: str, example: str) -> None:
        """Count a document that is dropped for this reason. Keep it as an example if the reason has few examples so
        far."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        kept = self.examples.setdefault(reason, [])
        if len(kept) < EXAMPLES:
            kept.append(example)

    def undo(self, licence: str, num_bytes: int) -> None:
        """Subtract a document that was counted as kept."""
        self.bytes -= num_bytes
        self.licences[licence] -= 1
        if not self.licences[licence]:
            del self.licences[licence]

    def add(self, other: Counts) -> None:
        """Add the counts of a later piece."""
        self.documents += other.documents
        self.bytes += other.bytes
        for mine, theirs in (
            (self.licences, other.licences),
            (self.dropped, other.dropped),
            (self.redacted, other.redacted),
            (self.other_licences, other.other_licences),
        ):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count
        for reason, examples in other.examples.items():
            kept = self.examples.setdefault(reason, [])
            kept += examples[: max(0, EXAMPLES - len(kept))]


@dataclass(frozen=True)
class Job:
    """One piece of a source to read. `number`: its index among all pieces. `source`: the index of the source in the
    config. `piece`: None if the source is not divided into pieces."""

    number: int
    source: int
    piece: Any


def open_source(config: CorpusConfig, index: int) -> DocumentSource:
    """Construct the document source of a `[[sources]]` table. Raises `PluginRefused`, `ConfigError` or `InputError`."""
    source: DocumentSource = make(Kind.DOCUMENTS, config.sources[index].kind, where=f"sources[{index}].kind")
    return source


def normalised(text: str) -> str:
    """Return a text without the differences that exact deduplication ignores: spaces at line ends, empty lines.

    >>> normalised("a \\r\\n\\n  b\\n") == normalised("a\\n  b")
    True
    """
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def read_piece(config: CorpusConfig, job: Job, folder: Path, heldout: HeldOutIndex) -> None:
    """Read and filter the documents of a piece, and write them with their digests and signatures to `folder`. Does
    nothing if the folder exists."""
    with _new_folder(folder) as scratch:
        if scratch is None:
            return
        counts, ends = Counts(), np.zeros(4, "<i8")
        names = (
            "text.bin", "provenance.bin", "said.bin", "recorded.bin", "index.bin", "exact.bin", "signatures.bin",
        )  # fmt: skip
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context((scratch / name).open("wb")) for name in names]
            for document, tokens in _kept(config, job, heldout, counts):
                data = document.text.encode()
                meta = msgspec.json.encode(
                    {
                        "source": config.sources[job.source].name,
                        "id": document.id,
                        "path": document.path,
                        "licence": document.licence,
                    }
                )
                said = np.array(document.said, "<i8").tobytes()
                recorded = np.array(document.token_ids, "<u4").tobytes()
                ends += [len(data), len(meta), len(document.said), len(document.token_ids)]
                exact = hashlib.sha256(normalised(document.text).encode()).digest()[:16]
                signed = signature(shingles_of(tokens)).astype("<u4").tobytes()
                parts = (data, meta, said, recorded, ends.tobytes(), exact, signed)
                for file, part in zip(files, parts, strict=True):
                    file.write(part)
                counts.bytes += len(data)
                counts.licences[document.licence] = counts.licences.get(document.licence, 0) + 1
        (scratch / "counts.json").write_bytes(msgspec.json.encode(counts, order="deterministic"))


def _kept(config: CorpusConfig, job: Job, heldout: HeldOutIndex, counts: Counts) -> Iterator[tuple[Document, Tokens]]:
    """Yield the documents of a piece that pass all filters and hold no held-out text, and their tokens."""
    source = config.sources[job.source]
    for found in _documents(config, job):
        progress.begin(f"filtering document {found.id!r} of source {source.name!r}")
        counts.documents += 1
        if isinstance(found, Dropped):
            counts.drop(found.reason, found.id)
            continue
        if not found.licence and source.licence:
            found = msgspec.structs.replace(found, licence=source.licence)
        result = filtered(found, config)
        for kind in result.secrets:
            counts.redacted[kind] = counts.redacted.get(kind, 0) + 1
        if result.document is None:
            counts.drop(result.reason, f"{found.id} has {result.licence}" if result.licence else found.id)
            if result.licence:
                counts.other_licences[result.licence] = counts.other_licences.get(result.licence, 0) + 1
            continue
        tokens = Tokens.of(result.document.text)
        if (leak := heldout.find(result.document.text, tokens)) is not None:
            counts.drop("held-out", f"{found.id} has {leak}")
        else:
            yield result.document, tokens


def _documents(config: CorpusConfig, job: Job) -> Iterator[Document | Dropped]:
    source, plugin = open_source(config, job.source), config.sources[job.source].kind
    name = f"of source {config.sources[job.source].name!r}"
    progress.begin(f"reading document 0 of piece {job.number} {name}")
    if isinstance(source, DividedSource) and job.piece is not None:
        with called(Kind.DOCUMENTS, plugin, "its method read"):
            for number, read in enumerate(source.read(job.piece), 1):
                yield read
                progress.begin(f"reading document {number} of piece {job.number} {name}")
        return
    found = bounded(Kind.DOCUMENTS, plugin, "documents", lambda: iter(source.documents()), deadline_s=NEXT_S)
    number = 0
    while True:
        progress.begin(f"reading document {number} {name}")
        one = bounded(Kind.DOCUMENTS, plugin, f"document {number}", lambda: next(found, None), deadline_s=NEXT_S)
        if one is None:
            return
        if not isinstance(one, Document | Dropped):
            raise unusable(Kind.DOCUMENTS, plugin, f"document {number} is {type(one).__name__}, expected a Document")
        number += 1
        yield _sound(one)


def _sound(document: Document | Dropped) -> Document | Dropped:
    """A document of a plug-in, unless it is too large or cannot be written as UTF-8."""
    if isinstance(document, Dropped):
        return document
    if len(document.text) > MAX_BYTES:
        return Dropped(document.id, "too-large")
    try:
        for part in (document.id, document.text, document.path, document.licence):
            part.encode()
    except UnicodeEncodeError:
        return Dropped(document.id.encode("utf-8", "replace").decode(), "not-utf-8")
    places = [place for span in document.said for place in span]
    length = len(document.token_ids or document.text)
    if places != sorted(places) or (places and not 0 <= places[0] <= places[-1] <= length):
        return Dropped(document.id, "bad-answers")
    return document


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path | None]:
    """Yield a scratch folder that is renamed to `folder` at the end of the block; None if `folder` is there."""
    if folder.is_dir():
        yield None
        return
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class Piece:
    """A piece that `read_piece` wrote to disk. It keeps no file open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """Where the parts of each document begin, int64 [N + 1, 4]: text and provenance in bytes, answers in
        (first, stop) pairs, recorded tokens in tokens. The last row is the ends."""
        ends = np.fromfile(self.folder / "index.bin", "<i8").reshape(-1, 4)
        return np.concatenate([np.zeros((1, 4), np.int64), ends])

    def __len__(self) -> int:
        return len(self.ends) - 1

    @cached_property
    def exact(self) -> npt.NDArray[np.uint64]:
        """[N, 2] uint64: digests of the normalised texts."""
        return np.fromfile(self.folder / "exact.bin", "<u8").reshape(-1, 2)

    def signatures(self) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the MinHash signatures in parts: [n, 128] uint32."""
        with (self.folder / "signatures.bin").open("rb") as file:
            while data := file.read(4 * NUM_HASHES * _ROWS):
                yield np.frombuffer(data, "<u4").reshape(-1, NUM_HASHES)

    @property
    def counts(self) -> Counts:
        """The counts of the piece, before deduplication."""
        return msgspec.json.decode((self.folder / "counts.json").read_bytes(), type=Counts)

    def text(self, index: int) -> str:
        """Return the text of a document."""
        return self._part("text.bin", index, 0).decode()

    def provenance(self, index: int) -> bytes:
        """Return source, id, path and licence of a document as a JSON object."""
        return self._part("provenance.bin", index, 1)

    def said(self, index: int) -> list[tuple[int, int]]:
        """Return the (first, last + 1) character of each answer in a chat, or token in a recorded rollout; empty for
        any other document."""
        start, stop = self.ends[index : index + 2, 2].tolist()
        if start == stop:
            return []
        found = np.fromfile(self.folder / "said.bin", "<i8", 2 * (stop - start), offset=16 * start)
        return [(int(first), int(last)) for first, last in found.reshape(-1, 2)]

    def recorded(self, index: int) -> npt.NDArray[np.uint32]:
        """Return the token ids of a recorded rollout, [T] uint32; of any other document none."""
        start, stop = self.ends[index : index + 2, 3].tolist()
        return np.fromfile(self.folder / "recorded.bin", "<u4", stop - start, offset=4 * start)

    def key(self, index: int) -> str:
        """Return the source and the id of a document, as one text."""
        meta = msgspec.json.decode(self.provenance(index), type=dict[str, str])
        return f"{meta['source']}/{meta['id']}"

    def _part(self, name: str, index: int, column: int) -> bytes:
        start, stop = self.ends[index : index + 2, column].tolist()
        with (self.folder / name).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)


def encode_piece(piece: Piece, kept: npt.NDArray[np.bool_], folder: Path, encoder: Encoder) -> None:
    """Encode the kept documents of a piece, and write their tokens to `folder`. Does nothing if the folder exists.

    Files: `tokens.bin` (uint32); `ends.bin` (int64, the end of every document of the piece; dropped documents have no
    tokens); if there is a chat, `said.bin` (a byte for each token: 1 if it belongs to an answer of the assistant)."""
    with _new_folder(folder) as scratch:
        if scratch is None:
            return
        end = 0
        has_chats = bool(piece.ends[-1, 2])
        with contextlib.ExitStack() as stack:
            tokens, ends = (stack.enter_context((scratch / name).open("wb")) for name in ("tokens.bin", "ends.bin"))
            marks = stack.enter_context((scratch / "said.bin").open("wb")) if has_chats else None
            for index in range(len(piece)):
                if kept[index]:
                    key = piece.key(index)
                    progress.begin(f"encoding document {key}")
                    said, recorded = piece.said(index), piece.recorded(index)
                    if len(recorded):
                        ids, marked = encoder.mark_recorded(recorded, said)
                    elif said:
                        ids, marked = encoder.encode_chat(piece.text(index), said)
                    else:
                        ids = encoder.encode(piece.text(index), key)
                        marked = np.zeros(len(ids), np.bool_)
                    if marks is not None:
                        marks.write(marked.tobytes())
                    tokens.write(ids.astype("<u4").tobytes())
                    end += len(ids)
                ends.write(np.array([end], "<i8").tobytes())


class EncodedPiece:
    """The token ids of a piece that `encode_piece` wrote. No file stays open: a corpus may have thousands of pieces."""

    def __init__(self, folder: Path) -> None:
        self._path, self._said = folder / "tokens.bin", folder / "said.bin"
        self.has_chats = self._said.is_file()
        self.ends = np.concatenate([np.zeros(1, np.int64), np.fromfile(folder / "ends.bin", "<i8")])

    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each document: [N]; 0 for one that was dropped."""
        return np.diff(self.ends)

    def tokens(self, index: int) -> npt.NDArray[np.uint32]:
        """Return the token ids of a document: [T] uint32."""
        start, stop = self.ends[index : index + 2].tolist()
        return np.fromfile(self._path, "<u4", stop - start, offset=4 * start)

    def said(self, index: int) -> npt.NDArray[np.bool_]:
        """Return which tokens of a document belong to answers of the assistant: [T] bool."""
        start, stop = self.ends[index : index + 2].tolist()
        if not self.has_chats:
            return np.zeros(stop - start, np.bool_)
        return np.fromfile(self._said, np.bool_, stop - start, offset=start)


def pieces_of(config: CorpusConfig, source: int) -> list[Any]:
    """Return the pieces of a source: [None] for one that is not divided."""
    opened = open_source(config, source)
    if isinstance(opened, OfTokenizer):
        opened.check_tokenizer(read_tokenizer(config.tokenizer)[1])
    if not isinstance(opened, DividedSource):
        return [None]
    with called(Kind.DOCUMENTS, config.sources[source].kind, "its method pieces"):
        return list(islice(opened.pieces(), 1 << 24))


class Pieces:
    """The pieces of all sources that `read_piece` wrote.

    Their documents are numbered 0 to N - 1, in the order of the sources and pieces. `sources_N`: the index of each
    document's source."""

    def __init__(self, work: Path, jobs: Sequence[Job]) -> None:
        self.work, self.jobs = work, jobs
        self._pieces = [Piece(piece_folder(work, job.number)) for job in jobs]
        lengths = [len(piece) for piece in self._pieces]
        self._firsts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.sources_N = np.repeat([job.source for job in jobs], lengths).astype(np.int64)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    def places(self, documents_D: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return for each of these documents the number of its piece, and its position in the piece: two arrays [D]."""
        numbers_D = np.searchsorted(self._firsts, documents_D, "right") - 1
        return numbers_D, documents_D - self._firsts[numbers_D]

    def split(self, values_N: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Split an array with a value for each document into one array for each piece."""
        return [values_N[a:b] for a, b in itertools.pairwise(self._firsts)]

    def find(self, document: int) -> tuple[Piece, int]:
        """Return the piece of a document, and the document's position in it."""
        number = int(np.searchsorted(self._firsts, document, "right")) - 1
        return self._pieces[number], document - int(self._firsts[number])

    @property
    def is_recorded_N(self) -> npt.NDArray[np.bool_]:
        """Whether each document is a recorded rollout: bool [N]."""
        return np.concatenate([np.zeros(0, np.bool_), *(np.diff(piece.ends[:, 3]) > 0 for piece in self._pieces)])

    @property
    def exact_N2(self) -> npt.NDArray[np.uint64]:
        """Digests of the normalised texts: uint64 [N, 2]."""
        return np.concatenate([np.zeros((0, 2), np.uint64), *(piece.exact for piece in self._pieces)])

    @property
    def tokens_N(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each document, 0 for one that was dropped. Only after `encode_piece`."""
        found = [EncodedPiece(tokens_folder(self.work, job.number)).num_tokens for job in self.jobs]
        return np.concatenate([np.zeros(0, np.int64), *found])


def piece_folder(work: Path, number: int) -> Path:
    """Return the folder of the read and filtered piece with this number."""
    return work / "pieces" / f"{number:06d}"


def tokens_folder(work: Path, number: int) -> Path:
    """Return the folder of the encoded piece with this number."""
    return work / "tokens" / f"{number:06d}"


def remove_unfinished(work: Path) -> None:
    """Remove the unfinished files of a build that was killed."""
    for scratch in [*work.glob("*/.*"), *work.glob("*.part")]:
        progress.tick()
        shutil.rmtree(scratch) if scratch.is_dir() else scratch.unlink()

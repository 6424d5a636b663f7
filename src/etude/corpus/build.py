"""Builds a corpus in passes: read and filter, deduplicate, encode, mix and write shards.

Reading, encoding and writing go piece by piece in several processes; deduplication is one process between them. What is
finished stays in `work/`, so a build that was killed goes on from there, and ends with the same bytes, whatever the
number of processes. Memory per process is bounded by the largest document, and grows by about 100 bytes per document of
the corpus in the parent (docs/formats/corpus.md)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from etude import progress
from etude.config import to_plain
from etude.corpus.config import CorpusConfig
from etude.corpus.contamination import HeldOutIndex
from etude.corpus.encoding import Encoder
from etude.corpus.heldout import heldout_texts
from etude.corpus.mixture import Drawn, Supply, draw
from etude.corpus.near import candidate_pairs, near_duplicates, shingles
from etude.corpus.pieces import Counts, EncodedPiece, Job, Piece, encode_piece, jobs_of, read_piece
from etude.corpus.shards import (
    FORMAT,
    HEADER,
    MAGIC,
    MANIFEST,
    VERSION,
    Corpus,
    DrawnFacts,
    HeldOutFacts,
    Manifest,
    PhaseFacts,
    ShardFacts,
    SourceFacts,
    write_atomically,
    write_manifest,
)
from etude.errors import CorpusError, InputError
from etude.file_checksums import file_digest

I64 = npt.NDArray[np.int64]
Progress = Callable[[str, int, int], None]
"""Called with the name of a pass, the number of its finished parts, and their total."""

_CACHED_SHINGLES = 64
_DUPLICATES = ("exact-duplicate", "near-duplicate")
_PR_SET_PDEATHSIG = 1


def build_corpus(config: CorpusConfig, folder: Path, *, jobs: int = 1, on_part: Progress | None = None) -> Corpus:
    """Build a corpus into a folder, or go on with a build that was stopped. `jobs`: number of processes.

    Returns the corpus at once if it was already built with this config. Raises `ConfigError` for settings that do not
    fit the tokenizer, `InputError` for a folder with other content, and `CorpusError` for a full disk, for sources that
    changed since the build began, and for a folder that another process is building."""
    encoder = Encoder.load(config.tokenizer, config.fim, seed=config.seed)
    plain = json.loads(json.dumps(to_plain(config)))
    work = folder / "work"
    if (folder / MANIFEST).exists():
        corpus = Corpus.open(folder)
        if corpus.manifest.config != plain or corpus.manifest.tokenizer.sha256 != encoder.facts.sha256:
            hint = "give another folder, or delete this one"
            raise InputError(f"{folder} has a corpus that was built with another config", hint=hint)
        shutil.rmtree(work, ignore_errors=True)  # of a build that was killed at its very end
        return corpus
    if folder.exists() and not work.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty", "it has no unfinished corpus", hint="give a new folder")
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _locked(work / "lock", folder):
            return _Build(config, plain, folder, encoder, jobs, on_part or (lambda *_: None)).run()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        facts = f"{folder} takes no more data; {shutil.disk_usage(folder).free:,} bytes are free"
        hint = "free space and run the same command again: what is finished is kept"
        raise CorpusError("the disk is full", facts, hint=hint) from None


@contextlib.contextmanager
def _locked(path: Path, folder: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CorpusError(f"another process is building {folder}", hint="wait for it, or stop it") from None
        yield


class _Work:
    """What every process of a build does with a part of the corpus. `work` is the folder of unfinished parts."""

    def __init__(self, config: CorpusConfig, folder: Path) -> None:
        self.config, self.folder, self.work = config, folder, folder / "work"
        self._pieces: dict[int, tuple[Piece, EncodedPiece]] = {}

    @cached_property
    def _heldout(self) -> HeldOutIndex:
        return HeldOutIndex.load(self.work / "heldout.npz")

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder.load(self.config.tokenizer, self.config.fim, seed=self.config.seed)

    def piece_folder(self, number: int) -> Path:
        return self.work / "pieces" / f"{number:06d}"

    def tokens_folder(self, number: int) -> Path:
        return self.work / "tokens" / f"{number:06d}"

    def read(self, job: Job) -> None:
        read_piece(self.config, job, self.piece_folder(job.number), self._heldout)

    def encode(self, number: int, kept: npt.NDArray[np.bool_]) -> None:
        encode_piece(Piece(self.piece_folder(number)), kept, self.tokens_folder(number), self._encoder)

    def shard(self, name: str, pieces_D: I64, places_D: I64) -> ShardFacts:
        """Write a shard of the documents at these places of these pieces, unless it is there. Returns its facts."""
        path, provenance = self.folder / f"{name}.tokens", self.folder / f"{name}.jsonl"
        found = [
            (*self._piece(piece), place) for piece, place in zip(pieces_D.tolist(), places_D.tolist(), strict=True)
        ]
        starts = np.zeros(len(found) + 1, np.int64)
        np.cumsum([encoded.num_tokens_of(place) for _, encoded, place in found], out=starts[1:])
        if not provenance.exists():
            self._write(provenance, (piece.provenance(place) + b"\n" for piece, _, place in found))
        if not path.exists():  # the last of the two
            vocab_size = self._encoder.facts.vocab_size
            head = HEADER.pack(MAGIC, VERSION, vocab_size, len(found), int(starts[-1])) + starts.astype("<i8").tobytes()
            tokens = (encoded.tokens(place).astype("<u4", copy=False).tobytes() for _, encoded, place in found)
            self._write(path, (part for parts in ([head], tokens) for part in parts))
        return ShardFacts(
            file=path.name,
            provenance=provenance.name,
            documents=len(found),
            tokens=int(starts[-1]),
            sha256=file_digest(path),
            provenance_sha256=file_digest(provenance),
        )

    def _write(self, path: Path, parts: Iterator[bytes]) -> None:
        """Write a file in parts in `work`, sync it, and rename it into place."""
        scratch = self.work / f"{path.name}.{os.getpid()}"
        with scratch.open("wb") as file:
            for part in parts:
                progress.tick()
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(path)

    def _piece(self, number: int) -> tuple[Piece, EncodedPiece]:
        if number not in self._pieces:
            self._pieces[number] = (Piece(self.piece_folder(number)), EncodedPiece(self.tokens_folder(number)))
        return self._pieces[number]


_child: _Work


def _start_child(config: CorpusConfig, folder: Path) -> None:
    """Prepare a process of the pool; the kernel kills it when the build is killed."""
    global _child
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once: what it had begun is done again
    _child = _Work(config, folder)


def _in_child(name: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_child, name)(*arguments)


@dataclass
class _Build:
    config: CorpusConfig
    plain: dict[str, Any]
    folder: Path
    encoder: Encoder
    jobs: int
    on_part: Progress

    def run(self) -> Corpus:
        self.here = _Work(self.config, self.folder)
        heldout = self._index_heldout()
        jobs = self._plan(heldout)
        with self._pool() as pool:
            self._each(pool, "reading", "read", [(job,) for job in jobs])
            pieces = [Piece(self.here.piece_folder(job.number)) for job in jobs]
            sources = np.repeat([job.source for job in jobs], [len(piece) for piece in pieces]).astype(np.int64)
            self.firsts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
            earlier, is_exact = self._duplicates(pieces)
            kept = earlier < 0
            parts = [kept[a:b] for a, b in zip(self.firsts[:-1], self.firsts[1:], strict=True)]
            self._each(pool, "encoding", "encode", list(enumerate(parts)))
            counts = self._counts(jobs, pieces, sources, earlier, is_exact)
            num_tokens = [EncodedPiece(self.here.tokens_folder(job.number)).num_tokens for job in jobs]
            tokens = np.concatenate([np.zeros(0, np.int64), *num_tokens])
            keys = np.concatenate([np.zeros(0, np.uint64), *(piece.exact[:, 0] for piece in pieces)])
            supplies = []
            for index, source in enumerate(self.config.sources):
                own = np.flatnonzero(kept & (sources == index))
                supplies.append(Supply(source.name, own, tokens[own], keys[own], source.max_epochs, self.config.seed))
            totals = {supply.name: supply.total for supply in supplies}
            if not any(totals.values()):
                dropped = {reason: n for one in counts.values() for reason, n in one.dropped.items()}
                facts = f"dropped: {dropped}" if dropped else "the sources have no document"
                raise CorpusError("no document is left", facts, hint="loosen the filters that the counts name")
            phases = [self._write_phase(pool, drawn, tokens) for drawn in draw(self.config, supplies)]
        by_source = {
            name: SourceFacts(
                documents=one.documents,
                kept=sum(one.licences.values()),
                bytes=one.bytes,
                tokens=totals[name],
                licences=dict(sorted(one.licences.items())),
                dropped=dict(sorted(one.dropped.items())),
                redacted=dict(sorted(one.redacted.items())),
                examples=dict(sorted(one.examples.items())),
            )
            for name, one in counts.items()
        }
        manifest = Manifest(
            format=FORMAT,
            version=VERSION,
            tokenizer=self.encoder.facts,
            heldout=heldout,
            sources=by_source,
            phases=tuple(phases),
            config=self.plain,
        )
        write_manifest(self.folder, manifest)
        shutil.rmtree(self.here.work)
        return Corpus(self.folder, manifest)

    def _index_heldout(self) -> HeldOutFacts:
        """Write the index of held-out texts. It is made again by every call: the files may have changed."""
        index = HeldOutIndex.build(heldout_texts(self.config.heldout))
        path = self.here.work / "heldout.npz"
        scratch = path.with_name("heldout.tmp.npz")
        index.save(scratch)
        scratch.replace(path)
        digest = hashlib.sha256(index.grams_G.tobytes() + index.segments_G.tobytes() + index.needs_S.tobytes())
        return HeldOutFacts(texts=len(index.names), too_short=index.too_short, sha256=digest.hexdigest())

    def _plan(self, heldout: HeldOutFacts) -> list[Job]:
        """Return the pieces of all sources. Raises `CorpusError` if the build began with others, or other settings."""
        jobs = jobs_of(self.config)
        pieces = json.dumps([[job.source, job.piece] for job in jobs], default=str)
        now = {
            "the config": json.dumps(self.plain, sort_keys=True),
            "the tokenizer": self.encoder.facts.sha256,
            "the held-out texts": heldout.sha256,
            "the sources": pieces,
            "the format": f"{VERSION}",
        }
        now = {name: hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest() for name, text in now.items()}
        path = self.here.work / "plan.json"
        try:
            begun = json.loads(path.read_bytes())
        except FileNotFoundError:
            write_atomically(path, json.dumps(now).encode())
            return jobs
        changed = [name for name, digest in now.items() if begun.get(name) != digest]
        if changed:
            hint = f"delete {self.here.work} to begin again, or undo the change"
            raise CorpusError(f"the build in {self.folder} cannot go on", f"changed: {', '.join(changed)}", hint=hint)
        return jobs

    @contextlib.contextmanager
    def _pool(self) -> Iterator[ProcessPoolExecutor | None]:
        if self.jobs == 1:
            yield None
            return
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self.jobs, context, initializer=_start_child, initargs=(self.config, self.folder))
        try:
            yield pool
        except BrokenProcessPool:
            hint = "it may have had too little memory: use fewer --jobs; run the same command again, it goes on"
            raise CorpusError("a process of the build was killed", hint=hint) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _each(
        self, pool: ProcessPoolExecutor | None, title: str, name: str, parts: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Call a method of `_Work` for each part, on all processes, and return the results in order."""
        results: list[Any] = [None] * len(parts)
        if pool is None:
            for i, arguments in enumerate(parts):
                results[i] = getattr(self.here, name)(*arguments)
                self.on_part(title, i + 1, len(parts))
            return results
        running: dict[Future[Any], int] = {}
        done = 0
        for i, arguments in enumerate(parts):
            running[pool.submit(_in_child, name, arguments)] = i
            while len(running) >= (2 * self.jobs if i + 1 < len(parts) else 1):
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    results[running.pop(future)] = future.result()
                    done += 1
                    progress.tick()
                    self.on_part(title, done, len(parts))
        return results

    def _duplicates(self, pieces: Sequence[Piece]) -> tuple[I64, npt.NDArray[np.bool_]]:
        """Return for each document the earlier one that it repeats, or -1; and whether it repeats it exactly."""
        path = self.here.work / "duplicates.npz"
        if path.exists():
            with np.load(path) as file:
                return file["earlier"], file["is_exact"]
        exact = np.concatenate([np.zeros((0, 2), np.uint64), *(piece.exact for piece in pieces)])
        earlier = np.full(len(exact), -1, np.int64)
        order = np.lexsort((exact[:, 1], exact[:, 0]))
        ordered = exact[order]
        is_first = np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(axis=1)])[: len(exact)]
        firsts = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
        earlier[order[~is_first]] = firsts[~is_first]
        is_exact = earlier >= 0
        unique = np.flatnonzero(~is_exact)
        self.on_part("comparing", 0, 1)

        @functools.lru_cache(_CACHED_SHINGLES)
        def shingles_of(index: int) -> npt.NDArray[np.uint64]:
            progress.tick()
            number = int(np.searchsorted(self.firsts, unique[index], "right")) - 1
            return shingles(pieces[number].text(int(unique[index] - self.firsts[number])))

        if len(unique):
            signatures = self._signatures(pieces, ~is_exact)
            pairs = candidate_pairs(signatures, self.config.near.threshold)
            near = near_duplicates(len(unique), pairs, shingles_of, self.config.near.threshold)
            earlier[unique[near >= 0]] = unique[near[near >= 0]]
        scratch = path.with_name("duplicates.tmp.npz")
        np.savez(scratch, earlier=earlier, is_exact=is_exact)
        scratch.replace(path)
        self.on_part("comparing", 1, 1)
        return earlier, is_exact

    def _signatures(self, pieces: Sequence[Piece], wanted: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
        """Return the signatures of the wanted documents, as a file that is mapped into memory: [N, 128] uint32."""
        path = self.here.work / "signatures.bin"
        with path.open("wb") as file:
            for piece, first in zip(pieces, self.firsts, strict=False):
                at = int(first)
                for rows in piece.signatures():
                    file.write(rows[wanted[at : at + len(rows)]].tobytes())
                    at += len(rows)
        return np.memmap(path, "<u4", "r").reshape(int(wanted.sum()), -1)

    def _counts(
        self,
        jobs: Sequence[Job],
        pieces: Sequence[Piece],
        sources: I64,
        earlier: I64,
        is_exact: npt.NDArray[np.bool_],
    ) -> dict[str, Counts]:
        """Return the counts of each source, with duplicates."""
        found = {source.name: Counts() for source in self.config.sources}
        for job, piece in zip(jobs, pieces, strict=True):
            found[self.config.sources[job.source].name].add(piece.counts)
        for reason, which in zip(_DUPLICATES, (is_exact, ~is_exact & (earlier >= 0)), strict=True):
            for index, source in enumerate(self.config.sources):
                places = np.flatnonzero(which & (sources == index))
                for place in places.tolist():
                    meta, size = self._described(pieces, place)
                    same, _ = self._described(pieces, int(earlier[place]))
                    found[source.name].undo(meta["licence"], size)
                    found[source.name].drop(reason, f"{meta['id']} has {same['id']} of {same['source']}")
        return found

    def _described(self, pieces: Sequence[Piece], index: int) -> tuple[dict[str, str], int]:
        """Return the provenance of a document, and the bytes of its text."""
        number = int(np.searchsorted(self.firsts, index, "right")) - 1
        place = int(index - self.firsts[number])
        meta = msgspec.json.decode(pieces[number].provenance(place), type=dict[str, str])
        return meta, int(pieces[number].ends[place + 1, 0] - pieces[number].ends[place, 0])

    def _write_phase(self, pool: ProcessPoolExecutor | None, drawn: Drawn, tokens: I64) -> PhaseFacts:
        numbers = np.searchsorted(self.firsts, drawn.documents_D, "right") - 1
        places = drawn.documents_D - self.firsts[numbers]
        sizes = tokens[drawn.documents_D]
        shard_of = (np.cumsum(sizes) - sizes) // self.config.shard_tokens
        cuts = np.flatnonzero(np.diff(shard_of)) + 1
        parts = [
            (f"{drawn.name}-{i:05d}", number_part, place_part)
            for i, (number_part, place_part) in enumerate(
                zip(np.split(numbers, cuts), np.split(places, cuts), strict=True)
            )
            if len(number_part)
        ]
        shards = self._each(pool, f"writing phase {drawn.name}", "shard", parts)
        return PhaseFacts(
            name=drawn.name,
            documents=len(drawn.documents_D),
            tokens=int(sizes.sum()),
            missing_tokens=drawn.missing_tokens,
            sources={
                name: DrawnFacts(documents=documents, tokens=num, epochs=epochs)
                for name, (documents, num, epochs) in drawn.by_source.items()
            },
            shards=tuple(shards),
        )

"""Builds a corpus in passes: read and filter, deduplicate, encode, mix and write shards.

Reading, encoding and writing go piece by piece in several processes; deduplication is one process between them. What is
finished stays in `work/`, so a build that was killed goes on from there, and ends with the same bytes, whatever the
number of processes. Memory per process is bounded by the largest document, and grows by about 100 bytes per document of
the corpus in the parent (docs/formats/corpus.md)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.config import to_plain
from etude.corpus.config import CorpusConfig
from etude.corpus.duplicates import Duplicates
from etude.corpus.encoding import Encoder
from etude.corpus.facts import counts_of, phase_facts, source_facts
from etude.corpus.mixture import Drawn, Supply, draw
from etude.corpus.pieces import WORK_FORMAT, Counts, Job, Pieces, remove_unfinished
from etude.corpus.shards import (
    FORMAT,
    MANIFEST,
    VERSION,
    Corpus,
    HeldOutFacts,
    Manifest,
    PhaseFacts,
    write_atomically,
    write_manifest,
)
from etude.corpus.work import Work
from etude.corpus.workers import InThisProcess, Workers
from etude.errors import CorpusError, InputError, nearest

I64 = npt.NDArray[np.int64]
_NAMED_LICENCES = 5
"""How many licences of dropped documents an error names, at most."""
Progress = Callable[[str, int, int], None]
"""Called with the name of a pass, the number of its finished parts, and their total."""


def build_corpus(
    config: CorpusConfig, folder: Path, *, jobs: int | None = None, on_part: Progress | None = None
) -> Corpus:
    """Build a corpus into a folder, or continue a build that was stopped.

    `jobs`: number of processes; one that makes no progress for `workers.STALL_S` seconds is killed. None: everything is
    done in this process, which hangs if a disk or a plug-in hangs. `on_part`: called with the progress.

    Returns the corpus at once if it was already built with this config. Raises `ConfigError` for settings that do not
    fit the tokenizer, `InputError` for a folder with other content or a path to a file, and `CorpusError` for a full
    disk, for sources that changed since the build began, for a process that hangs or was killed, and for a folder that
    another process is building. After each of these errors the finished parts are kept, and the same call continues the
    build."""
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
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise InputError(f"no corpus can be built in {folder}", f"{existing} is a file", hint="give a new folder")
    if folder.exists() and not work.is_dir() and any(folder.iterdir()):
        raise InputError(
            f"{folder} is not empty", "its files are not those of an unfinished corpus", hint="give a new folder"
        )
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _locked(work / "lock", folder):
            remove_unfinished(work)
            parts = Work(config, folder)
            with InThisProcess(parts) if jobs is None else Workers(parts, jobs) as workers:
                return _Build(config, plain, folder, encoder, workers, on_part or (lambda *_: None)).run()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        facts = f"{folder} takes no more data; {shutil.disk_usage(folder).free:,} bytes are free"
        hint = "free space and run the same command again: finished parts are kept"
        raise CorpusError("the disk is full", facts, hint=hint) from None


@contextlib.contextmanager
def _locked(path: Path, folder: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CorpusError(f"another process is building {folder}", hint="wait for it, or stop it") from None
        yield


@dataclass(frozen=True)
class _Build:
    config: CorpusConfig
    plain: dict[str, Any]
    folder: Path
    encoder: Encoder
    workers: Workers | InThisProcess
    on_part: Progress

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def run(self) -> Corpus:
        """Do the passes one after another, and write the manifest."""
        (heldout,) = self._each("indexing held-out texts", "index_heldout", [()])
        jobs = self._list()
        self._check_unchanged(jobs, heldout)
        self._each("reading", "read", [(job,) for job in jobs])
        pieces = Pieces(self.work, jobs)
        self.on_part("comparing", 0, 1)
        duplicates = Duplicates.find(pieces, self.config.near.threshold)
        self.on_part("comparing", 1, 1)
        self._each("encoding", "encode", list(enumerate(pieces.split(duplicates.kept_N))))
        counts = counts_of(self.config, pieces, duplicates)
        supplies = self._supplies(pieces, duplicates)
        _require_tokens(supplies, counts, self.config.licences)
        phases = [self._write_phase(pieces, drawn) for drawn in draw(self.config, supplies)]
        manifest = Manifest(
            format=FORMAT,
            version=VERSION,
            tokenizer=self.encoder.facts,
            heldout=heldout,
            sources=source_facts(counts, {supply.name: supply.total for supply in supplies}),
            phases=tuple(phases),
            config=self.plain,
        )
        write_manifest(self.folder, manifest)
        shutil.rmtree(self.work)
        return Corpus(self.folder, manifest)

    def _each(self, title: str, method: str, parts: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of `Work` for each part, and return the results in order."""
        return self.workers.map(method, parts, lambda done, total: self.on_part(title, done, total))

    def _list(self) -> list[Job]:
        """Return the pieces of all sources, in order: those of the first source first."""
        found = self._each("listing sources", "list_source", [(index,) for index in range(len(self.config.sources))])
        pieces = [(source, piece) for source, pieces in enumerate(found) for piece in pieces]
        return [Job(number, source, piece) for number, (source, piece) in enumerate(pieces)]

    def _check_unchanged(self, jobs: Sequence[Job], heldout: HeldOutFacts) -> None:
        """Raise `CorpusError` if the build began with other pieces, or with other settings."""
        pieces = json.dumps([[job.source, job.piece] for job in jobs], default=str)
        now = {
            "the config": json.dumps(self.plain, sort_keys=True),
            "the tokenizer": self.encoder.facts.sha256,
            "the held-out texts": heldout.sha256,
            "the sources": pieces,
            "the format": f"{VERSION} {WORK_FORMAT}",
        }
        now = {name: hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest() for name, text in now.items()}
        path = self.work / "plan.json"
        try:
            begun = json.loads(path.read_bytes())
        except FileNotFoundError:
            write_atomically(path, json.dumps(now).encode())
            return
        changed = [name for name, digest in now.items() if begun.get(name) != digest]
        if changed:
            hint = f"delete {self.work} to begin again, or undo the change"
            raise CorpusError(f"the build in {self.folder} cannot go on", f"changed: {', '.join(changed)}", hint=hint)

    def _supplies(self, pieces: Pieces, duplicates: Duplicates) -> list[Supply]:
        """Return the documents of each source that are kept."""
        tokens_N, keys_N = pieces.tokens_N, pieces.exact_N2[:, 0]
        supplies = []
        for index, source in enumerate(self.config.sources):
            own = np.flatnonzero(duplicates.kept_N & (pieces.sources_N == index))
            supplies.append(Supply(source.name, own, tokens_N[own], keys_N[own], source.max_epochs, self.config.seed))
        return supplies

    def _write_phase(self, pieces: Pieces, drawn: Drawn) -> PhaseFacts:
        """Write the shards of a phase. A shard ends with the first document at or after `shard_tokens`."""
        numbers_D, places_D = pieces.places(drawn.documents_D)
        shard_of_D = (np.cumsum(drawn.tokens_D) - drawn.tokens_D) // self.config.shard_tokens
        cuts = np.flatnonzero(np.diff(shard_of_D)) + 1
        columns = [np.split(column_D, cuts) for column_D in (numbers_D, places_D, drawn.epochs_D)]
        parts = [(f"{drawn.name}-{i:05d}", *part) for i, part in enumerate(zip(*columns, strict=True)) if len(part[0])]
        written = self._each(f"writing phase {drawn.name}", "shard", parts)
        sizes_D = np.concatenate([np.zeros(0, np.int64), *(sizes for _, sizes in written)])
        of_source = np.bincount(pieces.sources_N[drawn.documents_D], sizes_D, len(self.config.sources)).astype(np.int64)
        names = [source.name for source in self.config.sources]
        return phase_facts(drawn, dict(zip(names, of_source.tolist(), strict=True)), [shard for shard, _ in written])


def _require_tokens(supplies: Sequence[Supply], counts: dict[str, Counts], licences: Sequence[str] | None) -> None:
    if any(supply.total for supply in supplies):
        return
    total = Counts()
    for one in counts.values():
        total.add(one)
    facts, hint = "the sources have no document", "loosen the filters that the counts name"
    if total.dropped:
        facts = f"dropped: {total.dropped}"
    if licences and (found := total.other_licences):
        common = sorted(found, key=lambda name: -found[name])[:_NAMED_LICENCES]
        facts += f"; no document has {' or '.join(licences)}, their licences are " + ", ".join(
            f"{name} ({found[name]:,})" for name in common
        )
        hint = f"correct `licences` ({nearest(licences[0], common)}), or loosen the other filters that the counts name"
    raise CorpusError("no document is left", facts, hint=hint)

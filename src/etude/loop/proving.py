"""Compares every file of a run folder that has a checksum with it (`etude fsck`).

Files are recognised by their kind, not by their names (`etude.sums`): directories with SHA256SUMS, Parquet, JSON, event
logs. The ledger has checksums of its own, and those of stored rollouts; so has the chain of weights. An unexpected file
is either proven, or listed as not proven. It only reads, and may run beside the run: files that a live run replaces or
deletes meanwhile are no problem, and a store that changes and looks damaged is read again.

Knows nothing of training: `experience.auditing` checks that no rollout was lost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import EtudeError, LedgerError, RunError
from etude.loop.places import has_published, ledger_place, read_ledger, rollout_files, traces_folder, weights_store
from etude.run import HINT_COPY, RunFolder
from etude.sums import (
    SUMS,
    Unproven,
    digests,
    files_in,
    opened,
    prove_parquet,
    proven_line,
    proven_page,
    read_sums,
)
from etude.weights.chain import fsck

if TYPE_CHECKING:
    from etude.experience.ledger import Ledger

ROLLOUTS = "rollouts"
_PLAIN = {"lock", "logs", "trackers"}
"""Parts of a run folder that are never read back: the lock, the output of its processes, and files of trackers."""
_LEDGER = ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm")
_WRITTEN_IN_PLACE = {"tokenizer": "corpus", "corpus": "corpus", "checkpoints/mid": "mid-training"}
"""Directories that get their checksums last, and the phase that must have ended before they are whole."""
_HINTS = (
    ("checkpoints/final", "copy it back, or write it again: etude export RUN@STEP"),
    ("checkpoints/step-", "copy it back, or delete the checkpoint: a resumed run goes on from the one before it"),
    ("rollouts/", "copy it back; else its step is made without it, unless more than half of a step's are damaged"),
    ("traces/", "copy it back; training goes on without it, only a replay of that step needs it"),
    ("evals/", "copy it back, or evaluate again; training does not need it"),
    ("events/", "nothing needs to be done: reports leave the line out"),
    ("summary.json", "etude report RUN writes it again"),
    ("report.html", "etude report RUN writes it again"),
    ("audit.json", "delete it: the next `etude ledger audit` looks at all steps again"),
)


@dataclass(frozen=True)
class Found:
    """One file that is damaged or cannot be proven."""

    place: str  # in the run folder
    what: str
    hint: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}\n  hint: {self.hint}"


@dataclass
class Proof:
    """Result of comparing files with their checksums. Sound where `problems` is empty."""

    num_files: int = 0
    num_bytes: int = 0
    problems: list[Found] = field(default_factory=list)
    notices: list[Found] = field(default_factory=list)  # what has no checksum, what a killed process left
    plain: list[str] = field(default_factory=list)  # what nobody reads back

    def count(self, path: Path) -> None:
        self.num_files += 1
        self.num_bytes += path.stat().st_size

    def add(self, place: str, what: str, hint: str = "") -> None:
        self.problems.append(Found(place, what, hint or hint_for(place)))

    def note(self, place: str, what: str, hint: str) -> None:
        self.notices.append(Found(place, what, hint))


Step = Callable[[Proof], None]


def hint_for(place: str) -> str:
    """The hint for a damaged file."""
    return next((hint for start, hint in _HINTS if place.startswith(start)), HINT_COPY)


def steps_of(path: Path) -> list[Step]:
    """The parts of a proof, to be called one by one. Raises `NoRun` where there is no run."""
    proof = _Prover(path)
    return list(proof.steps())


class _Prover:
    """One look at a run folder."""

    def __init__(self, path: Path) -> None:
        self.path, self.run, self._identity = path, RunFolder(path), ""
        try:
            self.run = RunFolder.open(path)
            self.has_sums = self.run.has_sums
        except RunError as error:
            if not (path / "run.json").is_file():
                raise
            self._identity, self.has_sums = f"{error.what}: {error.facts}", True
        self.live = self.run.holder() is not None

    def steps(self) -> Iterator[Step]:
        yield self._about
        for place in sorted(self.path.iterdir()):
            if place.name in ("weights", ROLLOUTS, *_LEDGER, "run.json", "config.toml"):
                continue
            yield from self._below(place)
        yield self._ledger
        yield self._bucket
        yield self._weights

    def _below(self, path: Path) -> Iterator[Step]:
        name = path.relative_to(self.path).as_posix()
        if name in _PLAIN:
            yield lambda proof: proof.plain.append(name)
        elif _is_scratch(path):
            yield partial(self._scratch, name)
        elif path.is_file():
            yield partial(self._guarded, path, self._file)
        elif (path / SUMS).exists() or name in _WRITTEN_IN_PLACE or name.startswith("checkpoints/"):
            yield partial(self._guarded, path, self._folder)
        elif path.is_dir():
            for one in sorted(path.iterdir()):
                yield from self._below(one)

    def _guarded(self, path: Path, work: Callable[[Path, Proof], None], proof: Proof) -> None:
        try:
            work(path, proof)
        except OSError as error:
            if path.exists():  # else the run has deleted it, or moved it into its place
                proof.add(self._name(path), f"it cannot be read: {error.strerror}", "look at the disk and its mount")

    def _name(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def _scratch(self, name: str, proof: Proof) -> None:
        if not self.live:
            proof.note(name, "a process that was killed left it", "nothing reads it: delete it if you like")

    def _about(self, proof: Proof) -> None:
        """Identity and settings."""
        proof.count(self.path / "run.json")
        if self._identity:
            proof.add("run.json", self._identity)
            return
        config, digest = self.path / "config.toml", self.run.identity().get("config_digest")
        if not config.is_file():
            proof.add("config.toml", "it is gone")
        elif digest is not None:
            proof.count(config)
            if hashlib.sha256(config.read_bytes()).hexdigest() != digest:
                proof.add("config.toml", "it is not what the run was made with")

    def _folder(self, path: Path, proof: Proof) -> None:
        """A directory that was written once."""
        name = self._name(path)
        try:
            sums = read_sums(path)
        except Unproven as error:
            proof.add(name, f"{error.what}: {error.facts}", error.hint)
            return
        if sums is None:
            self._without(name, proof)
            return
        there = set(files_in(path))
        for file in sorted(sums.keys() - there):
            if path.exists():
                proof.add(f"{name}/{file}", "it is gone")
        for file in sorted(there - sums.keys()):
            proof.note(f"{name}/{file}", f"{SUMS} does not list it", "it was put there later: nobody proves it")
        for file, found in digests(path, sorted(there & sums.keys())).items():
            proof.count(path / file)
            if found != sums[file]:
                facts = f"its SHA-256 is {found[:12]}, written was {sums[file][:12]}"
                proof.add(f"{name}/{file}", f"it is damaged: {facts}")

    def _without(self, name: str, proof: Proof) -> None:
        """Something that has no checksum and could have one."""
        phase = next((phase for start, phase in _WRITTEN_IN_PLACE.items() if name.startswith(start)), "")
        if phase and not self._ended(phase):
            proof.note(name, "it is not whole yet", "it is written again when the run goes on")
        elif self.has_sums:
            proof.add(name, "its checksum is gone")
        else:
            proof.note(name, "an earlier etude wrote it, without a checksum", "nothing can be proven of it")

    def _ended(self, phase: str) -> bool:
        try:
            return self.run.ended(phase)
        except RunError:
            return True

    def _file(self, path: Path, proof: Proof) -> None:
        """A file by its kind."""
        name = self._name(path)
        try:
            proven = self._proven(path, proof)
        except Unproven as error:
            proof.add(name, f"it is damaged: {error.facts}")
        except ValueError as error:
            proof.add(name, f"it is damaged: {error}")
        else:
            if proven is None:
                proof.note(name, "no kind of file that has a checksum", "nothing can be proven of it")
            elif not proven:
                self._without(name, proof)
        proof.count(path)

    def _proven(self, path: Path, proof: Proof) -> bool | None:
        """Whether a file is what was written; False: it has no checksum, None: it is of no kind that has one."""
        name = self._name(path)
        match path.suffix:
            case ".parquet":
                with path.open("rb") as file:
                    return prove_parquet(file, name)
            case ".jsonl":
                self._events(path, proof)
                return True
            case ".json":
                value = json.loads(path.read_bytes())
                return opened(value, name) or value == []
            case ".html":
                found = proven_page(path.read_bytes())
                if found is False:
                    raise ValueError("its digest does not fit")
                return bool(found)
        return None

    def _events(self, path: Path, proof: Proof) -> None:
        """The lines of a log; a last one without an end is being written, or was when its writer was killed."""
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                found = proven_line(line[:-1]) if line.endswith(b"\n") else True
                if not found and (self.has_sums or found is False):
                    proof.add(self._name(path), f"line {number} is damaged")

    def _ledger(self, proof: Proof) -> None:
        try:
            place = ledger_place(self.run)
            published = has_published(self.run)
            if isinstance(place, Path) and not place.exists():
                if published:
                    proof.add("ledger.sqlite", "it is gone, and weights were published")
                return
            if not published:
                return  # a ledger of before its run's first version was never used
            with closing(read_ledger(self.run, still=not self.live)) as ledger:
                ledger.prove()
                self._rollouts(ledger, proof)
            if isinstance(place, Path):
                proof.count(place)
        except (EtudeError, OSError, ValueError) as error:
            proof.add("ledger.sqlite", *_words(error))

    def _rollouts(self, ledger: Ledger, proof: Proof) -> None:
        """Stored rollouts, by the size and digest that the ledger has of each."""
        files, names = rollout_files(self.run), rollout_files(self.run).names()
        stored = {files.path(one.rollout_id, one.attempt).name: one for one in ledger.stored()}
        for name, summary in sorted(stored.items()):
            try:
                files.read(summary)
            except LedgerError as error:
                if not self.live or ledger.is_kept(summary.rollout_id):  # else the run has dropped it
                    proof.add(f"{ROLLOUTS}/{name}", f"it is damaged: {error.facts}")
            if summary.stored is not None:
                proof.num_files, proof.num_bytes = proof.num_files + 1, proof.num_bytes + summary.stored.num_bytes
        for name in sorted({*names} - stored.keys()):
            if not self.live:
                facts = "its rollout had not finished, or is an evaluation's that was cut off"
                proof.note(f"{ROLLOUTS}/{name}", facts, "it is deleted when the run goes on")

    def _bucket(self, proof: Proof) -> None:
        """Traces that are not in the folder."""
        try:
            folder = traces_folder(self.run)
            if isinstance(folder, Path):
                return
            from etude.experience.traces import InStore, recorded, trace_path  # which needs pyarrow

            for step in recorded(folder):
                trace = trace_path(folder, step)
                assert isinstance(trace, InStore), "a store's"
                with trace.open() as file:
                    try:
                        if not prove_parquet(file, trace):
                            self._without(f"traces/{trace.name}", proof)
                    except Unproven as error:
                        proof.add(f"traces/{trace.name}", f"it is damaged: {error.facts}")
                proof.num_files += 1
        except (EtudeError, OSError, ValueError) as error:
            proof.add("traces", *_words(error))

    def _weights(self, proof: Proof) -> None:
        try:
            if not has_published(self.run) and not (self.path / "weights" / "manifests").is_dir():
                if self._ended("rl"):
                    proof.add("weights", "they are gone, and RL has ended")
                return
            store = weights_store(self.run, readonly=True)
            check = fsck.verify(store)
            if check.found and self.live:
                again = set(check.problems)
                check = fsck.verify(store)
                found = [one for one in check.found if str(one) in again]
            else:
                found = list(check.found)
        except (EtudeError, OSError, ValueError) as error:
            proof.add("weights", *_words(error))
            return
        proof.num_files += check.num_objects + check.num_versions
        proof.num_bytes += check.object_bytes
        for one in found:
            proof.add("weights", str(one), one.hint)
        for one in check.notices:
            proof.note("weights", str(one), one.hint)


def _is_scratch(path: Path) -> bool:
    return path.name.startswith(".") or path.suffix in (".tmp", ".partial")


def _words(error: EtudeError | OSError | ValueError) -> tuple[str, str]:
    if isinstance(error, EtudeError):
        return f"{error.what}: {error.facts}" if error.facts else error.what, error.hint
    return str(error), HINT_COPY

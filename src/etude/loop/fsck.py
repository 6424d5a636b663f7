"""Compares every file of a run folder with its checksum (`etude fsck`).

Files are recognised by their kind, not by their names (`etude.file_checksums`): directories with SHA256SUMS, Parquet,
JSON, event logs. The ledger has its own checksums and those of stored rollouts; so have the published weights. An
unexpected file is either verified or listed as not verifiable. It only reads, and may run beside the run: a file that a
live run replaces or deletes meanwhile is not reported, and a store that changes and looks damaged is read again.

`experience.auditing` checks in addition that no rollout was lost."""

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
from etude.experience.rollout_files import FORMAT as ROLLOUT_FORMAT
from etude.file_checksums import (
    SUMS,
    ChecksumMismatch,
    digests,
    files_in,
    read_sums,
    verify_json,
    verify_line,
    verify_page,
    verify_parquet,
)
from etude.loop.locations import (
    has_published,
    ledger_location,
    read_ledger,
    rollout_files,
    traces_folder,
    weights_store,
)
from etude.run import HINT_COPY, RunFolder
from etude.weights.chain import fsck
from etude.weights.chain.manifest import FORMAT as WEIGHTS_FORMAT

if TYPE_CHECKING:
    from etude.experience.ledger import Ledger

ROLLOUTS = "rollouts"
_PLAIN = {"lock", "rewards.lock", "logs", "trackers", "lease"}
"""Parts of a run folder that a resumed run does not read: locks, logs of processes, files of trackers, and files of
leases of engines. They have no checksums."""
_LEDGER = ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm")
_WRITTEN_IN_PLACE = {
    "tokenizer": "corpus",
    "corpus": "corpus",
    "checkpoints/start": "corpus",
    "checkpoints/mid": "mid-training",
}
"""Directories whose checksums are written last, and the phase after which they are complete."""
_PROGRESS = "checkpoints/mid.partial"
_HINTS = (
    ("checkpoints/final", "copy it back, or write it again: etude export RUN@STEP"),
    ("checkpoints/step-", "copy it back, or delete the checkpoint: a resumed run uses the one before it"),
    ("rollouts/", "copy it back; otherwise its step is trained without it, unless over half of a step's are damaged"),
    ("traces/", "copy it back; training continues without it, only a replay of that step needs it"),
    ("evals/", "copy it back, or evaluate again; training does not need it"),
    ("events/", "nothing needs to be done: reports skip the line"),
    ("summary.json", "etude report RUN writes it again"),
    ("report.html", "etude report RUN writes it again"),
    ("audit.json", "delete it: the next `etude ledger audit` checks all steps again"),
)


@dataclass(frozen=True)
class Finding:
    """A file of a run that is damaged or cannot be verified.

    `place` is its path in the run folder, `what` describes the damage, and `hint` says how to repair it."""

    place: str
    what: str
    hint: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}\n  hint: {self.hint}"


@dataclass
class FsckReport:
    """The result of comparing the files of a run with their checksums. Each check adds to it.

    The run is undamaged if `problems` is empty. `notices` are files without a checksum and files of killed processes.
    `plain` names files that no program reads. `formats` has the format numbers that were found, by kind of file.
    `num_files` and `num_bytes` count what was verified."""

    num_files: int = 0
    num_bytes: int = 0
    problems: list[Finding] = field(default_factory=list)
    notices: list[Finding] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    formats: dict[str, set[str]] = field(default_factory=dict)

    def count(self, path: Path) -> None:
        """Count a verified file."""
        self.num_files += 1
        self.num_bytes += path.stat().st_size

    def found_format(self, kind: str, number: object) -> None:
        """Note the format number of a file."""
        self.formats.setdefault(kind, set()).add(str(number))

    def add(self, place: str, what: str, hint: str = "") -> None:
        """Add a problem: the file at `place` is damaged. `what` describes the damage. `hint`: "" for
        `hint_for(place)`."""
        self.problems.append(Finding(place, what, hint or hint_for(place)))

    def note(self, place: str, what: str, hint: str) -> None:
        """Add a notice: the file at `place` cannot be verified, which does not make the run damaged."""
        self.notices.append(Finding(place, what, hint))


Check = Callable[[FsckReport], None]


def hint_for(place: str) -> str:
    """Return a text that says how to repair a damaged file at this path in the run folder."""
    return next((hint for start, hint in _HINTS if place.startswith(start)), HINT_COPY)


def checks_of(path: Path) -> list[Check]:
    """Return the checks of a run folder. Each is a function that takes the report; call all of them with the same
    report.

    Raises `NoRun` when the path is not a run."""
    return list(_RunChecker(path).checks())


class _RunChecker:
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

    def checks(self) -> Iterator[Check]:
        yield self._metadata
        for place in sorted(self.path.iterdir()):
            if place.name in ("weights", ROLLOUTS, *_LEDGER, "run.json", "config.toml"):
                continue
            yield from self._checks_below(place)
        yield self._ledger
        yield self._bucket
        yield self._weights

    def _checks_below(self, path: Path) -> Iterator[Check]:
        name = path.relative_to(self.path).as_posix()
        if name in _PLAIN:
            yield lambda report: report.plain.append(name)
        elif name == _PROGRESS and path.is_dir():  # a resumed run continues mid-training from there
            for one in sorted(path.iterdir()):
                yield from self._checks_below(one)
        elif _is_temporary(path):
            yield partial(self._temporary, name)
        elif path.is_file():
            yield partial(self._run_check, path, self._file)
        elif (path / SUMS).exists() or name in _WRITTEN_IN_PLACE or name.startswith("checkpoints/"):
            yield partial(self._run_check, path, self._folder)
        elif path.is_dir():
            for one in sorted(path.iterdir()):
                yield from self._checks_below(one)

    def _run_check(self, path: Path, work: Callable[[Path, FsckReport], None], report: FsckReport) -> None:
        try:
            work(path, report)
        except OSError as error:
            if path.exists():  # otherwise the run has deleted or renamed it
                report.add(self._name(path), f"it cannot be read: {error.strerror}", "check the disk and its mount")

    def _name(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def _temporary(self, name: str, report: FsckReport) -> None:
        if not self.live:
            report.note(name, "a killed process left it", "nothing reads it: it may be deleted")

    def _metadata(self, report: FsckReport) -> None:
        report.count(self.path / "run.json")
        if self._identity:
            report.add("run.json", self._identity)
            return
        report.found_format("run", self.run.identity().get("format"))
        config, digest = self.path / "config.toml", self.run.identity().get("config_digest")
        if not config.is_file():
            report.add("config.toml", "it is missing")
        elif digest is not None:
            report.count(config)
            if hashlib.sha256(config.read_bytes()).hexdigest() != digest:
                report.add("config.toml", "it was changed since the run was created")

    def _folder(self, path: Path, report: FsckReport) -> None:
        name = self._name(path)
        try:
            sums = read_sums(path)
        except ChecksumMismatch as error:
            report.add(name, f"{error.what}: {error.facts}", error.hint)
            return
        if sums is None:
            self._missing_checksum(name, report)
            return
        there = set(files_in(path))
        for file in sorted(sums.keys() - there):
            if path.exists():
                report.add(f"{name}/{file}", "it is missing")
        for file in sorted(there - sums.keys()):
            report.note(f"{name}/{file}", f"{SUMS} does not list it", "it was added later and cannot be verified")
        for file, found in digests(path, sorted(there & sums.keys())).items():
            report.count(path / file)
            if found != sums[file]:
                facts = f"its SHA-256 is {found[:12]}, written was {sums[file][:12]}"
                report.add(f"{name}/{file}", f"it is damaged: {facts}")

    def _missing_checksum(self, name: str, report: FsckReport) -> None:
        """Report a file or directory that has no checksum and could have one."""
        phase = next((phase for start, phase in _WRITTEN_IN_PLACE.items() if name.startswith(start)), "")
        if phase and not self._ended(phase):
            report.note(name, "it is not complete yet", "it is written again when the run is resumed")
        elif self.has_sums:
            report.add(name, "its checksum is missing")
        else:
            report.note(name, "an earlier etude wrote it, without a checksum", "it cannot be verified")

    def _ended(self, phase: str) -> bool:
        try:
            return self.run.ended(phase)
        except RunError:
            return True

    def _file(self, path: Path, report: FsckReport) -> None:
        name = self._name(path)
        try:
            proven = self._verify_file(path, report)
        except ChecksumMismatch as error:
            report.add(name, f"it is damaged: {error.facts}")
        except ValueError as error:
            report.add(name, f"it is damaged: {error}")
        else:
            if proven is None:
                report.note(name, "this kind of file has no checksum", "it cannot be verified")
            elif not proven:
                self._missing_checksum(name, report)
        report.count(path)

    def _verify_file(self, path: Path, report: FsckReport) -> bool | None:
        """Whether a file has the content that was written. False: it has no checksum; None: its kind has none."""
        name = self._name(path)
        match path.suffix:
            case ".parquet":
                with path.open("rb") as file:
                    proven = verify_parquet(file, name)
                if name.startswith("traces/"):
                    self._trace_format(path, report)
                return proven
            case ".jsonl":
                self._events(path, report)
                return True
            case ".json":
                value = json.loads(path.read_bytes())
                return verify_json(value, name) or value == []
            case ".html":
                found = verify_page(path.read_bytes())
                if found is False:
                    raise ValueError("its checksum does not match its content")
                return bool(found)
        return None

    def _trace_format(self, path: Path, report: FsckReport) -> None:
        from etude.experience.trace_reader import read_format  # needs pyarrow
        from etude.experience.traces import FORMAT

        found = read_format(path)
        report.found_format("traces", found)
        if not 1 <= found <= FORMAT:
            told = f"it has format {found}, and this version of etude reads formats 1 to {FORMAT}"
            report.add(self._name(path), told, "use the etude version that wrote it")

    def _events(self, path: Path, report: FsckReport) -> None:
        """Check the lines of a log. A last line without an end is being written, or its writer was killed."""
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                found = verify_line(line[:-1]) if line.endswith(b"\n") else True
                if not found and (self.has_sums or found is False):
                    report.add(self._name(path), f"line {number} is damaged")

    def _ledger(self, report: FsckReport) -> None:
        try:
            place = ledger_location(self.run)
            published = has_published(self.run)
            if isinstance(place, Path) and not place.exists():
                if published:
                    report.add("ledger.sqlite", "it is missing, and weights were published")
                return
            if not published:
                return  # before the first version the ledger is not used
            with closing(read_ledger(self.run, immutable=not self.live)) as ledger:
                ledger.verify()
                report.found_format("ledger", ledger.recall("format"))
                self._rollouts(ledger, report)
            if isinstance(place, Path):
                report.count(place)
        except (EtudeError, OSError, ValueError) as error:
            report.add("ledger.sqlite", *_error_text(error))

    def _rollouts(self, ledger: Ledger, report: FsckReport) -> None:
        files, names = rollout_files(self.run), rollout_files(self.run).names()
        stored = {files.path(one.rollout_id, one.attempt).name: one for one in ledger.stored_summaries()}
        for name, summary in sorted(stored.items()):
            try:
                files.read(summary)
                report.found_format("rollouts", ROLLOUT_FORMAT)  # others are refused
            except LedgerError as error:
                if not self.live or ledger.is_kept(summary.rollout_id):  # otherwise the run has deleted it
                    report.add(f"{ROLLOUTS}/{name}", f"it is damaged: {error.facts}")
            if summary.stored is not None:
                report.num_files, report.num_bytes = report.num_files + 1, report.num_bytes + summary.stored.num_bytes
        for name in sorted({*names} - stored.keys()):
            if not self.live:
                facts = "its rollout had not finished, or belongs to an interrupted evaluation"
                report.note(f"{ROLLOUTS}/{name}", facts, "it is deleted when the run is resumed")

    def _bucket(self, report: FsckReport) -> None:
        try:
            folder = traces_folder(self.run)
            if isinstance(folder, Path):
                return
            from etude.experience.traces import StoredTrace, recorded_steps, trace_path  # needs pyarrow

            for step in recorded_steps(folder):
                trace = trace_path(folder, step)
                assert isinstance(trace, StoredTrace), "in a store"

                with trace.open() as file:
                    try:
                        if not verify_parquet(file, trace):
                            self._missing_checksum(f"traces/{trace.name}", report)
                    except ChecksumMismatch as error:
                        report.add(f"traces/{trace.name}", f"it is damaged: {error.facts}")
                report.num_files += 1
        except (EtudeError, OSError, ValueError) as error:
            report.add("traces", *_error_text(error))

    def _weights(self, report: FsckReport) -> None:
        try:
            if not has_published(self.run) and not (self.path / "weights" / "manifests").is_dir():
                if self._ended("rl"):
                    report.add("weights", "they are missing, and RL has ended")
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
            report.add("weights", *_error_text(error))
            return
        report.found_format("weights", WEIGHTS_FORMAT)  # others are refused
        report.num_files += check.num_objects + check.num_versions
        report.num_bytes += check.object_bytes
        for one in found:
            report.add("weights", str(one), one.hint)
        for one in check.notices:
            report.note("weights", str(one), one.hint)


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(".") or path.suffix in (".tmp", ".partial")


def _error_text(error: EtudeError | OSError | ValueError) -> tuple[str, str]:
    if isinstance(error, EtudeError):
        return f"{error.what}: {error.facts}" if error.facts else error.what, error.hint
    return str(error), HINT_COPY

"""Copies a run into a backup while it runs, so that the copy can be resumed and trains nothing twice.

The order decides. Checkpoints come first. Then one snapshot of the ledger is taken, at a moment when the pointer of the
weights names the version that the ledger recorded last. Weights and traces come after it: what both name was written
before. Rollouts that may still be trained on are copied before and after the ledger. The run goes on meanwhile, and may
delete or prune something between two of these; then the pass is repeated, which copies only what is new
(docs/decisions/0100-the-order-of-a-backup.md)."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

from etude.backups.sources import (
    Kind,
    copy_any,
    copy_folder,
    copy_privacy,
    copy_store,
    files_below,
    keys_of_signals,
    kind_of,
    read_pointers,
    release_states,
)
from etude.backups.writer import BackupWriter, OriginalChanged
from etude.errors import BackupError, EtudeError, InputError
from etude.experience.ledger import Ledger
from etude.file_checksums import SUMS, ChecksumMismatch, files_in, read_sums, verify_parquet
from etude.loop.locations import ledger_location, read_ledger, rollout_files, weights_location
from etude.run import RunFolder
from etude.training.mid_training_progress import progress_folder
from etude.weights.chain.manifest import read_pointer

PASSES, PAUSE_S = 12, 0.25
STRICT = 8  # passes after which a lost file of a running run counts as damage, not as deleted meanwhile
POLICY = "pointers/policy"
LEDGER, DUMP, DUMP_S = "ledger.sqlite", "ledger.pgdump", 3600.0
_HEAD = ("run.json", "config.toml", "phases.json", "plugins.json", "rewards.json", "audit.json")
"""Small files that are replaced as a whole; if one was replaced meanwhile, the pass is repeated."""
_SEALED = ("tokenizer", "corpus")
_NOT_COPIED = {"lock", "rewards.lock", "lease", "logs/learner.address"}
"""Locks, and an address with its secret, which are of no use in another process."""
_ROLLOUTS, _CHECKPOINTS = "rollouts", "checkpoints"


def back_up(
    writer: BackupWriter, sources: dict[str, Path], *, with_keys: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy sources, by their names in the backup. Returns (what is left out, what is damaged), a sentence each.

    `with_keys`: also the keys of privacy folders. The folder of keys of a file of signals is a source of its own, named
    as the file with ".keys" appended.

    Raises `BackupError` if a run changed so fast that no pass was consistent."""
    changed = ""
    for number in range(PASSES):
        if number:
            time.sleep(PAUSE_S)
        files = {name: path for name, path in sources.items() if kind_of(path) in (Kind.DATABASE, Kind.FILE)}
        states = {name: release_states(path) for name, path in files.items()}
        left_out, damaged = list[str](), list[str]()
        try:
            for name, path in files.items():
                copy_any(writer, path, name)
                if (keys := keys_of_signals(path)) is not None:
                    left_out.append(_told_of_signals(name, keys, in_backup=f"{name}.keys" in sources))
            for name, path in sources.items():
                if name not in files:
                    _copy(writer, path, name, left_out, damaged, with_keys=with_keys, strict=number < STRICT)
        except OriginalChanged as error:
            changed = str(error)
            continue
        moved = [name for name, path in files.items() if release_states(path) != states[name]]
        if not moved:
            return tuple(left_out), tuple(damaged)
        changed = f"{moved[0]} has another state of a release"
    hint = "back up when the run writes fewer checkpoints, or raise rl.checkpoint_every"
    raise BackupError(f"no consistent copy after {PASSES} passes", f"the last time: {changed}", hint=hint)


def _told_of_signals(name: str, keys: Path, *, in_backup: bool) -> str:
    """What must be known of a file of signals when it is restored."""
    if in_backup:
        return f"{name}: subjects that were erased later must be erased again, since the backup has their signals"
    return (
        f"{name}: without its keys; put {keys.absolute()} beside it after a restore, as {name}.keys, and erase again"
        " the subjects that were erased since the backup"
    )


def _copy(
    writer: BackupWriter,
    path: Path,
    name: str,
    left_out: list[str],
    damaged: list[str],
    *,
    with_keys: bool,
    strict: bool,
) -> None:
    match kind_of(path):
        case Kind.RUN:
            _RunCopy(writer, RunFolder.open(path), name, left_out, damaged, strict=strict).copy()
        case Kind.PRIVACY:
            left_out += copy_privacy(writer, path, name, with_keys=with_keys)
        case Kind.STORE:
            damaged += copy_store(writer, path, name)
        case _:
            left_out += copy_folder(writer, path, name, with_keys=with_keys)


class _RunCopy:
    """One pass over a run. Raises `OriginalChanged` where the run has gone on so that the pass is not consistent."""

    def __init__(
        self,
        writer: BackupWriter,
        run: RunFolder,
        name: str,
        left_out: list[str],
        damaged: list[str],
        *,
        strict: bool,
    ) -> None:
        self.writer, self.run, self.name, self.left_out, self.damaged = writer, run, name, left_out, damaged
        self.live = strict and run.holder() is not None
        self.pointers: dict[str, bytes] | None = None

    def copy(self) -> None:
        small = {one: self._content(one) for one in _HEAD}
        for one, data in small.items():
            if data is not None:
                self.writer.write(f"{self.name}/{one}", data)
        self._checkpoints()
        self._rollouts()
        with contextlib.ExitStack() as opened:
            ledger = self._ledger()
            if ledger is not None:
                opened.enter_context(closing(ledger))
            self._rollouts()
            self._weights()
            self._rest()
            for one, data in small.items():
                if self._content(one) != data:
                    raise OriginalChanged(f"{self.run / one} was replaced")
            if ledger is not None:
                self._require_consistent(ledger)

    def _content(self, name: str) -> bytes | None:
        try:
            return (self.run / name).read_bytes()
        except FileNotFoundError:
            return None

    def _checkpoints(self) -> None:
        """Copy every complete checkpoint, the corpus and the tokeniser; those that the run has deleted are left out."""
        folders = [*_SEALED]
        for place in _folders_in(self.run / _CHECKPOINTS):
            inner = _folders_in(place) if place == progress_folder(place.with_suffix("")) else [place]
            folders += [one.relative_to(self.run.path).as_posix() for one in inner]
        for path in self.writer.below(f"{self.name}/{_CHECKPOINTS}"):
            if not self._original(path).exists():
                self.writer.drop(path)
        for folder in folders:
            try:
                self._sealed(folder)
            except OriginalChanged:
                for path in self.writer.below(f"{self.name}/{folder}"):
                    self.writer.drop(path)

    def _original(self, path: str) -> Path:
        return self.run / path.removeprefix(f"{self.name}/")

    def _sealed(self, folder: str) -> None:
        """Copy a folder that is complete once it has SHA256SUMS, which is copied last, and compare with it."""
        where = self.run / folder
        try:
            sums = read_sums(where)
        except ChecksumMismatch as error:
            sums = {}
            self.damaged.append(f"{self.name}/{folder}/{SUMS}: {error.facts}")
        if sums is None and self.run.has_sums:
            return  # it is being written
        for name in files_in(where):
            copied = self.writer.copy(where / name, f"{self.name}/{folder}/{name}", fixed=True)
            if sums and name in sums and sums[name] != copied.sha256:
                told = f"its SHA-256 is {copied.sha256[:12]}, written was {sums[name][:12]}"
                self.damaged.append(f"{self.name}/{folder}/{name}: {told}")
        if sums is not None:
            self.writer.copy(where / SUMS, f"{self.name}/{folder}/{SUMS}", fixed=True)
        missing = set(sums or ()) - set(files_in(where))
        if missing:
            if where.is_dir() and not self.live:
                self.damaged.append(f"{self.name}/{folder}/{min(missing)}: it is missing")
            else:
                raise OriginalChanged(f"{where} was deleted")

    def _weights(self) -> None:
        place = weights_location(self.run)
        if isinstance(place, Path):
            if place.is_dir():
                self.damaged += copy_store(self.writer, place, f"{self.name}/weights", self.pointers)
        else:
            self.left_out.append(f"{self.name}: its weights, which stay in {place}")
        if where := self.run.setting("stores.traces"):
            self.left_out.append(f"{self.name}: its traces, which stay in {where}")

    def _rollouts(self) -> None:
        """Copy stored rollouts; those that the run has deleted are dropped when the pass is checked."""
        files = rollout_files(self.run)
        for name in files.names():
            with contextlib.suppress(OriginalChanged):  # not needed any more, or the check finds that it is missing
                self.writer.copy(files.folder / name, f"{self.name}/{_ROLLOUTS}/{name}", fixed=True)

    def _ledger(self) -> Ledger | None:
        """Copy the ledger. Returns what was copied, to be compared with the rest; None before RL."""
        place = ledger_location(self.run)
        if isinstance(place, Path):
            if not place.exists():
                return None
            path = f"{self.name}/{LEDGER}"
            self.writer.copy_database(place, path, at=self._agrees)
            return Ledger.open_readonly(self.writer.path / path, immutable=True)
        from etude.experience.database import NoLedger

        try:
            ledger = read_ledger(self.run)
        except NoLedger:
            return None
        try:
            before = ledger.recall("versions")
            agreed = self._read_pointers(before)
            self._dump(place)
            if self.live and not (agreed and ledger.recall("versions") == before):
                raise OriginalChanged("the run published a version while its ledger was dumped")
        except BaseException:
            ledger.close()
            raise
        return ledger  # later than the dump: what it says of deletions holds for the dump, too

    def _agrees(self, snapshot: sqlite3.Connection) -> bool:
        """Whether the pointers of the weights, which are read now, and the ledger at this moment are of one version.

        A run commits a batch to its ledger right after it has published the version."""
        found = snapshot.execute("SELECT value FROM meta WHERE key = 'versions'").fetchone()
        return self._read_pointers(json.loads(found[0]) if found else None) or not self.live

    def _read_pointers(self, versions: list[list[object]] | None) -> bool:
        """Read the pointers of the weights. Returns whether the newest version is the ledger's last."""
        place = weights_location(self.run)
        if not isinstance(place, Path) or not place.is_dir():
            return True
        self.pointers = read_pointers(place)
        if POLICY not in self.pointers or not versions:
            return POLICY not in self.pointers and not versions
        version = read_pointer(self.pointers[POLICY]).head.version
        return versions[-1] == [version.step, version.incarnation, version.digest]

    def _dump(self, place: str) -> None:
        """Copy the schema of a ledger on a PostgreSQL server with pg_dump, which reads one snapshot."""
        from etude.experience.postgres import schema_of
        from etude.experience.postgres_errors import redacted_url

        url, _, run_id = place.partition("#")
        program = shutil.which("pg_dump")
        if program is None:
            hint = "install PostgreSQL's client (Debian: postgresql-client) of the server's version or newer"
            facts = f"the ledger of {self.run.path} is on {redacted_url(url)}, and there is no pg_dump here"
            raise InputError("this backup needs pg_dump", facts, hint=hint)
        path = f"{self.name}/{DUMP}"
        dumped = self.writer.path / f"{path}.part"
        dumped.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [program, "--format=custom", f"--schema={schema_of(run_id)}", f"--file={dumped}", f"--dbname={url}"]
        try:
            done = subprocess.run([*command, "--no-password"], capture_output=True, text=True, timeout=DUMP_S)
            if done.returncode:
                hint = (
                    "pg_dump must be of the server's version or newer; the password comes from PGPASSWORD or ~/.pgpass"
                )
                told = " ".join(done.stderr.replace(url, redacted_url(url)).split())[:300]
                raise BackupError(f"the ledger on {redacted_url(url)} cannot be copied", told, hint=hint)
            self.writer.copy(dumped, path)
        except subprocess.TimeoutExpired:
            hint = "back up the server by its own means, such as pg_basebackup"
            raise BackupError(f"waited {DUMP_S:g} s for pg_dump", redacted_url(url), hint=hint) from None
        finally:
            dumped.unlink(missing_ok=True)
        self.left_out.append(
            f"{self.name}: the ledger's server; load {DUMP} into an empty database with pg_restore --dbname=URL"
        )

    def _rest(self) -> None:
        """Copy traces and everything else: evaluations, events, logs, reports, files of trackers."""
        done = {*_HEAD, *_NOT_COPIED, *_SEALED, _CHECKPOINTS, _ROLLOUTS, "weights", LEDGER, DUMP}
        for path in files_below(self.run.path):
            if path in done or path.partition("/")[0] in done or path.startswith(f"{LEDGER}-"):
                continue
            target, original = f"{self.name}/{path}", self.run / path
            if path.endswith(".parquet"):
                before = target in self.writer
                copied = self.writer.copy(original, target, fixed=True)
                if not before:
                    self._verify_trace(path, copied.path)
            elif path.endswith(".jsonl"):
                self.writer.copy(original, target, lines=True)
            else:
                with contextlib.suppress(OriginalChanged):  # a log that was rotated
                    copy_any(self.writer, original, target)
        for path in self.writer.below(f"{self.name}/traces"):
            if not self._original(path).exists():
                self.writer.drop(path)

    def _verify_trace(self, name: str, path: str) -> None:
        try:
            with (self.writer.path / path).open("rb") as file:
                verify_parquet(file, name)
        except ChecksumMismatch as error:
            self.damaged.append(f"{self.name}/{name}: {error.facts}")

    def _require_consistent(self, ledger: Ledger) -> None:
        """Compare the ledger that was copied with what was copied before and after it."""
        checkpoint = re.compile(f"{re.escape(self.name)}/{_CHECKPOINTS}/step-([0-9]+)/{SUMS}")
        steps = [
            int(found[1])
            for path in self.writer.below(f"{self.name}/{_CHECKPOINTS}")
            if (found := checkpoint.fullmatch(path))
        ]
        pruned = int(ledger.recall("pruned") or 0)
        if pruned > max(steps, default=0):
            raise OriginalChanged(f"rollouts up to step {pruned} were deleted after the last copied checkpoint")
        on_disk = isinstance(ledger_location(self.run), Path)
        kept = {
            f"{self.name}/{_ROLLOUTS}/{rollout_files(self.run).path(one.rollout_id, one.attempt).name}"
            for one in ledger.stored_summaries()
        }
        missing = sorted(path for path in kept if path not in self.writer)
        if missing and self.live and on_disk:
            raise OriginalChanged(f"{missing[0]} was deleted")
        self.damaged += [f"{path}: it is missing" for path in missing if not self.live]
        if on_disk:
            for path in self.writer.below(f"{self.name}/{_ROLLOUTS}"):
                if path not in kept:
                    self.writer.drop(path)
        try:
            if on_disk:
                ledger.verify()
        except EtudeError as error:
            self.damaged.append(f"{self.name}/{LEDGER}: {error.facts}")


def _folders_in(path: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones; none where it does not exist or was just deleted."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(one for one in path.iterdir() if one.is_dir() and not one.name.startswith("."))
    return []

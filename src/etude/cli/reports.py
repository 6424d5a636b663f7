"""The commands ``etude compare``, ``report``, ``fsck`` and ``ledger audit``.

They only read what the run wrote, so the run may be active."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from rich.table import Table

from etude.cli.locations import RUNS, console, newest_run, open_ledger, open_run
from etude.cli.progress import ProgressBar
from etude.cli.store_locations import is_store
from etude.dashboard import RunView, damage
from etude.dashboard.formatting import number, size
from etude.errors import Exit, LedgerError, NoRun, RunError
from etude.evals import compare_runs
from etude.experience import audit
from etude.experience.auditing import steps_of
from etude.experience.traces import TraceFolder
from etude.file_checksums import ChecksumMismatch, sealed, verify_json
from etude.loop.locations import rollout_files, traces_folder, weights_location, weights_store
from etude.loop.retention import replayable_after
from etude.run import write_durably
from etude.seams import BlobStore
from etude.weights.chain.history import LineageSteps, backward, head
from etude.weights.chain.inspect import require_pointer
from etude.weights.chain.manifest import Manifest


def compare(args: argparse.Namespace) -> int:
    """Print the held-out results of two runs, and their difference with a confidence interval. Returns 0."""
    a, b = open_run(args.run_a), open_run(args.run_b)
    found = compare_runs(a.path, b.path)
    table = Table("run", "held-out solve rate", "95 % interval", "tasks", "problems", "turns", "sampled tokens")
    for result in (found.a, found.b):
        interval = f"{result.low:.3f} to {result.high:.3f}"
        numbers = (f"{result.turns_mean:.2f}", f"{result.sampled_mean:.1f}")
        table.add_row(
            result.name, f"{result.rate:.3f}", interval, str(result.num_tasks), str(result.num_problems), *numbers
        )
    screen = console()
    screen.print(table)
    difference = found.decisive
    how = f"paired on {found.num_shared} tasks" if difference is found.paired else "tasks taken as independent"
    screen.print(
        f"{found.b.name} is {found.verdict}: {difference.value:+.3f} "
        f"({difference.low:+.3f} to {difference.high:+.3f}, {how}); better on {found.better}, worse on {found.worse}"
    )
    return 0


def report(args: argparse.Namespace) -> int:
    """Write summary.json and report.html again from the files of the run.

    Returns exit code 1 if some of the files are unreadable."""
    from etude.loop.phases import write_run_report

    run = open_run(args.run)
    if not (run / "events" / "conductor.jsonl").exists():
        hint = "restore the file; summary.json and report.html are unchanged"
        raise RunError(f"{run.path} has no events", "a report needs events/conductor.jsonl", hint=hint)
    print(write_run_report(run))
    found = damage(RunView(run.path)) if run.holder() is None else []
    if found:
        hint = "the report contains the readable data; restore the files from a copy"
        raise RunError(f"the report of {run.path} is incomplete", "; ".join(found), hint=hint)
    return 0


def fsck(args: argparse.Namespace) -> int:
    """Verify every file of a run against its checksum. Returns exit code 1 if there is a problem.

    It only reads, so the run may be active."""
    from etude.loop.fsck import FsckReport, checks_of

    if args.run is None:
        path = newest_run().path
    else:
        path = args.run if args.run.exists() or not (RUNS / args.run).exists() else RUNS / args.run
    if not (path / "run.json").is_file() and is_store(str(path)):
        raise NoRun(f"{path} is not a run", "it is a store of weights", hint=f"etude weights fsck {path}")
    proof, parts = FsckReport(), checks_of(path)
    with ProgressBar("parts of the run", len(parts)) as progress:
        for part in parts:
            part(proof)
            progress.advance()
    for found in proof.problems:
        print(found)
    for found in proof.notices:
        print(f"notice: {found}")
    if proof.formats:
        told = (f"{kind} {', '.join(sorted(numbers))}" for kind, numbers in sorted(proof.formats.items()))
        print(f"formats: {'; '.join(told)}")
    print(
        f"{path}: {number(proof.num_files, 'file')}, {size(proof.num_bytes)} read:"
        f" {number(len(proof.problems), 'problem')}, {number(len(proof.notices), 'notice')}"
        + (f"; not verified, because no program reads them: {', '.join(proof.plain)}" if proof.plain else "")
    )
    return Exit.FAILED if proof.problems else Exit.DONE


def audit_ledger(args: argparse.Namespace) -> int:
    """Compare a run's ledger with the records of batches and weights, to find rollouts that were lost or trained on
    twice.

    Returns exit code 1 if it finds any."""
    run = open_run(args.run)
    ledger, weights, traces = open_ledger(run), weights_location(run), traces_folder(run)
    ledger.verify()
    if isinstance(weights, Path) and not weights.exists():
        hint = "restore it: its manifests list the rollouts of each version"
        raise RunError(f"{run.path} has a ledger but no weights folder", "the audit needs both", hint=hint)
    store, record = weights_store(run, readonly=True), run / "audit.json"
    after = _audited_step(store, record) if args.new else 0
    require_pointer(store)
    steps, everything = LineageSteps(store, down_to=after), LineageSteps(store)
    chain = _TrainedSteps(steps, traces)
    found = audit(
        ledger,
        traces,
        chain,
        deleted=replayable_after(ledger),
        after=after,
        before=_TrainedSteps(everything, traces),
        files=rollout_files(run),
    )
    unproven = len(found.missing) + len(found.ungraded)
    print(
        (f"failed: {unproven} without evidence ({(*found.missing, *found.ungraded)[0]}); " if unproven else "")
        + f"{len(found.lost)} lost, {len(found.twice)} trained twice, {len(found.leaked)} slots leaked; "
        f"{found.num_consumed} of {found.num_rollouts} rollouts consumed by {found.num_steps} steps"
        + (f" after step {after}; earlier steps passed an earlier audit" if after else "")
    )
    found.require_sound()
    if steps.damaged is not None:
        raise LedgerError(
            f"the manifest of {steps.damaged.version} is damaged",
            "for the steps up to it, only the traces say what was trained",
            hint=f"restore {steps.damaged.key} in {weights} from a copy, then repeat the audit",
        )
    _write_record(store, record)
    return 0


class _TrainedSteps:
    """Iterates over (step, rollout ids) of a lineage, newest first: from the manifests, and before a damaged manifest
    from the traces."""

    def __init__(self, steps: LineageSteps, traces: TraceFolder) -> None:
        self._steps, self._traces = steps, traces

    def __iter__(self) -> Iterator[tuple[int, Collection[str]]]:
        yield from self._steps
        if self._steps.damaged is not None:
            yield from steps_of(self._traces, self._steps.unread_up_to())


def _audited_step(store: BlobStore, record: Path) -> int:
    """The step up to which an earlier audit of this lineage passed; 0 if there was none."""
    try:
        saved = json.loads(record.read_text())
        verify_json(saved, record)
        step, version = int(saved["step"]), str(saved["version"])
    except (OSError, ValueError, KeyError, TypeError, ChecksumMismatch):
        return 0
    for manifest in backward(store, "policy"):
        if isinstance(manifest, Manifest) and manifest.version.step <= step:
            return step if str(manifest.version) == version else 0
    return 0


def _write_record(store: BlobStore, record: Path) -> None:
    """Record the newest version as audited. Does nothing if the run folder is not writable."""
    pointer = head(store, "policy")
    if pointer is not None and os.access(record.parent, os.W_OK):
        version = pointer.head.version
        write_durably(record, json.dumps(sealed({"format": 1, "step": version.step, "version": str(version)})).encode())

"""``etude compare | report | ledger``: they read a run folder, of a run that is under way, too."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from rich.table import Table

from etude.cli.places import console, open_ledger, open_run
from etude.dashboard import RunView, damage
from etude.errors import LedgerError, RunError
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
    """Two runs' held-out results and the difference with its interval."""
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
    apart = found.decisive
    how = f"paired on {found.num_shared} tasks" if apart is found.paired else "as of independent tasks"
    screen.print(
        f"{found.b.name} is {found.verdict}: {apart.value:+.3f} ({apart.low:+.3f} to {apart.high:+.3f}, {how}); "
        f"better on {found.better}, worse on {found.worse}"
    )
    return 0


def report(args: argparse.Namespace) -> int:
    """Write summary.json and report.html again, from what the run folder holds. Exit code 1 when some of that cannot be
    read."""
    from etude.loop.phases import write_run_report

    run = open_run(args.run)
    if not (run / "events" / "conductor.jsonl").exists():
        hint = "put them back; summary.json and report.html are left as they are"
        raise RunError(f"{run.path} has no events", "a report is made of events/conductor.jsonl", hint=hint)
    print(write_run_report(run))
    found = damage(RunView(run.path)) if run.holder() is None else []
    if found:
        hint = "the report has what could be read; restore the files from a copy"
        raise RunError(f"the report of {run.path} is not whole", "; ".join(found), hint=hint)
    return 0


def ledger_audit(args: argparse.Namespace) -> int:
    """Recompute from traces and manifests: lost, trained twice. Exit code 1 when anything is."""
    run = open_run(args.run)
    ledger, place, traces = open_ledger(run), weights_location(run), traces_folder(run)
    ledger.verify()
    if isinstance(place, Path) and not place.exists():
        hint = "put it back: what was trained is what its manifests list"
        raise RunError(f"{run.path} has a ledger and no weights folder", "nothing can be audited against it", hint=hint)
    store, note = weights_store(run, readonly=True), run / "audit.json"
    after = _proven(store, note) if args.new else 0
    require_pointer(store)
    steps, everything = LineageSteps(store, down_to=after), LineageSteps(store)
    chain = _Chained(steps, traces)
    found = audit(
        ledger,
        traces,
        chain,
        deleted=replayable_after(ledger),
        after=after,
        before=_Chained(everything, traces),
        files=rollout_files(run),
    )
    unproven = len(found.missing) + len(found.ungraded)
    print(
        (f"not sound: {unproven} without a proof ({(*found.missing, *found.ungraded)[0]}); " if unproven else "")
        + f"{len(found.lost)} lost, {len(found.twice)} trained twice, {len(found.leaked)} slots leaked; "
        f"{found.num_consumed} of {found.num_rollouts} rollouts consumed by {found.num_steps} steps"
        + (f" after step {after}, up to which it was sound before" if after else "")
    )
    found.require_sound()
    if steps.damaged is not None:
        raise LedgerError(
            f"the manifest of {steps.damaged.version} is damaged",
            "what was trained up to it is known from the traces alone",
            hint=f"copy {steps.damaged.key} back into {place}: then the audit proves it again",
        )
    _note(store, note)
    return 0


class _Chained:
    """A lineage's steps; where a manifest is damaged, those before it by the traces."""

    def __init__(self, steps: LineageSteps, traces: TraceFolder) -> None:
        self._steps, self._traces = steps, traces

    def __iter__(self) -> Iterator[tuple[int, Collection[str]]]:
        yield from self._steps
        if self._steps.damaged is not None:
            yield from steps_of(self._traces, self._steps.unread_up_to())


def _proven(store: BlobStore, note: Path) -> int:
    """The step up to which an audit found this very lineage sound; 0 when none did."""
    try:
        said = json.loads(note.read_text())
        verify_json(said, note)
        step, version = int(said["step"]), str(said["version"])
    except (OSError, ValueError, KeyError, TypeError, ChecksumMismatch):
        return 0
    for one in backward(store, "policy"):
        if isinstance(one, Manifest) and one.version.step <= step:
            return step if str(one.version) == version else 0
    return 0


def _note(store: BlobStore, note: Path) -> None:
    """Remember what was proven; a run folder that may not be written forgets."""
    pointer = head(store, "policy")
    if pointer is not None and os.access(note.parent, os.W_OK):
        version = pointer.head.version
        write_durably(note, json.dumps(sealed({"format": 1, "step": version.step, "version": str(version)})).encode())

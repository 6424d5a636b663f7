"""``etude compare | report | ledger``: they read a run folder, of a run that is under way, too."""

from __future__ import annotations

import argparse

from rich.table import Table

from etude.cli.places import console, open_ledger, open_run
from etude.errors import LedgerError, RunError
from etude.evals import compare_runs
from etude.experience import audit
from etude.experience.audit import steps_of
from etude.loop.retention import kept_from
from etude.stores import DirectoryStore
from etude.weights.chain.history import readable
from etude.weights.chain.inspect import require_pointer


def compare(args: argparse.Namespace) -> int:
    """Two runs' held-out results and the difference with its interval."""
    a, b = open_run(args.run_a), open_run(args.run_b)
    found = compare_runs(a.path, b.path)
    table = Table("run", "held-out solve rate", "95 % interval", "tasks", "turns", "sampled tokens")
    for result in (found.a, found.b):
        interval = f"{result.low:.3f} to {result.high:.3f}"
        numbers = (f"{result.turns_mean:.2f}", f"{result.sampled_mean:.1f}")
        table.add_row(result.name, f"{result.rate:.3f}", interval, str(result.num_tasks), *numbers)
    screen = console()
    screen.print(table)
    apart = found.paired or found.difference
    how = f"paired on {found.num_shared} tasks" if found.paired else "independent tasks"
    screen.print(
        f"{found.b.name} is {found.verdict}: {apart.value:+.3f} ({apart.low:+.3f} to {apart.high:+.3f}, {how}); "
        f"better on {found.better}, worse on {found.worse}"
        + (f", p = {found.p_value:.2g}" if found.p_value is not None else "")
    )
    return 0


def report(args: argparse.Namespace) -> int:
    """Write summary.json and report.html again, from what the run folder holds."""
    from etude.loop.phases import leave_report

    run = open_run(args.run)
    if not (run / "events" / "conductor.jsonl").exists():
        hint = "put them back; summary.json and report.html are left as they are"
        raise RunError(f"{run.path} has no events", "a report is made of events/conductor.jsonl", hint=hint)
    print(leave_report(run))
    return 0


def ledger_audit(args: argparse.Namespace) -> int:
    """Recompute from traces and manifests: lost, trained twice. Exit code 1 when anything is."""
    run = open_run(args.run)
    ledger = open_ledger(run)
    if not (run / "weights").exists():
        hint = "put it back: what was trained is what its manifests list"
        raise RunError(f"{run.path} has a ledger and no weights folder", "nothing can be audited against it", hint=hint)
    store = DirectoryStore(run / "weights")
    manifests, damaged = readable(store, "policy")
    require_pointer(store)
    from_traces = steps_of(run / "traces", damaged.version.step) if damaged is not None else []
    chain = [*from_traces, *(list(manifest.rollout_ids) for manifest in manifests)]
    deleted = [list(manifest.rollout_ids) for manifest in manifests if manifest.version.step <= kept_from(ledger)]
    found = audit(ledger, run / "traces", chain, deleted=deleted)
    unproven = len(found.missing) + len(found.ungraded)
    print(
        (f"not sound: {unproven} without a proof ({(*found.missing, *found.ungraded)[0]}); " if unproven else "")
        + f"{len(found.lost)} lost, {len(found.twice)} trained twice, {len(found.leaked)} slots leaked; "
        f"{found.num_consumed} of {found.num_rollouts} rollouts consumed by {found.num_steps} steps"
    )
    found.require_sound()
    if damaged is not None:
        raise LedgerError(
            f"the manifest of {damaged.version} is damaged",
            "what was trained up to it is known from the traces alone",
            hint=f"copy {damaged.key} back into {run / 'weights'}: then the audit proves it again",
        )
    return 0

"""``etude compare | report | rollouts | ledger``: they read a run folder, of a run that is under way, too."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from etude.cli.places import console, open_run
from etude.errors import InputError, LedgerError, nearest
from etude.evals import compare_runs
from etude.experience import Finished, Ledger, audit
from etude.experience.audit import steps_of
from etude.experience.ledger import FINISHED
from etude.experience.transitions import State
from etude.harness import ChatFormat
from etude.records import Graded
from etude.records.wire import unpack
from etude.stores import DirectoryStore
from etude.weights.history import readable
from etude.weights.inspect import require_pointer


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

    print(leave_report(open_run(args.run)))
    return 0


def rollouts_list(args: argparse.Namespace) -> int:
    """Rollouts of a run, the newest last."""
    run = open_run(args.run)
    if args.state is not None and args.state not in list(State):
        raise InputError(f"no state {args.state!r}", hint=nearest(args.state, list(State)))
    ledger = Ledger.reading(run / "ledger.sqlite")
    rows = [row for row in ledger.rows() if args.state in (None, row.state)][-args.limit :]
    table = Table("rollout", "state", "reward", "step", "attempt", "reason")
    for row in rows:
        reward = "" if row.reward is None else f"{row.reward:g}"
        table.add_row(row.rollout_id, row.state, reward, str(row.step or ""), str(row.attempt), row.reason)
    console().print(table)
    return 0


def rollouts_show(args: argparse.Namespace) -> int:
    """One rollout: what the model saw and said, how it was judged, what the ledger did with it."""
    run = open_run(args.run)
    ledger = Ledger.reading(run / "ledger.sqlite")
    history = ledger.history(args.rollout_id)
    ledger.row(args.rollout_id)
    data = ledger.get(args.rollout_id, FINISHED)
    console = Console(highlight=False, markup=False)
    for move in history:
        console.print(f"{move['t']:.2f} {move['origin'] or '-'} -> {move['state']} {move['reason']}")
    if data is None:
        console.print("(its record was pruned after training; its trace is in traces/)")
        return 0
    finished = unpack(data, Finished)
    if isinstance(finished.outcome, Graded):
        console.print(f"\nreward {finished.outcome.reward:g}: {finished.outcome.reason} ({finished.outcome.trust})")
    else:
        console.print(f"\ninvalid at {finished.outcome.boundary}: {finished.outcome.reason}")
    if finished.rollout is not None:
        chat = ChatFormat.load(run / "tokenizer")
        for leaf in finished.rollout.trace.leaves():
            console.print(chat.readable(finished.rollout.trace.path(leaf).token_ids))
    return 0


def ledger_audit(args: argparse.Namespace) -> int:
    """Recompute from traces and manifests: lost, trained twice. Exit code 1 when anything is."""
    run = open_run(args.run)
    path = run / "ledger.sqlite"
    if not path.exists():
        raise LedgerError(
            f"{run.path} has no ledger",
            "it has not begun RL",
            hint=f"audit it once it has: etude status {run.path} says where it is",
        )
    store = DirectoryStore(run / "weights")
    manifests, damaged = readable(store, "policy")
    require_pointer(store)
    from_traces = steps_of(run / "traces", damaged.version.step) if damaged is not None else []
    chain = [*from_traces, *(list(manifest.rollout_ids) for manifest in manifests)]
    found = audit(Ledger.reading(path), run / "traces", chain)
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

"""The commands ``etude rollouts list`` and ``show`` for rollouts of training and of evaluations.

When a rollout was trained on, its file is deleted after the second checkpoint that follows its step, and the trace (the
record of the step's batch) is kept. Other rollouts stay in their files.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from rich.table import Column, Table

from etude.cli.locations import RUNS, console, open_ledger, open_run
from etude.cli.rollout_tree import print_views
from etude.dashboard.formatting import number
from etude.errors import EtudeError, InputError, NoRun, nearest
from etude.evals import EvalRow, read_rows
from etude.experience import Ledger
from etude.experience.database import NoLedger
from etude.experience.groups import Row
from etude.experience.transitions import State
from etude.loop.locations import read_ledger
from etude.loop.rollout_views import evaluation_view, training_view
from etude.records.view import RolloutView
from etude.records.wire import to_json
from etude.run import RunFolder


def list_rollouts(args: argparse.Namespace) -> int:
    """List the last training rollouts of a run, the newest last, or the last rollouts of one evaluation. Returns 0."""
    run = open_run(args.run)
    if args.state is not None and args.state not in list(State):
        raise InputError(f"unknown state {args.state!r}", hint=nearest(args.state, list(State)))
    if args.eval is not None:
        if args.state is not None:
            facts = "only rollouts of training have a state"
            raise InputError("--state and --eval cannot be used together", facts, hint="leave out one of them")
        results = sorted(read_rows(_evaluation(run, args.eval)), key=lambda row: row.rollout_id)
        _print(_evaluated(results[-args.limit :]), len(results))
        return 0
    ledger = open_ledger(run)
    table = _table("rollout", "state", "reward", "step", "attempt")
    signs = ledger.quarantined()
    rows, total = _rows(ledger, args.state, args.limit, signs)
    for row in rows:
        reward, reason = "" if row.reward is None else f"{row.reward:g}", row.reason
        if row.rollout_id in signs:
            sign = signs[row.rollout_id]
            reason = f"{reason + '; ' if reason else ''}quarantined, graded {sign.graded:g}: {sign.reason}"
        table.add_row(row.rollout_id, row.state, reward, str(row.step or ""), str(row.attempt), reason)
    _print(table, total)
    return 0


def _table(*names: str) -> Table:
    """Make a table in which only the last column, "reason", is wrapped when the terminal is narrow."""
    return Table(*(Column(name, no_wrap=True) for name in names), Column("reason", overflow="fold"))


def _print(table: Table, total: int) -> None:
    screen = console()
    screen.print(table)
    if table.row_count < total:
        screen.print(f"the last {table.row_count} of {total} rollouts; all of them: --limit {total}")


def _rows(ledger: Ledger, state: str | None, limit: int, signs: Collection[str]) -> tuple[list[Row], int]:
    """Return (the newest rollouts in a state, at most `limit`; how many there are).

    The state `quarantined` includes rollouts whose record is unreadable and rollouts with signs of cheating (`signs`),
    in any state."""
    if state != State.QUARANTINED:
        counts = ledger.states()
        total = sum(counts.values()) if state is None else counts.get(State(state), 0)
        return ledger.rows(states=None if state is None else [State(state)], limit=limit), total
    found = [*ledger.find_rows(signs), *ledger.rows(states=[State.QUARANTINED])]
    return sorted(found, key=lambda row: row.rollout_id)[-limit:], len(found)


def _evaluation(run: RunFolder, name: str) -> Path:
    known = sorted(path.stem for path in (run / "evals").glob("*.parquet"))
    if name not in known:
        raise InputError(f"{run.path} has no evaluation {name!r}", hint=nearest(name, known))
    return run / "evals" / f"{name}.parquet"


def _evaluated(rows: list[EvalRow]) -> Table:
    table = _table("rollout", "family", "outcome", "reward", "turns")
    for row in rows:
        table.add_row(row.rollout_id, row.family, row.outcome, f"{row.reward:g}", str(row.turns), row.reason)
    return table


def show(args: argparse.Namespace) -> int:
    """Print one rollout as a tree of turns: calls, tokens, what was trained, and its grade. Returns 0.

    A rollout of an evaluation is printed once for each evaluation that has it."""
    try:
        run = open_run(args.run)
    except NoRun as error:
        if any((base / args.rollout_id / "run.json").is_file() for base in (Path(), RUNS)):
            error.hint = f"the run comes first: etude rollouts show {args.rollout_id} {args.run}"
        raise
    views = [*_training_view(run, args.rollout_id), *_evaluation_views(run, args.rollout_id)]
    if not views:
        known = {*_training_ids(run), *(row.rollout_id for _, rows in _evaluations(run) for row in rows)}
        close = nearest(args.rollout_id, known) + ", or " if difflib.get_close_matches(args.rollout_id, known) else ""
        if members := sorted(one for one in known if one.startswith(f"{args.rollout_id}.")):
            more = f" and {len(members) - 8} more" if len(members) > 8 else ""
            close = f"it is a group of {', '.join(members[:8])}{more}, or "
        raise InputError(
            f"{run.path} has no rollout {args.rollout_id!r}",
            f"{number(len(known), 'rollout')} of training and evaluations",
            hint=f"{close}list them: etude rollouts list, or etude rollouts list --eval before",
        )
    if args.json:
        print(to_json(views).decode())
    else:
        print_views(views, full=args.full)
    return 0


def _training_ids(run: RunFolder) -> Iterator[str]:
    try:
        yield from (row.rollout_id for row in read_ledger(run).rows())
    except NoLedger:
        return


def _training_view(run: RunFolder, rollout_id: str) -> Iterator[RolloutView]:
    """Yield the view of a rollout of training, if the ledger has it."""
    try:
        ledger = read_ledger(run)
    except NoLedger:
        return
    if not (history := ledger.history(rollout_id)):
        return
    yield training_view(run, ledger, ledger.row(rollout_id), history)


def _evaluation_views(run: RunFolder, rollout_id: str) -> Iterator[RolloutView]:
    for name, rows in _evaluations(run):
        yield from (evaluation_view(name, row) for row in rows if row.rollout_id == rollout_id)


def _evaluations(run: RunFolder) -> Iterator[tuple[str, list[EvalRow]]]:
    """Yield (name, rows) of each evaluation, oldest first. An unreadable file is reported on stderr and skipped."""
    for path in sorted((run / "evals").glob("*.parquet"), key=lambda path: path.stat().st_mtime):
        try:
            yield path.stem, read_rows(path)
        except EtudeError as error:
            print(f"skipped: {error.what}: {error.facts}", file=sys.stderr)

"""The commands ``etude rollouts list`` and ``show`` for rollouts of training and of evaluations.

The file of a rollout is deleted after the second checkpoint that follows its step; its trace is kept. A rollout that
was never trained on stays in its file. Rollouts of evaluations stay in the files of the evaluations.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from rich.table import Table

from etude.cli.locations import console, open_ledger, open_run
from etude.cli.rollout_tree import print_views
from etude.dashboard.formatting import number
from etude.errors import EtudeError, InputError, nearest
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
    """List the training rollouts of a run, the newest last, or the first rollouts of one evaluation. Returns 0."""
    run = open_run(args.run)
    if args.state is not None and args.state not in list(State):
        raise InputError(f"unknown state {args.state!r}", hint=nearest(args.state, list(State)))
    if args.eval is not None:
        console().print(_evaluated(read_rows(_evaluation(run, args.eval)), args.limit))
        return 0
    ledger = open_ledger(run)
    table = Table("rollout", "state", "reward", "step", "attempt", "reason")
    signs = ledger.quarantined()
    for row in _rows(ledger, args.state, args.limit, signs):
        reward, reason = "" if row.reward is None else f"{row.reward:g}", row.reason
        if row.rollout_id in signs:
            sign = signs[row.rollout_id]
            reason = f"{reason + '; ' if reason else ''}quarantined, graded {sign.graded:g}: {sign.reason}"
        table.add_row(row.rollout_id, row.state, reward, str(row.step or ""), str(row.attempt), reason)
    console().print(table)
    return 0


def _rows(ledger: Ledger, state: str | None, limit: int, signs: Collection[str]) -> list[Row]:
    """The newest rollouts in a state, at most `limit`. The state `quarantined` includes rollouts whose record is
    unreadable and rollouts with signs of cheating (`signs`), in any state."""
    if state != State.QUARANTINED:
        return ledger.rows(states=None if state is None else [State(state)], limit=limit)
    found = [*ledger.find_rows(signs), *ledger.rows(states=[State.QUARANTINED])]
    return sorted(found, key=lambda row: row.rollout_id)[-limit:] if limit else []


def _evaluation(run: RunFolder, name: str) -> Path:
    known = sorted(path.stem for path in (run / "evals").glob("*.parquet"))
    if name not in known:
        raise InputError(f"{run.path} has no evaluation {name!r}", hint=nearest(name, known))
    return run / "evals" / f"{name}.parquet"


def _evaluated(rows: list[EvalRow], limit: int) -> Table:
    table = Table("rollout", "family", "outcome", "reward", "turns", "reason")
    for row in sorted(rows, key=lambda row: row.rollout_id)[:limit]:
        table.add_row(row.rollout_id, row.family, row.outcome, f"{row.reward:g}", str(row.turns), row.reason)
    return table


def show(args: argparse.Namespace) -> int:
    """Print one rollout as a tree of turns: calls, tokens, what was trained, and its grade. Returns 0.

    A rollout of an evaluation is printed once for each evaluation that has it."""
    run = open_run(args.run)
    views = [*_training_view(run, args.rollout_id), *_evaluation_views(run, args.rollout_id)]
    if not views:
        known = {*_training_ids(run), *(row.rollout_id for _, rows in _evaluations(run) for row in rows)}
        close = nearest(args.rollout_id, known) + ", or " if difflib.get_close_matches(args.rollout_id, known) else ""
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

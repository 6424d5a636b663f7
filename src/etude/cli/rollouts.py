"""``etude rollouts list | show``: rollouts of training and of evaluations, from wherever the run keeps them.

A rollout's file is kept until two checkpoints lie behind its step; then its trace is, for good, and the evaluations'
files keep theirs. What was never trained on stays in its file.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from etude.cli.places import console, open_ledger, open_run
from etude.errors import EtudeError, InputError, nearest
from etude.evals import EvalRow, read_rows
from etude.experience import Ledger
from etude.experience.database import NoLedger
from etude.experience.groups import Row
from etude.experience.traces import read_rollout, trace_path
from etude.experience.transitions import State
from etude.harness import ChatFormat
from etude.loop.config import read_config
from etude.loop.locations import read_ledger, rollout_files, traces_folder
from etude.records import Graded, Outcome
from etude.records.wire import I32
from etude.run import RunFolder


def listed(args: argparse.Namespace) -> int:
    """Rollouts of a run's training, the newest last; or the first of one evaluation."""
    run = open_run(args.run)
    if args.state is not None and args.state not in list(State):
        raise InputError(f"no state {args.state!r}", hint=nearest(args.state, list(State)))
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
    """The last so many in a state; `quarantined` are those whose record cannot be read, and those with signs of
    cheating, whatever became of their groups."""
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
    """One rollout: what the model saw and said, how it was judged, what the ledger did with it; one of an evaluation
    as each evaluation of that task had it."""
    run, screen = open_run(args.run), Console(highlight=False, markup=False)
    found = [_show_trained(run, args.rollout_id, screen), *_show_evaluated(run, args.rollout_id, screen)]
    if not any(found):
        raise InputError(
            f"{run.path} has no rollout {args.rollout_id!r}",
            hint="list them: etude rollouts list, or etude rollouts list --eval before",
        )
    return 0


def _show_trained(run: RunFolder, rollout_id: str, screen: Console) -> bool:
    """Print a rollout of training; False when the ledger has none of that name."""
    try:
        ledger = read_ledger(run)
    except NoLedger:
        return False
    history = ledger.history(rollout_id)
    for move in history:
        screen.print(f"{move['t']:.2f} {move['origin'] or '-'} -> {move['state']} {move['reason']}")
    if not history:
        return False
    kept = _kept(run, ledger, ledger.row(rollout_id))
    if kept is None:
        screen.print("(it has left nothing: it was not played to an end)")
        return True
    outcome, paths = kept
    sign = ledger.quarantined().get(rollout_id)
    if sign is not None:
        screen.print(f"\nquarantined, graded {sign.graded:g}: {sign.reason}")
    if isinstance(outcome, Graded):
        reward = read_config(run).composition.of(outcome)
        screen.print(f"\nreward {reward.value:g}: {reward.reason} ({outcome.trust})")
        for term in outcome.terms:
            value = "unknown" if term.value is None else f"{term.value:g}"
            screen.print(f"  {term.name} {value}{term.evidence and ': ' + term.evidence}")
    elif outcome is not None:
        screen.print(f"\ninvalid at {outcome.boundary}: {outcome.reason}")
    chat = ChatFormat.load(run / "tokenizer")
    for token_ids in paths:
        screen.print(chat.readable(token_ids), soft_wrap=True)
    return True


def _kept(run: RunFolder, ledger: Ledger, row: Row) -> tuple[Outcome | None, list[I32]] | None:
    """Outcome and tokens of each path: from its file until that is deleted, then from its step's trace."""
    if (finished := ledger.finished(row.rollout_id)) is not None:
        if finished.summary is None or finished.summary.stored is None:
            return finished.outcome, []
        trace = rollout_files(run).read(finished.summary).trace
        return finished.outcome, [trace.path(leaf).token_ids for leaf in trace.leaves()]
    if row.step is None:
        return None
    return read_rollout(trace_path(traces_folder(run), row.step), row.rollout_id)


def _show_evaluated(run: RunFolder, rollout_id: str, screen: Console) -> Iterator[bool]:
    """Print a rollout of each evaluation that has it; a file that cannot be read is named and skipped."""
    for path in sorted((run / "evals").glob("*.parquet"), key=lambda path: path.stat().st_mtime):
        try:
            rows = [row for row in read_rows(path) if row.rollout_id == rollout_id]
        except EtudeError as error:
            screen.print(f"({error.what}: {error.facts})")
            continue
        for row in rows:
            judged = f"reward {row.reward:g}" if row.valid else f"invalid at {row.outcome}"
            screen.print(
                f"\nevaluation {path.stem}, {row.family}: {judged}: {row.reason}\n{row.transcript}", soft_wrap=True
            )
            yield True

"""The commands ``etude rollouts list`` and ``show`` for rollouts of training and of evaluations.

The file of a rollout is deleted after the second checkpoint that follows its step; its trace is kept. A rollout that
was never trained on stays in its file. Rollouts of evaluations stay in the files of the evaluations.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from etude.cli.locations import console, open_ledger, open_run
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
from etude.rollouts.logs import FOLDER as LOGS
from etude.rollouts.logs import read_logs
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
    """Print one rollout: prompts and completions, its grade, and its history in the ledger. Returns 0.

    A rollout of an evaluation is printed once for each evaluation that has it."""
    run, screen = open_run(args.run), Console(highlight=False, markup=False)
    found = [_show_trained(run, args.rollout_id, screen), *_show_evaluated(run, args.rollout_id, screen)]
    for attempt, text in read_logs(run / LOGS, args.rollout_id):
        screen.print(f"\nlog of the agent program, attempt {attempt}:\n{text.rstrip()}", soft_wrap=True)
    if not any(found):
        raise InputError(
            f"{run.path} has no rollout {args.rollout_id!r}",
            hint="list them: etude rollouts list, or etude rollouts list --eval before",
        )
    return 0


def _show_trained(run: RunFolder, rollout_id: str, screen: Console) -> bool:
    """Print a rollout of training. Returns False if the ledger does not have it."""
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
        screen.print("(nothing was stored: the rollout did not finish)")
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
    """The outcome of a rollout and the token ids of each path, from its file or from the trace of its step. None if
    nothing was stored."""
    if (finished := ledger.finished(row.rollout_id)) is not None:
        if finished.summary is None or finished.summary.stored is None:
            return finished.outcome, []
        trace = rollout_files(run).read(finished.summary).trace
        return finished.outcome, [trace.path(leaf).token_ids for leaf in trace.leaves()]
    if row.step is None:
        return None
    return read_rollout(trace_path(traces_folder(run), row.step), row.rollout_id)


def _show_evaluated(run: RunFolder, rollout_id: str, screen: Console) -> Iterator[bool]:
    """Print a rollout from each evaluation that has it. An unreadable file is reported and skipped."""
    for path in sorted((run / "evals").glob("*.parquet"), key=lambda path: path.stat().st_mtime):
        try:
            rows = [row for row in read_rows(path) if row.rollout_id == rollout_id]
        except EtudeError as error:
            screen.print(f"({error.what}: {error.facts})")
            continue
        for row in rows:
            result = f"reward {row.reward:g}" if row.valid else f"invalid at {row.outcome}"
            screen.print(
                f"\nevaluation {path.stem}, {row.family}: {result}: {row.reason}\n{row.transcript}", soft_wrap=True
            )
            yield True

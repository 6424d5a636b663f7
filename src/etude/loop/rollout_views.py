"""Reads the rollouts of a run as text for people: from the ledger, traces, rollout files and evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import LedgerError
from etude.evals import EvalRow
from etude.experience import Ledger
from etude.experience.groups import Row
from etude.experience.trace_reader import RecordedTree, read_rollout
from etude.experience.traces import trace_path
from etude.harness import ChatFormat
from etude.loop.config import read_config
from etude.loop.locations import rollout_files, traces_folder
from etude.records import Graded, Outcome, Trace
from etude.records.sample import Sample
from etude.records.view import RolloutView, TurnTokens, TurnView
from etude.records.wire import from_json
from etude.rollouts.logs import FOLDER as LOGS
from etude.rollouts.logs import read_logs
from etude.rollouts.view import turn_tokens, view_turns
from etude.run import RunFolder

REPORTED_STEPS, REPORTED_BYTES = 8, 256 << 20
"""How many of the last steps are searched for a group with a sample, and the maximum size of a trace, in bytes."""


@dataclass(frozen=True)
class ReadRollout:
    """A rollout of training: as text (`view`), and its tokens.

    `trace`: its turns; None if nothing is stored. `chat`: the run's chat format, if there is a trace. `samples`: pairs
    (number of the path's last turn, sample) of its batch."""

    view: RolloutView
    trace: Trace | None = None
    chat: ChatFormat | None = None
    samples: tuple[tuple[int, Sample], ...] = ()

    def tokens(self, turn: int, start: int, stop: int) -> TurnTokens | None:
        """Return the sampled tokens [start, stop) of a turn; None if the turn or its tokens are not stored."""
        if self.trace is None or self.chat is None or not 0 <= turn < len(self.trace.turns):
            return None
        return turn_tokens(self.trace, self.chat, turn, self.samples, start=start, stop=stop)


def training_view(run: RunFolder, ledger: Ledger, row: Row, history: Sequence[Mapping[str, Any]] = ()) -> RolloutView:
    """Return a rollout of training as text: the `view` of `read_training`, with its errors."""
    return read_training(run, ledger, row, history).view


def read_training(run: RunFolder, ledger: Ledger, row: Row, history: Sequence[Mapping[str, Any]] = ()) -> ReadRollout:
    """Read a rollout of training from the recorded batch (trace) of its step, or else from its file.

    `row` is its row in the ledger (the database of rollouts), and `history` its changes of state there. The result has
    no turns if nothing was stored. Raises `LedgerError` for damaged files, and `ChatError` if the run's tokeniser is
    missing."""
    found = _recorded(run, ledger, row)
    finished = ledger.finished(row.rollout_id)
    outcome: Outcome | None = None
    facts: dict[str, Any] = {}
    trace: Trace | None = None
    chat: ChatFormat | None = None
    if found is not None:
        chat, trace, outcome = ChatFormat.load(run / "tokenizer"), found.trace, found.rollout.outcome
        facts = {name: getattr(found.rollout, name) for name in ("task_id", "family", "ending")}
        facts["turns"] = view_turns(trace, chat, found.samples, first_row=found.first_row)
        facts["rows"] = tuple(range(found.first_row, found.first_row + len(found.samples)))
    elif finished is not None:
        outcome = finished.outcome
        if (summary := finished.summary) is not None:
            facts = {"task_id": summary.task_id, "family": summary.family, "ending": str(summary.ending)}
            if summary.stored is not None:
                trace, chat = rollout_files(run).read(summary).trace, ChatFormat.load(run / "tokenizer")
                facts["turns"] = view_turns(trace, chat)
    sign = ledger.quarantine_of(row.rollout_id)
    if isinstance(outcome, Graded):
        reward = read_config(run).composition.of(outcome)
        composed = row.reward if found is None else found.rollout.reward
        facts |= {"reward": reward.value if composed is None else composed, "reason": reward.reason}
        facts |= {"trust": str(outcome.trust), "terms": outcome.terms}
    elif outcome is not None:
        facts["invalid"] = f"{outcome.boundary}: {outcome.reason}"
    view = RolloutView(
        rollout_id=row.rollout_id,
        source="training",
        attempt=row.attempt,
        state=str(row.state),
        step=row.step,
        sign="" if sign is None else f"graded {sign.graded:g}: {sign.reason}",
        history=tuple(dict(one) for one in history),
        logs=tuple(read_logs(run / LOGS, row.rollout_id)),
        **facts,
    )
    return ReadRollout(view, trace, chat, () if found is None else found.samples)


def _recorded(run: RunFolder, ledger: Ledger, row: Row) -> RecordedTree | None:
    """Return the rollout from the trace of its step; None if there is no trace yet, but the rollout's file."""
    if row.step is None:
        return None
    try:
        return read_rollout(trace_path(traces_folder(run), row.step), row.rollout_id)
    except LedgerError:
        if not ledger.is_kept(row.rollout_id):
            raise
        return None


def evaluation_view(name: str, row: EvalRow) -> RolloutView:
    """Return a rollout of the evaluation `name` as text."""
    return RolloutView(
        rollout_id=row.rollout_id,
        source=f"evaluation {name}",
        task_id=row.task_id,
        family=row.family,
        ending=row.ending or None,
        reward=row.reward if row.valid else None,
        reason=row.reason if row.valid else "",
        invalid="" if row.valid else f"{row.outcome}: {row.reason}",
        sign=row.sign,
        turns=from_json(row.tree, tuple[TurnView, ...]) if row.tree else (),
        transcript="" if row.tree else row.transcript,
    )


def reported_views(run: RunFolder, ledger: Ledger) -> list[RolloutView]:
    """Return the rollouts of training that a report shows: the best and the worst rollout of one group of the last
    step.

    The group is one with a sample; the list is empty if there is none. Traces in a bucket, and large ones, are not
    read, since a report should take seconds."""
    folder = traces_folder(run)
    for step in ledger.steps()[: -REPORTED_STEPS - 1 : -1]:
        groups: dict[str, list[Row]] = {}
        for row in ledger.rows(step=step):
            if row.has_sample and row.reward is not None:
                groups.setdefault(row.group_id, []).append(row)
        if groups:
            trace = trace_path(folder, step)
            if not (isinstance(trace, Path) and trace.exists() and trace.stat().st_size <= REPORTED_BYTES):
                return []
            ranked = [sorted(rows, key=lambda row: row.reward or 0.0) for rows in groups.values()]
            chosen = max(ranked, key=lambda rows: (rows[-1].reward or 0.0) - (rows[0].reward or 0.0))
            return [training_view(run, ledger, row) for row in dict.fromkeys((chosen[-1], chosen[0]))]
    return []

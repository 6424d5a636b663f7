"""Audits a ledger: checks from independent records whether any rollout was lost or trained on twice.

What was trained on comes from the lineage (the rollout ids in the manifests of the current weights and of all versions
that they were trained from) and from the trace files. What is stored comes from the stored bytes. The states in the
ledger are compared with both. Memory does not grow with the run, since nothing of a sound step is kept."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from etude.errors import LedgerError
from etude.experience.groups import Finished, Row
from etude.experience.ledger import Ledger
from etude.experience.ledger_queries import FINISHED
from etude.experience.lineage import Lineage
from etude.experience.rollout_files import RolloutFiles
from etude.experience.trace_reader import Index, read_index, read_outcomes
from etude.experience.traces import TraceFolder, recorded_steps, trace_path
from etude.experience.transitions import HOLDING, State
from etude.records.wire import unpack

_FOUND = {
    "lost": "lost",
    "twice": "trained twice",
    "ungraded": "trained without a grade",
    "leaked": "with a slot that they should not have, or without one",
    "missing": "missing",
}


@dataclass(frozen=True)
class Report:
    """The result of an audit of a ledger. In a sound run every tuple is empty.

    The steps are those of the lineage: the steps that the current weights were trained by.

    - `num_consumed`: the number of rollouts that these steps consumed.
    - `lost`: ids of finished rollouts that no step consumed and that have no stored outcome.
    - `twice`: ids of rollouts that more than one step consumed.
    - `ungraded`: ids of rollouts that were trained on without a grade.
    - `leaked`: ids of rollouts that have a slot and should have none, or that have none and should have one.
    - `missing`: steps without a trace file, and ids of rollouts that are unknown to the ledger."""

    num_rollouts: int
    num_consumed: int
    num_steps: int
    lost: tuple[str, ...]
    twice: tuple[str, ...]
    ungraded: tuple[str, ...]
    leaked: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether the audit found nothing wrong."""
        return not (self.lost or self.twice or self.ungraded or self.leaked or self.missing)

    def require_sound(self) -> None:
        """Raise `LedgerError` with counts and first names if the report is not sound."""
        if self.sound:
            return
        found = {kind: getattr(self, kind) for kind in _FOUND if getattr(self, kind)}
        raise LedgerError(
            "the ledger does not agree with the weights and traces",
            "; ".join(f"{len(names)} {_FOUND[kind]} ({', '.join(names[:3])})" for kind, names in found.items()),
            hint="copy the missing files back: without them these steps cannot be verified"
            if found.keys() <= {"missing", "ungraded"}
            else "if the run was interrupted, etude run --resume reconciles it; else report this with the run folder",
        )


def audit(
    ledger: Ledger,
    traces: TraceFolder,
    lineage: Lineage,
    *,
    deleted: int = 0,
    after: int = 0,
    before: Lineage = (),
    files: RolloutFiles | None = None,
) -> Report:
    """Compare a ledger with traces, lineage and stored files, and return what is wrong with it.

    - `traces`: the folder of the trace files.
    - `lineage`: (step, rollout ids that it consumed) of each step that the current weights were trained by.
    - `deleted`: the last step whose traces may have been deleted on purpose; for the steps up to it, `lineage` is not
      compared with traces.
    - `after`: the step up to which an earlier audit found the run sound. Only later steps and open groups are read.
    - `before`: the lineage up to `after`, read only if a rollout was taken more than once.
    - `files`: the stored rollouts that may still be trained on; each is read and verified. None: not checked.

    Damaged traces count as missing. Audit a run that is stopped; a batch in flight is not an error."""
    found = _Found(held={row.rollout_id for row in ledger.rows(states=HOLDING)})
    steps: set[int] = set()
    for step, ids in lineage:
        if ids and step > after:
            found.twice |= _repeated(ids) if step not in steps else set(ids)
            steps.add(step)
            _check_step(ledger, _index(traces, step, ids), step, ids, found, deleted=step <= deleted)
    beyond = [step for step in ledger.steps(after) if step not in steps]
    outside = [row for step in beyond for row in ledger.rows(step=step)]
    found.unconsumed += [
        row for row in (*outside, *ledger.rows(open_only=True)) if row.rollout_id not in found.suspects
    ]
    return Report(
        num_rollouts=ledger.count(after=after if after else None),
        num_consumed=found.num_consumed,
        num_steps=len(steps),
        lost=tuple(row.rollout_id for row in found.unconsumed if _is_lost(ledger, row, files)),
        twice=_sorted(found.twice | _consumed_repeatedly(_both_lineages(lineage, before, after), found.suspects)),
        ungraded=_sorted(found.ungraded),
        # rollouts of a published step must not have a slot, whatever state the ledger has
        leaked=_sorted(set(ledger.slot_holders()) ^ found.held),
        missing=(*found.without_trace, *_sorted(found.unknown)),
    )


@dataclass
class _Found:
    """What an audit has found so far. In a sound run this is only open work."""

    held: set[str]  # in a state that has a slot, and in no step so far
    num_consumed: int = 0
    suspects: set[str] = field(default_factory=set)  # consumed by another step than in the ledger: perhaps by two
    twice: set[str] = field(default_factory=set)
    ungraded: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    without_trace: list[str] = field(default_factory=list)
    unconsumed: list[Row] = field(default_factory=list)  # in no step of the lineage


def _check_step(
    ledger: Ledger, index: Index | None, step: int, ids: Collection[str], found: _Found, *, deleted: bool
) -> None:
    """Compare the rollouts of one step in its manifest, the ledger and the trace."""
    wanted, rows = set(ids), {row.rollout_id: row for row in ledger.rows(step=step)}
    strangers = wanted - rows.keys()
    known = {row.rollout_id for row in ledger.find_rows(strangers)}
    found.unknown |= strangers - known
    found.suspects |= known | ledger.batched_repeatedly(wanted)
    found.num_consumed += len(wanted)
    found.held -= wanted
    found.unconsumed += [row for i, row in rows.items() if i not in wanted]
    if index is not None:
        found.ungraded |= index.trained - index.graded
    elif not deleted:
        found.without_trace.append(f"trace of step {step} ({min(ids)} …)")


def _repeated(ids: Collection[str]) -> set[str]:
    return {i for i, count in Counter(ids).items() if count > 1} if len(set(ids)) < len(ids) else set()


def _both_lineages(lineage: Lineage, before: Lineage, after: int) -> Lineage:
    return chain((one for one in lineage if one[0] > after), (one for one in before if one[0] <= after))


def _consumed_repeatedly(lineage: Lineage, suspects: set[str]) -> set[str]:
    """Return the suspects that more than one step consumed."""
    if not suspects:
        return set()
    met = Counter(i for _, ids in lineage for i in suspects.intersection(ids))
    return {i for i, count in met.items() if count > 1}


def steps_of(traces: TraceFolder, step: int) -> Iterator[tuple[int, list[str]]]:
    """Yield (step, its rollout ids) for each recorded step up to `step`, from the trace files.

    Use it if the manifests of the published weights, which list the same, are damaged."""
    for at in recorded_steps(traces):
        index = _index(traces, at) if at <= step else None
        if index is not None:
            yield at, sorted(index.rollout_ids)


def rollouts_of_tasks(ledger: Ledger, traces: TraceFolder, task_ids: Collection[str]) -> set[str]:
    """Return the ids of the ended rollouts of these tasks that the ledger still has the records of, or a trace holds.

    Reads all of both. Traces that cannot be read are left out."""
    found = set(ledger.rollouts_of_tasks(task_ids))
    for step in recorded_steps(traces):
        with contextlib.suppress(LedgerError):
            _, rollouts = read_outcomes(trace_path(traces, step))
            found |= {one.rollout_id for one in rollouts if one.task_id in task_ids}
    return found


def _is_lost(ledger: Ledger, row: Row, files: RolloutFiles | None) -> bool:
    """Return whether a rollout that the lineage did not consume is lost.

    It can then neither be run nor trained on, and did not end for a reason of its own."""
    if row.state in (State.TRAINED, State.NO_SIGNAL):
        return True
    if row.state in (State.GRADED, State.BATCHED):
        data = ledger.get(row.rollout_id, FINISHED)
        return data is None or not (files is None or _is_stored(data, files))
    return row.state in (State.INVALID, State.QUARANTINED, State.CANCELLED) and not row.reason


def _is_stored(data: bytes, files: RolloutFiles) -> bool:
    try:
        summary = unpack(data, Finished).summary
    except ValueError:
        return False
    return summary is None or files.has(summary)


def _index(traces: TraceFolder, step: int, ids: Collection[str] | None = None) -> Index | None:
    """Return the index of a step's trace; None if there is no sound trace of exactly these rollouts."""
    try:
        index = read_index(trace_path(traces, step))
    except LedgerError:
        return None
    return index if ids is None or index.rollout_ids == frozenset(ids) else None


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names))

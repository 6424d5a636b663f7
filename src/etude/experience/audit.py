"""The audit: was any rollout lost, or trained twice? Recomputed, not believed.

What was trained comes from the lineage (the rollout ids that the manifests of the current weights list) and from the
traces; what is stored comes from the stored bytes themselves. The ledger's own states are the thing under audit.
Knows nothing of manifests: the lineage is handed in as plain lists, oldest step first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.errors import LedgerError
from etude.experience.ledger import FINISHED, Ledger
from etude.experience.rows import Row
from etude.experience.traces import Index, read_index
from etude.experience.transitions import HOLDING, State


@dataclass(frozen=True)
class Report:
    """What the audit found; every tuple is empty in a sound run."""

    num_rollouts: int
    num_consumed: int  # rollouts that steps of the lineage consumed
    num_steps: int
    lost: tuple[str, ...]  # finished once; in no step of the lineage and with no stored outcome to train on
    twice: tuple[str, ...]  # consumed by more than one step of the lineage
    ungraded: tuple[str, ...]  # trained without a grade
    leaked: tuple[str, ...]  # hold a slot and should not, or should and do not
    missing: tuple[str, ...]  # steps of the lineage without their trace, rollouts unknown to the ledger

    @property
    def sound(self) -> bool:
        return not (self.lost or self.twice or self.ungraded or self.leaked or self.missing)

    def require_sound(self) -> None:
        """Raise `LedgerError` with the counts and the first names."""
        if self.sound:
            return
        kinds = ("lost", "twice", "ungraded", "leaked", "missing")
        found = {kind: getattr(self, kind) for kind in kinds if getattr(self, kind)}
        raise LedgerError(
            "the ledger does not agree with the weights and traces",
            "; ".join(f"{len(names)} {kind} ({', '.join(names[:3])})" for kind, names in found.items()),
            hint="copy the missing files back: without them those steps cannot be proven"
            if found.keys() <= {"missing", "ungraded"}
            else "if the run was interrupted, etude run --resume reconciles it; else report this with the run folder",
        )


def audit(
    ledger: Ledger, traces: Path, lineage: Sequence[Sequence[str]], *, deleted: Sequence[Sequence[str]] = ()
) -> Report:
    """Recompute. `traces` is the folder of trace files; `lineage` the rollout ids of each step, oldest first; `deleted`
    those steps of it whose traces were deleted on purpose: their manifests are believed.

    Damaged traces count as missing. Run it on a run that stands still; a batch in flight is no fault.
    """
    rows = {row.rollout_id: row for row in ledger.rows()}
    consumed = Counter(rollout_id for step in lineage for rollout_id in set(step))
    indices = _indices(traces)
    used, missing = _match(lineage, indices, {frozenset(step) for step in deleted})
    samples = Counter(rollout_id for index in used for rollout_id in index.trained)
    graded = {rollout_id for index in used for rollout_id in index.graded}
    return Report(
        num_rollouts=len(rows),
        num_consumed=len(consumed),
        num_steps=sum(bool(step) for step in lineage),
        lost=tuple(i for i, row in rows.items() if i not in consumed and _is_lost(ledger, row)),
        twice=_sorted(i for i in {*consumed, *samples} if consumed[i] > 1 or samples[i] > 1),
        ungraded=_sorted(i for i in samples if i not in graded),
        leaked=_leaked(ledger, rows, set(consumed)),
        missing=(*missing, *_sorted(i for i in consumed if i not in rows)),
    )


def steps_of(traces: Path, step: int) -> list[list[str]]:
    """The rollout ids of each step up to a version step, oldest first, by the traces: what stands in for manifests that
    are damaged."""
    indices = sorted((index for index in _indices(traces) if index.step <= step), key=lambda index: index.step)
    return [sorted(index.rollout_ids) for index in indices]


def _is_lost(ledger: Ledger, row: Row) -> bool:
    """Not consumed by the lineage: it must still be runnable, trainable, or ended for a reason of its own."""
    if row.state in (State.TRAINED, State.NO_SIGNAL):
        return True
    if row.state in (State.GRADED, State.BATCHED):
        return ledger.get(row.rollout_id, FINISHED) is None
    return row.state in (State.INVALID, State.QUARANTINED, State.CANCELLED) and not row.reason


def _leaked(ledger: Ledger, rows: dict[str, Row], consumed: set[str]) -> tuple[str, ...]:
    holders = set(ledger.slot_holders())
    # A step whose version is out has no claim on a slot, whatever the ledger's state says.
    entitled = {i for i, row in rows.items() if row.state in HOLDING and i not in consumed}
    return _sorted(holders ^ entitled)


def _indices(traces: Path) -> list[Index]:
    found = []
    for path in sorted(traces.glob("batch-*.parquet")):
        try:
            found.append(read_index(path))
        except LedgerError:
            continue  # a step of the lineage that needed it is reported as missing
    return found


def _match(
    lineage: Sequence[Sequence[str]], indices: Sequence[Index], deleted: set[frozenset[str]]
) -> tuple[list[Index], list[str]]:
    """The trace of each step of the lineage, found by what it holds, and the steps that have none."""
    by_content = {index.rollout_ids: index for index in indices}
    used, missing = [], []
    for number, step in enumerate(lineage):
        index = by_content.get(frozenset(step))
        if index is not None:
            used.append(index)
        elif step and frozenset(step) not in deleted:
            missing.append(f"trace of step {number} of the lineage ({min(step)} …)")
    return used, missing


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names))

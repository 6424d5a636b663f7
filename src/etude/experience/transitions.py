"""The states of a rollout, and the table of allowed transitions between them.

A rollout in a state of `HOLDING` occupies one of the run's slots. Every terminal state frees the slot and needs a
reason. This module does not access the database."""

from __future__ import annotations

import enum
from typing import NamedTuple

from etude.errors import LedgerError


class State(enum.StrEnum):
    """The state of a rollout in the ledger.

    - HELD: it has a task and a slot, and waits until the first siblings of its group have ended.
    - ADMITTED: it has a task and a slot, and waits for a worker. RUNNING: a worker runs it.
    - GRADED: it is graded and stored, and waits for its batch. BATCHED: it is in the batch of a step.
    - TRAINED, NO_SIGNAL: the current weights were trained on its batch. TRAINED: with a sample of it. NO_SIGNAL:
      without one, since its advantage was 0.
    - INVALID: it failed for reasons outside the agent; kept, never trained on.
    - REQUEUED: it will be run again, or its stored outcome will be used again.
    - QUARANTINED: its record cannot be read or trusted; kept, never trained on.
    - CANCELLED: it is not needed any more."""

    HELD = "held"
    ADMITTED = "admitted"
    RUNNING = "running"
    GRADED = "graded"
    INVALID = "invalid"
    BATCHED = "batched"
    TRAINED = "trained"
    NO_SIGNAL = "no-signal"
    REQUEUED = "requeued"
    QUARANTINED = "quarantined"
    CANCELLED = "cancelled"


HOLDING = frozenset({State.HELD, State.ADMITTED, State.RUNNING, State.REQUEUED, State.GRADED, State.BATCHED})
"""The states that occupy a slot."""

TERMINAL = frozenset({State.TRAINED, State.NO_SIGNAL, State.INVALID, State.QUARANTINED, State.CANCELLED})
"""The states that end a rollout: no slot, and always a reason. Only a lost lineage can reopen the first two."""

ENDED = frozenset({State.GRADED, State.INVALID, State.QUARANTINED, State.CANCELLED})
"""The states of a group's member for which the group no longer waits."""


class Move(NamedTuple):
    """One allowed transition from the state `origin` to the state `to`. `when` describes what causes it."""

    origin: State
    to: State
    when: str


MOVES = (
    Move(State.HELD, State.ADMITTED, "the rewards of its first siblings differ"),
    Move(State.HELD, State.CANCELLED, "the rewards of its first siblings are equal, or the run ends"),
    Move(State.ADMITTED, State.RUNNING, "a worker takes it"),
    Move(State.ADMITTED, State.CANCELLED, "the run ends"),
    Move(State.RUNNING, State.GRADED, "it was graded"),
    Move(State.RUNNING, State.INVALID, "it failed for reasons outside the agent"),
    Move(State.RUNNING, State.REQUEUED, "its worker or the run died, or no engine reached its version"),
    Move(State.RUNNING, State.CANCELLED, "the run ends"),
    Move(State.REQUEUED, State.RUNNING, "a worker takes it again"),
    Move(State.REQUEUED, State.GRADED, "its step was lost; its stored outcome is used again"),
    Move(State.REQUEUED, State.INVALID, "no attempt is left"),
    Move(
        State.REQUEUED, State.QUARANTINED, "its stored record cannot be read, or was deleted before its step was lost"
    ),
    Move(State.REQUEUED, State.CANCELLED, "the run ends"),
    Move(State.GRADED, State.BATCHED, "its batch is formed"),
    Move(State.GRADED, State.QUARANTINED, "its stored record cannot be read or trusted"),
    Move(State.GRADED, State.CANCELLED, "the run ends"),
    Move(State.BATCHED, State.TRAINED, "the version that learned from it is committed"),
    Move(State.BATCHED, State.NO_SIGNAL, "that version is committed, but this rollout had no advantage"),
    Move(State.BATCHED, State.REQUEUED, "its step was lost before the commit"),
    Move(State.BATCHED, State.QUARANTINED, "sampler and trainer disagree about it"),
    Move(State.TRAINED, State.REQUEUED, "the lineage went back before its step"),
    Move(State.NO_SIGNAL, State.REQUEUED, "the lineage went back before its step"),
)
"""All allowed transitions. Any other raises `LedgerError`."""

_ALLOWED = {(move.origin, move.to) for move in MOVES}


def check(rollout_id: str, origin: State, to: State, reason: str) -> None:
    """Check that a rollout may go from the state `origin` to the state `to`.

    Raises `LedgerError` when `MOVES` does not have this transition, or when `to` is a terminal state and `reason` is
    "".

    >>> check("g000001.0", State.RUNNING, State.GRADED, "")
    >>> check("g000001.0", State.RUNNING, State.TRAINED, "why not")
    Traceback (most recent call last):
    etude.errors.LedgerError: rollout g000001.0 cannot go from running to trained
      hint: from running it may go to cancelled, graded, invalid, requeued
    """
    if (origin, to) not in _ALLOWED:
        ways = ", ".join(sorted(move.to for move in MOVES if move.origin == origin)) or "nowhere: it has ended"
        raise LedgerError(
            f"rollout {rollout_id} cannot go from {origin} to {to}", hint=f"from {origin} it may go to {ways}"
        )
    if to in TERMINAL and not reason:
        raise LedgerError(
            f"rollout {rollout_id} cannot end as {to}",
            "a terminal state needs a reason",
            hint="pass `reason`, a text of one line",
        )

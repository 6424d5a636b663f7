"""The records of a release: its state, what is under way, and its transitions."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from etude.errors import EtudeError
from etude.records.completion import Version
from etude.releases.settings import ReleaseSettings


class ReleaseRefused(EtudeError):
    """A release is not in a state, or its channel does not point where the requested change needs it."""


class State(enum.StrEnum):
    """The state of a release.

    CANDIDATE: begun; serves nobody. GATED: passed its gate; serves nobody. REFUSED: did not pass it. CANARY: serves a
    share of the subjects. HELD: keeps its share until it is promoted, resumed or rolled back. PROMOTED: its version is
    the stable one. ROLLED_BACK: all subjects have the version from before."""

    CANDIDATE = "candidate"
    GATED = "gated"
    REFUSED = "refused"
    CANARY = "canary"
    HELD = "held"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled back"


OPEN = (State.CANDIDATE, State.GATED, State.CANARY, State.HELD)
"""The states in which a release keeps others from beginning."""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a release: from `origin` (None: its begin) to `state`, with `share` percent of the subjects after.

    `at`: in seconds since 1970. `by`: "rules" or "operator". `evidence`: plain data, such as the confidence sequences
    on which it rests."""

    at: float
    origin: State | None
    state: State
    share: int
    by: str
    reason: str
    evidence: Any = None


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """A release: whether and how a candidate version takes the place of the stable one.

    - `number`: from 1. `location`, `channel`: the store and the channel of the weights.
    - `candidate`, `stable`: the two versions, as at the begin.
    - `share`: percent of the subjects that get the candidate. `since`: when the share or the state changed last, in
      seconds since 1970. `salt`: of the assignment.
    - `pending`: a decided transition whose pointers may not all have moved yet; None: nothing is under way."""

    number: int
    location: str
    channel: str
    candidate: Version
    stable: Version
    settings: ReleaseSettings
    salt: bytes
    state: State
    share: int
    since: float
    pending: Transition | None = None

    @property
    def is_open(self) -> bool:
        """Whether it keeps other releases from beginning."""
        return self.state in OPEN

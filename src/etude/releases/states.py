"""The records of a release: its state, what is under way, and its transitions."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from etude.errors import EtudeError
from etude.records.completion import Version
from etude.releases.settings import ReleaseSettings


class ReleaseRefused(EtudeError):
    """Raised when a release cannot be changed as requested, because of its state or of the versions that the channel's
    branches name."""


class State(enum.StrEnum):
    """The state of a release.

    CANDIDATE: begun; serves no requests. GATED: passed its gate; serves no requests. REFUSED: did not pass the gate.
    CANARY: serves a share of the subjects. HELD: keeps its share until it is promoted, resumed or rolled back.
    PROMOTED: its version is now the stable one. ROLLED_BACK: all subjects get the version from before the release."""

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
    """One change of a release: from the state `origin` (None: the release begins) to `state`.

    `at`: the time, in seconds since 1970. `share`: percent of the subjects that get the candidate afterwards. `by`: who
    decided: "rules", "operator" (a person), or "loop" (`etude learn --releases`). `evidence`: the numbers that led to
    it, as plain data."""

    at: float
    origin: State | None
    state: State
    share: int
    by: str
    reason: str
    evidence: Any = None


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a release, in which a candidate version may replace the stable version.

    - `number`: from 1. `location`, `channel`: the store and the channel of the weights.
    - `candidate`, `stable`: the two versions when the release began.
    - `share`: percent of the subjects that get the candidate as a canary. `since`: when the share or the state changed
      last, in seconds since 1970. `salt`: random bytes; the version of a subject is computed from them and its name.
    - `pending`: a transition that was decided, while the pointers of the channel have not all moved yet; None: there is
      none."""

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
        """Whether the release has not ended. While it is open, no other release can begin."""
        return self.state in OPEN


def shares_now(newest: Release | None) -> dict[Version, int]:
    """Return {version: percent of the users that it serves now}, from the newest release of a file; {} for None.

    The candidate has the share of the canary, and the stable version the rest; a promoted candidate is the stable
    version. Versions that serve nobody are left out."""
    if newest is None:
        return {}
    if newest.state is State.PROMOTED:
        return {newest.candidate: 100}
    shares = {newest.candidate: newest.share, newest.stable: 100 - newest.share}
    return {version: share for version, share in shares.items() if share}

"""What engines, their registry and whoever asks engines tell each other over HTTP. No torch, no clock on the wire.

An engine joins with its URL, is given a lease, and renews it; times are durations, measured by each side's own
monotonic clock, so that nobody's clock has to be right.

Who says it: an engine's side is `registering`, the run's is `registrar` (HTTP, and its questions) over `registry` (who
is a member, and in which state: pure), and who asks engines for completions follows by `roster`, which keeps a `fleet`.
"""

from __future__ import annotations

import enum
import os

import msgspec

from etude.records.completion import Version

PREFIX = "/fleet/v1"
JOIN, RENEW, LEAVE, DRAIN = (f"{PREFIX}/{word}" for word in ("join", "renew", "leave", "drain"))
ENGINES, WANTED = f"{PREFIX}/engines", f"{PREFIX}/wanted"

NO_VERSION = Version(step=-1, incarnation="00000000", digest="0" * 64)
"""Of weights that are nobody's, until the chain has given some: under every step that can be asked for."""


class State(enum.StrEnum):
    """What an engine of a fleet is given."""

    CATCHING_UP = "catching-up"  # nothing yet: it does not hold the head of when it joined
    SERVING = "serving"  # everything
    STANDBY = "standby"  # nothing, until another is lost
    DRAINING = "draining"  # what its sessions still ask
    LOST = "lost"  # nothing: its lease has ended, or it does not answer
    LEFT = "left"  # nothing: it went, as it was told to, or by itself


ALIVE = frozenset({State.CATCHING_UP, State.SERVING, State.STANDBY, State.DRAINING})


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /fleet/v1/wanted: what an engine must be to serve this run. The weights come from the chain."""

    model: str  # config.json as its checkpoint has it
    mode: str  # `NumericsConfig`
    quantise: str
    degree: int
    dtype: str
    context_tokens: int
    max_sequences: int  # of the run's own engines; a default, no demand
    routes: bool  # whether completions must carry them
    store: str = ""  # where the weights are, if engines elsewhere can reach it: a bucket
    public_key: str = ""  # 64 hex, where the run signs what it publishes
    parity: str = ""  # in exact mode the learner's parity class, once it is known


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /fleet/v1/join."""

    name: str
    url: str  # as the conductor and its workers reach it
    region: str = ""  # "": a place of its own
    standby: bool = False


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """Its answer: renew this lease well within `lease_s` seconds."""

    lease: str
    lease_s: float


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /fleet/v1/renew and /fleet/v1/leave."""

    name: str
    lease: str


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a renewal: what the engine is to the fleet now. One that has `LEFT` was drained and may end."""

    state: State


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /fleet/v1/drain."""

    name: str


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as whoever asks engines is told of it. What nobody has seen yet is None."""

    url: str
    state: State = State.SERVING
    region: str = ""
    step: int | None = None  # of the version that it was last seen with
    max_sequences: int = 1
    num_running: int = 0
    num_waiting: int = 0
    kv_tokens_free: int | None = None  # None: not bounded by what is known here
    reason: str = ""  # of one that catches up and holds another lineage's weights


Roster = dict[str, Listed]
"""Engine name → what is known of it."""


def environment_token() -> str | None:
    """ETUDE_TOKEN: what requests to engines and to their registry bear."""
    return os.environ.get("ETUDE_TOKEN") or None

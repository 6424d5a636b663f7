"""The HTTP messages between engines, their registry, and clients that ask engines for completions. Imports no torch.

An engine joins with its URL, gets a lease, and renews it. Messages hold durations, never times of day: each side
measures with its own monotonic clock, so no clock has to be right.

`registering` is the engine's side. `registrar` is the run's: it serves HTTP and probes engines, over `registry`, which
keeps the members and their states (pure). Clients follow the members by `roster`, which keeps a `fleet`.
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
"""The version of an engine that has read no weights from the chain yet; its step is below every step asked for."""


class State(enum.StrEnum):
    """State of an engine in a fleet: which requests it is given."""

    CATCHING_UP = "catching-up"  # none yet: it has not reached the version that was the newest when it joined
    SERVING = "serving"  # all
    STANDBY = "standby"  # none, until another engine is lost
    DRAINING = "draining"  # only those of sessions that it has already
    LOST = "lost"  # none: its lease has ended, or it does not answer
    LEFT = "left"  # none: it was drained, or left by itself


ALIVE = frozenset({State.CATCHING_UP, State.SERVING, State.STANDBY, State.DRAINING})


class EngineRequirements(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /fleet/v1/wanted: the model and settings that an engine must have to serve this run. It reads the
    weights from the chain."""

    model: str  # text of config.json, as the run's checkpoint has it
    mode: str  # `NumericsConfig`
    quantise: str
    degree: int
    dtype: str
    context_tokens: int
    max_sequences: int  # of the run's own engines: a default that an engine may change
    routes: bool  # whether completions must carry routes
    store: str = ""  # where the weights are, if engines elsewhere can reach it: a bucket
    public_key: str = ""  # 64 hex, where the run signs what it publishes
    parity: str = ""  # in exact mode the learner's parity class, once it is known


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /fleet/v1/join: an engine asks to become a member."""

    name: str
    url: str  # as the conductor and its workers reach it
    region: str = ""  # "": a region of its own
    standby: bool = False


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a `JoinRequest`: the lease, to be renewed well within `lease_s` seconds."""

    lease: str
    lease_s: float


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /fleet/v1/renew and /fleet/v1/leave."""

    name: str
    lease: str


class RenewalAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a `Renewal`: the engine's state now. An engine in state `LEFT` was drained and may end."""

    state: State


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /fleet/v1/drain."""

    name: str


class ListedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in the list that clients get. Fields that nobody has measured yet are None."""

    url: str
    state: State = State.SERVING
    region: str = ""
    step: int | None = None  # of the version that it was last seen with
    max_sequences: int = 1
    num_running: int = 0
    num_waiting: int = 0
    kv_tokens_free: int | None = None  # None: not known, so it does not limit the engine
    reason: str = ""  # why an engine that catches up does not serve: it holds weights of another lineage


Roster = dict[str, ListedEngine]
"""Members of a fleet by engine name."""


def environment_token() -> str | None:
    """The bearer token of requests to engines and to their registry: the environment variable ETUDE_TOKEN, if set."""
    return os.environ.get("ETUDE_TOKEN") or None

"""The HTTP messages of the engine registry: between engines, the registry, and clients of engines. Imports no torch.

An engine joins with its URL, gets a lease, and renews it. Messages contain durations, never times of day: each side
uses its own monotonic clock, so clocks need not be synchronised.

- `registry`: the registry's state: members, leases and engine states (pure).
- `registry_server`: serves the registry over HTTP and probes the engines. Runs in the conductor.
- `registry_client`: the engine's side (join, renew, leave), and the side of clients, which keep a `Fleet` up to date.
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
"""The version of an engine that has no weights from the chain yet. Its step is lower than any demanded step."""


class State(enum.StrEnum):
    """The state of an engine in a fleet. It determines which requests the engine gets."""

    CATCHING_UP = "catching-up"  # none: it has not adopted the version that was the newest when it joined
    SERVING = "serving"  # all
    STANDBY = "standby"  # none, until another engine is lost
    DRAINING = "draining"  # only those of sessions that it already has
    LOST = "lost"  # none: its lease has expired, or it does not respond
    LEFT = "left"  # none: it was drained, or left


ALIVE = frozenset({State.CATCHING_UP, State.SERVING, State.STANDBY, State.DRAINING})
"""States of engines that respond."""


class EngineRequirements(msgspec.Struct, frozen=True, kw_only=True):
    """Response of GET /fleet/v1/wanted: the model and settings that an engine needs to serve this run. The engine
    fetches the weights from the chain."""

    model: str  # text of the checkpoint's config.json
    mode: str  # `NumericsConfig`
    quantise: str
    degree: int
    dtype: str
    context_tokens: int
    max_sequences: int  # default; an engine can choose another
    routes: bool  # whether completions must carry routes
    store: str = ""  # store of the weights, if other hosts can reach it: a bucket
    public_key: str = ""  # 64 hex characters, if the run signs its weights
    parity: str = ""  # in exact mode the learner's parity class, once known


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /fleet/v1/join: an engine asks to become a member."""

    name: str
    url: str  # at which the conductor and its workers reach it
    region: str = ""  # "": a separate region
    standby: bool = False


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Response to a `JoinRequest`: the lease, which must be renewed well within `lease_s` seconds."""

    lease: str
    lease_s: float


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /fleet/v1/renew and /fleet/v1/leave."""

    name: str
    lease: str


class RenewalAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Response to a `Renewal`: the engine's current state. An engine in state `LEFT` was drained and can exit."""

    state: State


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /fleet/v1/drain."""

    name: str


class ListedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in the list that clients get. Unknown fields are None."""

    url: str
    state: State = State.SERVING
    region: str = ""
    step: int | None = None  # step of its version at the last probe
    max_sequences: int = 1
    num_running: int = 0
    num_waiting: int = 0
    kv_tokens_free: int | None = None  # None: unknown, so it does not limit the engine
    reason: str = ""  # why an engine keeps catching up: its weights are of another lineage


Roster = dict[str, ListedEngine]
"""The engines of a fleet by name."""


def environment_token() -> str | None:
    """The bearer token for engines and their registry from the environment variable ETUDE_TOKEN, or None."""
    return os.environ.get("ETUDE_TOKEN") or None

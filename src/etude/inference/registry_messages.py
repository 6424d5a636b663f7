"""The HTTP messages of the engine registry: between engines, the registry, and clients of engines. Imports no torch.

An engine joins with its URL, gets a lease, and renews it. Messages contain durations, never times of day: each side
uses its own monotonic clock, so clocks need not be synchronised.

- `registry` has the registry's state: members, leases and engine states.
- `registry_server` serves the registry over HTTP and probes the engines. It runs in the conductor, the main process of
  a run.
- `registry_client` is the engine's side (join, renew, leave), and the side of clients, which keep a `Fleet` up to date.
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
    """The state of an engine in a fleet. It determines which requests the engine gets.

    - `CATCHING_UP`: none, since it has not loaded the version that was the newest when it joined.
    - `SERVING`: all.
    - `STANDBY`: none, until another engine is lost.
    - `DRAINING`: only those of sessions that it already has.
    - `LOST`: none, since its lease has expired or it does not respond.
    - `LEFT`: none, since it was drained, or left."""

    CATCHING_UP = "catching-up"
    SERVING = "serving"
    STANDBY = "standby"
    DRAINING = "draining"
    LOST = "lost"
    LEFT = "left"


ALIVE = frozenset({State.CATCHING_UP, State.SERVING, State.STANDBY, State.DRAINING})
"""States of engines that respond."""


class EngineRequirements(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine needs to serve a run: the response of GET /fleet/v1/wanted. The engine fetches the weights from
    the store.

    - `model`: the text of the checkpoint's config.json.
    - `mode`, `quantise`, `degree`: as in `NumericsConfig`.
    - `max_sequences`: a default; an engine can choose another.
    - `routes`: whether completions must have their routes (experts chosen by the MoE routers).
    - `store`: the store of the weights if other hosts can reach it, such as a bucket; else "".
    - `public_key`: 64 hex characters if the run signs its weights, else "".
    - `parity`: in exact mode the learner's parity class, once known. Processes of one class compute the same bits."""

    model: str
    mode: str
    quantise: str
    degree: int
    dtype: str
    context_tokens: int
    max_sequences: int
    routes: bool
    store: str = ""
    public_key: str = ""
    parity: str = ""


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /fleet/v1/join, with which an engine asks to become a member of the fleet.

    `url` is where the conductor and its workers reach the engine. `region` "" means a region of its own."""

    name: str
    url: str
    region: str = ""
    standby: bool = False


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a `JoinRequest`: the lease, which must be renewed well within `lease_s` seconds."""

    lease: str
    lease_s: float


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /fleet/v1/renew and /fleet/v1/leave, with the lease of a `JoinAnswer`."""

    name: str
    lease: str


class RenewalAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a `Renewal`: the engine's current state. An engine in state `LEFT` was drained and can exit."""

    state: State


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /fleet/v1/drain: the name of the engine that gets no new sessions from now on."""

    name: str


class ListedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in the list that clients get from the registry: its URL, state and load.

    `step` is the step of its weights at the last health check; None: unknown. `kv_tokens_free` None means unknown, so
    it does not limit the engine. `reason` says why an engine cannot serve yet, for example because its weights are of
    another run."""

    url: str
    state: State = State.SERVING
    region: str = ""
    step: int | None = None
    max_sequences: int = 1
    num_running: int = 0
    num_waiting: int = 0
    kv_tokens_free: int | None = None
    reason: str = ""


Roster = dict[str, ListedEngine]
"""The engines of a fleet by name."""


def environment_token() -> str | None:
    """Return the bearer token for engines and their registry from the environment variable ETUDE_TOKEN, or None."""
    return os.environ.get("ETUDE_TOKEN") or None

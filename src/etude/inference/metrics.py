"""Counters of an engine, exported to Prometheus (text exposition format 0.0.4) and to telemetry (`engine.load`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from etude.seams import EngineInfo


@dataclass
class Counters:
    """Totals since the engine started. One thread writes them; any thread may read them.

    - `requests`: completed requests, of rollouts and production.
    - `production_requests`, `production_tokens`: completed requests of production, and tokens decoded for them.
    - `production_wait_s`: sum over production requests of the seconds from arrival to the first token.
    - `rollouts_preempted`: requests of rollouts that lost their slot to a production request, and go on later.
    - `failed`: requests that were cancelled, late or refused.
    - `steps`, `busy_s`: forward passes, and the seconds in them.
    - `tokens`: tokens decoded.
    - `prefill_tokens`, `cached_tokens`: prompt tokens that were computed, and those whose KV was reused.
    - `cached_requests`: requests that began with reused KV, of their own session or of another request.
    - `drafted_tokens`, `accepted_tokens`: drafts that were computed (speculative decoding), and those that were
      accepted, each of which is one of `tokens`. Their ratio is the acceptance rate.
    - `swaps`: replacements of the weights."""

    requests: int = 0
    production_requests: int = 0
    production_tokens: int = 0
    production_wait_s: float = 0.0
    rollouts_preempted: int = 0
    failed: int = 0
    steps: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    cached_requests: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    swaps: int = 0
    busy_s: float = 0.0


def exposition(counters: Counters, info: EngineInfo) -> str:
    """Return the text of GET /metrics.

    >>> from etude.seams import EngineInfo
    >>> info = EngineInfo(name="e", version=None, paused=False, context_tokens=8, max_sequences=1, num_running=0,
    ...                   num_waiting=0, kv_tokens_free=8, capabilities=())
    >>> print(exposition(Counters(tokens=3), info).splitlines()[-1])
    etude_engine_version_step{engine="e"} -1
    """
    totals = {f"etude_engine_{k}_total": ("counter", v) for k, v in dataclasses.asdict(counters).items()}
    gauges = {
        "etude_engine_num_running": ("gauge", info.num_running),
        "etude_engine_num_waiting": ("gauge", info.num_waiting),
        "etude_engine_kv_tokens_free": ("gauge", info.kv_tokens_free),
        "etude_engine_paused": ("gauge", int(info.paused)),
        "etude_engine_version_step": ("gauge", -1 if info.version is None else info.version.step),
    }
    lines = []
    for name, (kind, value) in (totals | gauges).items():
        lines += [f"# TYPE {name} {kind}", f'{name}{{engine="{info.name}"}} {value}']
    return "\n".join(lines) + "\n"


class Load:
    """The increase of an engine's counters between two calls of `since`."""

    def __init__(self) -> None:
        self._before = Counters()

    def since(self, counters: Counters, info: EngineInfo, *, wall_s: float) -> dict[str, Any]:
        """Return the fields of an `engine.load` event for the last `wall_s` seconds, the time since the last call."""
        now, before = dataclasses.replace(counters), self._before
        self._before = now
        return {
            "num_running": info.num_running,
            "num_waiting": info.num_waiting,
            "tokens": now.tokens - before.tokens,
            "prefill_tokens": now.prefill_tokens - before.prefill_tokens,
            "cached_tokens": now.cached_tokens - before.cached_tokens,
            "drafted_tokens": now.drafted_tokens - before.drafted_tokens,
            "accepted_tokens": now.accepted_tokens - before.accepted_tokens,
            "busy_share": round(min(1.0, (now.busy_s - before.busy_s) / wall_s), 4),
        }

"""Counters of an engine, exported to Prometheus (text exposition format 0.0.4) and telemetry (`engine.load`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from etude.seams import EngineInfo


@dataclass
class Counters:
    """Totals since the engine started. One thread writes them; any thread may read them."""

    requests: int = 0  # completed requests of both classes
    production_requests: int = 0  # completed requests of production
    production_tokens: int = 0  # tokens decoded for production
    production_wait_s: float = 0.0  # sum over production requests of the time from arrival to the first token
    rollouts_preempted: int = 0  # rollouts that production made start again
    failed: int = 0  # requests that were cancelled, late or refused
    steps: int = 0
    tokens: int = 0  # tokens decoded
    prefill_tokens: int = 0  # prompt tokens computed
    cached_tokens: int = 0  # prompt tokens whose KV was reused
    swaps: int = 0
    busy_s: float = 0.0  # time in steps


def exposition(counters: Counters, info: EngineInfo) -> str:
    """The text of GET /metrics.

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
    """Differences of an engine's counters between two calls."""

    def __init__(self) -> None:
        self._before = Counters()

    def since(self, counters: Counters, info: EngineInfo, *, wall_s: float) -> dict[str, Any]:
        """The fields of an `engine.load` event for the time since the last call, `wall_s` seconds."""
        now, before = dataclasses.replace(counters), self._before
        self._before = now
        return {
            "num_running": info.num_running,
            "num_waiting": info.num_waiting,
            "tokens": now.tokens - before.tokens,
            "prefill_tokens": now.prefill_tokens - before.prefill_tokens,
            "cached_tokens": now.cached_tokens - before.cached_tokens,
            "busy_share": round(min(1.0, (now.busy_s - before.busy_s) / wall_s), 4),
        }

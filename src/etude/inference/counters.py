"""What an engine has done since it started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Totals; written by the stepping thread only, read by anybody."""

    requests: int = 0  # completed, of both classes
    production_requests: int = 0  # of those, production's
    production_tokens: int = 0  # decoded for production
    production_wait_s: float = 0.0  # from arrival to the first token, of production's in all
    rollouts_preempted: int = 0  # had to start again, for production
    failed: int = 0  # cancelled, late, or refused
    steps: int = 0
    tokens: int = 0  # decoded
    prefill_tokens: int = 0  # prompt tokens computed
    cached_tokens: int = 0  # prompt tokens whose KV was reused
    swaps: int = 0
    busy_s: float = 0.0  # in steps

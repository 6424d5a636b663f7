"""Which engine serves production and which one is lent, as a state machine. It has no clock and calls no engine.

```
serving ─► draining ─► loading ─► lent ─► returning ─► serving
              └──────────── taken back ──────┘
```
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from etude.errors import EngineError


class Lease(enum.StrEnum):
    """The state of an engine.

    SERVING: it serves production. DRAINING: it completes the requests of production that it has, and gets no new ones.
    LOADING: it loads the weights of rollouts. LENT: it serves rollouts. RETURNING: it loads the weights of
    production."""

    SERVING = "serving"
    DRAINING = "draining"
    LOADING = "loading"
    LENT = "lent"
    RETURNING = "returning"


_NEXT = {
    Lease.SERVING: {Lease.DRAINING},
    Lease.DRAINING: {Lease.LOADING, Lease.SERVING},
    Lease.LOADING: {Lease.LENT, Lease.RETURNING},
    Lease.LENT: {Lease.RETURNING},
    Lease.RETURNING: {Lease.SERVING},
}
AWAY = (Lease.DRAINING, Lease.LOADING, Lease.LENT)
"""The states of engines that are lent or about to be."""


class Leases:
    """The states of all engines of a fleet. At first all serve production.

    `min_serving`: the number of engines that are never lent, at least 1."""

    def __init__(self, names: Iterable[str], *, min_serving: int = 1) -> None:
        self.states = dict.fromkeys(names, Lease.SERVING)
        self._min_serving = max(1, min_serving)

    def count(self, *states: Lease) -> int:
        """Return the number of engines that are in one of the states."""
        return sum(state in states for state in self.states.values())

    def move(self, name: str, state: Lease) -> None:
        """Change the state of an engine.

        Raises `EngineError` if its present state does not lead to the new one, or if fewer than `min_serving` engines
        would serve production."""
        now = self.states[name]
        if state not in _NEXT[now]:
            raise EngineError(
                f"{name} cannot be {state} now", f"it is {now}", hint="wait until its lease has ended, or take it back"
            )
        if state is Lease.DRAINING and self.count(Lease.SERVING) <= self._min_serving:
            raise EngineError(
                f"{name} cannot be lent",
                f"{self.count(Lease.SERVING)} engines serve production, of which {self._min_serving} must stay",
                hint="lend fewer engines",
            )
        self.states[name] = state

    def changes(self, num_away: int, load: Mapping[str, float]) -> tuple[list[str], list[str]]:
        """Return which engines to lend and which to take back, so that `num_away` are lent or about to be.

        `load`: requests of production of each engine. The engines with the lowest load are lent first. The engines
        that have the least to load are taken back first."""
        away = [name for state in AWAY for name, now in self.states.items() if now is state]
        if len(away) > num_away:
            return [], away[: len(away) - max(0, num_away)]
        serving = sorted((n for n, now in self.states.items() if now is Lease.SERVING), key=lambda n: (load[n], n))
        most = max(0, len(serving) - self._min_serving)
        return serving[: min(num_away - len(away), most)], []

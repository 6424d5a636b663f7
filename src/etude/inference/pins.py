"""Which sessions forbid a swap, and for how long: pure, the clock is passed in.

A request that pins a version step (an evaluation) must never be swapped under, and its session's next call must
find the same version. So a pinned session holds the version while it has a request here and for a lease after it.
The engine delays adoption until nobody holds; the lease bounds how long a session that never comes back can.
"""

from __future__ import annotations


class Pins:
    """Sessions that hold the current version.

    >>> pins = Pins(lease_s=10.0)
    >>> pins.enter("eval.0")
    >>> pins.held(now=0.0), pins.leave("eval.0", now=5.0, coming_back=True), pins.held(now=14.0), pins.held(now=15.0)
    (True, None, True, False)
    """

    def __init__(self, *, lease_s: float) -> None:
        self.lease_s = lease_s
        self._running: dict[str, int] = {}
        self._leases: dict[str, float] = {}  # session -> when its lease ends

    def enter(self, session_id: str) -> None:
        """A pinned request of the session was accepted."""
        self._running[session_id] = self._running.get(session_id, 0) + 1

    def leave(self, session_id: str, *, now: float, coming_back: bool) -> None:
        """It ended, however it did; `coming_back`: the session may call again."""
        self._running[session_id] -= 1
        if not self._running[session_id]:
            del self._running[session_id]
        if coming_back:
            self._leases[session_id] = now + self.lease_s
        else:
            self._leases.pop(session_id, None)

    def held(self, *, now: float) -> bool:
        """Whether anybody holds the version at this moment."""
        self._leases = {s: end for s, end in self._leases.items() if end > now}
        return bool(self._running or self._leases)

"""How many machines of each snapshot will be asked for before new ones could be made.

The method is a base stock under a newsvendor's quantile. Time is cut into windows as long as it takes to make
machines again (`lead_s`); the demand of a snapshot is the number of machines asked for in a window, windows without a
request counting as 0. Windows fade with their age (`memory_s`), and the *burst quantile* of what is left is what would
be kept at hand: with .95 the bursts that come in at least one window of twenty, however large, and none that come
less often. One request says nothing of a second, so a snapshot's forecast is 0 until it was asked for in two windows;
and as empty windows pass it falls to 0 again.

A budget is shared by what a machine is worth: the next one goes to the snapshot that will use it most probably.
Pure: time is passed. Knows nothing of runtimes.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

_WINDOWS = 128  # with a request, of one snapshot: older ones have faded


class Demand:
    """The demand of one snapshot.

    >>> demand = Demand(lead_s=1.0, memory_s=60.0)
    >>> for t in range(0, 30, 5):
    ...     demand.asked(float(t), 16)
    >>> demand.quantile(0.95, 30.0), demand.quantile(0.5, 30.0)
    (16, 0)
    >>> demand.quantile(0.95, 120.0)
    0
    """

    def __init__(self, *, lead_s: float, memory_s: float) -> None:
        self._lead_s, self._fade = lead_s, math.exp(-lead_s / memory_s)
        self._first: int | None = None
        self._windows: deque[list[int]] = deque(maxlen=_WINDOWS)  # [window, machines asked for in it], those with any

    def asked(self, now_s: float, n: int) -> None:
        """n machines were asked for."""
        window = int(now_s // self._lead_s)
        if self._first is None:
            self._first = window
        if self._windows and self._windows[-1][0] >= window:
            self._windows[-1][1] += n
        else:
            self._windows.append([window, n])

    def tail(self, now_s: float) -> list[tuple[int, float]]:
        """(machines, share of windows in which at least so many were asked for), the largest demand first."""
        if self._first is None or len(self._windows) < 2:
            return []
        now = max(int(now_s // self._lead_s), self._windows[-1][0])
        # one older than the first stands for all the time before it, in which nobody asked
        first = self._first if len(self._windows) < _WINDOWS else self._windows[0][0]  # as far back as is known
        total = (1 - self._fade ** (now - first + 2)) / (1 - self._fade) if self._fade < 1 else now - first + 2.0
        reached, tail = 0.0, []
        for window, n in sorted(self._windows, key=lambda w: -w[1]):
            reached += self._fade ** (now - window)
            tail.append((n, reached / total))
        return tail

    def quantile(self, share: float, now_s: float) -> int:
        """So many machines are enough in this share of windows."""
        return enough(self.tail(now_s), share)


def enough(tail: Sequence[tuple[int, float]], share: float) -> int:
    """The quantile, of a tail."""
    return next((n for n, more in tail if more > 1 - share), 0)


class Forecast:
    """The demand of many snapshots, the least recently asked for forgotten first.

    >>> forecast = Forecast(quantile=0.9, lead_s=1.0, memory_s=60.0)
    >>> for t in range(4):
    ...     forecast.asked("often", 2.0 * t, 4)
    >>> forecast.asked("once", 6.0, 100)
    >>> forecast.plan(7.0, budget=64), forecast.plan(7.0, budget=3)
    ({'often': 4}, {'often': 3})
    """

    def __init__(
        self, *, quantile: float = 0.95, lead_s: float = 2.0, memory_s: float = 60.0, max_snapshots: int = 1024
    ) -> None:
        self._quantile, self._lead_s, self._memory_s = quantile, lead_s, memory_s
        self._max_snapshots = max_snapshots
        self._demands: OrderedDict[str, Demand] = OrderedDict()

    def asked(self, snapshot: str, now_s: float, n: int) -> None:
        """n machines of a snapshot were asked for."""
        demand = self._demands.get(snapshot)
        if demand is None:
            demand = self._demands[snapshot] = Demand(lead_s=self._lead_s, memory_s=self._memory_s)
        self._demands.move_to_end(snapshot)
        demand.asked(now_s, n)
        if len(self._demands) > self._max_snapshots:
            self._demands.popitem(last=False)

    def plan(self, now_s: float, *, budget: int) -> dict[str, int]:
        """How many machines of each snapshot to keep at hand, at most `budget` together."""
        steps = {snapshot: self._worth(demand, now_s) for snapshot, demand in self._demands.items()}
        heap = [
            (-chance, snapshot, n) for snapshot, worth in steps.items() for n, chance in [next(worth, (0, 0.0))] if n
        ]
        heapq.heapify(heap)
        planned: dict[str, int] = {}
        while heap and budget > 0:
            _, snapshot, n = heap[0]
            taken = min(n, budget)
            planned[snapshot] = planned.get(snapshot, 0) + taken
            budget -= taken
            following = next(steps[snapshot], None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (-following[1], snapshot, following[0]))
        return planned

    def _worth(self, demand: Demand, now_s: float) -> Iterator[tuple[int, float]]:
        """Further machines and the chance that they are all used within a window, the surest first."""
        held, steps, tail = 0, [], demand.tail(now_s)
        wanted = enough(tail, self._quantile)
        for n, chance in reversed(tail):  # the smallest demand, which was reached most often, first
            if held < n <= wanted:
                steps.append((n - held, chance))
                held = n
        return iter(steps)

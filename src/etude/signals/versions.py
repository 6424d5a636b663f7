"""Which version of the weights answered at a time, from few observations instead of a record of each answer.

An observation says that an answer of a model, begun at a time, was sampled by one version from its first token to its
last. The version at a time is that of the last observation by then. An answer is recorded as one only if those before
it would say something else: once for each change of a model's weights, or some more where answers overlap."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from etude.records.completion import Completion

KEPT = 256
"""How many observations of each model are kept in memory."""


class Observation(NamedTuple):
    """An answer of a model that was begun at a time (Unix time in s) and sampled by one version."""

    model: str
    began: float
    version: str


class Observations:
    """The last observations of each model. `known` are those that were recorded before."""

    def __init__(self, known: Iterable[Observation] = ()) -> None:
        self._by_model: dict[str, list[Observation]] = {}
        for one in known:
            self._insert(one)

    def add(self, one: Observation) -> bool:
        """Add an observation if it is news: the version at its time is a different one by the known observations.

        Returns whether it was added."""
        kept = self._by_model.get(one.model, [])
        before = bisect.bisect_right(kept, one.began, key=lambda other: other.began)
        if before and kept[before - 1].version == one.version:
            return False
        if not before and len(kept) >= KEPT:  # older than all that are kept
            return False
        self._insert(one)
        return True

    def _insert(self, one: Observation) -> None:
        kept = self._by_model.setdefault(one.model, [])
        bisect.insort_right(kept, one, key=lambda other: other.began)
        del kept[:-KEPT]


def only_version(completion: Completion) -> str:
    """Return the version that sampled a whole completion; "" if there were several or none."""
    found = {str(span.version) for span in completion.spans}
    return found.pop() if len(found) == 1 else ""

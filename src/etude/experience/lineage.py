"""What the manifests of the current weights list: which rollouts each step consumed. Plain data; knows no manifest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

Lineage = Iterable[tuple[int, Collection[str]]]
"""(version step, ids of the rollouts that it consumed) in order of training; a version that was published again has
none. It may be read more than once, and is looked at step by step, so a long run's need not be in memory as a whole."""


def by_step(
    lineage: Lineage, known: Iterable[int], *, believed: Callable[[], int] = lambda: 0
) -> Iterator[tuple[int, Collection[str] | None]]:
    """Every step of the lineage with its ids, and every other one of `known` with none; None up to `believed()`.

    >>> list(by_step([(0, []), (1, ["a"]), (2, ["b"]), (2, [])], [1, 2, 3]))
    [(1, ['a']), (2, ['b']), (3, ())]
    """
    met = set()
    for step, ids in lineage:
        if ids:
            met.add(step)
            yield step, ids
    for step in known:
        if step not in met:
            yield step, None if step <= believed() else ()

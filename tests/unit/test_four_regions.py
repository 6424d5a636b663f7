"""What `benchmarks.weights.four_regions` says a region cost, on times that are made up."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.weights.four_regions import held_up_s, uncovered_s


def rollout(begin: float, end: float, engine: str) -> dict[str, Any]:
    return {"t": end, "wall_s": end - begin, "engines": [engine]}


def slow(event: dict[str, Any]) -> bool:
    return "slow" in event["engines"]


def test_uncovered_s_is_the_time_outside_of_all_spans() -> None:
    assert uncovered_s(10, 20, []) == 10
    assert uncovered_s(10, 20, [(0, 12), (11, 14), (16, 17), (19, 30)]) == 4
    assert uncovered_s(10, 20, [(5, 25)]) == 0
    assert uncovered_s(10, 20, [(0, 10), (20, 30)]) == 10


@pytest.mark.parametrize(
    ("others", "held", "caused"),
    [
        ([], 4.0, 4.0),  # nobody else had anything to do
        ([rollout(13, 17, "near")], 4.0, 1.0),  # of the next batch: it is ready so much earlier
        ([rollout(0, 40, "near")], 4.0, 0.0),
    ],
)
def test_a_wait_for_a_slow_region_alone_is_caused_by_it_where_nobody_else_works(
    others: list[dict[str, Any]], held: float, caused: float
) -> None:
    rollouts = {"a": rollout(5, 14, "near"), "b": rollout(5, 18, "slow"), "c": rollout(2, 8, "slow")}
    rollouts |= {f"next {i}": event for i, event in enumerate(others)}
    assert held_up_s([(1, 10.0, ["a", "b", "c"])], rollouts, [slow]) == (held, caused)


def test_a_region_that_is_not_the_last_or_not_waited_for_costs_nothing() -> None:
    rollouts = {"a": rollout(5, 18, "near"), "b": rollout(5, 14, "slow")}
    assert held_up_s([(1, 10.0, ["a", "b"])], rollouts, [slow]) == (0.0, 0.0)
    rollouts = {"a": rollout(5, 8, "near"), "b": rollout(5, 14, "slow")}
    assert held_up_s([(1, 0.5, ["a", "b"])], rollouts, [slow]) == (0.5, 0.5), "at most the wait"

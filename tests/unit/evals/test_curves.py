"""pass@k and best-of-k are unbiased, their comparison tells sharpening from expansion, and intervals hold the truth."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from benchmarks.evals import coverage
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.evals.test_evals import row

from etude.evals import EvalRow
from etude.evals.curves import Effect, best_of, compare_curves, curve_points, pass_at_k, pass_curve, reward_curve
from etude.evals.intervals import clustered_rate, crossed_difference, crossed_rate, paired_difference, wilson


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_the_subsets_of_k_attempts_that_have_a_success(n: int, data: st.DataObject) -> None:
    solved, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([1] * solved + [0] * (n - solved), k))
    assert pass_at_k(n, solved, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.data())
def test_best_of_k_is_the_mean_of_the_best_over_all_subsets(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    subsets = list(itertools.combinations(rewards, k))
    assert best_of(rewards, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "solved", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0), (4, -1, 1)])
def test_counts_that_cannot_be_are_refused(n: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match="attempts"):
        pass_at_k(n, solved, k)
    assert curve_points(1) == [1]


def attempts(chances: dict[str, float], n: int, *, seed: int) -> list[EvalRow]:
    rng = random.Random(seed)
    return [row(task, float(rng.random() < p), attempt=i) for task, p in chances.items() for i in range(n)]


def test_training_that_makes_solvable_tasks_sure_sharpens_and_one_that_solves_new_ones_expands() -> None:
    half = {f"t{i:03d}": 0.5 if i % 2 else 0.0 for i in range(200)}
    sure = {task: min(1.0, 2 * p) for task, p in half.items()}
    new = {task: max(p, 0.5) for task, p in half.items()}
    untrained = attempts(half, 8, seed=0)
    assert compare_curves(untrained, attempts(sure, 8, seed=1)).effect is Effect.SHARPENS
    assert compare_curves(untrained, attempts(new, 8, seed=2)).effect is Effect.EXPANDS
    assert compare_curves(attempts(new, 8, seed=2), untrained).effect is Effect.NARROWS
    again = compare_curves(untrained, attempts(half, 8, seed=3))
    assert (again.effect, again.num_tasks, sorted(again.differences)) == (Effect.UNDECIDED, 200, [1, 2, 4, 8])


def test_a_task_with_invalid_attempts_is_left_out_of_the_curve_and_said() -> None:
    rows = attempts({f"t{i:02d}": 0.5 for i in range(30)}, 4, seed=0)
    rows[0] = row("t00", outcome="machine")
    found = pass_curve(rows)
    assert (sorted(found.points), found.num_left_out) == ([1, 2, 4], 1)
    assert found.points[1].value <= found.points[2].value <= found.points[4].value
    assert pass_curve([]).points == {}
    half = [row(f"t{i}", 0.5 * (j % 2), attempt=j) for i in range(4) for j in range(2)]
    assert (reward_curve(half), pass_curve(half).points[2].value) == ({1: 0.25, 2: 0.5}, 0.0)


def test_an_interval_of_task_means_uses_that_they_vary_less_than_single_rollouts() -> None:
    values, problems = [0.5, 0.6, 0.4, 0.5] * 10, list(range(40))
    single = clustered_rate([1.0, 0.0] * 20, problems)
    means = clustered_rate(values, problems)
    assert means.value == pytest.approx(single.value)
    assert means.high - means.low < 0.5 * (single.high - single.low)


def test_equal_differences_of_means_are_surer_than_those_of_single_rollouts() -> None:
    problems = list(range(40))
    small, whole = paired_difference([0.1, 0.0] * 20, problems), paired_difference([1.0, 0.0] * 20, problems)
    assert small.high - small.low < 0.2 * (whole.high - whole.low)


def test_a_recipe_is_as_unsure_as_its_seeds_differ() -> None:
    alike = [[1.0, 0.0, 1.0, 1.0] * 10] * 3
    apart = [[1.0] * 40, [0.0] * 40, [1.0] * 40]
    problems = list(range(40))
    same, other = crossed_rate(alike, problems), crossed_rate(apart, problems)
    assert (same.value, other.value) == (0.75, pytest.approx(2 / 3))
    assert same.high - same.low < 0.35
    assert other.high - other.low > 0.7
    with pytest.raises(ValueError, match="1 seeds"):
        crossed_rate([[1.0]], ["a"])


def near(found: float, draws: int) -> bool:
    """Whether a coverage may be 95 % +- 1.5 by this many draws."""
    error = 3 * math.sqrt(0.95 * 0.05 / draws)
    return 0.935 - error <= found <= 0.965 + error


def test_intervals_hold_the_truth_in_95_of_100_simulated_suites() -> None:
    small = coverage.Kind("40 problems, 1 to 8 variants", 40, (1, 1, 2, 4, 8), 1, 0.5)
    assert near(coverage.rates(150, small, coverage.MIDDLE, peers=False)["clustered"], 150)
    assert near(coverage.pairs(150, small, coverage.MIDDLE), 150)
    assert all(near(found, 100) for found in coverage.curve(100, replace(small, tries=4), coverage.MIDDLE).values())
    assert near(coverage.gains(150, 3, 0.6), 150)


@pytest.mark.parametrize("kind", [coverage.Kind("22", 22, (1,), 23, 0.3), coverage.Kind("40", 40, (4,), 4, 0.5)])
@pytest.mark.parametrize("band", ["0.9 to 0.99", "0.01 to 0.1"])
def test_intervals_hold_the_truth_also_where_few_problems_fail_or_are_solved(kind: coverage.Kind, band: str) -> None:
    found = coverage.rates(600, kind, coverage.BANDS[band], peers=False)
    assert near(found["clustered"], 600), found
    problems_alone = wilson(0.95 * kind.problems, kind.problems)  # as if all results of a problem were equal
    assert found["width"] < 1.1 * (problems_alone.high - problems_alone.low), found


def test_more_failures_of_the_same_problem_say_little_and_results_near_1_stay_sharp() -> None:
    problems = [i // 16 for i in range(640)]
    none, one, whole = (clustered_rate([0.0] * k + [1.0] * (640 - k), problems) for k in (0, 1, 16))
    assert none.low > 0.9
    assert none.high == 1.0
    assert whole.low < one.low < 0.95  # one failure does not show that no problem fails often
    assert 0.999 < one.high < 1.0


def test_the_interval_of_a_recipe_holds_the_truth_also_where_three_seeds_differ_much() -> None:
    found = [coverage.seeds(1500, 3, spread) for spread in (0.1, 1.0)]
    assert all(0.935 <= one <= 0.975 for one in found), found


def test_a_gain_over_seeds_is_as_unsure_as_the_seeds_differ() -> None:
    problems = list(range(40))
    same = crossed_difference([[0.0, 1.0] * 20] * 3, problems)
    other = crossed_difference([[1.0] * 40, [-0.5] * 40, [1.0] * 40], problems)
    assert (same.value, other.value) == (0.5, 0.5)
    assert same.low > 0.3
    assert other.low < 0
    none = crossed_difference([[0.0] * 40] * 3, problems)
    assert none.low < none.value == 0.0 < none.high < 0.1
    assert crossed_difference([[1.0], [1.0]], ["a"]).low == -1.0


def test_intervals_of_a_judges_agreement_hold_the_truth_with_few_clusters_of_labels() -> None:
    found = coverage.agreement(250, {"good judge, 2 scores": (2, 0.2), "fair judge, 5 scores": (5, 0.5)}, (10,))
    assert all(rate >= 0.935 for case in found["agreement"].values() for rate in case.values()), found

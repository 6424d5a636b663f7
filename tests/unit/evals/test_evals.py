from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.errors import StoreError
from etude.evals import (
    EvalRow,
    best_of_k,
    compare,
    compare_runs,
    difference,
    evaluate,
    make_row,
    paired_difference,
    read_rows,
    wilson,
    write_rows,
)
from etude.evals.intervals import Interval, clustered_rate, over_seeds
from etude.records import Invalid, Rollout, Task, Trace
from etude.records.reward import Reward
from etude.records.rollout import Boundary, Ending
from etude.records.summary import summary_of
from etude.records.task import Split


def row(
    task: str, reward: float = 0.0, *, outcome: str = "graded", attempt: int = 0, family: str = "ab", problem: str = ""
) -> EvalRow:
    return EvalRow(
        task_id=task,
        rollout_id=f"{task}.{attempt}",
        family=family,
        problem=problem or task,
        outcome=outcome,
        reward=reward,
        ending="submitted",
        reason="",
        turns=3,
        sampled=20,
        malformed=0,
        wall_s=0.5,
        tool_s=0.1,
        transcript="[user] fix",
    )


def rows_of(solved: int, n: int) -> list[EvalRow]:
    return [row(f"t{i:04d}", float(i < solved)) for i in range(n)]


def test_wilson_gives_the_published_values() -> None:
    known = wilson(81, 263)  # Newcombe 1998, table I
    assert (round(known.low, 4), round(known.high, 4)) == (0.2553, 0.3662)
    none = wilson(0, 20)
    assert (none.low, round(none.high, 4)) == (0.0, 0.1611)
    assert wilson(20, 20).high == 1.0


@given(st.integers(0, 400), st.integers(0, 400))
def test_wilson_stays_inside_zero_and_one_and_holds_its_rate(solved: int, more: int) -> None:
    interval = wilson(solved, solved + more)
    assert 0.0 <= interval.low <= interval.value <= interval.high <= 1.0


@pytest.mark.parametrize(("solved", "n"), [(-1, 3), (4, 3)])
def test_a_count_that_cannot_be_is_refused(solved: int, n: int) -> None:
    with pytest.raises(ValueError, match="solved = "):
        wilson(solved, n)


def test_a_difference_of_independent_rates_gives_the_published_values() -> None:
    found = difference(wilson(48, 80), wilson(56, 70))  # Newcombe 1998b, table II (a), method 10
    assert (round(found.value, 4), round(found.low, 4), round(found.high, 4)) == (0.2, 0.0524, 0.3339)


def test_a_paired_difference_is_sharper_where_the_same_tasks_are_solved() -> None:
    a, b = rows_of(50, 100), rows_of(60, 100)
    found = compare(a, b)
    assert found.paired is not None
    assert found.paired.high - found.paired.low < found.difference.high - found.difference.low
    assert (found.better, found.worse, found.num_shared, found.verdict) == (10, 0, 100, "better")
    assert compare(b, a).verdict == "worse"
    assert compare(a, a).verdict == "undecided"


def test_the_paired_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, covered = random.Random(0), 0
    for _ in range(400):
        drawn = [rng.choices([1.0, 0.0, -1.0], [0.25, 0.65, 0.1])[0] for _ in range(60)]
        interval = paired_difference(drawn, range(60))
        covered += interval.low <= 0.15 <= interval.high
    assert 0.92 <= covered / 400 <= 0.98


def variants(rng: random.Random, mean: float, problems: int, alike: float) -> tuple[list[float], list[int]]:
    """Results of tasks that are variants of problems, 1 to 8 of each; `alike`: the share that is as the first one."""
    solved, of = [], []
    for problem in range(problems):
        first = float(rng.random() < mean)
        for _ in range(rng.choice([1, 1, 2, 4, 8])):
            solved.append(first if rng.random() < alike else float(rng.random() < mean))
            of.append(problem)
    return solved, of


def covered(mean: float, problems: int, interval: Callable[[list[float], list[int]], Interval]) -> float:
    rng, hits = random.Random(f"{mean} {problems}"), 0
    for _ in range(400):
        found = interval(*variants(rng, mean, problems, alike=0.9))
        hits += found.low <= mean <= found.high
    return hits / 400


@pytest.mark.parametrize(("mean", "problems"), [(0.05, 127), (0.5, 127), (0.95, 127), (0.7, 20)])
def test_an_interval_over_variants_covers_the_truth_where_one_over_independent_tasks_does_not(
    mean: float, problems: int
) -> None:
    assert 0.92 <= covered(mean, problems, clustered_rate) <= 0.99
    assert covered(mean, problems, lambda solved, _: wilson(sum(solved), len(solved))) < 0.8


def test_a_paired_interval_over_variants_covers_the_truth() -> None:
    def paired(a: list[float], of: list[int]) -> Interval:
        found = paired_difference([0.5 - one for one in a], of)
        return Interval(0.5 - found.value, 0.5 - found.high, 0.5 - found.low)

    assert 0.92 <= covered(0.7, 60, paired) <= 0.99


def test_unique_tasks_have_wilsons_interval_and_variants_that_are_alike_count_once() -> None:
    unique, plain = clustered_rate([1.0] * 9 + [0.0], list("abcdefghij")), wilson(9, 10)
    assert (unique.value, unique.low, unique.high) == pytest.approx((plain.value, plain.low, plain.high))
    alike = clustered_rate([1.0] * 40 + [0.0] * 40, [i // 8 for i in range(80)])
    apart = wilson(5, 10)
    assert alike.high - alike.low > apart.high - apart.low
    assert clustered_rate([1.0] * 80, [i // 8 for i in range(80)]).low == pytest.approx(wilson(10, 10).low)


def test_an_evaluation_of_variants_of_few_problems_is_less_sure_than_one_of_as_many_problems() -> None:
    rows = rows_of(60, 120)
    alike = [row(r.task_id, r.reward, problem=str(i // 10)) for i, r in enumerate(rows)]
    one, other = (evaluate(x, name="after", split="heldout", step=1, wall_s=0.0) for x in (rows, alike))
    assert (one.num_problems, other.num_problems) == (120, 12)
    assert other.high - other.low > 2 * (one.high - one.low)


def test_what_few_shared_problems_say_does_not_decide_a_comparison() -> None:
    shared_a, shared_b = rows_of(0, 10), rows_of(10, 10)
    rest_a = [row(f"a{i}", float(i % 2)) for i in range(200)]
    rest_b = [row(f"b{i}", float(i % 2)) for i in range(200)]
    found = compare(shared_a + rest_a, shared_b + rest_b)
    assert found.paired is not None
    assert found.paired.low > 0
    assert (found.decisive, found.verdict) == (found.difference, "undecided")


def test_the_variance_between_seeds_is_told_from_two_seeds_on() -> None:
    assert over_seeds([0.9, 0.9]) == Interval(0.9, 0.9, 0.9)
    with pytest.raises(ValueError, match="got 1"):
        over_seeds([0.9])


def test_runs_without_a_shared_task_are_compared_as_independent() -> None:
    a = [row(f"x{i}", float(i < 10)) for i in range(100)]
    found = compare(a, rows_of(60, 100))
    assert (found.paired, found.num_shared, found.verdict) == (None, 0, "better")


def test_an_evaluation_counts_invalid_rollouts_and_leaves_them_out_of_its_rate() -> None:
    rows = [*rows_of(3, 8), row("t9", outcome="provider"), row("t10", outcome="machine"), row("t11", outcome="machine")]
    result = evaluate(rows, name="after", split="heldout", step=45, wall_s=1.5)
    assert (result.solved, result.rate, result.num_tasks, result.tries) == (3, 0.375, 8, 1)
    assert result.invalid == {"machine": 2, "provider": 1}
    assert (result.low, result.high) == (wilson(3, 8).low, wilson(3, 8).high)
    assert (result.turns_mean, result.sampled_mean, result.by_family) == (3.0, 20.0, {"ab": 0.375})
    assert set(result.facts()) >= {"name", "split", "step", "num_tasks", "tries", "solved", "rate", "low", "high"}


def test_several_tries_a_task_widen_the_interval_to_that_of_the_tasks() -> None:
    rows = [row(f"t{i}", float(i < 5), attempt=k) for i in range(10) for k in range(4)]
    result = evaluate(rows, name="x", split="train", step=0, wall_s=0.0)
    assert (result.tries, result.rate, result.best_of_k) == (4, 0.5, 0.5)
    by_task = wilson(5, 10)  # and a little wider: the variance between ten tasks is an estimate
    assert by_task.low - 0.05 < result.low < by_task.low < by_task.high < result.high < by_task.high + 0.05


def test_best_of_k_needs_one_valid_success_a_task() -> None:
    rows = [row("a", 0.0), row("a", 1.0, attempt=1), row("b", 0.0), row("c", 1.0, outcome="grader")]
    assert best_of_k(rows) == 0.5
    assert best_of_k([]) == 0.0


def test_an_evaluation_without_rollouts_has_rate_0_and_an_interval_from_0_to_1() -> None:
    result = evaluate([], name="x", split="train", step=0, wall_s=0.0)
    assert (result.rate, result.low, result.high, result.num_tasks) == (0.0, 0.0, 1.0, 0)
    assert not math.isnan(result.turns_mean)


def test_rows_are_made_of_rollouts_and_their_outcomes() -> None:
    task = Task(
        source="list", split=Split.HELDOUT, index=0, family="ak", instruction="fix", files={}, exports=("a.py",)
    )
    rollout = Rollout(
        rollout_id="g.0",
        group_id="g",
        attempt=0,
        task=task,
        trace=Trace(()),
        ending=Ending.SUBMITTED,
        exports={},
        wall_s=1.0,
        tool_s=0.5,
    )
    summary = summary_of(rollout)
    graded = make_row(summary, Reward(value=1.0, raw=1.0, reason="all"), turns=())
    assert (graded.solved, graded.task_id, graded.ending, graded.outcome) == (True, task.task_id, "submitted", "graded")
    lost = make_row(summary, Invalid(boundary=Boundary.GRADER, reason="died", evidence="exit 9"), turns=())
    assert (lost.valid, lost.outcome, lost.reward, lost.ending) == (False, "grader", 0.0, "")


def test_rows_come_back_from_the_file_in_order(tmp_path: Path) -> None:
    path = tmp_path / "evals" / "after.parquet"
    rows = rows_of(2, 5)
    write_rows(path, reversed(rows))
    assert read_rows(path) == rows
    write_rows(path, [])
    assert read_rows(path) == []
    assert [p.name for p in path.parent.iterdir()] == ["after.parquet"]


def test_a_file_of_an_etude_that_did_not_look_for_cheats_is_read(tmp_path: Path) -> None:
    write_rows(tmp_path / "after.parquet", rows_of(2, 5))
    old = pq.read_table(tmp_path / "after.parquet").drop_columns(["sign"])
    pq.write_table(old.replace_schema_metadata({}), tmp_path / "old.parquet")
    assert read_rows(tmp_path / "old.parquet") == rows_of(2, 5)
    pq.write_table(old.drop_columns(["reward"]).replace_schema_metadata({}), tmp_path / "no.parquet")
    with pytest.raises(StoreError, match="is not an evaluation"):
        read_rows(tmp_path / "no.parquet")


def test_two_runs_are_compared_by_their_files(tmp_path: Path) -> None:
    for name, solved in (("one", 10), ("two", 90)):
        write_rows(tmp_path / name / "evals" / "after.parquet", rows_of(solved, 100))
    found = compare_runs(tmp_path / "one", tmp_path / "two")
    assert (found.a.name, found.b.name, found.verdict) == ("one", "two", "better")
    with pytest.raises(StoreError, match="no evaluation"):
        compare_runs(tmp_path / "one", tmp_path / "three")
    write_rows(tmp_path / "three" / "evals" / "after.parquet", [row("a", outcome="provider")])
    with pytest.raises(StoreError, match="nothing to compare"):
        compare_runs(tmp_path / "one", tmp_path / "three")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 30), st.binary(min_size=1, max_size=8), st.booleans())
def test_a_damaged_file_is_an_error_or_rows(tmp_path: Path, at: int, junk: bytes, cut: bool) -> None:
    path = tmp_path / "x.parquet"
    write_rows(path, rows_of(2, 5))
    data = bytearray(path.read_bytes())
    at %= len(data)
    path.write_bytes(bytes(data[:at]) if cut else bytes(data[:at]) + junk + bytes(data[at + len(junk) :]))
    with contextlib.suppress(StoreError):
        assert all(isinstance(r, EvalRow) for r in read_rows(path))


def test_another_kind_of_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(StoreError, match="not an evaluation"):
        read_rows(tmp_path / "x.parquet")


@pytest.mark.parametrize("function", ["etude.evals:read_rows", "etude.dashboard.report:_rows"])
def test_reading_leaves_no_thread_that_could_abort_the_interpreter_at_its_end(
    tmp_path: Path, threads_left: Callable[[str, Path], int], function: str
) -> None:
    write_rows(tmp_path / "after.parquet", rows_of(3, 5))
    assert threads_left(function, tmp_path / "after.parquet") == 0

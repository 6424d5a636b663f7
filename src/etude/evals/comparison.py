"""Compare two evaluations: the difference of their solve rates with a confidence interval."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from etude.errors import StoreError
from etude.evals.intervals import Interval, difference, paired_difference
from etude.evals.result import EvalResult, evaluate, tries_by_task
from etude.evals.rows import EvalRow, read_rows

MIN_SHARED = 20
"""Minimum number of shared problems to use the paired interval; they must also be at least half of the problems of the
smaller evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of `etude compare`. Differences are b - a."""

    a: EvalResult
    b: EvalResult
    difference: Interval  # for two independent rates, as if each run had its own tasks
    paired: Interval | None  # over the shared tasks; None if there are none
    num_shared: int
    shared_enough: bool  # whether enough problems are shared for the paired interval
    better: int  # number of shared tasks with a higher solve rate in b
    worse: int

    @property
    def verdict(self) -> str:
        """ "better", "worse" or "undecided" for b compared with a, according to `decisive`."""
        interval = self.decisive
        return "better" if interval.low > 0 else "worse" if interval.high < 0 else "undecided"

    @property
    def decisive(self) -> Interval:
        """The narrower of the two intervals; the paired one only if enough problems are shared. The choice depends only
        on the widths, not on the values."""
        both = [self.difference]
        if self.paired is not None and self.shared_enough:
            both.append(self.paired)
        return min(both, key=lambda i: i.high - i.low)


def compare(a: Iterable[EvalRow], b: Iterable[EvalRow], *, names: tuple[str, str] = ("a", "b")) -> Comparison:
    """Compare two evaluations. Shared tasks are also compared pairwise, which gives narrower intervals."""
    rows_a, rows_b = [r for r in a if r.valid], [r for r in b if r.valid]
    result_a = evaluate(rows_a, name=names[0], split="", step=0, wall_s=0.0)
    result_b = evaluate(rows_b, name=names[1], split="", step=0, wall_s=0.0)
    shares_a, shares_b = _shares(rows_a), _shares(rows_b)
    shared = sorted(shares_a.keys() & shares_b.keys())
    differences = [shares_b[t] - shares_a[t] for t in shared]
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    problem_of = {r.task_id: r.problem for r in rows_a}
    problems = [problem_of[t] for t in shared]
    most = min(result_a.num_problems, result_b.num_problems)
    num_problems = len(set(problems))
    return Comparison(
        a=result_a,
        b=result_b,
        difference=difference(_interval(result_a), _interval(result_b)),
        paired=paired_difference(differences, problems) if shared else None,
        num_shared=len(shared),
        shared_enough=num_problems >= MIN_SHARED and 2 * num_problems >= most,
        better=better,
        worse=worse,
    )


def compare_runs(run_a: Path, run_b: Path, *, name: str = "after") -> Comparison:
    """Compare the evaluations `name` of two run folders. Raises `StoreError`."""
    rows = [read_rows(run / "evals" / f"{name}.parquet") for run in (run_a, run_b)]
    for run, found in zip((run_a, run_b), rows, strict=True):
        if not any(r.valid for r in found):
            raise StoreError(
                f"nothing to compare in {run}", f"evals/{name} has no valid rollout", hint="use another run"
            )
    return compare(rows[0], rows[1], names=(run_a.name, run_b.name))


def _shares(rows: Iterable[EvalRow]) -> dict[str, float]:
    return {task: sum(r.solved for r in tries) / len(tries) for task, tries in tries_by_task(rows).items()}


def _interval(result: EvalResult) -> Interval:
    return Interval(result.rate, result.low, result.high)

"""Compares two evaluations: the difference of their solve rates with a confidence interval."""

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
    """The comparison of two evaluations, a and b. Differences are the solve rate of b minus that of a.

    - `difference`: the difference and its interval, computed as if the two evaluations had different tasks.
    - `paired`: the mean difference over the tasks that both have; None if there are none.
    - `num_shared`: how many tasks both have; `shared_enough`: whether these have enough different problems for `paired`
      to be used.
    - `better`, `worse`: shared tasks with a higher or a lower solve rate in b."""

    a: EvalResult
    b: EvalResult
    difference: Interval
    paired: Interval | None
    num_shared: int
    shared_enough: bool
    better: int
    worse: int

    @property
    def verdict(self) -> str:
        """ "better" or "worse" for b compared with a if `decisive` excludes 0, else "undecided"."""
        interval = self.decisive
        return "better" if interval.low > 0 else "worse" if interval.high < 0 else "undecided"

    @property
    def decisive(self) -> Interval:
        """The narrower of the intervals `difference` and `paired`; the latter only if enough problems are shared.

        The choice depends on the widths of the intervals and not on their values."""
        both = [self.difference]
        if self.paired is not None and self.shared_enough:
            both.append(self.paired)
        return min(both, key=lambda i: i.high - i.low)


def compare(a: Iterable[EvalRow], b: Iterable[EvalRow], *, names: tuple[str, str] = ("a", "b")) -> Comparison:
    """Compare two evaluations, given by the rows of their rollouts. `names` are shown in the result.

    Tasks that both have are also compared pairwise, which gives narrower intervals."""
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
    """Compare the evaluations called `name` of two run folders.

    Raises `StoreError` if one cannot be read or has no valid rollout."""
    rows = [read_rows(run / "evals" / f"{name}.parquet") for run in (run_a, run_b)]
    for run, found in zip((run_a, run_b), rows, strict=True):
        if not any(r.valid for r in found):
            raise StoreError(
                f"nothing to compare in {run}",
                f"evals/{name} has no valid rollout",
                hint="see in its report why rollouts were invalid, or compare another run",
            )
    return compare(rows[0], rows[1], names=(run_a.name, run_b.name))


def _shares(rows: Iterable[EvalRow]) -> dict[str, float]:
    return {task: sum(r.solved for r in tries) / len(tries) for task, tries in tries_by_task(rows).items()}


def _interval(result: EvalResult) -> Interval:
    return Interval(result.rate, result.low, result.high)

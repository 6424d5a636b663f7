"""Two evaluations side by side: is one better, and how sure is that. Pure, but for reading the two files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import comb
from pathlib import Path

from etude.errors import StoreError
from etude.evals.intervals import Interval, difference, paired_difference
from etude.evals.result import EvalResult, evaluate, tries_by_task
from etude.evals.rows import EvalRow, read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `etude compare` says. Differences are b - a."""

    a: EvalResult
    b: EvalResult
    difference: Interval  # as if the tasks were drawn anew for each: two independent rates
    paired: Interval | None  # over the tasks that both tried; None where they share none
    num_shared: int
    better: int  # shared tasks on which b solved a larger share of its tries
    worse: int
    p_value: float | None  # exact sign test (McNemar) of better against worse; None without shared tasks

    @property
    def verdict(self) -> str:
        """One word, by the sharper interval that there is: "better", "worse" or "undecided" (b against a)."""
        interval = self.paired or self.difference
        return "better" if interval.low > 0 else "worse" if interval.high < 0 else "undecided"


def compare(a: Iterable[EvalRow], b: Iterable[EvalRow], *, names: tuple[str, str] = ("a", "b")) -> Comparison:
    """Compare two evaluations. Tasks that both tried are compared on themselves, which needs fewer of them."""
    rows_a, rows_b = [r for r in a if r.valid], [r for r in b if r.valid]
    result_a = evaluate(rows_a, name=names[0], split="", step=0, wall_s=0.0)
    result_b = evaluate(rows_b, name=names[1], split="", step=0, wall_s=0.0)
    shares_a, shares_b = _shares(rows_a), _shares(rows_b)
    shared = sorted(shares_a.keys() & shares_b.keys())
    differences = [shares_b[t] - shares_a[t] for t in shared]
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Comparison(
        a=result_a,
        b=result_b,
        difference=difference(_interval(result_a), _interval(result_b)),
        paired=paired_difference(differences) if shared else None,
        num_shared=len(shared),
        better=better,
        worse=worse,
        p_value=sign_test(better, worse) if shared else None,
    )


def compare_runs(run_a: Path, run_b: Path, *, name: str = "after") -> Comparison:
    """Compare the evaluations of one name in two run folders. Raises `StoreError`."""
    rows = [read_rows(run / "evals" / f"{name}.parquet") for run in (run_a, run_b)]
    for run, found in zip((run_a, run_b), rows, strict=True):
        if not any(r.valid for r in found):
            raise StoreError(
                f"nothing to compare in {run}", f"evals/{name} has no valid rollout", hint="take another run"
            )
    return compare(rows[0], rows[1], names=(run_a.name, run_b.name))


def sign_test(better: int, worse: int) -> float:
    """The two-sided exact probability of a split at least as uneven, if neither side were favoured.

    >>> sign_test(0, 0), sign_test(6, 0)
    (1.0, 0.03125)
    """
    n = better + worse
    tail = sum(comb(n, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / (1 << n))


def _shares(rows: Iterable[EvalRow]) -> dict[str, float]:
    return {task: sum(r.solved for r in tries) / len(tries) for task, tries in tries_by_task(rows).items()}


def _interval(result: EvalResult) -> Interval:
    return Interval(result.rate, result.low, result.high)

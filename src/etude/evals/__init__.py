"""Results of evaluations: rows of graded rollouts, solve rates with confidence intervals, comparisons of runs.

This package does not run rollouts: those of an evaluation are ordinary rollouts with fixed weights.
`etude.evals.parity` has metrics of sampler-trainer mismatch; `etude.evals.doctor` compares an engine with the learner.

>>> from etude.evals import wilson
>>> wilson(90, 100).low > 0.8
True
"""

from etude.evals.comparison import Comparison, compare, compare_runs
from etude.evals.intervals import Interval, difference, paired_difference, wilson
from etude.evals.result import EvalResult, best_of_k, evaluate
from etude.evals.rows import EvalRow, make_row, read_rows, write_rows

__all__ = [
    "Comparison",
    "EvalResult",
    "EvalRow",
    "Interval",
    "best_of_k",
    "compare",
    "compare_runs",
    "difference",
    "evaluate",
    "make_row",
    "paired_difference",
    "read_rows",
    "wilson",
    "write_rows",
]

"""The result of a training recipe: several models, trained with different seeds and evaluated on the same tasks.

The interval of one model's solve rate covers new problems. The interval of a recipe also covers new seeds. Comparisons
of recipes need it, since two seeds of one recipe differ, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from etude.errors import InputError
from etude.evals.intervals import Interval, crossed_difference, crossed_rate, mean_over_seeds
from etude.evals.result import tries_by_task
from etude.evals.rows import EvalRow


class SeedsResult(msgspec.Struct, frozen=True, kw_only=True):
    """The solve rate of a recipe over training seeds.

    - `rate`, `low`, `high`: the rate and its 95 % interval for new seeds and new problems.
    - `by_seed`: the rate of each model by its label, on the same tasks.
    - `gain`: (value, low, high) of the rate minus the rate of the untrained models, paired by seed and task. None: the
      untrained models were not evaluated.
    - `general_rise`: (value, low, high) of the loss on the general text minus the loss of the untrained models, in bits
      per byte, with Student's t interval over seeds. None: not measured.
    - `num_tasks`: tasks with a valid rollout of every model; only these count. `num_problems`: distinct problems of
      these tasks. `num_left_out`: the number of other tasks."""

    rate: float
    low: float
    high: float
    by_seed: dict[str, float]
    gain: tuple[float, float, float] | None
    general_rise: tuple[float, float, float] | None
    num_tasks: int
    num_problems: int
    num_left_out: int


def over_training_seeds(
    trained: Mapping[str, Iterable[EvalRow]],
    untrained: Sequence[Iterable[EvalRow]] = (),
    *,
    general_rises: Sequence[float] = (),
) -> SeedsResult:
    """Summarise the evaluations of models that one recipe trained with different seeds.

    - `trained`: the rollouts of each model, by its label.
    - `untrained`: the rollouts of the checkpoint that each model started from, in the same order. Empty: no gain is
      computed.
    - `general_rises`: for each model, its loss on the general text minus the loss of its starting checkpoint, in bits
      per byte. Empty: unknown.

    Raises `InputError` for fewer than two models, for another number of untrained models, and if no task has a valid
    rollout of every model."""
    if len(trained) < 2 or len(untrained) not in (0, len(trained)):
        what = "a result over training seeds needs two or more models, and no untrained model or one for each"
        facts = f"got {len(trained)} models and {len(untrained)} untrained models"
        raise InputError(what, facts, hint="give --checkpoint once for each seed")
    after, before = [*map(_rates, trained.values())], [*map(_rates, untrained)]
    problem_of = {row.task_id: row.problem for rows in trained.values() for row in rows}
    shared = sorted(set(problem_of).intersection(*after, *before))
    if not shared:
        facts = "for every task there is a model without a valid rollout of it"
        hint = "see the field `invalid` of the results for the reasons, and evaluate all models on the same tasks"
        raise InputError("no task has a valid rollout of every model", facts, hint=hint)
    problems = [problem_of[task] for task in shared]
    solved = [[rates[task] for task in shared] for rates in after]
    found, gain = crossed_rate(solved, problems), None
    if before:
        gains = [[a[task] - b[task] for task in shared] for a, b in zip(after, before, strict=True)]
        gain = _plain(crossed_difference(gains, problems))
    return SeedsResult(
        rate=found.value,
        low=found.low,
        high=found.high,
        by_seed={label: sum(row) / len(row) for label, row in zip(trained, solved, strict=True)},
        gain=gain,
        general_rise=_plain(mean_over_seeds(general_rises)) if general_rises else None,
        num_tasks=len(shared),
        num_problems=len(set(problems)),
        num_left_out=len(problem_of) - len(shared),
    )


def _rates(rows: Iterable[EvalRow]) -> dict[str, float]:
    """Return the solve rate of each task over its valid rollouts, by task id."""
    valid = tries_by_task(row for row in rows if row.valid)
    return {task: sum(row.solved for row in tries) / len(tries) for task, tries in valid.items()}


def _plain(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high

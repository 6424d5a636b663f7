"""The result of a training recipe: several models, trained with different seeds, on the same tasks.

The solve rate of one model has an interval for new problems. That of a recipe is also for new seeds: which is the
question where recipes are compared, since two seeds of one recipe differ, too."""

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
    - `gain`: (value, low, high) of the rate minus that of the untrained models, paired by seed and task. None: they
      were not played.
    - `general_rise`: (value, low, high) of the loss on the general text minus that of the untrained models, in bits per
      byte, with Student's t interval over seeds. None: not measured.
    - `num_tasks`, `num_problems`: tasks with a valid rollout of every model, and their different problems.
      `num_left_out`: other tasks."""

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

    `trained` has the rollouts of each model by its label. `untrained` has those of the model from which each of them
    started, in the same order; empty: no gain is computed. `general_rises`: by how much the loss of each model on the
    general text is above that of its start; empty: unknown. Raises `InputError` for fewer than two models, and if no
    task has a valid rollout of every model."""
    if len(trained) < 2 or len(untrained) not in (0, len(trained)):
        raise InputError(f"{len(trained)} models are no several seeds", hint="give --checkpoint once for each seed")
    after, before = [*map(_rates, trained.values())], [*map(_rates, untrained)]
    problem_of = {row.task_id: row.problem for rows in trained.values() for row in rows}
    shared = sorted(set(problem_of).intersection(*after, *before))
    if not shared:
        facts = "of every task, the rollouts of some model are all invalid, or the models played different tasks"
        raise InputError("the models share no task", facts, hint="see why rollouts are invalid: the field `invalid`")
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
    """The share of valid rollouts that solved each task, by task."""
    valid = tries_by_task(row for row in rows if row.valid)
    return {task: sum(row.solved for row in tries) / len(tries) for task, tries in valid.items()}


def _plain(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high

"""The result of an evaluation: solve rate with interval, best of k, turns, tokens, time, money, invalid rollouts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from etude.evals.costs import NO_PRICE, Price, cost, quantile, total
from etude.evals.curves import pass_curve, reward_curve
from etude.evals.intervals import clustered_mean, clustered_rate
from etude.evals.rows import EvalRow


@dataclass(frozen=True, slots=True, kw_only=True)
class TermMean:
    """The mean of a reward term over the rollouts of an evaluation for which it is known.

    `low`, `high`: its 95 % interval over problems; None: there are too few problems for one. All three are None if the
    term is known for no rollout. `num_known`, `num_unknown`: numbers of rollouts; those with a closed gate are in
    neither."""

    value: float | None
    low: float | None
    high: float | None
    num_known: int
    num_unknown: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The summary of an evaluation, as in the `eval.result` event. Rates are over valid rollouts only.

    - `name`: "before", "during" or "after" (of RL), or the name of a baseline; `step`: training step of the weights.
    - `num_tasks`: tasks with at least one valid rollout; `num_problems`: different problems (variants of one problem
      are not independent); `tries`: largest number of rollouts of a task.
    - `solved`: rollouts with reward 1; `cheats`: rollouts with signs of cheating, which do not count as solved.
    - `rate`, `low`, `high`: the solve rate and its 95 % interval; `best_of_k`: share of tasks that some rollout solved.
    - `pass_at_k`: by k, the probability that one of k rollouts solves a task, with its interval, [value, low, high].
      `reward_at_k`: by k, the expected largest reward of k rollouts of a task.
    - `turns_mean`, `sampled_mean`, `prompt_mean`: turns, sampled tokens and prompt tokens per rollout. `cached_share`:
      the share of prompt tokens that servers had in their caches. None: unknown.
    - `latency_p50_s`, `latency_p99_s`: quantiles of the wall time of a valid rollout, in seconds. None: no valid ones.
    - `machine_s`: seconds in which all rollouts, valid or not, had a machine.
    - `dollars`: what all rollouts cost. `dollars_per_solved`: divided by the rollouts that solved their task.
      `dollars_per_solved_task`: divided by the tasks that some rollout solved. None: a price is unknown, or nothing was
      solved.
    - `judge_dollars`: what judges cost that measured `terms`; it is not in `dollars`, since a served model has no
      judge. None: unknown, or there was no judge.
    - `terms`: means of the suite's reward terms, by name.
    - `by_family`: solve rate by family of tasks; `invalid`: number of invalid rollouts by the component that failed."""

    name: str
    split: str
    step: int
    num_tasks: int
    num_problems: int
    tries: int
    solved: int
    cheats: int
    rate: float
    low: float
    high: float
    best_of_k: float
    pass_at_k: Mapping[int, tuple[float, float, float]]
    reward_at_k: Mapping[int, float]
    turns_mean: float
    sampled_mean: float
    prompt_mean: float | None
    cached_share: float | None
    latency_p50_s: float | None
    latency_p99_s: float | None
    machine_s: float
    dollars: float | None
    dollars_per_solved: float | None
    by_family: Mapping[str, float]
    invalid: Mapping[str, int]
    wall_s: float
    dollars_per_solved_task: float | None = None
    judge_dollars: float | None = None
    terms: Mapping[str, TermMean] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Return the result as plain data, for `Telemetry.event("eval.result", **result.facts())`."""
        points = {str(k): list(v) for k, v in self.pass_at_k.items()}
        return {**asdict(self), "pass_at_k": points, "reward_at_k": {str(k): v for k, v in self.reward_at_k.items()}}


def evaluate(
    rows: Iterable[EvalRow],
    *,
    name: str,
    split: str,
    step: int,
    wall_s: float,
    price: Price = NO_PRICE,
    judge_dollars: float | None = None,
) -> EvalResult:
    """Summarise the rollouts of one evaluation. `wall_s` is its duration in seconds, and `price` the prices from which
    its cost is computed. `judge_dollars`: the cost of the judges of its reward terms; None: unknown, or no judge.

    The interval uses the effective number of independent rollouts, because rollouts of one task, and tasks that are
    variants of one problem, are correlated."""
    rows = list(rows)
    valid = [r for r in rows if r.valid]
    by_task = tries_by_task(valid)
    tries = max((len(v) for v in tries_by_task(rows).values()), default=0)
    solved = sum(r.solved for r in valid)
    n = len(valid)
    problems = [r.problem for r in valid]
    interval = clustered_rate([float(r.solved) for r in valid], problems)
    families = _group(valid, lambda r: r.family)
    curve = pass_curve(valid).points
    prompt, cached = total(r.prompt for r in valid), total(r.cached for r in valid)
    dollars = cost(rows, price, wall_s=wall_s)
    num_solved = sum(any(r.solved for r in tries) for tries in by_task.values())
    return EvalResult(
        name=name,
        split=split,
        step=step,
        num_tasks=len(by_task),
        num_problems=len(set(problems)),
        tries=tries,
        solved=solved,
        cheats=sum(bool(r.sign) for r in valid),
        rate=solved / n if n else 0.0,
        low=interval.low,
        high=interval.high,
        best_of_k=best_of_k(valid),
        pass_at_k={k: (i.value, i.low, i.high) for k, i in curve.items()},
        reward_at_k=reward_curve(valid),
        turns_mean=sum(r.turns for r in valid) / n if n else 0.0,
        sampled_mean=sum(r.sampled for r in valid) / n if n else 0.0,
        prompt_mean=prompt / n if n and prompt is not None else None,
        cached_share=cached / prompt if prompt and cached is not None else None,
        latency_p50_s=quantile([r.wall_s for r in valid], 0.5),
        latency_p99_s=quantile([r.wall_s for r in valid], 0.99),
        machine_s=round(sum(r.wall_s for r in rows), 3),
        dollars=dollars,
        dollars_per_solved=dollars / solved if dollars is not None and solved else None,
        by_family={f: sum(r.solved for r in rs) / len(rs) for f, rs in sorted(families.items())},
        invalid=dict(sorted(Counter(r.outcome for r in rows if not r.valid).items())),
        wall_s=wall_s,
        dollars_per_solved_task=dollars / num_solved if dollars is not None and num_solved else None,
        judge_dollars=judge_dollars,
        terms=term_means(valid),
    )


def term_means(rows: Iterable[EvalRow]) -> dict[str, TermMean]:
    """Return the mean of each reward term of some rollouts with its interval, by name."""
    found: dict[str, list[tuple[float | None, str]]] = {}
    for row in rows:
        for name, value in json.loads(row.terms).items():
            found.setdefault(name, []).append((value, row.problem))
    return {name: _mean(values) for name, values in sorted(found.items())}


def _mean(values: Sequence[tuple[float | None, str]]) -> TermMean:
    known = [(value, problem) for value, problem in values if value is not None]
    if not known:
        return TermMean(value=None, low=None, high=None, num_known=0, num_unknown=len(values))
    mean = clustered_mean([value for value, _ in known], [problem for _, problem in known])
    low, high = (bound if math.isfinite(bound) else None for bound in (mean.low, mean.high))
    num_unknown = len(values) - len(known)
    return TermMean(value=mean.value, low=low, high=high, num_known=len(known), num_unknown=num_unknown)


def best_of_k(rows: Iterable[EvalRow]) -> float:
    """Compute the share of tasks that at least one valid rollout solved; 0.0 without valid rollouts."""
    by_task = tries_by_task([r for r in rows if r.valid])
    return sum(any(r.solved for r in tries) for tries in by_task.values()) / len(by_task) if by_task else 0.0


def tries_by_task(rows: Iterable[EvalRow]) -> dict[str, list[EvalRow]]:
    """Group rows by task id."""
    return _group(rows, lambda r: r.task_id)


def _group(rows: Iterable[EvalRow], key: Callable[[EvalRow], str]) -> dict[str, list[EvalRow]]:
    groups: dict[str, list[EvalRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups

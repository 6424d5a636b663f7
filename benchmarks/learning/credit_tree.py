"""Credit by turn and credit by rollout on a small exact problem: how noisy the gradient is, and how fast both learn.

A task is a sequence of turns with one right action each, and the reward is 1 if all actions are right. The policy has
its own logits at each context of each task, so its solve rate is an exact product. Groups are sampled as in a run,
their advantages are those of `etude.experience.credit`, and a step is plain gradient ascent. Both ways start from the
same policy, with the same random numbers per seed.

`python -m benchmarks.learning.credit_tree` Seconds.
"""

from __future__ import annotations

import argparse
import bisect
import statistics
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.report import report
from etude.evals.intervals import mean_over_seeds
from etude.experience.credit import SCHEMES, Credit, advantages, turn_advantages
from etude.records.reward import Reward
from etude.records.rollout import TurnKind
from etude.records.summary import TurnPlace

BASE, FORK = Credit.RLOO, Credit.FORK
TASKS, GROUP, TURNS, ACTIONS = 4, 8, 6, 4
STEPS, RATE = 25, 4.0
STARTS = {"hard": 0.6, "even": 0.8}
"""The probability of the right action at each turn, before training."""
Context = tuple[int, ...]  # the task, then the actions so far; 0 is the right one
F64 = npt.NDArray[np.float64]


class Policy:
    """A softmax over the actions at each context. `right`: the probability of the right action where nothing was
    learned."""

    def __init__(self, right: float) -> None:
        start = np.full(ACTIONS, np.log((1 - right) / (ACTIONS - 1)))
        start[0] = np.log(right)
        self.logits: defaultdict[Context, F64] = defaultdict(start.copy)

    def probabilities(self, context: Context) -> F64:
        odds = np.exp(self.logits[context] - self.logits[context].max())
        found: F64 = odds / odds.sum()
        return found

    def solved(self) -> float:
        """The mean probability of a solved task, exactly."""
        right = [[self.probabilities((task, *(0,) * turn))[0] for turn in range(TURNS)] for task in range(TASKS)]
        return float(np.prod(right, axis=1).mean())


def gradient(policy: Policy, way: Credit, rng: np.random.Generator) -> dict[Context, F64]:
    """The estimate of a step: the mean over rollouts of the sum over turns of advantage times score."""
    found: defaultdict[Context, F64] = defaultdict(lambda: np.zeros(ACTIONS))
    known = cache(policy.probabilities)
    cumulated = cache(lambda context: known(context).cumsum().tolist())
    for task in range(TASKS):
        rollouts = [list[int]() for _ in range(GROUP)]
        for actions in rollouts:
            for draw in rng.random(TURNS).tolist():
                actions.append(min(bisect.bisect(cumulated((task, *actions)), draw), ACTIONS - 1))
        values = [float(not any(actions)) for actions in rollouts]
        rewards = [Reward(value=value, raw=value, reason="") for value in values]
        places = [
            [TurnPlace(bytes([*actions[:turn]]), turn - 1 if turn else None, TurnKind.ACT) for turn in range(TURNS)]
            for actions in rollouts
        ]
        by_turn = turn_advantages(rewards, places, SCHEMES[way])
        whole = advantages(rewards, SCHEMES[way])
        for i, actions in enumerate(rollouts):
            for turn, action in enumerate(actions):
                context = (task, *actions[:turn])
                score = -known(context)
                score[action] += 1
                found[context] += (by_turn[i][turn] if by_turn[i] else whole[i]) * score / (TASKS * GROUP)
    return found


def noise(right: float, way: Credit, *, samples: int = 60) -> float:
    """The sum of the variances of all entries of the gradient at the start."""
    policy, rng = Policy(right), np.random.default_rng(0)
    drawn = [gradient(policy, way, rng) for _ in range(samples)]
    contexts = sorted({context for one in drawn for context in one})
    zero = np.zeros(ACTIONS)
    table = np.array([[one.get(context, zero) for context in contexts] for one in drawn])
    return float(table.var(axis=0, ddof=1).sum())


def learned(right: float, way: Credit, seed: int) -> list[float]:
    """The solve rate before each step, and after the last."""
    policy, rng = Policy(right), np.random.default_rng(seed)
    rates = [policy.solved()]
    for _ in range(STEPS):
        for context, change in gradient(policy, way, rng).items():
            policy.logits[context] = policy.logits[context] + RATE * change
        rates.append(policy.solved())
    return rates


def compared(right: float, seeds: int) -> dict[str, Any]:
    """Both ways from one start: the mean solve rate over the steps, and after them."""
    rates = {way: [learned(right, way, seed) for seed in range(seeds)] for way in (BASE, FORK)}
    gains = {
        "mean": [statistics.fmean(b) - statistics.fmean(a) for a, b in zip(rates[BASE], rates[FORK], strict=True)],
        "after": [b[-1] - a[-1] for a, b in zip(rates[BASE], rates[FORK], strict=True)],
    }
    found: dict[str, Any] = {"solved_before": round(right**TURNS, 4)}
    for way, of in rates.items():
        found[way] = {
            "mean": round(statistics.fmean(map(statistics.fmean, of)), 4),
            "after": round(statistics.fmean(one[-1] for one in of), 4),
        }
    for name, values in gains.items():
        mean = mean_over_seeds(values)
        found[f"fork_minus_rloo_{name}"] = {k: round(getattr(mean, k), 4) for k in ("value", "low", "high")}
    found["noise_of_fork_to_rloo"] = round(noise(right, FORK) / noise(right, BASE), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    args = parser.parse_args()
    sizes = {"tasks": TASKS, "group": GROUP, "turns": TURNS, "actions": ACTIONS, "steps": STEPS, "rate": RATE}
    starts = {name: compared(right, args.seeds) for name, right in STARTS.items()}
    report("credit_tree", {**sizes, "seeds": args.seeds, "starts": starts})


if __name__ == "__main__":
    main()

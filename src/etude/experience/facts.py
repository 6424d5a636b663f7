"""Statistics of a batch: the numbers of an `rl.step` event that come from the plan. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from etude.records.rollout import Invalid
from etude.records.summary import BatchPlan, BatchRef


def step_facts(plan: BatchPlan, batch: BatchRef) -> dict[str, Any]:
    """reward_mean, best_of_k, num_groups, no_signal_share, lag, token_lag, invalid, turns_mean, sampled_mean, as
    `docs/formats/run.md` has them, and masked_share: of the tokens with an advantage those kept out of the loss as
    stale. Rewards are those before the KL penalty. Lags are of all valid rollouts, as they were sampled; means are 0.0
    where nothing is valid."""
    groups = plan.judged
    valid = [rollout for judged in groups.values() for rollout, _ in judged]
    rewards = [[reward.raw for _, reward in judged] for judged in groups.values()]
    lag: Counter[int] = Counter()
    token_lag: Counter[int] = Counter()
    for rollout in valid:
        oldest = rollout.oldest_steps
        if oldest:
            lag[batch.step - 1 - min(oldest)] += 1
            token_lag.update({batch.step - 1 - step: count for step, count in oldest.items()})
    invalid = (str(member.outcome.boundary) for member in plan.members if isinstance(member.outcome, Invalid))
    return {
        "reward_mean": _mean([r for group in rewards for r in group]),
        "best_of_k": _mean([max(group) for group in rewards if group]),
        "num_groups": len(groups),
        "no_signal_share": _mean([float(len(set(group)) < 2) for group in rewards]),
        "lag": {str(k): n for k, n in sorted(lag.items())},
        "token_lag": {str(k): n for k, n in sorted(token_lag.items())},
        "invalid": dict(Counter(invalid)),
        "turns_mean": _mean([rollout.num_turns for rollout in valid]),
        "sampled_mean": _mean([rollout.num_sampled for rollout in valid]),
        "masked_share": batch.num_masked / max(1, batch.num_trained + batch.num_masked),
    }


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values)) if values else 0.0

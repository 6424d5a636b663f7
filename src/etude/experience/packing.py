"""From groups to the rows that one optimiser step trains on.

`make_batch` gives credit and keeps the samples that carry a gradient. Pure and deterministic: the same groups give the
same batch. How a batch is cut to fit memory is the learner's business. Knows nothing of the ledger, of the window,
or of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from etude.experience.admission import Straggler, bounded, masked
from etude.experience.credit import Scheme, advantages, dr_grpo, with_k1_penalty
from etude.experience.groups import Group
from etude.records.rollout import Path, Rollout, Trace
from etude.records.sample import Batch, Sample


def paths(trace: Trace) -> Iterator[Path]:
    """Every root-to-leaf path, with each sampled token in the loss of exactly one of them.

    A branch (a summary, a sub-agent) repeats the turns it shares with an earlier one; there they are context.
    """
    seen: set[int] = set()
    for leaf in trace.leaves():
        keep: list[np.ndarray[tuple[int], np.dtype[np.bool_]]] = []
        at: int | None = leaf
        while at is not None:
            turn = trace.turns[at]
            keep.append(np.full(len(turn.prompt_ids) + len(turn.completion.token_ids), at not in seen))
            seen.add(at)
            at = turn.parent
        path = trace.path(leaf)
        yield path if all(k.all() for k in keep) else masked(path, np.concatenate(keep[::-1]))


def make_batch(
    groups: Sequence[Group],
    *,
    batch_id: str,
    step: int,
    max_lag: int,
    scheme: Scheme = dr_grpo,
    straggler: Straggler = Straggler.WAIT,
    k1: Mapping[str, float] | None = None,
    beta: float = 0.0,
) -> Batch:
    """The batch that makes version step `step`, trained at learner step `step - 1`.

    Tokens of a lost lineage that are past the bound are masked under either policy: no window can keep a restart from
    making them stale.

    `k1` is Σ log π − log π_ref of each valid rollout that sampled a token, by its id; `beta` times that is taken off
    its reward.

    Samples of non-zero advantage only; every rollout of the groups is consumed, and every token that a valid rollout
    sampled counts in the normaliser. So a batch with little signal has a small gradient, but not a small step: the
    optimiser divides by the gradient's recent size. One without any sample changes no weight.
    """
    samples: list[Sample] = []
    num_loss_tokens = 0
    for group in groups:
        rewards = group.rewards
        if k1 is not None:
            of = [k1[rollout.rollout_id] if rollout.num_sampled else 0.0 for rollout, _ in group.valid]
            rewards = [with_k1_penalty(reward, one, beta=beta) for reward, one in zip(rewards, of, strict=True)]
        for (rollout, _), advantage in zip(group.valid, advantages(rewards, scheme, raw=group.rewards), strict=True):
            num_loss_tokens += rollout.num_sampled
            if advantage:
                policy = Straggler.MASK if rollout.rollout_id in group.lost else straggler
                samples += _samples(rollout, advantage, step - 1, max_lag, policy)
    return Batch(
        batch_id=batch_id,
        step=step,
        samples=tuple(sorted(samples, key=lambda sample: sample.rollout_id)),
        rollout_ids=tuple(sorted(i for group in groups for i in group.rollout_ids)),
        num_loss_tokens=num_loss_tokens,
    )


def whole_samples(groups: Sequence[Group]) -> list[Sample]:
    """Every path of every valid rollout, without credit: what a reference model is asked about."""
    return [
        Sample(rollout_id=rollout.rollout_id, path=path, advantage=0.0)
        for group in groups
        for rollout, _ in group.valid
        for path in paths(rollout.trace)
        if path.mask.any()
    ]


def _samples(
    rollout: Rollout, advantage: float, learner_step: int, max_lag: int, straggler: Straggler
) -> Iterator[Sample]:
    for whole in paths(rollout.trace):
        path = bounded(whole, learner_step=learner_step, max_lag=max_lag, straggler=straggler)
        if path.mask.any():
            yield Sample(rollout_id=rollout.rollout_id, path=path, advantage=advantage)

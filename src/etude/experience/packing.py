"""Turns groups into the batch of one optimiser step, in two parts.

`plan_batch` computes advantages; it needs only rewards and counts, so that the conductor holds no tokens. `make_batch`
reads the planned rollouts and keeps the samples that carry a gradient. Both are deterministic: the same groups give the
same batch. The learner splits a batch to fit its memory. Knows nothing of the ledger, of the window, or of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from etude.experience.admission import Straggler, bounded, masked
from etude.experience.credit import Scheme, advantages, dr_grpo, with_k1_penalty
from etude.experience.groups import Group
from etude.records.rollout import Path, Rollout, Trace
from etude.records.sample import Batch, Sample
from etude.records.summary import BatchPlan, Member, RolloutSummary, as_seen
from etude.records.wire import F32, Array, Bools

Read = Callable[[RolloutSummary], Rollout]
"""A function that reads the whole rollout of a summary: `RolloutFiles.read`."""


def paths(trace: Trace) -> Iterator[Path]:
    """Yield every path from root to leaf. Each sampled token is in the loss of exactly one path.

    A branch (a summary, a sub-agent) repeats the turns that it shares with an earlier path; there they are context.
    """
    seen: set[int] = set()
    for leaf in trace.leaves():
        chain, path = trace.chain(leaf), trace.path(leaf)
        yield path if seen.isdisjoint(chain) else masked(path, _by_turn(trace, chain, [at not in seen for at in chain]))
        seen.update(chain)


def _by_turn(trace: Trace, chain: Sequence[int], values: Sequence[float]) -> Array:
    """[T] each token of a path has the value of its turn."""
    turns = [trace.turns[at] for at in chain]
    return np.repeat(values, [len(turn.prompt_ids) + len(turn.completion.token_ids) for turn in turns])


def temperatures(trace: Trace, leaf: int, mask: Bools, *, run: float) -> F32 | None:
    """[S] the temperature of the distribution that each token with loss was sampled from, which is 1 where sampling was
    greedy; None where all are `run`, the temperature of the run."""
    chain = trace.chain(leaf)
    found = _by_turn(trace, chain, [trace.turns[at].sampling.temperature or 1.0 for at in chain])
    sampled = found[mask].astype(np.float32)
    return None if (sampled == np.float32(run)).all() else sampled


def plan_batch(
    groups: Sequence[Group],
    *,
    batch_id: str,
    step: int,
    max_lag: int,
    scheme: Scheme = dr_grpo,
    straggler: Straggler = Straggler.WAIT,
    k1: Mapping[str, float] | None = None,
    beta: float = 0.0,
    full_groups: int = 0,
) -> BatchPlan:
    """Plan the batch that makes version step `step`, trained at learner step `step - 1`.

    Tokens of a lost lineage that are past the bound are masked under either `straggler`: no window can prevent that a
    restart makes them stale.

    `k1`: by rollout id, Σ log π − log π_ref of each valid rollout that sampled a token; `beta` times that is
    subtracted from its reward.

    Every rollout of the groups is consumed, and every token that a valid rollout sampled counts in the normaliser. So a
    batch with little signal has a small gradient, but not a small step: the optimiser divides by the gradient's recent
    size. One without any sample changes no weight. With `full_groups` the step's learning rate is scaled by the share
    of so many groups that have a sample (`Batch.lr_share`), at most 1.
    """
    given: dict[str, float] = {}
    num_loss_tokens = 0
    for group in groups:
        rewards = group.rewards
        if k1 is not None:
            of = [k1[rollout.rollout_id] if rollout.num_sampled else 0.0 for rollout, _ in group.valid]
            rewards = [with_k1_penalty(reward, one, beta=beta) for reward, one in zip(rewards, of, strict=True)]
        for (rollout, _), advantage in zip(group.valid, advantages(rewards, scheme, raw=group.rewards), strict=True):
            num_loss_tokens += rollout.num_sampled
            given[rollout.rollout_id] = advantage
    return BatchPlan(
        batch_id=batch_id,
        step=step,
        max_lag=max_lag,
        members=tuple(sorted(_members(groups, given, straggler), key=lambda member: member.rollout_id)),
        num_loss_tokens=num_loss_tokens,
        full_groups=full_groups,
    )


def _members(groups: Sequence[Group], given: Mapping[str, float], straggler: Straggler) -> Iterator[Member]:
    for group in groups:
        ended = {one.rollout_id: one for one in group.finished}
        for i in group.rollout_ids:
            if (one := ended.get(i)) is None:
                yield Member(rollout_id=i, group_id=group.group_id)
            else:
                advantage = given.get(i, 0.0)
                yield Member(
                    rollout_id=i,
                    group_id=group.group_id,
                    outcome=one.outcome,
                    summary=one.summary,
                    advantage=advantage,
                    masks_stale=straggler is Straggler.MASK or i in group.lost,
                )


def make_batch(plan: BatchPlan, read: Read, *, temperature: float = 1.0) -> Batch:
    """Make the planned batch: read its rollouts, and keep the samples with a non-zero advantage, in order of rollout
    id. `temperature`: the run's."""
    samples = list[Sample]()
    for member in plan.members:
        if member.summary is not None and member.advantage:
            trace = as_seen(read(member.summary), member.summary).trace
            samples += [sample for _, sample in samples_of(plan, member, trace, temperature=temperature)]
    return batch_of(plan, samples)


def batch_of(plan: BatchPlan, samples: Sequence[Sample]) -> Batch:
    """Make a plan's batch of samples that were made already: those of its members, in the members' order."""
    group_of = {member.rollout_id: member.group_id for member in plan.members}
    having = len({group_of[sample.rollout_id] for sample in samples})
    return Batch(
        batch_id=plan.batch_id,
        step=plan.step,
        samples=tuple(samples),
        rollout_ids=plan.rollout_ids,
        num_loss_tokens=plan.num_loss_tokens,
        lr_share=min(1.0, having / plan.full_groups) if plan.full_groups else 1.0,
    )


def samples_of(plan: BatchPlan, member: Member, trace: Trace, *, temperature: float) -> list[tuple[int, Sample]]:
    """Make the samples of one member from the trace of its rollout, each with the turn at which its path ends. Tokens
    that are too stale are masked. Empty where the advantage is 0, or no token with loss is left."""
    if not member.advantage:
        return []
    straggler = Straggler.MASK if member.masks_stale else Straggler.WAIT
    found = list[tuple[int, Sample]]()
    for leaf, whole in zip(trace.leaves(), paths(trace), strict=True):
        path = bounded(whole, learner_step=plan.step - 1, max_lag=plan.max_lag, straggler=straggler)
        if path.mask.any():
            own = temperatures(trace, leaf, path.mask, run=temperature)
            found.append((leaf, Sample.uniform(member.rollout_id, path, member.advantage, own)))
    return found


def teaches(group: Group, *, learner_step: int, max_lag: int) -> bool:
    """Whether a step trained at `learner_step` has a sample of the group, if all tokens past the bound are masked: some
    member with an advantage sampled a token within it."""
    given = advantages(group.rewards)
    return any(
        learner_step - step <= max_lag
        for (rollout, _), advantage in zip(group.valid, given, strict=True)
        if advantage
        for step in rollout.oldest_steps
    )


def whole_samples(rollouts: Iterable[Rollout], *, temperature: float = 1.0) -> list[Sample]:
    """Make a sample of advantage 0 of every path of these rollouts: the input of a reference model. `temperature`: the
    run's."""
    return [
        Sample.uniform(one.rollout_id, path, 0.0, temperatures(one.trace, leaf, path.mask, run=temperature))
        for one in rollouts
        for leaf, path in zip(one.trace.leaves(), paths(one.trace), strict=True)
        if path.mask.any()
    ]

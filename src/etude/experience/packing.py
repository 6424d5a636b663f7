"""Turns groups into the batch of one optimiser step, in two parts.

`plan_batch` composes rewards and computes advantages; it needs only terms and counts, so that the conductor holds no
tokens. `make_batch`
reads the planned rollouts and keeps the samples that carry a gradient. Both are deterministic: the same groups give the
same batch. The learner splits a batch to fit its memory. Knows nothing of the ledger, of the window, or of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from etude.experience.admission import Straggler, bounded, masked
from etude.experience.credit import DR_GRPO, credited
from etude.experience.groups import Group
from etude.records.reward import K1, Term
from etude.records.rollout import Graded, Path, Rollout, Trace
from etude.records.sample import Batch, Sample
from etude.records.summary import BatchPlan, Member, RolloutSummary, with_versions_of
from etude.records.wire import F32, Array, Bools
from etude.rewards import AS_MEASURED, Composition
from etude.seams import CreditScheme

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
    composition: Composition = AS_MEASURED,
    scheme: CreditScheme = DR_GRPO,
    straggler: Straggler = Straggler.WAIT,
    k1: Mapping[str, float] | None = None,
    full_groups: int = 0,
) -> BatchPlan:
    """Plan the batch that makes version step `step`, trained at learner step `step - 1`. The rewards are composed here,
    from the terms that are stored.

    Tokens of a lost lineage that are past the bound are masked under either `straggler`: no window can prevent that a
    restart makes them stale.

    `k1`: by rollout id, Σ log π − log π_ref of each valid rollout that sampled a token. It becomes a term of the
    rollout, of which `composition.kl` is the weight.

    Every rollout of the groups is consumed, and every token that a valid rollout sampled counts in the normaliser. So a
    batch with little signal has a small gradient, but not a small step: the optimiser divides by the gradient's recent
    size. One without any sample changes no weight. With `full_groups` the step's learning rate is scaled by the share
    of so many groups that have a sample (`Batch.lr_share`), at most 1.

    Raises `EtudeError` where a reward or an advantage is no finite number.
    """
    members = [member for group in groups for member in _members(group, composition, scheme, straggler, k1)]
    return BatchPlan(
        batch_id=batch_id,
        step=step,
        max_lag=max_lag,
        members=tuple(sorted(members, key=lambda member: member.rollout_id)),
        num_loss_tokens=sum(one.summary.num_sampled for one in members if one.summary and one.reward is not None),
        full_groups=full_groups,
    )


def _members(
    group: Group,
    composition: Composition,
    scheme: CreditScheme,
    straggler: Straggler,
    k1: Mapping[str, float] | None,
) -> Iterator[Member]:
    graded = [_with_k1(rollout, one, k1) for rollout, one in group.valid]
    ids = [rollout.rollout_id for rollout, _ in group.valid]
    credit = dict(zip(ids, credited(graded, composition, scheme), strict=True))
    judged = dict(zip(ids, graded, strict=True))
    ended = {one.rollout_id: one for one in group.finished}
    for i in group.rollout_ids:
        if (one := ended.get(i)) is None:
            yield Member(rollout_id=i, group_id=group.group_id)
        else:
            reward, advantage = credit.get(i, (None, 0.0))
            yield Member(
                rollout_id=i,
                group_id=group.group_id,
                outcome=judged.get(i, one.outcome),
                summary=one.summary,
                reward=reward,
                advantage=advantage,
                masks_stale=straggler is Straggler.MASK or i in group.lost,
            )


def _with_k1(rollout: RolloutSummary, graded: Graded, k1: Mapping[str, float] | None) -> Graded:
    """The verdict with the term `K1`, where that is measured."""
    if k1 is None:
        return graded
    value = k1[rollout.rollout_id] if rollout.num_sampled else 0.0
    return graded.with_terms(Term(name=K1, value=value, evidence="of the sampled tokens, to the starting checkpoint"))


def make_batch(plan: BatchPlan, read: Read, *, temperature: float = 1.0) -> Batch:
    """Make the planned batch: read its rollouts, and keep the samples with a non-zero advantage, in order of rollout
    id. `temperature`: the run's."""
    samples = list[Sample]()
    for member in plan.members:
        if member.summary is not None and member.advantage:
            trace = with_versions_of(read(member.summary), member.summary).trace
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


def teaches(
    group: Group,
    *,
    learner_step: int,
    max_lag: int,
    composition: Composition = AS_MEASURED,
    scheme: CreditScheme = DR_GRPO,
) -> bool:
    """Whether a step trained at `learner_step` has a sample of the group, if all tokens past the bound are masked: some
    member with an advantage sampled a token within it."""
    credit = credited([graded for _, graded in group.valid], composition, scheme)
    return any(
        learner_step - step <= max_lag
        for (rollout, _), (_, advantage) in zip(group.valid, credit, strict=True)
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

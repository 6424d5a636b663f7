"""Makes the batch of one optimiser step from groups of rollouts, in two stages, and computes the step's metrics.

`plan_batch` composes rewards and computes advantages. It needs only terms and counts, so that the conductor reads no
tokens. `make_batch` reads the planned rollouts and makes the samples that have a gradient. Both are deterministic: the
same groups give the same batch. The learner splits a batch to fit its memory. This module does not depend on the
ledger, the window or torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from etude.experience.admission import Straggler, mask_path, mask_stale
from etude.experience.credit import DR_GRPO, better_than, paired
from etude.experience.group_credit import num_context_turns, staged_credit
from etude.experience.groups import Group, in_first_stage
from etude.experience.hints import HintFormat
from etude.records.reward import K1, Term
from etude.records.rollout import Graded, Invalid, Path, Rollout, Trace, Turn, TurnKind
from etude.records.sample import Batch, PlacedHint, Sample
from etude.records.summary import BatchPlan, BatchRef, Member, RolloutSummary, with_versions_of
from etude.records.wire import F32, Array, Bools
from etude.rewards import DEFAULT_COMPOSITION, Composition
from etude.seams import CreditScheme

Read = Callable[[RolloutSummary], Rollout]
"""Reads the full rollout of a summary: `RolloutFiles.read`."""


def paths(trace: Trace, num_context: int = 0, *, learns: Callable[[Turn], bool] | None = None) -> Iterator[Path]:
    """Yield every path of a trace from root to leaf.

    Each sampled token is in the loss of at most one path, the first that has it: later paths have shared turns (before
    a summary, a sub-agent) as context. In no loss are turns for which `learns` returns False (default: `trained`), and
    the first `num_context` turns."""
    learns = trained if learns is None else learns
    seen = {at for at, turn in enumerate(trace.turns) if at < num_context or not learns(turn)}
    for leaf in trace.leaves():
        chain, path = trace.chain(leaf), trace.path(leaf)
        yield (
            path
            if seen.isdisjoint(chain)
            else mask_path(path, _repeat_by_turn(trace, chain, [at not in seen for at in chain]))
        )
        seen.update(chain)


def trained(turn: Turn) -> bool:
    """Return whether the sampled tokens of a turn can be in the loss.

    They cannot be in the loss if the turn is a side call (such as a request for a title), since the reward says nothing
    about it. They cannot be in the loss either if the turn was sampled with penalties, truncation or a grammar (not
    `Sampling.plain`), since the learner does not compute these probabilities."""
    return turn.sampling.plain and turn.kind is not TurnKind.SIDE


def num_not_plain(trace: Trace, num_context: int = 0) -> int:
    """Return the number of sampled tokens that can never be in the loss (`trained` is False for their turn).

    Those of the first `num_context` turns do not count."""
    return sum(len(turn.completion.token_ids) for turn in trace.turns[num_context:] if not trained(turn))


def _repeat_by_turn(trace: Trace, chain: Sequence[int], values: Sequence[float]) -> Array:
    """Return [T]: for each token of a path, the value of its turn."""
    turns = [trace.turns[at] for at in chain]
    return np.repeat(values, [len(turn.prompt_ids) + len(turn.completion.token_ids) for turn in turns])


def temperatures(trace: Trace, leaf: int, mask: Bools, *, run: float) -> F32 | None:
    """Return the temperature at which each of the S tokens with loss was sampled, [S] float32; 1 for greedy sampling.

    `leaf` is the number of the path's last turn, and `mask`, [T], selects its tokens with loss. Returns None if all
    temperatures equal `run`, the temperature of the run."""
    chain = trace.chain(leaf)
    found = _repeat_by_turn(trace, chain, [trace.turns[at].sampling.temperature or 1.0 for at in chain])
    sampled = found[mask].astype(np.float32)
    return None if (sampled == np.float32(run)).all() else sampled


def plan_batch(
    groups: Sequence[Group],
    *,
    batch_id: str,
    step: int,
    max_lag: int,
    composition: Composition = DEFAULT_COMPOSITION,
    scheme: CreditScheme = DR_GRPO,
    straggler: Straggler = Straggler.WAIT,
    k1: Mapping[str, float] | None = None,
    full_groups: int = 0,
    min_group_size: int = 0,
) -> BatchPlan:
    """Plan the batch that produces version step `step`, trained at learner step `step - 1`.

    Rewards are composed from the stored terms. Every rollout of the groups is consumed, and the loss is divided by the
    number of all tokens that valid rollouts sampled. So a batch with little signal has a small gradient. Its step need
    not be small, since the optimiser divides by the recent size of gradients. A batch without samples changes no
    weight.

    - `max_lag`: the largest allowed age of a token in steps. `straggler`: MASK masks older tokens; with WAIT they are
      an error. Older tokens that were sampled before a restart went back to an earlier step are masked in any case.
    - `k1`: by rollout id, Σ log π − log π_ref of each valid rollout that sampled a token. It becomes a term of the
      rollout with weight `composition.kl`. None: no KL penalty.
    - `full_groups`: if not 0, the step's learning rate is scaled by the number of groups with a sample over this
      number, at most 1 (`Batch.lr_share`).
    - `min_group_size`: the number of rollouts in the first stage of a group (`group_credit.staged_credit`); 0: one
      stage.

    A rollout with tokens that are too old is in no preference pair: without its masked tokens, it cannot be compared
    with a complete rollout.

    Raises `EtudeError` when a reward or an advantage is not finite."""
    members = [
        member
        for group in groups
        for member in _members(
            group, composition, scheme, straggler, k1, min_group_size, _too_old(group, step - 1, max_lag)
        )
    ]
    return BatchPlan(
        batch_id=batch_id,
        step=step,
        max_lag=max_lag,
        members=tuple(sorted(members, key=lambda member: member.rollout_id)),
        num_loss_tokens=sum(one.num_own for one in members if one.reward is not None),
        full_groups=full_groups,
        rewards={
            **asdict(composition),
            "scheme": scheme.name,
            "scheme_version": scheme.version,
            "min_group_size": min_group_size,
            **({"forks": forks} if (forks := _recorded_forks(members)) else {}),
        },
    )


def _recorded_forks(members: Iterable[Member]) -> dict[str, dict[str, Any]]:
    """Return the `Fork` of each rollout that has one, as data for JSON, by rollout id."""
    forks = {one.rollout_id: one.summary.fork for one in members if one.summary is not None}
    return {rollout_id: msgspec.to_builtins(fork) for rollout_id, fork in sorted(forks.items()) if fork is not None}


def _members(
    group: Group,
    composition: Composition,
    scheme: CreditScheme,
    straggler: Straggler,
    k1: Mapping[str, float] | None,
    min_group_size: int,
    unpaired: Collection[str],
) -> Iterator[Member]:
    """Yield the members of a group. `unpaired`: ids of rollouts that are in no preference pair."""
    graded = [_with_k1(rollout, one, k1) for rollout, one in group.valid]
    ids = [rollout.rollout_id for rollout, _ in group.valid]
    places = [rollout.places for rollout, _ in group.valid]
    forks = [rollout.fork for rollout, _ in group.valid]
    given = staged_credit(graded, places, in_first_stage(ids, min_group_size), composition, scheme, forks)
    credit = dict(zip(ids, given, strict=True))
    context = dict(zip(ids, num_context_turns(forks), strict=True))
    pairs = better_than([one.reward for one in given], ids, scheme, without=unpaired)
    preferred = dict(zip(ids, pairs, strict=True))
    in_pairs = paired(preferred)
    judged = dict(zip(ids, graded, strict=True))
    ended = {one.rollout_id: one for one in group.finished}
    for i in group.rollout_ids:
        if (one := ended.get(i)) is None:
            yield Member(rollout_id=i, group_id=group.group_id)
        else:
            reward, advantage, by_turn = credit.get(i, (None, 0.0, ()))
            yield Member(
                rollout_id=i,
                group_id=group.group_id,
                outcome=judged.get(i, one.outcome),
                summary=one.summary,
                reward=reward,
                advantage=advantage,
                turn_advantages=by_turn,
                better_than=preferred.get(i, ()),
                paired=i in in_pairs,
                hints=composition.hints_of(judged[i]) if i in judged else (),
                masks_stale=straggler is Straggler.MASK or i in group.lost,
                num_context_turns=context.get(i, 0),
            )


def _too_old(group: Group, learner_step: int, max_lag: int) -> list[str]:
    """Return the ids of the valid rollouts with a token beyond the lag bound. They are in no preference pair."""
    return [one.rollout_id for one, _ in group.valid if exceeds_lag(one.oldest_steps, learner_step, max_lag)]


def exceeds_lag(oldest_steps: Iterable[int], learner_step: int, max_lag: int) -> bool:
    """Return whether one of these version steps is more than `max_lag` steps older than `learner_step`."""
    return any(learner_step - step > max_lag for step in oldest_steps)


def _with_k1(rollout: RolloutSummary, graded: Graded, k1: Mapping[str, float] | None) -> Graded:
    """Return the verdict with the term `K1`, if it was measured."""
    if k1 is None:
        return graded
    value = k1[rollout.rollout_id] if rollout.num_sampled else 0.0
    return graded.with_terms(Term(name=K1, value=value, evidence="of the sampled tokens, to the starting checkpoint"))


def make_batch(
    plan: BatchPlan, read: Read, *, temperature: float = 1.0, hint_format: HintFormat | None = None
) -> Batch:
    """Make the batch of a plan: read its rollouts, and make the samples of those that have credit.

    A rollout has credit if it has an advantage that is not 0, a hint, or a preference pair (`Member.credited`). The
    samples are in order of rollout id. `read`: returns the full rollout of a summary. `temperature`: the sampling
    temperature of the run. `hint_format`: needed if the plan has hints."""
    samples = list[Sample]()
    for member in plan.members:
        if member.summary is not None and member.credited:
            trace = with_versions_of(read(member.summary), member.summary).trace
            found = samples_of(plan, member, trace, temperature=temperature, hint_format=hint_format)
            samples += [sample for _, sample in found]
    return batch_of(plan, samples)


def batch_of(plan: BatchPlan, samples: Sequence[Sample]) -> Batch:
    """Make a plan's batch from finished samples of its members, in the members' order.

    A pair is left out if one of its rollouts has no sample, because all of its tokens are masked."""
    group_of = {member.rollout_id: member.group_id for member in plan.members}
    sampled = {sample.rollout_id for sample in samples}
    having = len({group_of[rollout_id] for rollout_id in sampled})
    pairs = [(member.rollout_id, worse) for member in plan.members for worse in member.better_than]
    return Batch(
        batch_id=plan.batch_id,
        step=plan.step,
        samples=tuple(samples),
        rollout_ids=plan.rollout_ids,
        num_loss_tokens=plan.num_loss_tokens,
        lr_share=plan.lr_share * (min(1.0, having / plan.full_groups) if plan.full_groups else 1.0),
        pairs=tuple(pair for pair in pairs if sampled.issuperset(pair)),
    )


def samples_of(
    plan: BatchPlan, member: Member, trace: Trace, *, temperature: float, hint_format: HintFormat | None = None
) -> list[tuple[int, Sample]]:
    """Make the samples of one rollout of a plan from its trace. Returns pairs (index of the path's last turn, sample).

    A rollout that was summarised has a sample for each of its conversations; each sampled token is in one of them, with
    the advantage of its rollout or turn. Tokens that are too old are masked, and those of turns that another member is
    trained on (`Member.num_context_turns`). Refused summaries are masked if the
    advantage is positive, since they did not contribute to the success. The list is empty if the rollout has no credit
    (`Member.credited`), or if no token with loss is left. `temperature`: the sampling temperature of the run.
    `hint_format`: needed if the member has hints; raises `ValueError` without it."""
    if not member.credited:
        return []
    given = member.turn_advantages or (member.advantage,) * len(trace.turns)
    straggler = Straggler.MASK if member.masks_stale else Straggler.WAIT
    found = list[tuple[int, Sample]]()
    for leaf, whole in zip(trace.leaves(), paths(trace, member.num_context_turns), strict=True):
        path = mask_stale(whole, learner_step=plan.step - 1, max_lag=plan.max_lag, straggler=straggler)
        chain = trace.chain(leaf)
        refused = [trace.turns[at].kind is TurnKind.REFUSED and given[at] > 0 for at in chain]
        if any(refused):
            path = mask_path(path, ~_repeat_by_turn(trace, chain, refused))
        if path.mask.any():
            own = temperatures(trace, leaf, path.mask, run=temperature)
            each = _repeat_by_turn(trace, chain, [given[at] for at in chain])[path.mask].astype(np.float32)
            hints = _placed(member, path, trace, chain, hint_format)
            sample = Sample(rollout_id=member.rollout_id, path=path, advantages=each, temperatures=own, hints=hints)
            found.append((leaf, sample))
    return found


def _placed(
    member: Member, path: Path, trace: Trace, chain: Sequence[int], hint_format: HintFormat | None
) -> tuple[PlacedHint, ...]:
    if not member.hints:
        return ()
    if hint_format is None:
        raise ValueError(f"rollout {member.rollout_id} has hints, so the argument hint_format is required")
    placed = (hint_format.place(hint, path, trace, chain) for hint in member.hints)
    return tuple(one for one in placed if one is not None)


def has_fresh_signal(
    group: Group,
    *,
    learner_step: int,
    max_lag: int,
    composition: Composition = DEFAULT_COMPOSITION,
    scheme: CreditScheme = DR_GRPO,
    min_group_size: int = 0,
) -> bool:
    """Return whether a rollout of the group has credit (an advantage, a hint or a pair) and a token within `max_lag`.

    Then a step trained at `learner_step` has a sample of the group, even if all older tokens are masked. The KL penalty
    is not part of these advantages, since it is measured later."""
    too_old = _too_old(group, learner_step, max_lag)
    return any(
        learner_step - step <= max_lag
        for member in _members(group, composition, scheme, Straggler.WAIT, None, min_group_size, too_old)
        if member.summary is not None and member.credited
        for step in member.summary.oldest_steps
    )


def reference_samples(rollouts: Iterable[Rollout], *, temperature: float = 1.0) -> list[Sample]:
    """Make a sample with advantage 0 of every path of these rollouts, as input of a reference model.

    `temperature`: the sampling temperature of the run."""
    return [
        Sample.uniform(one.rollout_id, path, 0.0, temperatures(one.trace, leaf, path.mask, run=temperature))
        for one in rollouts
        for leaf, path in zip(one.trace.leaves(), paths(one.trace), strict=True)
        if path.mask.any()
    ]


def step_metrics(plan: BatchPlan, batch: BatchRef) -> dict[str, Any]:
    """Return the metrics of a step that come from its plan, for the event `rl.step` (`docs/formats/run.md`).

    They are reward_mean, best_of_k, num_groups, no_signal_share (share of the groups without credit), lag, token_lag,
    invalid, turns_mean, sampled_mean, masked_share, not_plain_share, and, where the rewards have hints, hints and
    unplaced_hints (`BatchRef.num_hints`, `num_unplaced_hints`). masked_share is the share of the tokens with an
    advantage that are not in the loss because they are too old; not_plain_share is the share that are not in it because
    of their sampling parameters (`Sampling.plain`). Rewards are before the KL penalty. Lags are of all valid rollouts,
    trained on or not. Of rollouts that share their first turns (`Fork`) only the first one counts for the rewards;
    `continuations` is the number of the others, where there are any. `unknown_terms` is the share of the graded
    rollouts for which a term's contribution is unknown, by name of the term, where it is not 0. Means are 0.0 if there
    is no valid rollout."""
    groups = plan.judged
    valid = [rollout for judged in groups.values() for rollout, _ in judged]
    further = {member.rollout_id for member in plan.members if member.num_context_turns}
    rewards = [[reward.raw for one, reward in judged if one.rollout_id not in further] for judged in groups.values()]
    lag: Counter[int] = Counter()
    token_lag: Counter[int] = Counter()
    for rollout in valid:
        oldest = rollout.oldest_steps
        if oldest:
            lag[batch.step - 1 - min(oldest)] += 1
            token_lag.update({batch.step - 1 - step: count for step, count in oldest.items()})
    num_credited = max(1, batch.num_trained + batch.num_masked + batch.num_not_plain)
    invalid = (str(member.outcome.boundary) for member in plan.members if isinstance(member.outcome, Invalid))
    return {
        "reward_mean": _mean([r for group in rewards for r in group]),
        "best_of_k": _mean([max(group) for group in rewards if group]),
        "num_groups": len(groups),
        "no_signal_share": 1.0 - len(plan.groups_with_signal) / len(groups) if groups else 0.0,
        "lag": {str(k): n for k, n in sorted(lag.items())},
        "token_lag": {str(k): n for k, n in sorted(token_lag.items())},
        "invalid": dict(Counter(invalid)),
        "turns_mean": _mean([rollout.num_turns for rollout in valid]),
        "sampled_mean": _mean([rollout.num_sampled for rollout in valid]),
        "masked_share": batch.num_masked / num_credited,
        "not_plain_share": batch.num_not_plain / num_credited,
        **({"continuations": len(further)} if further else {}),
        **({"unknown_terms": unknown} if (unknown := _unknown_terms(plan)) else {}),
        **({"hints": batch.num_hints, "unplaced_hints": batch.num_unplaced_hints} if plan.rewards.get("hints") else {}),
    }


def _unknown_terms(plan: BatchPlan) -> dict[str, float]:
    how = Composition(weights=plan.rewards["weights"], when=plan.rewards["when"])
    graded = [member.outcome for member in plan.members if isinstance(member.outcome, Graded)]
    counts = {name: sum(bool(how.why_unknown(one, name)) for one in graded) for name in how.weights}
    return {name: count / len(graded) for name, count in counts.items() if count}


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values)) if values else 0.0

"""Computes the rewards, the advantages and the batch of a recorded step again, with the same settings or with others.

Everything needed is in the trace of the step: raw terms, turns, and the settings that were used. With these settings
the result must be equal bit for bit. With others it shows what the step would have been."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from etude.experience.credit import better_than, paired
from etude.experience.group_credit import Credited, num_context_turns, staged_credit
from etude.experience.groups import in_first_stage
from etude.experience.hints import HintFormat
from etude.experience.packing import batch_of, exceeds_lag, samples_of
from etude.experience.trace_reader import RecordedStep
from etude.experience.traces import batch_digest
from etude.records.reward import Reward
from etude.records.rollout import Graded
from etude.records.summary import BatchPlan, Member, oldest_steps, turn_places
from etude.rewards import Composition
from etude.seams import CreditScheme


@dataclass(frozen=True)
class RecomputedRollout:
    """The recomputed reward and advantage of one rollout of a recorded step.

    `recorded`: the reward in the trace. `trained_with`: (lowest, highest) advantage of its tokens in the recorded
    batch; None if it has no sample."""

    rollout_id: str
    group_id: str
    recorded: float | None
    reward: Reward
    advantage: float
    trained_with: tuple[float, float] | None


@dataclass(frozen=True)
class RecomputedStep:
    """The result of `recompute`. `digest`: the digest of the recomputed batch; `recorded_digest`: that of the batch in
    the trace."""

    step: int
    rollouts: tuple[RecomputedRollout, ...]
    digest: str
    recorded_digest: str

    @property
    def different(self) -> tuple[RecomputedRollout, ...]:
        """The rollouts whose recomputed reward differs from the recorded one."""
        return tuple(one for one in self.rollouts if one.recorded != one.reward.value)

    @property
    def equal(self) -> bool:
        """Whether all rewards and the batch are bit for bit equal to the recorded ones."""
        return self.digest == self.recorded_digest and not self.different


def recorded_composition(rewards: Mapping[str, Any], default: Composition) -> Composition:
    """Return the settings that a step's trace recorded for composing rewards from terms.

    `rewards` is that record. Traces of earlier versions have none; for them `default` is returned."""
    names = {field.name for field in fields(Composition)} & rewards.keys()
    recorded: dict[str, Any] = {name: rewards[name] for name in names}
    recorded |= {"charges": tuple(recorded.get("charges", ()))} if names else {}
    return Composition(**recorded) if names else default


def recompute(
    recorded: RecordedStep,
    composition: Composition,
    scheme: CreditScheme,
    *,
    max_lag: int,
    full_groups: int = 0,
    hint_format: HintFormat | None = None,
) -> RecomputedStep:
    """Compute the rewards, advantages, hints and the batch of a recorded step again.

    `composition`, `scheme`: how rewards and advantages are computed. `max_lag`: the largest allowed age of a token in
    steps. `full_groups`: if fewer groups than this have a sample, the learning rate is scaled down; 0: it is never
    scaled. `hint_format`: the run's hint format, needed if the composition has hints. Raises `EtudeError` when a reward
    or an advantage is not finite."""
    credit, preferred = _credit(recorded, composition, scheme, max_lag=max_lag)
    graded = [i for i, tree in enumerate(recorded.trees) if isinstance(tree.rollout.outcome, Graded)]
    forks = [recorded.trees[i].rollout.fork for i in graded]
    context = dict(zip(graded, num_context_turns(forks), strict=True))
    members, in_pairs = list[Member](), paired(preferred)
    for i, tree in enumerate(recorded.trees):
        reward, advantage, turns = credit.get(i, (None, 0.0, ()))
        outcome, rollout_id = tree.rollout.outcome, tree.rollout.rollout_id
        members.append(
            Member(
                rollout_id=rollout_id,
                group_id=tree.rollout.group_id,
                reward=reward,
                advantage=advantage,
                turn_advantages=turns,
                hints=composition.hints_of(outcome) if isinstance(outcome, Graded) else (),
                masks_stale=True,
                better_than=preferred.get(rollout_id, ()),
                paired=rollout_id in in_pairs,
                num_context_turns=context.get(i, 0),
            )
        )
    plan = BatchPlan(
        batch_id=recorded.batch_id,
        step=recorded.step,
        max_lag=max_lag,
        members=tuple(members),
        num_loss_tokens=recorded.num_loss_tokens,
        full_groups=full_groups,
    )
    made = [
        samples_of(plan, member, tree.trace, temperature=recorded.temperature, hint_format=hint_format)
        for member, tree in zip(members, recorded.trees, strict=True)
    ]
    batch = batch_of(plan, [sample for some in made for _, sample in some])
    found = list[RecomputedRollout]()
    for i, (reward, advantage, *_) in sorted(credit.items()):
        tokens = [float(value) for _, sample in made[i] for value in (sample.advantages.min(), sample.advantages.max())]
        rollout = recorded.trees[i].rollout
        found.append(
            RecomputedRollout(
                rollout_id=rollout.rollout_id,
                group_id=rollout.group_id,
                recorded=rollout.reward,
                reward=reward,
                advantage=advantage,
                trained_with=(min(tokens), max(tokens)) if tokens else None,
            )
        )
    return RecomputedStep(recorded.step, tuple(found), batch_digest(batch), recorded.digest)


def _credit(
    recorded: RecordedStep, composition: Composition, scheme: CreditScheme, *, max_lag: int
) -> tuple[dict[int, Credited], dict[str, tuple[str, ...]]]:
    """Return the credit of each graded rollout by its index, and by rollout id the rollouts that it is better than."""
    groups: dict[str, list[int]] = {}
    for i, tree in enumerate(recorded.trees):
        if isinstance(tree.rollout.outcome, Graded):
            groups.setdefault(tree.rollout.group_id, []).append(i)
    credit, preferred = dict[int, Credited](), dict[str, tuple[str, ...]]()
    min_group_size = int(recorded.rewards.get("min_group_size", 0))
    for some in groups.values():
        outcomes = [one for i in some if isinstance(one := recorded.trees[i].rollout.outcome, Graded)]
        places = [turn_places(recorded.trees[i].trace) for i in some]
        ids = [recorded.trees[i].rollout.rollout_id for i in some]
        forks = [recorded.trees[i].rollout.fork for i in some]
        given = staged_credit(outcomes, places, in_first_stage(ids, min_group_size), composition, scheme, forks)
        credit |= dict(zip(some, given, strict=True))
        oldest = [oldest_steps(recorded.trees[i].trace) for i in some]
        late = [one for one, steps in zip(ids, oldest, strict=True) if exceeds_lag(steps, recorded.step - 1, max_lag)]
        pairs = better_than([one.reward for one in given], ids, scheme, without=late)
        preferred |= dict(zip(ids, pairs, strict=True))
    return credit, preferred

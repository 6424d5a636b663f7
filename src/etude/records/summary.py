"""What is known of a finished rollout without its tokens, and the step that is to be made of many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from etude.records.completion import Version
from etude.records.rollout import Ending, Graded, Invalid, Rollout, Trace


class Stored(msgspec.Struct, frozen=True):
    """Which bytes a rollout was stored as."""

    num_bytes: int
    sha256: str  # 64 hex characters


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout without its tokens and files: what the conductor and the ledger keep of it. Made by whoever
    played it; the whole rollout is in the file that `stored` describes."""

    rollout_id: str
    group_id: str
    attempt: int
    task_id: str
    family: str
    problem: str  # id of the problem that the task is one statement of; else the task's own
    ending: Ending
    num_turns: int
    num_sampled: int  # tokens that the policy sampled
    num_prompt: int  # tokens that the harness appended
    num_malformed: int  # tool calls that could not be parsed
    wall_s: float
    tool_s: float
    engines: tuple[str, ...]  # names of those that served its turns, sorted
    num_moves: int  # turns that another engine served than the turn before
    versions: tuple[Version, ...]  # that sampled something, in order; with their apparent steps, once seen from others
    sampled_by: tuple[tuple[tuple[int, ...], int], ...]  # (places in `versions` of all behind a token, how many tokens)
    invalid: Invalid | None = None  # set when it failed outside the agent's reach
    stored: Stored | None = None  # None: its file was not kept

    @property
    def oldest_steps(self) -> dict[int, int]:
        """How many sampled tokens have which oldest version step behind them, in order of the step."""
        steps: Counter[int] = Counter()
        for places, count in self.sampled_by:
            steps[min(self.versions[place].step for place in places)] += count
        return dict(sorted(steps.items()))


def _versions(trace: Trace) -> tuple[Version, ...]:
    found = {span.version for turn in trace.turns for span in turn.completion.spans}
    return tuple(sorted(found, key=lambda version: (version.step, version.incarnation, version.digest)))


def _sampled_by(trace: Trace, versions: Sequence[Version]) -> Counter[tuple[int, ...]]:
    """Tokens by the versions behind each: of its own span, and of those before whose keys were kept."""
    places, counts = {version: place for place, version in enumerate(versions)}, Counter[tuple[int, ...]]()
    for turn in trace.turns:
        behind: set[int] = set()
        for span in turn.completion.spans:
            behind = {places[span.version], *(behind if span.kv_epoch else ())}
            counts[tuple(sorted(behind))] += span.num_tokens
    return counts


def as_seen(rollout: Rollout, summary: RolloutSummary) -> Rollout:
    """A stored rollout with the steps that its summary gives to its versions."""
    versions = _versions(rollout.trace)
    if versions == summary.versions:
        return rollout
    seen, replace = dict(zip(versions, summary.versions, strict=True)), msgspec.structs.replace
    turns = []
    for turn in rollout.trace.turns:
        spans = tuple(replace(span, version=seen[span.version]) for span in turn.completion.spans)
        turns.append(replace(turn, completion=replace(turn.completion, spans=spans)))
    return replace(rollout, trace=Trace(tuple(turns)))


def summary_of(rollout: Rollout, stored: Stored | None = None) -> RolloutSummary:
    """The summary of a rollout that was stored so."""
    turns = rollout.trace.turns
    served = [turn.completion.engine for turn in turns]
    versions = _versions(rollout.trace)
    return RolloutSummary(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        attempt=rollout.attempt,
        task_id=rollout.task.task_id,
        family=rollout.task.family,
        problem=rollout.task.problem or rollout.task.task_id,
        ending=rollout.ending,
        num_turns=rollout.num_turns,
        num_sampled=rollout.num_sampled,
        num_prompt=sum(len(turn.prompt_ids) for turn in turns),
        num_malformed=rollout.num_malformed,
        wall_s=rollout.wall_s,
        tool_s=rollout.tool_s,
        engines=tuple(sorted(set(served))),
        num_moves=sum(one != other for one, other in pairwise(served)),
        versions=versions,
        sampled_by=tuple(sorted(_sampled_by(rollout.trace, versions).items())),
        invalid=rollout.invalid,
        stored=stored,
    )


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a step."""

    rollout_id: str
    group_id: str
    outcome: Graded | Invalid | None = None  # None: cancelled or quarantined
    summary: RolloutSummary | None = None  # None, too, where the process that ran it left nothing
    advantage: float = 0.0  # 0.0: it is recorded and not trained on
    masks_stale: bool = False  # tokens staler than the bound are masked: as the plan says of all, or of a lost lineage


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The batch of a step without its tokens: which rollouts, and the advantage of each. Made by the conductor; the
    learner reads the rollouts' files and makes the batch."""

    batch_id: str  # "b000007"
    step: int  # the version step this batch will produce
    max_lag: int
    members: tuple[Member, ...]  # every rollout that the step consumes, in order of its id
    num_loss_tokens: int  # the loss's constant normaliser: sampled tokens of all valid rollouts

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        return tuple(member.rollout_id for member in self.members)


class BatchRef(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that is recorded in its step's trace. Made by the learner, which trains on what has this digest."""

    batch_id: str
    step: int
    rollout_ids: tuple[str, ...]
    sampled: frozenset[str]  # ids of the rollouts with a sample
    num_trained: int  # tokens that carry loss
    num_masked: int  # tokens with an advantage that carry none, as too stale
    digest: str  # SHA-256 of all that a learner reads of it

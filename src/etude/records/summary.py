"""Summaries of finished rollouts without their tokens, and the plan of a batch in terms of summaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from etude.records.completion import Version
from etude.records.reward import Reward
from etude.records.rollout import Ending, Graded, Invalid, Rollout, Trace


class StoredFile(msgspec.Struct, frozen=True):
    """Size and digest of the file of a stored rollout."""

    num_bytes: int
    sha256: str  # 64 hex characters


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout without its tokens and files. The conductor and the ledger work with summaries; the complete
    rollout is in the file that `stored` describes."""

    rollout_id: str
    group_id: str
    attempt: int
    task_id: str
    family: str
    problem: str  # id of the problem that the task is a variant of; else the task id
    ending: Ending
    num_turns: int
    num_sampled: int  # tokens that the policy sampled
    num_prompt: int  # tokens that the harness appended
    num_malformed: int  # tool calls that could not be parsed
    wall_s: float
    tool_s: float
    engines: tuple[str, ...]  # names of the engines that served its turns, sorted
    num_moves: int  # turns served by another engine than the previous turn
    versions: tuple[Version, ...]  # versions that sampled tokens, sorted; steps relative to the current lineage
    sampled_by: tuple[
        tuple[tuple[int, ...], int], ...
    ]  # (indices of the versions that a token depends on, number of tokens)
    invalid: Invalid | None = None  # set when it failed outside the agent's reach
    stored: StoredFile | None = None  # None: the file was not kept

    @property
    def oldest_steps(self) -> dict[int, int]:
        """Number of sampled tokens by the oldest version step that they depend on, ascending by step."""
        steps: Counter[int] = Counter()
        for places, count in self.sampled_by:
            steps[min(self.versions[place].step for place in places)] += count
        return dict(sorted(steps.items()))


def _versions(trace: Trace) -> tuple[Version, ...]:
    found = {span.version for turn in trace.turns for span in turn.completion.spans}
    return tuple(sorted(found, key=lambda version: (version.step, version.incarnation, version.digest)))


def _sampled_by(trace: Trace, versions: Sequence[Version]) -> Counter[tuple[int, ...]]:
    """Number of tokens by the versions that they depend on: the version of their span, and those of earlier spans whose
    keys they attend to."""
    places, counts = {version: place for place, version in enumerate(versions)}, Counter[tuple[int, ...]]()
    for turn in trace.turns:
        behind: set[int] = set()
        for span in turn.completion.spans:
            behind = {places[span.version], *(behind if span.kv_epoch else ())}
            counts[tuple(sorted(behind))] += span.num_tokens
    return counts


def with_versions_of(rollout: Rollout, summary: RolloutSummary) -> Rollout:
    """Replace the versions in a stored rollout by those of its summary. After a lost lineage the summary's steps
    differ."""
    versions = _versions(rollout.trace)
    if versions == summary.versions:
        return rollout
    seen, replace = dict(zip(versions, summary.versions, strict=True)), msgspec.structs.replace
    turns = []
    for turn in rollout.trace.turns:
        spans = tuple(replace(span, version=seen[span.version]) for span in turn.completion.spans)
        turns.append(replace(turn, completion=replace(turn.completion, spans=spans)))
    return replace(rollout, trace=Trace(tuple(turns)))


def summary_of(rollout: Rollout, stored: StoredFile | None = None) -> RolloutSummary:
    """Make the summary of a rollout. `stored`: size and digest of its file."""
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
    """One rollout of a step: outcome, reward and advantage."""

    rollout_id: str
    group_id: str
    outcome: Graded | Invalid | None = None  # None: cancelled or quarantined
    summary: RolloutSummary | None = None  # None: cancelled, quarantined, or the process that ran it died
    reward: Reward | None = None  # composed from the outcome's terms; None unless it was graded
    advantage: float = 0.0  # 0.0: recorded and not trained on
    masks_stale: bool = False  # whether tokens older than `max_lag` get no loss (by config, or for a lost lineage)


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The batch of a step without its tokens: the rollouts and their advantages. The conductor makes the plan; the
    learner reads the rollouts' files and builds the batch."""

    batch_id: str  # "b000007"
    step: int  # version step that training on this batch produces
    max_lag: int
    members: tuple[Member, ...]  # every rollout that the step consumes, in order of rollout id
    num_loss_tokens: int  # divisor of the loss: sampled tokens of all valid rollouts
    full_groups: int = 0  # number of groups with a sample from which the full learning rate is used; 0: always

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """Ids of all members, in order."""
        return tuple(member.rollout_id for member in self.members)

    @property
    def judged(self) -> dict[str, list[tuple[RolloutSummary, Reward]]]:
        """The graded members of each group, by group id. A group without graded members has an empty list."""
        found: dict[str, list[tuple[RolloutSummary, Reward]]] = {member.group_id: [] for member in self.members}
        for member in self.members:
            if member.summary is not None and member.reward is not None:
                found[member.group_id].append((member.summary, member.reward))
        return found


class BatchRef(msgspec.Struct, frozen=True, kw_only=True):
    """A reference to a batch that the learner has built, recorded in the trace of its step."""

    batch_id: str
    step: int
    rollout_ids: tuple[str, ...]
    sampled: frozenset[str]  # ids of the rollouts with a sample
    num_trained: int  # tokens with loss
    num_masked: int  # tokens with an advantage but without loss, because they are too stale
    digest: str  # SHA-256 of everything in the batch that the learner uses
    num_not_plain: int = 0  # tokens with an advantage but without loss, because their sampling was not plain

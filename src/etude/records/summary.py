"""Records of finished rollouts and of planned batches without tokens, which the conductor and the ledger use."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from etude.records.completion import Version
from etude.records.reward import Hint, Reward
from etude.records.rollout import Ending, Fork, Graded, Invalid, Rollout, Trace, TurnKind, Unforked
from etude.records.wire import I32


class StoredFile(msgspec.Struct, frozen=True):
    """Size and SHA-256 digest (64 hex characters) of the file of a stored rollout."""

    num_bytes: int
    sha256: str  # 64 hex characters


class TurnPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of a turn in its rollout's tree, without its tokens, from which credit schemes by turn find forks.

    `context`: a digest (16 bytes) of all tokens that the model read for the turn. Turns of any rollouts with equal
    digests continue the same prefix. `parent`: index of the turn that this one continues; None at the root. `kind`: the
    kind of the turn, such as a side call."""

    context: bytes
    parent: int | None
    kind: TurnKind


def turn_places(trace: Trace) -> tuple[TurnPlace, ...]:
    """Return the `TurnPlace` of each turn of a trace, in the order of `trace.turns`."""
    read, ends = list[TurnPlace](), list[bytes]()
    for turn in trace.turns:
        before = b"" if turn.parent is None else ends[turn.parent]
        context = _digest(before, turn.prompt_ids)
        ends.append(_digest(context, turn.completion.token_ids))
        read.append(TurnPlace(context, turn.parent, turn.kind))
    return tuple(read)


def _digest(before: bytes, token_ids: I32) -> bytes:
    return hashlib.blake2b(before + token_ids.astype("<i4").tobytes(), digest_size=16).digest()


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout without its tokens and files, for the conductor and the ledger (the database of all rollouts).

    The complete rollout is in the file that `stored` describes; None: it was not kept.

    - `problem`: the id of the problem that the task is a variant of; else the task id.
    - `num_sampled`, `num_prompt`: tokens that the policy sampled, and tokens that the agent program appended.
    - `num_malformed`: tool calls that could not be parsed.
    - `tool_s`: seconds of `wall_s` in tool calls.
    - `engines`: names of the engines that served its turns, sorted. `num_moves`: turns served by another engine than
      the turn before.
    - `versions`: versions of the weights that sampled tokens, sorted. After a restart went back to a checkpoint, their
      steps are relative to the weights that continue (`experience.lineage`).
    - `sampled_by`: pairs (indices into `versions` that a token depends on, number of such tokens).
    - `invalid`: the reason, if the rollout failed outside the agent's control; None otherwise.
    - `places`: the places of its turns (`TurnPlace`); empty in summaries by earlier versions of etude.
    - `fork`, `unforked`: as in `Rollout`."""

    rollout_id: str
    group_id: str
    attempt: int
    task_id: str
    family: str
    problem: str
    ending: Ending
    num_turns: int
    num_sampled: int
    num_prompt: int
    num_malformed: int
    wall_s: float
    tool_s: float
    engines: tuple[str, ...]
    num_moves: int
    versions: tuple[Version, ...]
    sampled_by: tuple[tuple[tuple[int, ...], int], ...]
    invalid: Invalid | None = None
    stored: StoredFile | None = None
    places: tuple[TurnPlace, ...] = ()
    fork: Fork | None = None
    unforked: Unforked | None = None

    @property
    def oldest_steps(self) -> dict[int, int]:
        """Version step → number of sampled tokens whose oldest version has this step; ascending by step."""
        return _by_oldest(self.versions, self.sampled_by)


def oldest_steps(trace: Trace) -> dict[int, int]:
    """Return `RolloutSummary.oldest_steps` of a rollout with this trace."""
    versions = _versions(trace)
    return _by_oldest(versions, _sampled_by(trace, versions).items())


def _by_oldest(versions: Sequence[Version], sampled_by: Iterable[tuple[tuple[int, ...], int]]) -> dict[int, int]:
    steps: dict[int, int] = {}
    for places, count in sampled_by:
        oldest = min(versions[place].step for place in places)
        steps[oldest] = steps.get(oldest, 0) + count
    return dict(sorted(steps.items()))


def _versions(trace: Trace) -> tuple[Version, ...]:
    found = {span.version for turn in trace.turns for span in turn.completion.spans}
    return tuple(sorted(found, key=lambda version: (version.step, version.incarnation, version.digest)))


def _sampled_by(trace: Trace, versions: Sequence[Version]) -> Counter[tuple[int, ...]]:
    """Count tokens by the versions that they depend on: that of their span, and of keys that they attend to."""
    places, counts = {version: place for place, version in enumerate(versions)}, Counter[tuple[int, ...]]()
    for turn in trace.turns:
        behind: set[int] = set()
        for span in turn.completion.spans:
            behind = {places[span.version], *(behind if span.kv_epoch else ())}
            counts[tuple(sorted(behind))] += span.num_tokens
    return counts


def with_versions_of(rollout: Rollout, summary: RolloutSummary) -> Rollout:
    """Return the rollout with the versions of its summary in place of its own.

    They differ if a restart went back to a checkpoint, since the ledger then changes the steps in summaries, but not in
    the files of rollouts."""
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
        places=turn_places(rollout.trace),
        fork=rollout.fork,
        unforked=rollout.unforked,
    )


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a planned batch: outcome, reward and advantage.

    `outcome`, `summary`: None if the rollout was cancelled or quarantined; `summary` also if its process died.
    `reward`: composed from the outcome's terms; None unless it was graded. `advantage`: the advantage of the whole
    rollout. `turn_advantages`: one for each turn; empty if all turns have `advantage`. `hints`: texts that would have
    helped the policy in some turns, which change the advantages of their tokens. `masks_stale`: whether tokens that
    were sampled more than `max_lag` steps before get no loss; otherwise such a token is an error. `better_than`: ids of
    the rollouts of the same group that this one is preferred to; empty unless the credit scheme forms preference pairs.
    `paired`: whether it is in such a pair, as the better or the worse rollout. `num_context_turns`: so many first turns
    are context only, since another member that shares them is trained on them (`Fork`)."""

    rollout_id: str
    group_id: str
    outcome: Graded | Invalid | None = None
    summary: RolloutSummary | None = None
    reward: Reward | None = None
    advantage: float = 0.0
    turn_advantages: tuple[float, ...] = ()
    hints: tuple[Hint, ...] = ()
    masks_stale: bool = False
    better_than: tuple[str, ...] = ()
    paired: bool = False
    num_context_turns: int = 0

    @property
    def num_own(self) -> int:
        """The number of tokens that the policy sampled for this member, without those that count for another one."""
        if self.summary is None:
            return 0
        shared = self.summary.fork.num_sampled if self.summary.fork and self.num_context_turns else 0
        return self.summary.num_sampled - shared

    @property
    def credited(self) -> bool:
        """Whether the rollout has credit: an advantage of any token, a hint, or a pair that it is in.

        Otherwise it is recorded, but not trained on."""
        return bool(self.hints or self.paired) or any(self.turn_advantages or (self.advantage,))


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The batch of a step without its tokens: the rollouts and their advantages.

    The conductor makes the plan. The learner reads the rollouts' files and builds the `Batch`. `members`: every rollout
    that the step consumes, in order of rollout id. `max_lag`: the largest allowed age of a token in steps.
    `num_loss_tokens`: the divisor of the loss: sampled tokens of all valid rollouts. `full_groups`: if fewer groups
    than this have a sample, the learning rate is scaled down; 0: it is never scaled. `lr_share`: a further factor of
    the learning rate. `rewards`: the settings by which the rewards were composed and credited, for the record
    (`docs/formats/traces.md`)."""

    batch_id: str  # "b000007"
    step: int  # version step that training on this batch produces
    max_lag: int
    members: tuple[Member, ...]
    num_loss_tokens: int
    full_groups: int = 0
    lr_share: float = 1.0
    rewards: dict[str, Any] = {}

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """Ids of all members, in order."""
        return tuple(member.rollout_id for member in self.members)

    @property
    def judged(self) -> dict[str, list[tuple[RolloutSummary, Reward]]]:
        """For each group id the (summary, reward) of its graded rollouts; an empty list if none was graded."""
        found: dict[str, list[tuple[RolloutSummary, Reward]]] = {member.group_id: [] for member in self.members}
        for member in self.members:
            if member.summary is not None and member.reward is not None:
                found[member.group_id].append((member.summary, member.reward))
        return found

    @property
    def groups_with_signal(self) -> set[str]:
        """Ids of the groups in which a rollout has an advantage, a hint, or a preference pair."""
        return {member.group_id for member in self.members if member.credited}


class BatchRef(msgspec.Struct, frozen=True, kw_only=True):
    """A reference to a batch that the learner has built from a `BatchPlan` and recorded in the trace file of its step.

    `sampled`: ids of the rollouts with a sample. `num_trained`: the number of tokens with loss. `num_masked`: the
    number of tokens with an advantage but without loss, because they are too old. `num_not_plain`: the number of tokens
    with an advantage but without loss, because their turn is a side call or was not sampled plainly (`Sampling.plain`).
    `num_hints`: the number of hints. `num_unplaced_hints`: the number of hints that the step does not use, because the
    context has no room for them or their turn has no token with loss. `digest`: SHA-256 of everything in the batch that
    the learner uses."""

    batch_id: str
    step: int
    rollout_ids: tuple[str, ...]
    sampled: frozenset[str]
    num_trained: int
    num_masked: int
    digest: str
    num_not_plain: int = 0
    num_hints: int = 0
    num_unplaced_hints: int = 0

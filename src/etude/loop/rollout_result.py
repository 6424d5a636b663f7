"""The result of a rollout that a worker returns to the conductor. The rollout itself is stored in a file.

Graders and the learner read that file, since they need its tokens or exported files."""

from __future__ import annotations

import msgspec

from etude.environments.grading.cheat_detector import CheatIndicators, scan_rollout
from etude.experience import RolloutFiles
from etude.harness import ChatFormat
from etude.records import Rollout, Task
from etude.records.summary import RolloutSummary, summary_of
from etude.records.view import TurnView
from etude.rollouts.view import view_turns


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout as the conductor, the main process of a run, sees it.

    `signs` are signs of cheating. `turns` are its turns as text; empty unless they were requested. `continuations`: the
    other rollouts that continue from the fork of its machine (`records.rollout.Fork`)."""

    summary: RolloutSummary
    task: Task
    signs: CheatIndicators = CheatIndicators()
    turns: tuple[TurnView, ...] = ()
    continuations: tuple[RolloutResult, ...] = ()


class RolloutReply(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a worker to the conductor (the main process of a run): a `RolloutResult` without its task."""

    summary: RolloutSummary
    signs: CheatIndicators
    turns: tuple[TurnView, ...]
    continuations: tuple[RolloutReply, ...] = ()

    def with_task(self, task: Task) -> RolloutResult:
        """Return the `RolloutResult` for this reply and its task."""
        others = tuple(one.with_task(task) for one in self.continuations)
        return RolloutResult(summary=self.summary, task=task, signs=self.signs, turns=self.turns, continuations=others)


def store_rollout(
    rollout: Rollout,
    files: RolloutFiles,
    *,
    kept: bool = True,
    find_signs: bool = False,
    chat: ChatFormat | None = None,
) -> RolloutReply:
    """Store a rollout in a file, and return the reply for the conductor. Raises `StoreError`.

    With `kept` the file is synced to disk, since the ledger (the database of rollouts) will refer to it. With
    `find_signs` the rollout is searched for signs of cheating, unless it is invalid. `chat` is the chat format that
    turns tokens into text for the reply's `turns`; None: the reply has no turns."""
    stored, signs = files.write(rollout, durable=kept), CheatIndicators()
    if find_signs and rollout.invalid is None:
        calls = [turn.calls for turn in rollout.trace.turns]
        signs = scan_rollout(rollout.task, calls=calls, exports=rollout.exports)
    turns = () if chat is None else view_turns(rollout.trace, chat)
    return RolloutReply(summary=summary_of(rollout, stored), signs=signs, turns=turns)

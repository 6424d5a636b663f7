"""The result of a rollout that a worker returns. The rollout itself is stored in a file.

Whoever needs tokens or files reads the stored rollout: graders and the learner. The conductor reads this.
"""

from __future__ import annotations

import msgspec

from etude.environments.grading.signs import Signs, signs_of
from etude.experience import RolloutFiles
from etude.harness import ChatFormat
from etude.records import Rollout, Task
from etude.records.summary import RolloutSummary, summary_of


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that was played: its summary, and what was found in it."""

    summary: RolloutSummary
    task: Task
    signs: Signs = Signs()  # of cheating
    transcript: str = ""  # of the last path, where it was asked for


class RolloutReply(msgspec.Struct, frozen=True, kw_only=True):
    """A `RolloutResult` without its task, as it is sent to the conductor, which has the task."""

    summary: RolloutSummary
    signs: Signs
    transcript: str

    def with_task(self, task: Task) -> RolloutResult:
        return RolloutResult(summary=self.summary, task=task, signs=self.signs, transcript=self.transcript)


def store_rollout(
    rollout: Rollout, files: RolloutFiles, *, kept: bool = True, looks: bool = False, chat: ChatFormat | None = None
) -> RolloutReply:
    """Store a rollout; what is to be said of it. `kept`: a ledger will count on the file, so it is on the disk when
    this returns. `looks`: for signs of cheating, but in what is invalid. `chat`: how to write a transcript. Raises
    `StoreError`."""
    stored, signs = files.write(rollout, durable=kept), Signs()
    if looks and rollout.invalid is None:
        calls = [turn.calls for turn in rollout.trace.turns]
        signs = signs_of(rollout.task, calls=calls, exports=rollout.exports)
    leaves = rollout.trace.leaves() if chat is not None else []
    transcript = chat.readable(rollout.trace.path(leaves[-1]).token_ids) if chat is not None and leaves else ""
    return RolloutReply(summary=summary_of(rollout, stored), signs=signs, transcript=transcript)

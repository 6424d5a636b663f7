"""The result of a rollout that a worker returns. The rollout itself is stored in a file.

Graders and the learner read the stored file, since they need tokens or exports. The conductor needs only this result.
"""

from __future__ import annotations

import msgspec

from etude.environments.grading.cheat_detector import CheatIndicators, scan_rollout
from etude.experience import RolloutFiles
from etude.harness import ChatFormat
from etude.records import Rollout, Task
from etude.records.summary import RolloutSummary, summary_of


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout: its summary, its task, and signs of cheating."""

    summary: RolloutSummary
    task: Task
    signs: CheatIndicators = CheatIndicators()  # of cheating
    transcript: str = ""  # of the last path, if requested


class RolloutReply(msgspec.Struct, frozen=True, kw_only=True):
    """A `RolloutResult` without its task, as it is sent to the conductor, which has the task."""

    summary: RolloutSummary
    signs: CheatIndicators
    transcript: str

    def with_task(self, task: Task) -> RolloutResult:
        """The result with its task."""
        return RolloutResult(summary=self.summary, task=task, signs=self.signs, transcript=self.transcript)


def store_rollout(
    rollout: Rollout,
    files: RolloutFiles,
    *,
    kept: bool = True,
    find_signs: bool = False,
    chat: ChatFormat | None = None,
) -> RolloutReply:
    """Store a rollout and return its reply. `kept`: the ledger will refer to the file, so it is synced to disk.
    `looks`: look for signs of cheating, except in invalid rollouts. `chat`: the chat format for a transcript; None: no
    transcript. Raises `StoreError`."""
    stored, signs = files.write(rollout, durable=kept), CheatIndicators()
    if find_signs and rollout.invalid is None:
        calls = [turn.calls for turn in rollout.trace.turns]
        signs = scan_rollout(rollout.task, calls=calls, exports=rollout.exports)
    leaves = rollout.trace.leaves() if chat is not None else []
    transcript = chat.readable(rollout.trace.path(leaves[-1]).token_ids) if chat is not None and leaves else ""
    return RolloutReply(summary=summary_of(rollout, stored), signs=signs, transcript=transcript)

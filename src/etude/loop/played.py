"""The result of a rollout that a worker returns. The rollout itself is stored in a file.

Whoever needs tokens or files reads the stored rollout: graders and the learner. The conductor reads this.
"""

from __future__ import annotations

import msgspec

from etude.environments.grading.cheat_detector import CheatIndicators, scan_rollout
from etude.experience import RolloutFiles
from etude.harness import ChatFormat
from etude.records import Rollout, Task
from etude.records.summary import RolloutSummary, summary_of


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that was played: its summary, and what was found in it."""

    summary: RolloutSummary
    task: Task
    signs: CheatIndicators = CheatIndicators()  # of cheating
    transcript: str = ""  # of the last path, where it was asked for


class HandedOver(msgspec.Struct, frozen=True, kw_only=True):
    """A `Played` without its task, as it is sent to the conductor, which has the task."""

    summary: RolloutSummary
    signs: CheatIndicators
    transcript: str

    def of(self, task: Task) -> Played:
        return Played(summary=self.summary, task=task, signs=self.signs, transcript=self.transcript)


def hand_over(
    rollout: Rollout, files: RolloutFiles, *, kept: bool = True, looks: bool = False, chat: ChatFormat | None = None
) -> HandedOver:
    """Store a rollout; what is to be said of it. `kept`: a ledger will count on the file, so it is on the disk when
    this returns. `looks`: for signs of cheating, but in what is invalid. `chat`: how to write a transcript. Raises
    `StoreError`."""
    stored, signs = files.write(rollout, durable=kept), CheatIndicators()
    if looks and rollout.invalid is None:
        calls = [turn.calls for turn in rollout.trace.turns]
        signs = scan_rollout(rollout.task, calls=calls, exports=rollout.exports)
    leaves = rollout.trace.leaves() if chat is not None else []
    transcript = chat.readable(rollout.trace.path(leaves[-1]).token_ids) if chat is not None and leaves else ""
    return HandedOver(summary=summary_of(rollout, stored), signs=signs, transcript=transcript)

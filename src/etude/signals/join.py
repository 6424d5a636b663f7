"""Captured answers with their signals, in the order in which the answers were served, for rewards and training.

An answer is settled when the window after it, and `GRACE_S` more, have passed. Its signals are those that were received
within the window, by the clock of the gateway: this set changes by an erasure only, so a join that is repeated gives
the same outcomes. Signals that came later are told apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from etude.privacy import Captured, Level, PrivacyFolder
from etude.signals.file import FeedbackFile
from etude.signals.store import Signal

GRACE_S = 60.0
"""Seconds after a window within which what was served and received by its end is on the disk."""
_PAGE = 256


class Cursor(NamedTuple):
    """How far a join has come: time (Unix time in s) and record id of the last answer."""

    at: float = 0.0
    record_id: str = ""


BEGIN = Cursor()
"""Before all answers."""


class SettledAnswer(NamedTuple):
    """A captured answer with its signals, each in the order in which they were received.

    - `record`: the answer; `PrivacyFolder.records.read` returns its content.
    - `signals`: those that were received within the window. Empty if its user sent none: silence is no bad rating.
    - `late`: those that were received after the window."""

    record: Captured
    signals: tuple[Signal, ...]
    late: tuple[Signal, ...]

    @property
    def cursor(self) -> Cursor:
        """The place of this answer, to go on after it."""
        return Cursor(self.record.at, self.record.record_id)

    def outcomes(self, *, with_late: bool = False) -> dict[str, float]:
        """Return the value of the last signal of each name, by the time at which they happened.

        `with_late`: whether late signals count, too."""
        told = (*self.signals, *self.late) if with_late else self.signals
        return {one.name: one.value for one in sorted(told, key=lambda one: one.at)}


def settled_answers(
    folder: PrivacyFolder,
    file: FeedbackFile,
    *,
    settle_s: float,
    after: Cursor = BEGIN,
    level: Level = Level.TRAIN,
    clock: Callable[[], float] = time.time,
) -> Iterator[SettledAnswer]:
    """Yield the answers whose window has passed, with their signals: each served at least `settle_s` + `GRACE_S` ago.

    - `settle_s`: the length of the window in seconds, from when an answer was complete. Choose it longer than the time
      after which an edit counts as kept.
    - `after`: go on after this place (`SettledAnswer.cursor`).
    - `level`: only answers and signals that were kept under at least this consent level, and whose subject allows it
      now. Ask `PrivacyFolder.usable` again before a batch is committed.

    It ends with the last settled answer; call it again later with the last cursor. An answer that it has left out for
    lack of consent does not come again. Raises `PrivacyError`."""
    until = clock() - settle_s - GRACE_S
    while page := folder.records.served(after=after, until=until, limit=_PAGE):
        usable = folder.usable([one.record_id for one in page], level)
        by_answer: dict[tuple[str, int], list[Signal]] = {}
        for signal in file.signals(response_ids=[one.response_id for one in page]):
            if signal.level is not None and signal.level >= level:
                by_answer.setdefault((signal.response_id, signal.answer), []).append(signal)
        for record in page:
            if record.record_id in usable:
                told = by_answer.get((record.response_id, record.answer), [])
                end = record.at + settle_s
                in_time = tuple(one for one in told if one.received <= end)
                yield SettledAnswer(record, in_time, tuple(one for one in told if one.received > end))
        after = Cursor(page[-1].at, page[-1].record_id)

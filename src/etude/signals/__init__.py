"""Signals from product use (an edit was kept, an answer was rated), as feedback about answers that a gateway gave.
Usable alone, no torch.

    writer = FeedbackWriter(Path("feedback.sqlite"))      # etude serve --feedback feedback.sqlite
    with FeedbackFile(Path("feedback.sqlite")) as file:
        for signal in file.signals(): ...
    for answer in settled_answers(privacy_folder, file, settle_s=6 * 3600): ...

- The ids of responses are signed (`ResponseIds`): a signal about an answer that its sender was not given is refused,
  and nothing is stored for each answer.
- A signal counts once, however often it is sent (its `id`), and a loud subject by a cap.
- With a privacy folder, consent holds for signals, too, and an erasure deletes them.
- `settled_answers` joins captured answers with their signals, `send_feedback` sends signals to a gateway."""

from etude.signals.client import FeedbackFailed, send_feedback
from etude.signals.file import FeedbackFile, Receipt, Status
from etude.signals.ids import ResponseId, ResponseIds
from etude.signals.join import Cursor, SettledAnswer, settled_answers
from etude.signals.messages import GivenSignal
from etude.signals.store import Signal, Summary
from etude.signals.writer import FeedbackWriter

__all__ = [
    "Cursor",
    "FeedbackFailed",
    "FeedbackFile",
    "FeedbackWriter",
    "GivenSignal",
    "Receipt",
    "ResponseId",
    "ResponseIds",
    "SettledAnswer",
    "Signal",
    "Status",
    "Summary",
    "send_feedback",
    "settled_answers",
]

"""Signals about answers of a gateway with a clock, for the tests of signals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.errors import SignalRefused
from etude.signals import FeedbackFile, GivenSignal, Receipt
from etude.signals.file import Sent

HOUR_S, DAY_S = 3600.0, 86_400.0
BEGIN = 1_800_000_000.0


class Clock:
    """A clock that a test moves; Unix time in s."""

    def __init__(self, now: float = BEGIN) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def opened(path: Path, clock: Clock | None = None, **options: Any) -> FeedbackFile:
    return FeedbackFile(path, create=True, clock=clock or Clock(), **options)


def given(response_id: str, signal_id: str = "s1", **changes: Any) -> GivenSignal:
    fields: dict[str, Any] = {"name": "kept", "value": 1.0}
    return GivenSignal(**(fields | changes), id=signal_id, response_id=response_id)


def add(file: FeedbackFile, *signals: GivenSignal, organisation: str = "acme", user: str = "bob") -> list[str]:
    """The statuses of signals of one request. Raises what it is refused with."""
    [result] = file.add([Sent(organisation, user, signals)])
    if isinstance(result, SignalRefused):
        raise result
    assert all(isinstance(one, Receipt) for one in result)
    return [one.status.value for one in result]

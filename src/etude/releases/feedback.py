"""Signals from product use as outcomes of a release."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from etude.releases.outcomes import Outcome
from etude.signals import Signal


def outcomes_of(signals: Iterable[Signal], metrics: Collection[str]) -> Iterator[Outcome]:
    """Yield an outcome for each signal whose name is one of `metrics` and whose answer's version is known.

    It counts for the version that answered. Its subject is the digest (32 hex characters) that the file of signals
    has."""
    for one in signals:
        if one.name in metrics and one.version:
            yield Outcome(
                id=one.id,
                subject=one.subject,
                metric=one.name,
                value=one.value,
                version=one.version,
                answered=one.began,
            )

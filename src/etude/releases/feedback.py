"""Signals from product use as outcomes of a release, and what its answers cost per change that users kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator

from etude.errors import PrivacyError
from etude.prices import Prices
from etude.privacy import Level, PrivacyFolder
from etude.privacy.records import Content
from etude.releases.assignment import Arm
from etude.releases.costs import Costs, cost_per_kept
from etude.releases.outcomes import Outcome
from etude.releases.states import Release
from etude.signals import Cursor, FeedbackFile, Signal, settled_answers

MODEL = "policy"
"""The name of a release's model in a table of prices, as in `etude eval`."""


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


class CostReader:
    """Adds up what the answers of a release's two versions cost and what users kept, at the canary's present share.

    An answer counts when the `window_s` of the release and a minute have passed after it, with the last value of the
    first metric that was received within them. `since`: when the share began, Unix time in s. `clock`: returns Unix
    time in s."""

    def __init__(
        self, release: Release, prices: Prices, *, since: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.release, self.since, self._prices, self._clock = release, since, prices.tokens(MODEL), clock
        self._arms = {str(release.stable): Arm.STABLE, str(release.candidate): Arm.CANARY}
        self._spent: dict[Arm, dict[str, tuple[float | None, float]]] = {arm: {} for arm in Arm}
        self._answers = dict.fromkeys(Arm, 0)
        self._responses = set[str]()
        self._cursor = Cursor(since)

    def read(self, folder: PrivacyFolder, file: FeedbackFile) -> Costs:
        """Read the answers that have settled since the last call, and return the costs of all.

        Only answers and signals count whose users allow it (`Level.METRICS`). Raises `PrivacyError`."""
        settings, level = self.release.settings, Level.METRICS
        found = settled_answers(
            folder, file, settle_s=settings.window_s, after=self._cursor, level=level, clock=self._clock
        )
        for answer in found:
            self._cursor, record = answer.cursor, answer.record
            arm = self._arms.get(record.version)
            if arm is None:
                continue
            try:
                dollars = self._dollars(record.response_id, folder.records.read(record))
            except PrivacyError:
                continue  # erased meanwhile, or damaged: `etude privacy export` names it
            before, kept = self._spent[arm].get(record.subject, (0.0, 0.0))
            kept += answer.outcomes().get(settings.metrics[0].name, 0.0)
            self._spent[arm][record.subject] = None if dollars is None or before is None else before + dollars, kept
            self._answers[arm] += 1
        return {arm: cost_per_kept([*users.values()], answers=self._answers[arm]) for arm, users in self._spent.items()}

    def _dollars(self, response_id: str, content: Content) -> float | None:
        """Return the dollars of an answer; those of the prompt count once for all answers of a response."""
        is_first = response_id not in self._responses
        self._responses.add(response_id)
        prompt, cached = (content.num_prompt, content.num_cached) if is_first else (0, 0)
        read, written = content.summary_tokens
        return self._prices.cost(prompt + read, cached, content.num_sampled + written)

"""Takes signals beside the gateway: a bounded queue, and a thread that verifies and stores what waits in one
transaction.

A signal is acknowledged when it is on the disk. While the disk is full, signals are refused, to be sent again, and
answers are served."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import msgspec

from etude.errors import EtudeError, PrivacyError, SignalRefused
from etude.privacy import PrivacyFolder
from etude.records.served import ServedAnswer
from etude.signals.file import FeedbackFile, Receipt, Sent
from etude.signals.ids import began_at
from etude.signals.messages import GivenSignal, SignalBatch, parse_body
from etude.signals.versions import Observation, Observations, only_version

logger = logging.getLogger("etude.signals")
COUNTS = ("stored", "duplicate", "over_cap", "no_consent", "invalid", "unknown", "expired", "conflict", "failed")
"""What becomes of a signal (`Status`), or of a request that is refused (`SignalRefused.reason`).

failed: requests whose signals could not be stored, to be sent again."""
Receipts = Future[Sequence[tuple[str, str]]]
_BATCH = 64
_EXPIRE_S = 3600.0
_MAX_OBSERVED = 1000  # observations that wait to be written


class _Request(NamedTuple):
    organisation: str
    user: str
    body: bytes
    receipts: Receipts


class FeedbackWriter:
    """Signs the ids of a gateway's responses, and stores the signals about them in a `FeedbackFile`.

    - `privacy`: the folder of consent; None: all signals are kept.
    - `keep_days`, `cap`: as those of `FeedbackFile`.
    - `max_waiting`, `max_waiting_bytes`: the most requests that wait, and their bytes. Further ones are refused.

    Raises as `FeedbackFile`."""

    bodies: tuple[type[msgspec.Struct], ...] = (GivenSignal, SignalBatch)

    def __init__(
        self,
        path: Path,
        *,
        privacy: Path | None = None,
        keep_days: float = 90.0,
        cap: int = 1000,
        max_waiting: int = 1024,
        max_waiting_bytes: int = 64 << 20,
    ) -> None:
        self._max_waiting, self._max_bytes = max_waiting, max_waiting_bytes
        self._privacy = None if privacy is None else PrivacyFolder(privacy)
        try:
            self._file = FeedbackFile(path, privacy=self._privacy, keep_days=keep_days, cap=cap, create=True)
        except BaseException:
            self._close_privacy()
            raise
        self._ids = self._file.ids
        self._known = Observations(self._file.store.observations())
        self._queue, self._num_bytes = deque[_Request](), 0
        self._observed, self._due = deque[Observation](maxlen=_MAX_OBSERVED), False
        self._counts: Counter[str] = Counter()
        self._news, self._closing = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
        self._thread.start()

    def new_id(self, organisation: str, user: str, model: str, answers: int = 1) -> str:
        """Return the signed id of a new response (`ResponseIds.new`)."""
        return self._ids.new(organisation, user, model, answers)

    def offer(self, answer: ServedAnswer) -> None:
        """Record which version of the weights sampled an answer, in the background. Returns at once."""
        version = only_version(answer.completion)
        if version:
            one = Observation(answer.model, began_at(answer.response_id), version)
            with self._news:
                if self._known.add(one):
                    self._observed.append(one)
                    self._due = True
                    self._news.notify()

    def receive(self, organisation: str, user: str, body: bytes) -> Receipts:
        """Queue the body of a request with signals (`parse_body`) to be stored. Returns a future at once.

        Its result is the (id, status) of each signal, as soon as they are durable. It raises `SignalRefused` if one is
        invalid, and `PrivacyError` if they cannot be stored now. The method itself raises `PrivacyError` if too many
        requests wait."""
        receipts: Receipts = Future()
        with self._news:
            if self._closing:
                raise PrivacyError("signals are not taken any more", "the gateway stops", hint="send them again")
            if len(self._queue) >= self._max_waiting or self._num_bytes + len(body) > self._max_bytes:
                self._counts["failed"] += 1
                facts = f"{len(self._queue)} requests with {self._num_bytes} bytes"
                raise PrivacyError("too many signals wait to be stored", facts, hint="send them again")
            self._queue.append(_Request(organisation, user, body, receipts))
            self._num_bytes += len(body)
            self._news.notify()
        return receipts

    def counts(self) -> dict[str, int]:
        """Return what became of the signals since the start: a number for each of `COUNTS`."""
        with self._news:
            return {name: self._counts[name] for name in COUNTS}

    def close(self, deadline_s: float = 5.0) -> bool:
        """Store what waits, at most `deadline_s` seconds, and end. Returns whether it has ended."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        expired_at = -_EXPIRE_S
        try:
            while self._wait():
                requests, observed = self._take()
                try:
                    if requests or observed:
                        self._store(requests, observed)
                    if time.monotonic() - expired_at > _EXPIRE_S:
                        self._file.expire()
                        expired_at = time.monotonic()
                except Exception as error:  # noqa: BLE001  whatever it is, the next ones may be stored
                    self._failed(requests, observed, error)
        finally:
            self._file.close()
            self._close_privacy()

    def _wait(self) -> bool:
        """Wait for something to store, or to expire. Returns False at the end."""
        with self._news:
            self._news.wait_for(lambda: self._queue or self._due or self._closing, timeout=_EXPIRE_S)
            return bool(self._queue) or self._due or not self._closing

    def _take(self) -> tuple[list[_Request], list[Observation]]:
        with self._news:
            requests = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            self._num_bytes -= sum(len(one.body) for one in requests)
            observed = [*self._observed]
            self._observed.clear()
            self._due = False
        return [one for one in requests if one.receipts.set_running_or_notify_cancel()], observed

    def _store(self, requests: Sequence[_Request], observed: Sequence[Observation]) -> None:
        """Store the signals of requests, and give each its result."""
        parsed = list[tuple[_Request, Sent]]()
        for one in requests:
            try:
                parsed.append((one, Sent(one.organisation, one.user, parse_body(one.body))))
            except SignalRefused as error:
                self._refuse(one, error)
        results = self._file.add([sent for _, sent in parsed], observed)
        for (one, _), result in zip(parsed, results, strict=True):
            if isinstance(result, SignalRefused):
                self._refuse(one, result)
            else:
                self._acknowledge(one, result)

    def _acknowledge(self, request: _Request, receipts: Sequence[Receipt]) -> None:
        with self._news:
            self._counts.update(one.status.value for one in receipts)
        request.receipts.set_result([(one.id, one.status.value) for one in receipts])

    def _refuse(self, request: _Request, error: SignalRefused) -> None:
        with self._news:
            self._counts[error.reason] += 1
        request.receipts.set_exception(error)

    def _failed(self, requests: Sequence[_Request], observed: Sequence[Observation], error: Exception) -> None:
        """Give the requests that have no result an error. What was observed is stored with the next ones."""
        told = str(error) if isinstance(error, EtudeError) else f"{type(error).__name__}: {error}"
        logger.warning("signals are not stored, and will be sent again: %s", told)
        with self._news:
            waiting = [one for one in requests if not one.receipts.done()]
            self._counts["failed"] += len(waiting)
        for one in waiting:
            one.receipts.set_exception(PrivacyError("the signals cannot be stored now", hint="send them again"))
        with self._news:
            self._observed.extendleft(reversed(observed))

    def _close_privacy(self) -> None:
        if self._privacy is not None:
            self._privacy.close()

"""Captures served answers beside the gateway: a bounded queue, and a thread that encrypts and writes.

`CaptureWriter.offer` never waits and never raises. What finds no place in the queue is dropped and counted. After an
error of the disk, capture is off until the gateway is started again, and serving goes on."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from pathlib import Path

import msgspec

from etude.errors import EtudeError, InputError, PrivacyError
from etude.privacy.consent import Level
from etude.privacy.folder import PrivacyFolder
from etude.privacy.records import Captured, Content, seal
from etude.privacy.subjects import Subject
from etude.records.served import ServedAnswer

logger = logging.getLogger("etude.privacy")
COUNTS = ("captured", "no_consent", "dropped", "refused", "failed")
"""What becomes of an answer that is offered.

captured: written. no_consent: the level of its subject is off. dropped: the queue was full. refused: its subject has no
valid name. failed: after an error, or while capture is off."""
DAY_S = 86_400.0
_BATCH = 64
_EXPIRE_S = 3600.0


class CaptureWriter:
    """Stores the answers that a gateway serves in a privacy folder, if and as far as the consent of their subjects
    allows it.

    - `keep_days`: the number of days after which records expire.
    - `max_queued`, `max_queued_bytes`: the largest number of answers that wait to be written, and their approximate
      size in bytes. Further answers are not stored.

    Raises `InputError` without the library `cryptography`."""

    def __init__(
        self, folder: Path, *, keep_days: float = 30.0, max_queued: int = 1024, max_queued_bytes: int = 64 << 20
    ) -> None:
        try:
            import cryptography  # noqa: F401
        except ImportError:
            hint = "pip install 'etude[signing]'"
            raise InputError(
                "capture needs cryptography", "it encrypts the answers and is not installed", hint=hint
            ) from None
        self._folder, self._keep_s = folder, keep_days * DAY_S
        self._max_queued, self._max_bytes = max_queued, max_queued_bytes
        self._queue: deque[tuple[ServedAnswer, int]] = deque()
        self._num_bytes = self._unwritten = 0
        self._counts: Counter[str] = Counter()
        self._stored: Counter[str] = Counter()  # those that the folder has
        self._news = threading.Condition()
        self._is_off = self._closing = False
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def offer(self, answer: ServedAnswer) -> None:
        """Queue an answer to be stored. Returns at once."""
        size = _approximate_bytes(answer)
        with self._news:
            if self._is_off or self._closing:
                self._counts["failed"] += 1
            elif len(self._queue) >= self._max_queued or self._num_bytes + size > self._max_bytes:
                self._counts["dropped"] += 1
            else:
                self._queue.append((answer, size))
                self._num_bytes += size
                self._news.notify()

    def counts(self) -> dict[str, int]:
        """Return the number of answers since the start for each possible outcome in `COUNTS` ("captured", "no_consent",
        ...)."""
        with self._news:
            return {name: self._counts[name] for name in COUNTS}

    def close(self, deadline_s: float = 5.0) -> bool:
        """Write the answers that wait, for at most `deadline_s` seconds, and stop. Returns whether all were written."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(deadline_s)
        return not self._thread.is_alive() and not self._is_off

    def _run(self) -> None:
        try:
            with PrivacyFolder(self._folder) as folder:
                expired_at = -_EXPIRE_S
                while batch := self._take():
                    if time.monotonic() - expired_at > _EXPIRE_S:
                        folder.records.expire()
                        expired_at = time.monotonic()
                    self._write(folder, batch)
                self._store(folder, [], Counter())
        except Exception as error:  # noqa: BLE001  whatever it is, serving goes on without capture
            self._turn_off(error)

    def _take(self) -> list[ServedAnswer]:
        """Wait for answers and return some; [] at the end."""
        with self._news:
            self._news.wait_for(lambda: self._queue or self._closing)
            taken = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            self._num_bytes -= sum(size for _, size in taken)
            self._unwritten = len(taken)
            return [answer for answer, _ in taken]

    def _write(self, folder: PrivacyFolder, batch: list[ServedAnswer]) -> None:
        new, counts = list[tuple[Captured, bytes]](), Counter[str]()
        with folder.keys.lock():  # from the look at consent to the commit no erasure comes between
            for answer in batch:
                became, record = self._seal(folder, answer)
                counts[became] += 1
                new += [] if record is None else [record]
            self._store(folder, new, counts)

    def _seal(self, folder: PrivacyFolder, answer: ServedAnswer) -> tuple[str, tuple[Captured, bytes] | None]:
        """Return what becomes of an answer, one of `COUNTS`, and its encrypted record if it is captured."""
        try:
            names = folder.keys.names(Subject.of(answer.organisation, answer.user))
        except InputError:
            return "refused", None
        level = min(folder.consent.level_of(names), folder.consent.level_of(names, at=answer.at))
        if level is Level.OFF:
            return "no_consent", None
        try:
            key = folder.keys.find_or_create(names)
        except PrivacyError as error:  # the key of this one subject is damaged
            logger.warning("an answer is not captured: %s", error)
            return "failed", None
        spans = answer.completion.spans
        captured = Captured(
            record_id=secrets.token_hex(16),
            response_id=answer.response_id,
            answer=answer.index,
            organisation=names.organisation,
            subject=names.subject,
            level=level,
            at=answer.at,
            expires=answer.at + self._keep_s,
            model=answer.model,
            version=str(spans[-1].version) if spans else "",
            key_id=key.id,
        )
        return "captured", (captured, seal(captured, _content(answer, level), key))

    def _store(self, folder: PrivacyFolder, new: list[tuple[Captured, bytes]], counts: Counter[str]) -> None:
        """Write records, `counts` of what became of their batch, and what was dropped since the last call."""
        with self._news:
            dropped = self._counts - self._stored
        folder.records.add(new, counts + dropped)
        with self._news:
            self._counts += counts
            self._stored += counts + dropped
            self._unwritten = 0

    def _turn_off(self, error: Exception) -> None:
        with self._news:
            self._is_off = True
            self._counts["failed"] += len(self._queue) + self._unwritten
            self._queue.clear()
            self._num_bytes = 0
        told = str(error) if isinstance(error, EtudeError) else f"{type(error).__name__}: {error}"
        logger.warning("capture is off until the gateway is started again; serving goes on: %s", told)


def _content(answer: ServedAnswer, level: Level) -> Content:
    completion = answer.completion
    numbers = Content(
        dialect=answer.dialect,
        finish=answer.finish,
        num_prompt=len(answer.prompt_ids),
        num_sampled=len(completion.token_ids),
        num_cached=completion.num_cached,
        summary_tokens=answer.summary_tokens,
    )
    if level < Level.CAPTURE:
        return numbers
    return msgspec.structs.replace(
        numbers,
        messages=msgspec.json.encode(answer.messages),
        reply=msgspec.json.encode(answer.reply),
        prompt_ids=answer.prompt_ids,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        spans=completion.spans,
        sampling=answer.sampling,
    )


def _approximate_bytes(answer: ServedAnswer) -> int:
    """Return about how many bytes an answer takes in memory: its tokens, and as much text as they usually have."""
    return 12 * len(answer.prompt_ids) + 16 * len(answer.completion.token_ids) + 1024

"""Requests to a bucket through obstore: so many in flight, each with a deadline, tried again where that is safe.

obstore (Rust's object_store) signs, encodes and pools connections. Trying again is done here and not there, so that a
wait ends at its deadline and says what it waited for, and so that a request whose repetition would lie is sent once:
a compare-and-swap that worked and is sent again finds that "somebody else" won. Only the parts of a multipart upload,
which obstore cuts, are repeated by it. Knows nothing of keys, objects and pointers.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Generic, TypeVar

from etude.errors import StoreError
from etude.stores import troubles
from etude.stores.places import PROVIDERS, Place

if TYPE_CHECKING:
    from obstore.store import AzureStore, ClientConfig, GCSStore, RetryConfig, S3Store

    Client = S3Store | GCSStore | AzureStore

T = TypeVar("T")
CONNECT_S = 5.0
MIN_PART_BYTES = 5 << 20  # what S3 takes
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_runtime_pid: int | None = None  # the process in which obstore started its threads: it does not survive a fork


@dataclass(frozen=True)
class Limits:
    """How long and how much; a link of `part_bytes` / `attempt_s`, 70 kB/s, is the slowest that serves."""

    deadline_s: float = 20.0  # after that no further attempt of a request begins
    silence_s: float = 10.0  # the longest wait for the next bytes of an answer
    attempt_s: float = 120.0  # one request, its body included
    max_requests: int = 16  # in flight at once
    part_bytes: int = 8 << 20  # the most that one request carries

    def __post_init__(self) -> None:
        shortest = min(self.deadline_s, self.silence_s, self.attempt_s)
        if shortest <= 0 or self.max_requests < 1 or self.part_bytes < MIN_PART_BYTES:
            raise ValueError(f"times must be over 0, requests 1 or more, parts {MIN_PART_BYTES} bytes or more: {self}")


class Transport:
    """Runs calls of obstore's functions on this process's clients for a place. Safe between threads."""

    def __init__(self, place: Place, limits: Limits) -> None:
        self.place, self.limits = place, limits
        self.quick = _client(place, limits, silence_s=limits.silence_s)
        self.slow = _client(place, limits)  # for bodies that go up: the client takes that for silence
        self.in_parts = _client(place, limits, max_retries=8)
        self._free = limits.max_requests
        self._changed = threading.Condition()

    def run(
        self,
        what: str,
        call: Callable[[], T],
        *,
        may: tuple[type[Exception], ...] = (),
        repeat: bool = True,
        width: int = 1,
    ) -> T:
        """What `call` returns; `width` requests of it are in flight at once. `repeat`: it may be sent again although it
        may have worked. Raises those of `Missing`, `Taken`, `Beyond` that it `may`, and `StoreError`, which begins with
        `what`."""
        deadline = time.monotonic() + self.limits.deadline_s
        for attempts in itertools.count(1):
            with self._in_flight(what, width, deadline):
                answer = self._attempt(call)
            if isinstance(answer, _Done):
                return answer.value
            if isinstance(answer, may):
                raise answer
            if not isinstance(answer, troubles.Trouble):
                answer = troubles.misplaced(answer)
            if not (answer.passing and (repeat or answer.undone)):
                raise answer.error(what, "" if answer.undone or repeat else "whether it was done is not known")
            if not self.pause(attempts, deadline):
                tried = f"{attempts} attempt{'s' if attempts > 1 else ''} in {self.limits.deadline_s:g} s"
                raise answer.error(what, tried)
        raise AssertionError("counted without end")

    def pause(self, attempts: int, deadline: float) -> bool:
        """Wait before another attempt, longer each time and not as long as others do; False: no time is left."""
        longest = min(_FIRST_PAUSE_S * 2**attempts, _LONGEST_PAUSE_S)
        pause = longest * (0.5 + secrets.randbelow(1000) / 2000)
        if time.monotonic() + pause >= deadline:
            return False
        time.sleep(pause)
        return True

    def _attempt(self, call: Callable[[], T]) -> _Done[T] | troubles.Answer:
        from obstore.exceptions import BaseError

        if os.getpid() != _runtime_pid:
            raise StoreError(
                f"{self.place} cannot be used in a forked process",
                "the client's threads did not come along",
                hint="start processes with spawn, and send the store to them: it pickles",
            )
        try:
            return _Done(call())
        except (BaseError, OSError, troubles.Short) as error:
            return troubles.read(error, self.place.scheme)  # outside of `except` nothing refers to the client's text

    @contextmanager
    def _in_flight(self, what: str, width: int, deadline: float) -> Iterator[None]:
        width = min(width, self.limits.max_requests)
        with self._changed:
            while self._free < width:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise StoreError(
                        what,
                        f"{self.limits.max_requests} requests were in flight for {self.limits.deadline_s:g} s",
                        hint="ask from fewer threads, or give the store more `max_requests`",
                    )
            self._free -= width
        try:
            yield
        finally:
            with self._changed:
                self._free += width
                self._changed.notify_all()


@dataclass(frozen=True)
class _Done(Generic[T]):
    value: T


def _client(place: Place, limits: Limits, *, silence_s: float | None = None, max_retries: int = 0) -> Client:
    """A client with what the environment says. Raises `StoreError`: obstore is not installed, or takes it not."""
    global _runtime_pid
    try:
        from obstore.exceptions import BaseError
        from obstore.store import AzureStore, GCSStore, S3Store
    except ImportError:
        raise StoreError(
            f"a store in {PROVIDERS[place.scheme]} needs obstore, which is not installed",
            hint="pip install 'etude[buckets]'",
        ) from None
    if _runtime_pid is None:
        _runtime_pid = os.getpid()
    client: ClientConfig = {
        "timeout": timedelta(seconds=limits.attempt_s),
        "connect_timeout": timedelta(seconds=min(CONNECT_S, limits.silence_s)),
    }
    if silence_s is not None:
        client["read_timeout"] = timedelta(seconds=silence_s)
    if place.scheme == "s3" and _endpoint().startswith("http://"):
        client["allow_http"] = True
    retry: RetryConfig = {"max_retries": max_retries, "retry_timeout": timedelta(seconds=limits.attempt_s)}
    prefix = place.prefix or None
    try:
        if place.scheme == "s3":
            return S3Store(
                place.bucket,
                prefix=prefix,
                client_options=client,
                retry_config=retry,
                copy_if_not_exists=os.environ.get("AWS_COPY_IF_NOT_EXISTS", "multipart"),
            )
        if place.scheme == "gs":
            return GCSStore(place.bucket, prefix=prefix, client_options=client, retry_config=retry)
        return AzureStore(place.bucket, prefix=prefix, client_options=client, retry_config=retry)
    except (BaseError, OSError, TypeError, ValueError) as error:
        kind = type(error).__name__  # its text may quote the environment
    raise StoreError(f"no client for {place} can be made", kind, hint=troubles.environment_hint(place.scheme))


def _endpoint() -> str:
    """Where an S3 client goes when it is told so, as obstore reads it."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")

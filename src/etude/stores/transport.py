"""Sends requests to a bucket through obstore, with a limit of requests in flight, deadlines and retries.

obstore (Rust's object_store) signs requests and pools connections. Retries are done here and not by obstore, for two
reasons: an error names the deadline and the operation, and a compare-and-swap is sent only once. (A successful one that
is sent again would seem to have lost against another writer.) obstore itself retries only the parts of multipart
uploads."""

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
from etude.stores import error_mapping
from etude.stores.locations import PROVIDERS, BucketLocation

if TYPE_CHECKING:
    from obstore.store import AzureStore, ClientConfig, GCSStore, RetryConfig, S3Store

    Client = S3Store | GCSStore | AzureStore

T = TypeVar("T")
CONNECT_S = 5.0
MIN_PART_BYTES = 5 << 20  # the minimum of S3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_runtime_pid: int | None = None  # the process in which obstore started its threads, which do not survive a fork


@dataclass(frozen=True)
class Limits:
    """Time and size limits of requests to a bucket.

    - `deadline_s`: seconds after which no further attempt of a request starts.
    - `silence_s`: the longest wait for the next bytes of a response, in seconds.
    - `attempt_s`: the longest time of one attempt, including its body, in seconds.
    - `max_requests`: the most requests in flight at once.
    - `part_bytes`: the largest body of one request.

    The network must transfer at least `part_bytes` / `attempt_s`, by default 70 kB/s. Raises `ValueError` for invalid
    limits.
    """

    deadline_s: float = 20.0
    silence_s: float = 10.0
    attempt_s: float = 120.0
    max_requests: int = 16
    part_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        shortest = min(self.deadline_s, self.silence_s, self.attempt_s)
        if shortest <= 0 or self.max_requests < 1 or self.part_bytes < MIN_PART_BYTES:
            raise ValueError(f"times must be over 0, requests 1 or more, parts {MIN_PART_BYTES} bytes or more: {self}")


class Transport:
    """Runs obstore calls against one bucket, with retries and a limit of requests in flight. Thread-safe.

    It has three obstore clients to make the calls with. `quick` is for calls that get bytes, `slow` for uploads (during
    which the client receives nothing), and `in_parts` for multipart uploads."""

    def __init__(self, location: BucketLocation, limits: Limits) -> None:
        self.location, self.limits = location, limits
        self.quick = _client(location, limits, silence_s=limits.silence_s)
        self.slow = _client(location, limits)
        self.in_parts = _client(location, limits, max_retries=8)
        self._free = limits.max_requests
        self._changed = threading.Condition()

    def run(
        self,
        what: str,
        call: Callable[[], T],
        *,
        expected: tuple[type[Exception], ...] = (),
        idempotent: bool = True,
        width: int = 1,
    ) -> T:
        """Run `call` with retries until the deadline, and return its result.

        - `what`: the failed operation, with which the error message begins.
        - `expected`: those of `NotFound`, `ConditionFailed` and `RangeBeyondEnd` that are raised to the caller.
        - `idempotent`: retry even if the server may have executed the last attempt.
        - `width`: the number of requests that `call` has in flight.

        Raises `StoreError` for all other failures, and at the deadline."""
        deadline = time.monotonic() + self.limits.deadline_s
        for attempts in itertools.count(1):
            with self._in_flight(what, width, deadline):
                answer = self._attempt(call)
            if isinstance(answer, _Done):
                return answer.value
            if isinstance(answer, expected):
                raise answer
            if not isinstance(answer, error_mapping.Failure):
                answer = error_mapping.unexpected(answer)
            if not (answer.retryable and (idempotent or answer.not_executed)):
                raise answer.error(
                    what, "" if answer.not_executed or idempotent else "it is not known whether it was executed"
                )
            if not self.pause(attempts, deadline):
                tried = f"{attempts} attempt{'s' if attempts > 1 else ''} in {self.limits.deadline_s:g} s"
                raise answer.error(what, tried)
        raise AssertionError("unreachable")

    def pause(self, attempts: int, deadline: float) -> bool:
        """Sleep before the next attempt, with exponential backoff and jitter.

        `attempts` is the number of attempts so far, and `deadline` a time of `time.monotonic`. Returns False, without a
        sleep, if the deadline comes first."""
        longest = min(_FIRST_PAUSE_S * 2**attempts, _LONGEST_PAUSE_S)
        pause = longest * (0.5 + secrets.randbelow(1000) / 2000)
        if time.monotonic() + pause >= deadline:
            return False
        time.sleep(pause)
        return True

    def _attempt(self, call: Callable[[], T]) -> _Done[T] | error_mapping.Outcome:
        from obstore.exceptions import BaseError

        if os.getpid() != _runtime_pid:
            raise StoreError(
                f"{self.location} cannot be used in a forked process",
                "the threads of the client do not survive a fork",
                hint="start processes with spawn and pass them the store: it can be pickled",
            )
        try:
            return _Done(call())
        except (BaseError, OSError, error_mapping.WrongLength) as error:
            # not raised here: the new error must not have the client's text as its context
            return error_mapping.classify(error, self.location.scheme)

    @contextmanager
    def _in_flight(self, what: str, width: int, deadline: float) -> Iterator[None]:
        width = min(width, self.limits.max_requests)
        with self._changed:
            while self._free < width:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise StoreError(
                        what,
                        f"{self.limits.max_requests} requests were in flight for {self.limits.deadline_s:g} s",
                        hint="use fewer threads, or increase `max_requests` of the store",
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


def _client(
    location: BucketLocation, limits: Limits, *, silence_s: float | None = None, max_retries: int = 0
) -> Client:
    """Make an obstore client from the environment. Raises `StoreError` if obstore is not installed or refuses."""
    global _runtime_pid
    try:
        from obstore.exceptions import BaseError
        from obstore.store import AzureStore, GCSStore, S3Store
    except ImportError:
        raise StoreError(
            f"a store in {PROVIDERS[location.scheme]} needs obstore, which is not installed",
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
    if location.scheme == "s3" and _endpoint().startswith("http://"):
        client["allow_http"] = True
    retry: RetryConfig = {"max_retries": max_retries, "retry_timeout": timedelta(seconds=limits.attempt_s)}
    prefix = location.prefix or None
    try:
        if location.scheme == "s3":
            return S3Store(
                location.bucket,
                prefix=prefix,
                client_options=client,
                retry_config=retry,
                copy_if_not_exists=os.environ.get("AWS_COPY_IF_NOT_EXISTS", "multipart"),
            )
        if location.scheme == "gs":
            return GCSStore(location.bucket, prefix=prefix, client_options=client, retry_config=retry)
        return AzureStore(location.bucket, prefix=prefix, client_options=client, retry_config=retry)
    except (BaseError, OSError, TypeError, ValueError) as error:
        kind = type(error).__name__  # its text can quote the environment
    raise StoreError(f"cannot make a client for {location}", kind, hint=error_mapping.environment_hint(location.scheme))


def _endpoint() -> str:
    """Return the configured S3 endpoint from the variables that obstore reads, or "" for the default."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")

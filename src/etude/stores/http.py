"""A read-only blob store that reads from a relay (`etude.stores.relay`) over HTTP.

A response that breaks off is continued if it has more bytes than a pointer can have: then it is an object, and objects
never change. A shorter one could be a pointer, and is read again from its start."""

from __future__ import annotations

import http.client
import json
import math
import os
import secrets
import time
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from urllib.parse import quote, urlsplit

from etude.errors import StoreError
from etude.stores.keys import check_key, check_prefix, check_range, is_key

TOKEN = "ETUDE_TOKEN"
_CHUNK = 1 << 16
_LARGER_THAN_POINTERS = 1 << 20
_MAX_LISTING = 1 << 28
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_IDLE = 8


class HttpStore:
    """A read-only `BlobStore` served by `etude weights relay` at ``http://host:port``.

    Sends ETUDE_TOKEN from the environment as bearer token if it is set. Thread-safe. It can be pickled; a copy has no
    connections and no token. Raises `StoreError` if the URL is invalid.

    `silence_s` is the longest wait for a connection or for the next bytes, in seconds. It must be long enough for the
    relay to download an object. No retry starts later than `deadline_s` seconds after the last new byte."""

    def __init__(self, url: str, *, silence_s: float = 30.0, deadline_s: float = 60.0) -> None:
        self._scheme, self._host, self._port = _parse_url(url)
        self.url, self._silence_s, self.deadline_s = url, silence_s, deadline_s
        self._idle: deque[http.client.HTTPConnection] = deque()
        weakref.finalize(self, _close, self._idle)

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(HttpStore, silence_s=self._silence_s, deadline_s=self.deadline_s), (self.url,))

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of an object or a pointer, as far as they exist. `stop` None: up to its end.

        Raises `KeyError` if the key does not exist, `StoreError` if there is no response in time."""
        check_range(start, stop)
        data = self._request(f"object {key!r} cannot be read", f"/{check_key(key)}", start, stop)
        if data is None:
            raise KeyError(key)
        return data

    def list(self, prefix: str) -> list[str]:
        """Return the sorted keys that start with `prefix`.

        Raises `StoreError` if there is no valid response in time."""
        check_prefix(prefix)
        what = f"keys under {prefix!r} cannot be listed"
        data = self._request(what, f"/?prefix={quote(prefix, safe='')}", 0, _MAX_LISTING, may_resume=False)
        try:
            keys = json.loads(data or b"")
            if isinstance(keys, list) and all(
                isinstance(key, str) and is_key(key) and key.startswith(prefix) for key in keys
            ):
                return sorted(keys)
        except (ValueError, RecursionError):
            pass
        raise StoreError(
            f"{what} at {self.url}",
            "the response is not a list of keys",
            hint="check that this is an etude weights relay",
        )

    def put(self, key: str, data: bytes) -> None:
        """Raise `StoreError`: a relay is read-only."""
        raise self._read_only(check_key(key))

    def delete(self, key: str) -> None:
        """Raise `StoreError`: a relay is read-only."""
        raise self._read_only(check_key(key))

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Raise `StoreError`: a relay is read-only."""
        raise self._read_only(check_key(key))

    def _request(self, what: str, path: str, start: int, stop: int | None, *, may_resume: bool = True) -> bytes | None:
        """Request a path with retries.

        Returns the body of a 200, None for a 404. Raises `StoreError` at the deadline."""
        got, attempts, pause_s = bytearray(), 0, _FIRST_PAUSE_S
        deadline = time.monotonic() + self.deadline_s
        while True:
            before, attempts = len(got), attempts + 1
            failure = self._attempt(path, start + before, stop, got)
            if failure is None:
                return bytes(got)
            if failure.status == 404:
                return None
            if len(got) < _LARGER_THAN_POINTERS or not may_resume:
                del got[:]
            if len(got) > before:
                deadline, pause_s = time.monotonic() + self.deadline_s, _FIRST_PAUSE_S
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) * (0.5 + secrets.randbelow(1000) / 2000)
            if not failure.retryable or time.monotonic() + pause_s >= deadline:
                tried = f"; {attempts} attempts" if failure.retryable else ""
                raise StoreError(f"{what} at {self.url}", f"{failure.facts}{tried}", hint=failure.hint)
            time.sleep(pause_s)

    def _attempt(self, path: str, start: int, stop: int | None, got: bytearray) -> _Failure | None:
        """Request once and append the received bytes to `got`. Returns None when the response is complete."""
        fresh = not self._idle
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connection()
        try:
            headers = {"X-Etude-Range": f"{start}-{'' if stop is None else stop}"}
            if token := os.environ.get(TOKEN):
                headers["Authorization"] = f"Bearer {token}"
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            if response.status != 200:
                body = response.read(_CHUNK)
                connection.close()
                return _refusal(response.status, body)
            left = stop - start if stop is not None else math.inf
            while chunk := response.read(_CHUNK):
                got += chunk
                left -= len(chunk)
                if left < 0:
                    connection.close()
                    return _Failure(
                        "received more bytes than requested", "check that this is an etude weights relay", False
                    )
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if not fresh and isinstance(error, http.client.RemoteDisconnected | ConnectionError):
                _close(self._idle)  # the relay has closed the idle connections
            facts = "no response in time" if isinstance(error, TimeoutError) else type(error).__name__
            if isinstance(error, OSError) and error.strerror:
                facts = error.strerror
            return _Failure(facts, "check that the relay runs and can be reached from this machine", True)
        if len(self._idle) < _IDLE:
            self._idle.append(connection)
        else:
            connection.close()
        return None

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._scheme == "https" else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._silence_s)

    def _read_only(self, key: str) -> StoreError:
        return StoreError(
            f"{key!r} cannot be written",
            f"{self.url} is a relay, which only reads",
            hint="write to the store behind the relay",
        )


class _Failure:
    def __init__(self, facts: str, hint: str, retryable: bool, status: int = 0) -> None:
        self.facts, self.hint, self.retryable, self.status = facts, hint, retryable, status


def _refusal(status: int, body: bytes) -> _Failure:
    facts = f"HTTP {status}"
    if status == 401:
        return _Failure(facts, f"set {TOKEN} to the token of the relay", False, status)
    with suppress(ValueError, RecursionError):
        content = json.loads(body)
        if isinstance(content, dict) and isinstance(content.get("error"), str):
            facts = f"{facts}: {content['error'][:500]}"
    return _Failure(facts, "read the log of the relay", status >= 500, status)


def _parse_url(url: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or "@" in parts.netloc or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise StoreError("the URL of a relay has only a host and a port", hint="write http://host:port")
    return parts.scheme, host, port or (443 if parts.scheme == "https" else 80)


def _close(idle: deque[http.client.HTTPConnection]) -> None:
    while idle:
        idle.pop().close()

"""A relay's store, read over HTTP: see `relay`. It cannot be written.

Where an answer breaks off, what is missing is asked for, if more came than any pointer has: an object never changes, a
pointer does. Knows nothing of what the bytes mean.
"""

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
from urllib.parse import quote, urlsplit

from etude.errors import StoreError
from etude.stores.keys import check_key, check_prefix, check_range, is_key

TOKEN = "ETUDE_TOKEN"
_CHUNK = 1 << 16
_NO_POINTER = 1 << 20
_MAX_LISTING = 1 << 28
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_IDLE = 8


class HttpStore:
    """What an `etude weights relay` serves at ``http://host:port``. ETUDE_TOKEN in the environment is sent along, if
    there is one. Safe between threads; pickles without its connections and without the token.

    `silence_s`: the longest wait for a connection and for the next bytes, during which the relay may be fetching;
    `deadline_s`: after so long without a new byte it is not tried again. Raises `StoreError`: a URL of another form.
    """

    def __init__(self, url: str, *, silence_s: float = 30.0, deadline_s: float = 60.0) -> None:
        self._scheme, self._host, self._port = _parsed(url)
        self.url, self._silence_s, self.deadline_s = url, silence_s, deadline_s
        self._idle: deque[http.client.HTTPConnection] = deque()
        weakref.finalize(self, _close, self._idle)

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_made, (self.url, self._silence_s, self.deadline_s))

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes [start, stop), fewer at the end. Raises `KeyError`, `StoreError`: no answer in time."""
        check_range(start, stop)
        data = self._ask(f"object {key!r} cannot be read", f"/{check_key(key)}", start, stop)
        if data is None:
            raise KeyError(key)
        return data

    def list(self, prefix: str) -> list[str]:
        """Sorted keys that start with `prefix`. Raises `StoreError`, also where the relay answers with other keys."""
        check_prefix(prefix)
        what = f"keys under {prefix!r} cannot be listed"
        data = self._ask(what, f"/?prefix={quote(prefix, safe='')}", 0, _MAX_LISTING, may_resume=False)
        try:
            keys = json.loads(data or b"")
            if isinstance(keys, list) and all(
                isinstance(key, str) and is_key(key) and key.startswith(prefix) for key in keys
            ):
                return sorted(keys)
        except (ValueError, RecursionError):
            pass
        raise StoreError(f"{what} at {self.url}", "its answer is no list", hint="is it an etude weights relay?")

    def put(self, key: str, data: bytes) -> None:
        """Raises `StoreError`, always."""
        raise self._read_only(check_key(key))

    def delete(self, key: str) -> None:
        """Raises `StoreError`, always."""
        raise self._read_only(check_key(key))

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Raises `StoreError`, always."""
        raise self._read_only(check_key(key))

    def _ask(self, what: str, path: str, start: int, stop: int | None, *, may_resume: bool = True) -> bytes | None:
        """The body of a 200; None for a 404."""
        got, attempts, pause_s = bytearray(), 0, _FIRST_PAUSE_S
        deadline = time.monotonic() + self.deadline_s
        while True:
            before, attempts = len(got), attempts + 1
            trouble = self._attempt(path, start + before, stop, got)
            if trouble is None:
                return bytes(got)
            if trouble.status == 404:
                return None
            if len(got) < _NO_POINTER or not may_resume:
                del got[:]
            if len(got) > before:
                deadline, pause_s = time.monotonic() + self.deadline_s, _FIRST_PAUSE_S
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) * (0.5 + secrets.randbelow(1000) / 2000)
            if not trouble.passing or time.monotonic() + pause_s >= deadline:
                tried = f"; {attempts} attempts" if trouble.passing else ""
                raise StoreError(f"{what} at {self.url}", f"{trouble.facts}{tried}", hint=trouble.hint)
            time.sleep(pause_s)

    def _attempt(self, path: str, start: int, stop: int | None, got: bytearray) -> _Trouble | None:
        """Add what comes to `got`; None when all came."""
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
            answer = connection.getresponse()
            if answer.status != 200:
                told = answer.read(_CHUNK)
                connection.close()
                return _refusal(answer.status, told)
            most = stop - start if stop is not None else math.inf
            while chunk := answer.read(_CHUNK):
                got += chunk
                most -= len(chunk)
                if most < 0:
                    connection.close()
                    return _Trouble("more bytes came than were asked for", "is it an etude weights relay?", False)
            if answer.length:
                raise http.client.IncompleteRead(b"", answer.length)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if not fresh and isinstance(error, http.client.RemoteDisconnected | ConnectionError):
                _close(self._idle)  # they were closed while they lay idle
            facts = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
            if isinstance(error, OSError) and error.strerror:
                facts = error.strerror
            return _Trouble(facts, "see whether the relay runs and can be reached from here", True)
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
            f"{key!r} cannot be written", f"{self.url} is a relay", hint="write to the store that the relay reads"
        )


class _Trouble:
    """Why an attempt brought nothing, or not all."""

    def __init__(self, facts: str, hint: str, passing: bool, status: int = 0) -> None:
        self.facts, self.hint, self.passing, self.status = facts, hint, passing, status


def _refusal(status: int, told: bytes) -> _Trouble:
    facts = f"HTTP {status}"
    if status == 401:
        return _Trouble(facts, f"set {TOKEN} to the relay's", False, status)
    with suppress(ValueError, RecursionError):
        said = json.loads(told)
        if isinstance(said, dict) and isinstance(said.get("error"), str):
            facts = f"{facts}: {said['error'][:500]}"
    return _Trouble(facts, "see what the relay says where it runs", status >= 500, status)


def _parsed(url: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or "@" in parts.netloc or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise StoreError("a relay's URL names a host and a port alone", hint="write http://host:port")
    return parts.scheme, host, port or (443 if parts.scheme == "https" else 80)


def _close(idle: deque[http.client.HTTPConnection]) -> None:
    while idle:
        idle.pop().close()


def _made(url: str, silence_s: float, deadline_s: float) -> HttpStore:
    return HttpStore(url, silence_s=silence_s, deadline_s=deadline_s)

"""Calls to a service of E2B's shape: retried where that is safe, bounded in time, their failures by name.

A call is tried again where the service said so, or where it cannot have got it. Beyond that, only calls that do the
same however often they come are (`again=True`): reads, deletions, and creations with a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from etude.environments.remote import connect
from etude.environments.remote.connect import Code, RpcError
from etude.errors import MachineError

T = TypeVar("T")
_RETRIED = (429, 502, 503, 504)
_FIRST_S, _LONGEST_S = 0.1, 5.0
_MAX_ANSWER = 64 << 20


@dataclass(frozen=True)
class Answer:
    """What a service said."""

    status: int
    body: bytes

    @property
    def message(self) -> str:
        """Why it refused."""
        return connect.of_answer(self.status, self.body).message

    def read(self, kind: type[T]) -> T:
        """The body as a message. Raises `MachineError`."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            hint = "give the URL of a service that speaks E2B's API"
            raise MachineError(f"the service's answer is no {kind.__name__}", str(error), hint=hint) from None


class Calls:
    """Connections to a service. They belong to the event loop of the first call."""

    def __init__(self, *, tries: int) -> None:
        self._tries = tries
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        """Idempotent."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(
        self,
        method: str,
        url: str,
        *,
        what: str,
        deadline_s: float,
        headers: Mapping[str, str],
        body: bytes | None = None,
        again: bool = True,
        max_bytes: int = _MAX_ANSWER,
    ) -> Answer:
        """One call with its retries. `MachineError` where the service cannot be reached, or not within the deadline."""
        end = time.monotonic() + deadline_s
        for attempt in range(self._tries):
            last = attempt + 1 == self._tries
            left_s = end - time.monotonic()
            try:
                answer, retry_s = await self._once(method, url, headers, body, max(left_s, 0.001), max_bytes)
                if retry_s is None or last or time.monotonic() + retry_s >= end or not (again or answer.status == 429):
                    return answer
                wait_s = retry_s
            except aiohttp.ClientConnectorError as error:
                if last:
                    raise _unreachable(url, what, error) from None
                wait_s = _backoff_s(attempt)
            except TimeoutError:
                raise late(url, what, deadline_s) from None
            except (aiohttp.ClientError, OSError) as error:
                if last or not again:
                    raise _unreachable(url, what, error) from None
                wait_s = _backoff_s(attempt)
            wait_s = max(wait_s, _backoff_s(attempt))
            if time.monotonic() + wait_s >= end:
                raise late(url, what, deadline_s)
            await asyncio.sleep(wait_s)
        raise late(url, what, deadline_s)

    async def _once(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, left_s: float, max_bytes: int
    ) -> tuple[Answer, float | None]:
        """The answer, and after how long to ask again (None: not)."""
        timeout = aiohttp.ClientTimeout(total=left_s, sock_connect=min(left_s, 10.0))
        given = None if body is None else io.BytesIO(body)  # large bytes are refused as they are
        async with self._open().request(method, url, data=given, headers=headers, timeout=timeout) as answer:
            data = bytearray()
            async for chunk in answer.content.iter_any():
                data += chunk
                if len(data) > max_bytes:
                    raise ValueError(f"the answer is larger than {max_bytes} bytes")
            said = answer.headers.get("should-retry", "").lower()
            hopeless = said == "false" or b"was not found" in data
            if hopeless or (not said and answer.status not in _RETRIED) or answer.status < 400:
                return Answer(answer.status, bytes(data)), None
            after = answer.headers.get("retry-after", "")
            retry_s = float(after) if after.isascii() and after.isdigit() and len(after) < 6 else 0.0
            return Answer(answer.status, bytes(data)), retry_s

    @contextlib.asynccontextmanager
    async def stream(
        self, url: str, message: object, kind: type[T], *, deadline_s: float, headers: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[T]]:
        """A streaming call. Raises `RpcError`; `UNAVAILABLE` with the hint "unsent" where nobody can have got it."""
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=min(deadline_s, 10.0))
        headers = {**headers, "content-type": connect.STREAM, "connect-protocol-version": "1"}
        body = io.BytesIO(connect.envelope(message))
        try:
            async with self._open().post(url, data=body, headers=headers, timeout=timeout) as answer:
                if answer.status != 200:
                    raise connect.of_answer(answer.status, await answer.content.read(1 << 16))
                yield connect.envelopes(answer.content.iter_any(), kind, is_answer=True)
        except aiohttp.ClientConnectorError as error:
            raise RpcError(Code.UNAVAILABLE, str(error), hint="unsent") from None
        except TimeoutError:
            raise RpcError(Code.DEADLINE_EXCEEDED, f"not within {deadline_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise RpcError(Code.UNAVAILABLE, str(error) or type(error).__name__) from None

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise MachineError("the runtime is closed", hint="make a new runtime")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)  # a command that runs has a connection
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=True)
        return self._session


def _backoff_s(attempt: int) -> float:
    return float(min(_FIRST_S * 2**attempt, _LONGEST_S) * random.uniform(0.5, 1.0))


def _unreachable(url: str, what: str, error: Exception) -> MachineError:
    facts = f"{what}: {str(error) or type(error).__name__}"
    return MachineError(f"{_origin(url)} cannot be reached", facts, hint="is it up, and the URL right?")


def late(url: str, what: str, deadline_s: float) -> MachineError:
    """A call that was not answered in time."""
    what = f"{_origin(url)} did not answer within {deadline_s:g} s: {what}"
    return MachineError(what, hint="it hangs or is overloaded: see its log")


def _origin(url: str) -> str:
    return "/".join(url.split("/", 3)[:3])

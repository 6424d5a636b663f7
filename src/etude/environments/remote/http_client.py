"""HTTP client of a service with E2B's API: retries, deadlines, clear errors.

A request is retried if the service says so or cannot have received it. In other cases only idempotent requests are
retried: reads, deletions, and creations with an idempotency key.
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
class Reply:
    """The response of a service: HTTP status and complete body."""

    status: int
    body: bytes

    @property
    def message(self) -> str:
        """Error message in the body."""
        return connect.error_of_response(self.status, self.body).message

    def read(self, kind: type[T]) -> T:
        """Decode the JSON body to an object of type `kind`. Raises `MachineError` if it is invalid."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            hint = "use the URL of a service with E2B's API"
            raise MachineError(f"the response of the service is not a {kind.__name__}", str(error), hint=hint) from None


class HttpClient:
    """The HTTP connections to one service, for use in one event loop.

    `tries` is the largest number of attempts for a request."""

    def __init__(self, *, tries: int) -> None:
        self._tries = tries
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def request(
        self,
        method: str,
        url: str,
        *,
        what: str,
        deadline_s: float,
        headers: Mapping[str, str],
        body: bytes | None = None,
        idempotent: bool = True,
        max_bytes: int = _MAX_ANSWER,
    ) -> Reply:
        """Send an HTTP request, if necessary several times, and return the response, whatever its status.

        `what` names the purpose of the request in errors. `deadline_s` covers all attempts. `idempotent` says that the
        request may be sent again even if the service may have received it. Raises `MachineError` if the service does
        not respond within the deadline, `ValueError` if the response body is larger than `max_bytes`."""
        end = time.monotonic() + deadline_s
        for attempt in range(self._tries):
            last = attempt + 1 == self._tries
            left_s = end - time.monotonic()
            try:
                answer, retry_s = await self._once(method, url, headers, body, max(left_s, 0.001), max_bytes)
                if (
                    retry_s is None
                    or last
                    or time.monotonic() + retry_s >= end
                    or not (idempotent or answer.status == 429)
                ):
                    return answer
                wait_s = retry_s
            except aiohttp.ClientConnectorError as error:
                if last:
                    raise _unreachable(url, what, error) from None
                wait_s = _backoff_s(attempt)
            except TimeoutError:
                raise deadline_error(url, what, deadline_s) from None
            except (aiohttp.ClientError, OSError) as error:
                if last or not idempotent:
                    raise _unreachable(url, what, error) from None
                wait_s = _backoff_s(attempt)
            wait_s = max(wait_s, _backoff_s(attempt))
            if time.monotonic() + wait_s >= end:
                raise deadline_error(url, what, deadline_s)
            await asyncio.sleep(wait_s)
        raise deadline_error(url, what, deadline_s)

    async def _once(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, left_s: float, max_bytes: int
    ) -> tuple[Reply, float | None]:
        """Send a request once. Returns the response, and the seconds before a retry (None: do not retry)."""
        timeout = aiohttp.ClientTimeout(total=left_s, sock_connect=min(left_s, 10.0))
        given = None if body is None else io.BytesIO(body)  # aiohttp warns about large bytes objects
        async with self._open().request(method, url, data=given, headers=headers, timeout=timeout) as answer:
            data = bytearray()
            async for chunk in answer.content.iter_any():
                data += chunk
                if len(data) > max_bytes:
                    raise ValueError(f"the response is larger than {max_bytes} bytes")
            retry_header = answer.headers.get("should-retry", "").lower()
            is_final = retry_header == "false" or b"was not found" in data
            if is_final or (not retry_header and answer.status not in _RETRIED) or answer.status < 400:
                return Reply(answer.status, bytes(data)), None
            after = answer.headers.get("retry-after", "")
            retry_s = float(after) if after.isascii() and after.isdigit() and len(after) < 6 else 0.0
            return Reply(answer.status, bytes(data)), retry_s

    @contextlib.asynccontextmanager
    async def stream(
        self, url: str, message: object, kind: type[T], *, deadline_s: float, headers: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[T]]:
        """Send a message and yield an iterator over the messages of the response stream.

        Each message is decoded to type `kind`. The connection is closed at the end of the `with` block. Raises
        `RpcError`; code UNAVAILABLE with hint "unsent" means that the service cannot have received the request."""
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=min(deadline_s, 10.0))
        headers = {**headers, "content-type": connect.STREAM, "connect-protocol-version": "1"}
        body = io.BytesIO(connect.envelope(message))
        try:
            async with self._open().post(url, data=body, headers=headers, timeout=timeout) as answer:
                if answer.status != 200:
                    raise connect.error_of_response(answer.status, await answer.content.read(1 << 16))
                yield connect.envelopes(answer.content.iter_any(), kind, is_response=True)
        except aiohttp.ClientConnectorError as error:
            raise RpcError(Code.UNAVAILABLE, str(error), hint="unsent") from None
        except TimeoutError:
            raise RpcError(Code.DEADLINE_EXCEEDED, f"the call took more than {deadline_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise RpcError(Code.UNAVAILABLE, str(error) or type(error).__name__) from None

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise MachineError("the runtime is closed", hint="make a new runtime")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)  # each running command has a connection
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=True)
        return self._session


def _backoff_s(attempt: int) -> float:
    return float(min(_FIRST_S * 2**attempt, _LONGEST_S) * random.uniform(0.5, 1.0))


def _unreachable(url: str, what: str, error: Exception) -> MachineError:
    facts = f"{what}: {str(error) or type(error).__name__}"
    return MachineError(f"{_origin(url)} cannot be reached", facts, hint="check that it runs and that the URL is right")


def deadline_error(url: str, what: str, deadline_s: float) -> MachineError:
    """Build the error for a request without a response in time. `what` is the purpose of the request."""
    what = f"{_origin(url)} did not respond within {deadline_s:g} s: {what}"
    return MachineError(what, hint="the server may hang or be overloaded: see the server's log")


def _origin(url: str) -> str:
    return "/".join(url.split("/", 3)[:3])

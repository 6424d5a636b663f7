"""Calls to a server of another make: HTTP over a socket of the file system or of loopback, and what a make must know.

Everything that differs between makes is behind `Calls` and its `Dialect`; who has both is an engine
(`engine.ForeignEngine`).
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

import aiohttp
import msgspec

from etude.errors import EngineError
from etude.inference.foreign.parts import Part
from etude.models.config import ModelConfig
from etude.records.completion import CompletionRequest
from etude.records.wire import Routes

CONTROL_S = 30.0


class Dialect(Protocol):
    """What a make is asked and answers, pure."""

    GENERATE: str  # the path of requests for tokens

    def asked(self, request: CompletionRequest, name: str, *, salt: str, native_routes: bool) -> bytes: ...
    def scored(self, token_ids: list[int], name: str, *, salt: str) -> bytes: ...
    def read_event(self, line: bytes, *, engine: str) -> Part | None: ...
    def is_end(self, line: bytes) -> bool: ...
    def read_scores(self, body: bytes, token_ids: list[int], *, engine: str) -> tuple[int | None, list[float]]: ...
    def refused(self, status: int, body: bytes, *, engine: str) -> EngineError: ...
    def given_routes(self, data: str | None, model: ModelConfig, *, count: int) -> Routes: ...


@dataclass(frozen=True)
class RouteSource:
    """Where routes come from: told with each answer by the build, kept by a worker extension, or nowhere."""

    native: bool = False
    kept: bool = False
    missing: str = field(default="", compare=False)  # why there are none

    @property
    def there(self) -> bool:
        return self.native or self.kept


class Calls(abc.ABC):
    """Calls to one server. `at`: its socket, or its port on loopback."""

    make: ClassVar[str]
    dialect: ClassVar[Dialect]

    def __init__(self, at: Path | int, *, name: str, headers: Mapping[str, str] | None = None) -> None:
        self.name, self.at = name, at
        self._headers = {"content-type": "application/json", **(headers or {})}
        self._session: aiohttp.ClientSession | None = None

    @abc.abstractmethod
    async def freeze(self) -> None:
        """Nothing decodes or begins any more; what was asked keeps its keys and values."""

    @abc.abstractmethod
    async def thaw(self) -> None:
        """It goes on."""

    @abc.abstractmethod
    async def label(self, label: str) -> None:
        """Tokens from here on carry this."""

    @abc.abstractmethod
    async def route_source(self, num_moe_layers: int) -> RouteSource:
        """Where routes will come from."""

    @abc.abstractmethod
    async def take_routes(self, name: str) -> str | None:
        """What was kept of a request that has ended."""

    def forget(self, name: str) -> None:  # noqa: B027 - most drop what nobody waits for
        """A request is given up; its connection is closed already."""

    @property
    def alive(self) -> bool:
        """Whether there is a server, as far as can be told from here."""
        return not isinstance(self.at, Path) or self.at.exists()

    async def disconnect(self) -> None:
        """Close the connections; the next call opens others, in its own event loop. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post(self, path: str, body: bytes, *, deadline_s: float = CONTROL_S) -> tuple[int, bytes]:
        """(status, body). Raises `EngineError` where the server is gone or late."""
        async with self.answer(path, body, deadline_s=deadline_s) as answer:
            return answer.status, await answer.read()

    async def ask(self, path: str, body: object = None, *, what: str, deadline_s: float = CONTROL_S) -> bytes:
        """The body of an answer of 200. Raises `EngineError`."""
        status, data = await self.post(path, msgspec.json.encode(body), deadline_s=deadline_s)
        if status != 200:
            error = self.dialect.refused(status, data, engine=self.name)
            what = f"{self.make} of {self.name} was asked {what}"
            raise EngineError(what, f"{error.what}: {error.facts}", hint=error.hint)
        return data

    async def get(self, path: str, *, deadline_s: float) -> tuple[int, bytes]:
        """(status, body). Raises `EngineError`."""
        async with self.answer(path, None, deadline_s=deadline_s) as answer:
            return answer.status, await answer.read()

    @contextlib.asynccontextmanager
    async def answer(
        self, path: str, body: bytes | None, *, deadline_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer, its body yet to be read. Left early, its connection is closed, and the request dropped. Without a
        deadline the caller has one of its own."""
        timeout, method = aiohttp.ClientTimeout(total=deadline_s), "GET" if body is None else "POST"
        host = "server" if isinstance(self.at, Path) else f"127.0.0.1:{self.at}"
        try:
            async with self._connected().request(method, f"http://{host}{path}", data=body, timeout=timeout) as answer:
                yield answer
        except TimeoutError:
            raise EngineError(
                f"{self.make} of {self.name} did not answer {path} within {deadline_s or 0.0:g} s",
                "it lives" if self.alive else "it has ended",
                hint="it hangs, or has too much to do: see the engine's log",
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(
                f"{self.make} of {self.name} broke off",
                f"{type(error).__name__}: {error}; it was asked {path}",
                hint="its last words are in the engine's log",
            ) from None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            by_file = isinstance(self.at, Path)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(self.at), limit=0) if by_file else aiohttp.TCPConnector(limit=0),
                headers=self._headers,
                read_bufsize=1 << 22,  # of a line of a stream, which holds all routes of a request at its end
            )
        return self._session

"""Calls to a server of other software (vLLM, SGLang): HTTP over a Unix socket or loopback.

What differs between them is in a subclass of `ServerClient` and in its `Dialect`. `engine.ExternalEngine` makes an engine of
the two.
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
from etude.inference.external.answers import AnswerPart
from etude.models.config import ModelConfig
from etude.records.completion import CompletionRequest
from etude.records.wire import Routes

CONTROL_S = 30.0


class Dialect(Protocol):
    """Writes the requests and reads the answers of one kind of server. Pure."""

    GENERATE: str  # the path of requests for tokens

    def encode_request(self, request: CompletionRequest, name: str, *, salt: str, native_routes: bool) -> bytes: ...
    def encode_scoring_request(self, token_ids: list[int], name: str, *, salt: str) -> bytes: ...
    def read_event(self, line: bytes, *, engine: str) -> AnswerPart | None: ...
    def is_end(self, line: bytes) -> bool: ...
    def read_scores(self, body: bytes, token_ids: list[int], *, engine: str) -> tuple[int | None, list[float]]: ...
    def read_error(self, status: int, body: bytes, *, engine: str) -> EngineError: ...
    def decode_routes(self, data: str | None, model: ModelConfig, *, count: int) -> Routes: ...


@dataclass(frozen=True)
class RouteSource:
    """How routes are obtained: `native`, the server sends them with each answer; `kept`, a worker extension keeps them;
    or not at all, for the reason `missing`."""

    native: bool = False
    kept: bool = False
    missing: str = field(default="", compare=False)  # why there are none

    @property
    def available(self) -> bool:
        return self.native or self.kept


class ServerClient(abc.ABC):
    """Calls to one server. `at`: its socket, or its port on loopback."""

    server: ClassVar[str]
    dialect: ClassVar[Dialect]

    def __init__(self, at: Path | int, *, name: str, headers: Mapping[str, str] | None = None) -> None:
        self.name, self.at = name, at
        self._headers = {"content-type": "application/json", **(headers or {})}
        self._session: aiohttp.ClientSession | None = None

    @abc.abstractmethod
    async def freeze(self) -> None:
        """Stop decoding, and begin no request. Requests in flight keep their KV cache."""

    @abc.abstractmethod
    async def thaw(self) -> None:
        """Continue after `freeze`."""

    @abc.abstractmethod
    async def label(self, label: str) -> None:
        """Set the label of all tokens that are sampled from now on."""

    @abc.abstractmethod
    async def route_source(self, num_moe_layers: int) -> RouteSource:
        """Find out how routes can be obtained from this server."""

    @abc.abstractmethod
    async def take_routes(self, name: str) -> str | None:
        """Fetch and drop the routes that the worker extension kept of a request that has ended: base64, as
        `parts.decode_kept_routes` reads it. None where it kept none."""

    def forget(self, name: str) -> None:  # noqa: B027 - most servers drop a request whose connection is closed
        """Have the server drop a request that was given up; its connection is closed already."""

    @property
    def alive(self) -> bool:
        """Whether there seems to be a server: its socket exists. Always True on loopback."""
        return not isinstance(self.at, Path) or self.at.exists()

    async def disconnect(self) -> None:
        """Close the connections; the next call opens others, in its own event loop. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post(self, path: str, body: bytes, *, deadline_s: float = CONTROL_S) -> tuple[int, bytes]:
        """Send a POST request; returns (status, body). Raises `EngineError` where the server is gone or late."""
        async with self.answer(path, body, deadline_s=deadline_s) as answer:
            return answer.status, await answer.read()

    async def ask(self, path: str, body: object = None, *, what: str, deadline_s: float = CONTROL_S) -> bytes:
        """Send a request and return the body of its answer. `what`: the request in words, for the error. Raises
        `EngineError`, also for an answer that is not 200."""
        status, data = await self.post(path, msgspec.json.encode(body), deadline_s=deadline_s)
        if status != 200:
            error = self.dialect.read_error(status, data, engine=self.name)
            what = f"{self.server} of {self.name} was asked {what}"
            raise EngineError(what, f"{error.what}: {error.facts}", hint=error.hint)
        return data

    async def get(self, path: str, *, deadline_s: float) -> tuple[int, bytes]:
        """Send a GET request; returns (status, body). Raises `EngineError`."""
        async with self.answer(path, None, deadline_s=deadline_s) as answer:
            return answer.status, await answer.read()

    @contextlib.asynccontextmanager
    async def answer(
        self, path: str, body: bytes | None, *, deadline_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the answer for a block, its body not read yet. Leaving the block early closes the
        connection, so that the server drops the request. Without `deadline_s` the caller must have a deadline."""
        timeout, method = aiohttp.ClientTimeout(total=deadline_s), "GET" if body is None else "POST"
        host = "server" if isinstance(self.at, Path) else f"127.0.0.1:{self.at}"
        try:
            async with self._connected().request(method, f"http://{host}{path}", data=body, timeout=timeout) as answer:
                yield answer
        except TimeoutError:
            raise EngineError(
                f"{self.server} of {self.name} did not answer {path} within {deadline_s or 0.0:g} s",
                "it lives" if self.alive else "it has ended",
                hint="it hangs or is overloaded: see the engine's log",
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(
                f"{self.server} of {self.name} broke off",
                f"{type(error).__name__}: {error}; it was asked {path}",
                hint="see the end of the engine's log",
            ) from None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            by_file = isinstance(self.at, Path)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(self.at), limit=0) if by_file else aiohttp.TCPConnector(limit=0),
                headers=self._headers,
                read_bufsize=1 << 22,  # for one line of a stream: the last one has all routes of a request
            )
        return self._session

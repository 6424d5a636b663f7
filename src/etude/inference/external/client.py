"""HTTP client of an external server (vLLM, SGLang), over a Unix socket or loopback.

What differs between the servers is in a subclass of `ServerClient` and in its `Dialect`. `engine.ExternalEngine` makes
an engine of the two."""

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
from etude.inference.external.answers import AnswerPart, read_error
from etude.models.config import ModelConfig
from etude.records.completion import CompletionRequest
from etude.records.wire import Routes

CONTROL_S = 30.0


class Dialect(Protocol):
    """Encodes the requests and parses the responses of one kind of server, such as the module `vllm.protocol`.

    `GENERATE` is the path of the endpoint that samples. `engine` is the engine's name, for errors."""

    GENERATE: str  # the path of completion requests

    def encode_request(self, request: CompletionRequest, name: str, *, salt: str, native_routes: bool) -> bytes:
        """Return the body of a completion request.

        `name` is the request's id in the server. Requests share cached prefixes only with others of the same `salt`.
        `native_routes` asks the server for routes. Raises `MalformedRequest`."""
        ...

    def encode_scoring_request(self, token_ids: list[int], name: str, *, salt: str) -> bytes:
        """Return the body of a request for the log-probabilities of a text.

        `name` and `salt` are as in `encode_request`."""
        ...

    def read_event(self, line: bytes, *, engine: str) -> AnswerPart | None:
        """Parse one line of a streamed response. Returns None for a line without tokens. Raises `EngineError`."""
        ...

    def read_scores(self, body: bytes, token_ids: list[int], *, engine: str) -> tuple[int | None, list[float]]:
        """Parse the response to `encode_scoring_request`.

        Returns the number of the adoption (replacement of the weights) with which the text was computed, None without a
        label, and the log-probability of each token except the first. Raises `BrokenAnswer`."""
        ...

    def decode_routes(self, data: str | None, model: ModelConfig, *, count: int) -> Routes:
        """Decode routes (experts chosen by the MoE routers) from `AnswerPart.routed` to [count, MoE layers, top_k].
        Raises `ValueError`."""
        ...


@dataclass(frozen=True)
class RouteSource:
    """How a server's routes (experts chosen by the MoE routers) are obtained.

    With `native`, the server sends them with each response. With `kept`, an extension of the server's workers records
    them. Otherwise there are none, and `missing` says why."""

    native: bool = False
    kept: bool = False
    missing: str = field(default="", compare=False)  # why there are none

    @property
    def available(self) -> bool:
        """Whether there are routes."""
        return self.native or self.kept


class ServerClient(abc.ABC):
    """A client of one external server; the base class of `VllmClient` and `SglangClient`.

    `at` is the server's Unix socket, or its port on loopback. `name` is the engine's name, for errors. `server` is the
    name of the software."""

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
        """Set the label of all tokens that are sampled from now on. The server sends it with the tokens."""

    @abc.abstractmethod
    async def route_source(self, num_moe_layers: int) -> RouteSource:
        """Return how routes can be obtained from this server, whose model has `num_moe_layers` MoE layers."""

    @abc.abstractmethod
    async def take_routes(self, name: str) -> str | None:
        """Fetch the routes that the worker extension recorded for the ended request `name`, and delete them in the
        worker.

        The result is base64 for `answers.decode_kept_routes`, or None when there is none."""

    @abc.abstractmethod
    async def end(self, name: str) -> None:
        """Abort the request `name`: the last part of its response then has the finish reason "abort"."""

    def forget(self, name: str) -> None:  # noqa: B027 - most servers drop a request whose connection is closed
        """Tell the server to stop the cancelled request `name`, whose connection is closed already."""

    @property
    def alive(self) -> bool:
        """Whether the server seems to run: its socket exists. Always True on loopback."""
        return not isinstance(self.at, Path) or self.at.exists()

    async def disconnect(self) -> None:
        """Close the connections. The next call opens new ones in its own event loop."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post(self, path: str, body: bytes, *, deadline_s: float = CONTROL_S) -> tuple[int, bytes]:
        """Send a POST request.

        Returns the status and the body. Raises `EngineError` when the server is gone or late."""
        async with self.answer(path, body, deadline_s=deadline_s) as answer:
            return answer.status, await answer.read()

    async def ask(self, path: str, body: object = None, *, what: str, deadline_s: float = CONTROL_S) -> bytes:
        """Send a POST request with `body` as JSON and return the body of the response.

        `what` completes the sentence "server did not …" in the error. Raises `EngineError`, also when the status is not
        200."""
        status, data = await self.post(path, msgspec.json.encode(body), deadline_s=deadline_s)
        if status != 200:
            error = read_error(self.server, status, data, engine=self.name)
            failed = f"{self.server} of {self.name} did not {what}"
            raise EngineError(failed, f"{error.what}: {error.facts}", hint=error.hint)
        return data

    async def get(self, path: str, *, deadline_s: float) -> tuple[int, bytes]:
        """Send a GET request. Returns the status and the body. Raises `EngineError`."""
        async with self.answer(path, None, deadline_s=deadline_s) as answer:
            return answer.status, await answer.read()

    @contextlib.asynccontextmanager
    async def answer(
        self, path: str, body: bytes | None, *, deadline_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the response, whose body is not read yet. Raises `EngineError`.

        It is a GET request if `body` is None, else a POST request. Leaving the block early closes the connection, so
        that the server drops the request. Without `deadline_s` the caller must set a deadline."""
        timeout, method = aiohttp.ClientTimeout(total=deadline_s), "GET" if body is None else "POST"
        host = "server" if isinstance(self.at, Path) else f"127.0.0.1:{self.at}"
        try:
            async with self._connected().request(method, f"http://{host}{path}", data=body, timeout=timeout) as answer:
                yield answer
        except TimeoutError:
            raise EngineError(
                f"{self.server} of {self.name} did not answer {path} within {deadline_s or 0.0:g} s",
                "it is running" if self.alive else "it has exited",
                hint="it hangs or is overloaded: see the engine's log",
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(
                f"the connection to {self.server} of {self.name} broke",
                f"{type(error).__name__}: {error}; the request was {path}",
                hint="see the end of the engine's log",
            ) from None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            by_file = isinstance(self.at, Path)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(self.at), limit=0) if by_file else aiohttp.TCPConnector(limit=0),
                headers=self._headers,
                read_bufsize=1 << 22,  # a line of a stream can be long: the last one has all routes of a request
            )
        return self._session

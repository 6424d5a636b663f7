"""HTTP client of an engine server, with the interface `seams.Engine`. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Self, TypeVar

from etude.errors import EngineError
from etude.http_client import HttpClient, HttpResponse
from etude.inference.errors import EngineGone, EngineLate, from_http
from etude.inference.wire import (
    END,
    GENERATE,
    MSGPACK,
    STREAM,
    AdoptRequest,
    EndRequest,
    HoldRequest,
    OperatorResult,
    OperatorResults,
    OperatorsRequest,
    Verified,
    VerifyRequest,
    read_frames,
)
from etude.records.completion import Completion, CompletionRequest, Version
from etude.records.wire import pack, unpack
from etude.seams import EngineInfo

T = TypeVar("T")

CONTROL_DEADLINE_S = 35.0  # longer than the engine's own deadline, whose error says more
GRACE_S, END_S, HOLD_DEADLINE_S = 2.0, 5.0, 5.0


class HttpEngine:
    """A client of one engine server. It implements `seams.Engine`, `seams.Streaming` and `seams.Ending`.

    `token` is the bearer token of the requests. Connections belong to the event loop of the first call.

    >>> HttpEngine("http://127.0.0.1:8000/").url
    'http://127.0.0.1:8000'
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"accept": MSGPACK, "content-type": MSGPACK}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._http: HttpClient | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Further calls of `close` do nothing."""
        http, self._http = self._http, None
        if http is not None:
            http.close()

    async def generate(self, request: CompletionRequest) -> Completion:
        """Sample a completion for the request, under the contract of `seams.Engine.generate`.

        The engine enforces the request's `deadline_s`, since it sees its own progress. While the engine does not
        respond, this client checks that it is alive. Raises the errors of `seams.Engine.generate`, `EngineGone` when no
        server responds, and `EngineLate` for a server that hangs."""
        what, deadline_s = f"request {request.request_id}", request.deadline_s + GRACE_S
        check = partial(self._check_alive, what, deadline_s)
        async with self._answer(
            "POST", GENERATE, pack(request), what=what, silence_s=deadline_s, on_silence=check
        ) as answer:
            return self._read(await answer.read(), Completion)

    async def _check_alive(self, what: str, deadline_s: float) -> None:
        try:
            await self.info()
        except EngineGone:
            raise
        except EngineError as error:
            raise self._late(what, deadline_s, error.what) from None

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[list[int] | Completion]:
        """Sample a completion and yield lists of token ids as they are sampled, at the end the `Completion`.

        Closing the generator early closes the connection, and the engine drops the request."""
        what, deadline_s = f"request {request.request_id}", request.deadline_s + GRACE_S
        async with self._answer("POST", STREAM, pack(request), what=what, silence_s=deadline_s) as answer:
            async for part in read_frames(answer.readexactly, engine=self.url):
                yield part

    async def end(self, request_id: str) -> None:
        with contextlib.suppress(EngineError):
            await self._call("POST", END, pack(EndRequest(request_id=request_id)), what="end", deadline_s=END_S)

    async def pause(self) -> None:
        await self._call("POST", "/pause", b"", what="pause", deadline_s=CONTROL_DEADLINE_S)

    async def resume(self) -> None:
        await self._call("POST", "/resume", b"", what="resume", deadline_s=CONTROL_DEADLINE_S)

    async def adopt(self, min_step: int, *, deadline_s: float) -> Version:
        body = AdoptRequest(min_step=min_step, deadline_s=deadline_s)
        what = f"adopt step {min_step}"
        return await self._post("/adopt", body, Version, what=what, deadline_s=deadline_s + GRACE_S)

    async def hold(self, seconds: float) -> Version:
        """Make the engine keep its version for the next `seconds` (0 to 60), and return the version.

        Each call replaces the time of the last one; 0 allows new versions at once. Raises `EngineError` if the engine
        does not respond, or is of a kind that cannot keep a version."""
        return await self._post("/hold", HoldRequest(seconds=seconds), Version, what="hold", deadline_s=HOLD_DEADLINE_S)

    async def info(self, *, deadline_s: float = 5.0) -> EngineInfo:
        body = await self._call("GET", "/info", None, what="info", deadline_s=deadline_s)
        return self._read(body, EngineInfo)

    async def verify(self, token_ids: Sequence[int]) -> tuple[Version, list[float]]:
        body = VerifyRequest(token_ids=[int(t) for t in token_ids])
        what = "verify"
        answer = await self._post("/verify", body, Verified, what=what, deadline_s=CONTROL_DEADLINE_S)
        return answer.version, answer.logprobs

    async def operators(self, token_ids: Sequence[int], *, prompt_tokens: int) -> list[OperatorResult]:
        """Have the engine compute a text, and return the results of every operator of the model.

        An operator is for example a norm or a matrix product. The first `prompt_tokens` of `token_ids` are computed as
        a prompt, the others one by one. Raises `MalformedRequest` when the engine was not started with
        --show-operators."""
        body = OperatorsRequest(token_ids=[int(t) for t in token_ids], prompt_tokens=prompt_tokens)
        what = "operators"
        answer = await self._post("/operators", body, OperatorResults, what=what, deadline_s=CONTROL_DEADLINE_S)
        return answer.results

    async def _post(self, path: str, body: object, kind: type[T], *, what: str, deadline_s: float | None) -> T:
        return self._read(await self._call("POST", path, pack(body), what=what, deadline_s=deadline_s), kind)

    def _read(self, body: bytes, kind: type[T]) -> T:
        try:
            return unpack(body, kind)
        except ValueError as error:
            raise EngineError(
                f"the response of {self.url} is not a {kind.__name__}",
                str(error),
                hint="give the URL of an engine, as in its ready file",
            ) from None

    async def _call(self, method: str, path: str, body: bytes | None, *, what: str, deadline_s: float | None) -> bytes:
        async with self._answer(method, path, body, what=what, deadline_s=deadline_s) as answer:
            return await answer.read()

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        what: str,
        deadline_s: float | None = None,
        silence_s: float | None = None,
        on_silence: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncIterator[HttpResponse]:
        """Send a request and yield the response, whose status is 200 and whose body is not read yet.

        Raises `EngineError`, also when it takes more than `deadline_s` in all. `silence_s` and `on_silence` are those
        of `HttpClient.request`."""
        http = self._connected(what)
        try:
            async with (
                asyncio.timeout(deadline_s),
                http.request(method, path, body, silence_s=silence_s, on_silence=on_silence) as answer,
            ):
                if answer.status != 200:
                    raise from_http(answer.status, await answer.read(), engine=self.url)
                yield answer
        except TimeoutError:
            raise self._late(what, deadline_s or silence_s or 0.0) from None
        except OSError as error:
            raise self._gone(what, error) from None

    def _late(self, what: str, deadline_s: float, facts: str = "") -> EngineLate:
        return EngineLate(
            f"{self.url} did not answer {what} within {deadline_s:g} s",
            facts,
            hint="the engine hangs or is overloaded: look at its log, and at GET /health",
        )

    def _gone(self, what: str, error: Exception) -> EngineGone:
        facts = f"{type(error).__name__}: {error}; the request was {what}"
        hint = "check the URL, and that the engine's process runs"
        return EngineGone(f"no engine answers at {self.url}", facts, hint=hint)

    def _connected(self, what: str) -> HttpClient:
        if self._http is None:
            try:
                self._http = HttpClient(self.url, self._headers)
            except ValueError as error:
                hint = "correct the engine's URL or its token"
                raise EngineGone(
                    f"no request can be sent to {self.url}", f"{error}; it was {what}", hint=hint
                ) from None
        return self._http

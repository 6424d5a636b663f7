"""The HTTP API of an engine, as an ASGI app.

The completion endpoint takes and returns token ids, in the shape of vLLM's, as msgpack or JSON by content type (arrays
with dtype and shape, never lists of numbers). Error bodies are `errors.ErrorBody`. When a client disconnects, its
request is cancelled.

Completions bypass Starlette's middleware and router, which took as much time as everything else in a call."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from etude.errors import EtudeError, MalformedRequest
from etude.grammars import MAX_BYTES
from etude.http_server import disconnected
from etude.inference.config import EngineConfig
from etude.inference.errors import Unauthorised, to_http
from etude.inference.wire import (
    END,
    GENERATE,
    JSON,
    MEDIA_TYPE,
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
    frame,
)
from etude.records.completion import Completion, CompletionRequest, Version
from etude.records.wire import from_json, pack, to_json, unpack
from etude.seams import Ending, Engine, Streaming

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class ServedEngine(Engine, Streaming, Ending, Protocol):
    """The interface of an engine that `build_app` can serve: `seams.Engine`, `seams.Streaming`, `seams.Ending`, and its
    health.

    `trouble`: why the last attempt to load the newest weights failed; "" if it did not fail."""

    name: str
    config: EngineConfig
    trouble: str  # why the latest adoption failed; "" when it did not

    @property
    def alive(self) -> bool:
        """Whether the engine can still compute."""
        ...

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine last showed that it makes progress."""
        ...

    async def hold(self, seconds: float) -> Version:
        """Keep the loaded version for the next `seconds`, and return it. Each call replaces the time of the last one; 0
        allows new versions at once.

        Raises `MalformedRequest` if this kind of engine cannot keep a version."""
        ...

    async def metrics(self) -> str:
        """Return the text of GET /metrics, in Prometheus' format."""
        ...


class Operators(Protocol):
    """The type of a function that computes a text and returns the results of all operators of the model.

    An operator is for example a norm or a matrix product. `ReferenceEngine.operators` is one."""

    async def __call__(self, token_ids: list[int], *, prompt_tokens: int) -> list[OperatorResult]: ...


def build_app(
    engine: ServedEngine,
    *,
    token: str | None = None,
    lifespan: AbstractAsyncContextManager[None] | None = None,
    operators: Operators | None = None,
) -> ASGIApp:
    """Return the ASGI app that serves an engine over HTTP.

    - `token`: the bearer token of every POST request. None: no check, for an engine on loopback.
    - `lifespan`: entered before the first request and exited after the last.
    - `operators`: the function for POST /operators, during which all other requests wait. None: this endpoint is
      disabled."""
    endpoints = _Endpoints(engine, token, operators)
    generate = endpoints.authenticated(endpoints.generate)
    router = Starlette(
        routes=[
            Route(GENERATE, generate, methods=["POST"]),  # only reached by other methods, to refuse them
            Route(STREAM, endpoints.authenticated(endpoints.stream), methods=["POST"]),
            Route(END, endpoints.authenticated(endpoints.end), methods=["POST"]),
            Route("/pause", endpoints.authenticated(endpoints.pause), methods=["POST"]),
            Route("/resume", endpoints.authenticated(endpoints.resume), methods=["POST"]),
            Route("/adopt", endpoints.authenticated(endpoints.adopt), methods=["POST"]),
            Route("/hold", endpoints.authenticated(endpoints.hold), methods=["POST"]),
            Route("/verify", endpoints.authenticated(endpoints.verify), methods=["POST"]),
            Route("/operators", endpoints.authenticated(endpoints.operators), methods=["POST"]),
            Route("/health", endpoints.health),
            Route("/info", endpoints.info),
            Route("/metrics", endpoints.metrics),
        ],
        lifespan=lambda _: nullcontext() if lifespan is None else lifespan,
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == GENERATE and scope["method"] == "POST":
            response = await generate(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await router(scope, receive, send)

    return app


class _Endpoints:
    def __init__(self, engine: ServedEngine, token: str | None, operators: Operators | None) -> None:
        self.engine, self._token, self._operators = engine, token, operators
        self._max_body = 64 * 1024 + 16 * engine.config.context_tokens + 2 * MAX_BYTES  # ids and a grammar

    def authenticated(self, handler: Handler) -> Handler:
        """Wrap a handler: check the token, and convert errors to responses."""

        async def answer(request: Request) -> Response:
            try:
                self._authorise(request)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except EtudeError as error:
                status, body = to_http(error)
                return Response(body, status, media_type=JSON)

        return answer

    async def generate(self, request: Request) -> Response:
        """Return a completion."""
        body = await self._read(request, CompletionRequest)
        return _reply(request, await _cancel_on_disconnect(request, self.engine.generate(body)))

    async def stream(self, request: Request) -> Response:
        """Stream a completion as frames. An error before the first token has its own HTTP status."""
        parts = self.engine.stream(await self._read(request, CompletionRequest))
        first = await _cancel_on_disconnect(request, anext(parts))
        return StreamingResponse(_frames(first, parts), media_type=MEDIA_TYPE)

    async def end(self, request: Request) -> Response:
        """End a streamed request with the tokens sampled so far."""
        await self.engine.end((await self._read(request, EndRequest)).request_id)
        return Response(b"{}", media_type=JSON)

    async def pause(self, request: Request) -> Response:
        await self.engine.pause()
        return Response(b"{}", media_type=JSON)

    async def resume(self, request: Request) -> Response:
        await self.engine.resume()
        return Response(b"{}", media_type=JSON)

    async def adopt(self, request: Request) -> Response:
        """Wait for a version."""
        body = await self._read(request, AdoptRequest)
        return _reply(request, await self.engine.adopt(body.min_step, deadline_s=body.deadline_s))

    async def hold(self, request: Request) -> Response:
        """Keep the loaded version for a limited time."""
        return _reply(request, await self.engine.hold((await self._read(request, HoldRequest)).seconds))

    async def verify(self, request: Request) -> Response:
        body = await self._read(request, VerifyRequest)
        version, logprobs = await self.engine.verify(body.token_ids)
        return _reply(request, Verified(version=version, logprobs=logprobs))

    async def operators(self, request: Request) -> Response:
        """Return every operator's results for a text, if enabled."""
        body = await self._read(request, OperatorsRequest)
        if self._operators is None:
            raise MalformedRequest(
                f"{self.engine.name} does not return the results of its operators",
                hint="start the engine with --show-operators",
            )
        shown = await self._operators(body.token_ids, prompt_tokens=body.prompt_tokens)
        return _reply(request, OperatorResults(results=shown))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the engine makes steps; 503 when it has ended or hangs."""
        engine = self.engine
        healthy = engine.alive and engine.stalled_s < engine.config.stall_s
        body = msgspec.json.encode(
            {"well": healthy, "stalled_s": round(engine.stalled_s, 3), "trouble": engine.trouble}
        )
        return Response(body, 200 if healthy else 503, media_type=JSON)

    async def info(self, request: Request) -> Response:
        return _reply(request, await self.engine.info())

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(await self.engine.metrics())

    def _authorise(self, request: Request) -> None:
        if self._token is None:
            return
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            hint = "set the environment variable ETUDE_TOKEN to the engine's token"
            raise Unauthorised("the bearer token is missing or wrong", hint=hint)

    async def _read(self, request: Request, kind: type[T]) -> T:
        """Decode the record in the body. Raises `MalformedRequest`, also for a body that is too large."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_body:
                facts = f"it has more than {self._max_body} bytes"
                raise MalformedRequest("the request's body is too large", facts, hint="send fewer token ids")
        try:
            return from_json(bytes(body), kind) if _wants_json(request, "content-type") else unpack(bytes(body), kind)
        except (ValueError, NotImplementedError, RecursionError) as error:
            raise MalformedRequest(
                f"the request's body is not a valid {kind.__name__}",
                str(error),
                hint=f"correct the field that is named, and send the body as {MSGPACK} or {JSON}",
            ) from None


def _wants_json(request: Request, header: str) -> bool:
    return request.headers.get(header, "").startswith(JSON)


def _reply(request: Request, record: object) -> Response:
    """Encode a response as msgpack, or as JSON when the request was JSON or accepts it."""
    if _wants_json(request, "accept" if request.method == "GET" else "content-type"):
        return Response(to_json(record), media_type=JSON)
    return Response(pack(record), media_type=MSGPACK)


async def _frames(first: list[int] | Completion, parts: AsyncGenerator[list[int] | Completion]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(parts):
        yield frame(first)
        try:
            async for part in parts:
                yield frame(part)
        except EtudeError as error:
            yield frame(error)


async def _cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Await `work`. When the client disconnects first, cancel it and raise `ClientDisconnect`."""
    me = asyncio.current_task()
    assert me is not None, "requests are served in tasks"
    gone = asyncio.create_task(disconnected(request))
    gone.add_done_callback(lambda listener: listener.cancelled() or me.cancel())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone.done():
            raise
        me.uncancel()
        raise ClientDisconnect from None
    finally:
        gone.cancel()

"""The ASGI app of the gateway: serves models in several dialects.

    request → API key → body size → the dialect's validation → running slot → tokens → context limit → policy → response

Each step can refuse the request, with an error in the dialect's format. A text that is certainly too long for the
context is refused without being tokenised; others are tokenised in a thread. The gateway stores the tokens of
conversations: a client sends text, and the model gets exactly the tokens that it read and sampled before. A stream is
sent while the policy samples, or as one part if the policy cannot stream. When a client disconnects, its request is
cancelled. Clients execute tool calls."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from etude.capture import Chat
from etude.errors import EtudeError
from etude.gateway.config import GatewayConfig
from etude.gateway.dialects import DIALECTS, Dialect, EventStream, new_head
from etude.gateway.errors import RequestRefused, from_error
from etude.gateway.http import HANDLERS, host, is_loopback, run_until_disconnect
from etude.gateway.model import ServedModel
from etude.gateway.requests import ChatRequest
from etude.seams import Policy

_SHORT_BYTES = 64 << 10  # a larger body is parsed in a thread


def create_app(
    policy: Policy,
    chat: Chat,
    *,
    model: str,
    context_tokens: int,
    config: GatewayConfig | None = None,
    key: str | None = None,
) -> Starlette:
    """Return the ASGI app that serves one model over OpenAI's API. Run it with `serving`.

    `policy` samples the completions and `chat` converts messages to tokens and back. `model` is the name that clients
    send. `context_tokens` is the largest number of tokens of prompt and answer together. `key` is the API key that
    clients must send; without one, only requests to a loopback host name (such as localhost) are answered."""
    served = ServedModel(policy, chat, name=model, context_tokens=context_tokens, config=config)
    gateway = Gateway(served, config=config, key=key)
    routes = [
        Route("/health", gateway.health),
        Route("/v1/models", gateway.models),
        Route("/v1/models/{name:path}", gateway.one_model),
        *(
            Route(dialect.path, partial(gateway.serve, dialect=dialect), methods=["POST"], name=dialect.name)
            for dialect in DIALECTS.values()
        ),
    ]
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.state.needs_key = key is not None
    return app


class Gateway:
    """The app's request handlers. `create_app` makes one. `key` is the API key, if one is needed."""

    def __init__(self, model: ServedModel, *, config: GatewayConfig | None = None, key: str | None = None) -> None:
        self.config, self._model, self._key = config or GatewayConfig(), model, key

    async def health(self, request: Request) -> Response:
        """Answer GET /health with status 200. No API key is needed."""
        return JSONResponse({"status": "ok", "model": self._model.name})

    async def models(self, request: Request) -> Response:
        """Answer GET /v1/models with a list that has the one model."""
        self._admit(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        """Answer GET /v1/models/{name} with the model's description, or with 404 for another name."""
        self._admit(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    async def serve(self, request: Request, dialect: Dialect) -> Response:
        """Answer a request in a dialect: sample the model's next message, or continue a text."""
        self._admit(request)
        if not request.headers.get("content-type", "").startswith("application/json"):
            raise RequestRefused(415, "send the body as content-type: application/json", code="unsupported_media_type")
        try:
            async with asyncio.timeout(self.config.deadline_s):
                parsed = await self._read(dialect, await self._body(request))
                self._check_model(parsed.model)
                head = new_head(parsed)
                if parsed.stream:
                    stream = dialect.stream(parsed, head, self._model.chat)
                    events = self._events(parsed, stream)
                    first = await run_until_disconnect(request, anext(events))  # an error up to here has an HTTP status
                    return _streaming(first, events, stream)
                answers = await run_until_disconnect(request, self._model.answer(parsed))
        except TimeoutError:
            raise self._model.timeout_refusal() from None
        except ClientDisconnect:
            return Response(status_code=499)
        return JSONResponse(dialect.body(parsed, head, answers))

    async def _events(self, parsed: ChatRequest, stream: EventStream) -> AsyncGenerator[bytes]:
        async with aclosing(self._model.stream(parsed)) as parts:
            async for index, part in parts:
                for event in stream.tokens(part, index) if isinstance(part, list) else stream.finish(part, index):
                    yield event
        for event in stream.end():
            yield event

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "etude",
            "max_model_len": self._model.context_tokens,
        }

    def _admit(self, request: Request) -> None:
        """Check the API key. Without a key, check that the Host header is loopback.

        The second check refuses a web page whose host name resolves to this machine."""
        if self._key is None:
            if not is_loopback(host(request)):
                raise RequestRefused(403, "without a key only localhost is answered", code="forbidden")
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._key.encode()):
            raise RequestRefused(401, "the API key is missing or wrong", code="invalid_api_key")

    def _check_model(self, name: str) -> None:
        if name != self._model.name:
            message = f"The model {name[:100]!r} does not exist; this is {self._model.name!r}."
            raise RequestRefused(404, message, code="model_not_found", param="model")

    async def _body(self, request: Request) -> bytes:
        limit, body = self.config.max_body_bytes, bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise RequestRefused(413, f"the body is larger than {limit} bytes", code="request_too_large")
        return bytes(body)

    async def _read(self, dialect: Dialect, body: bytes) -> ChatRequest:
        if len(body) <= _SHORT_BYTES:
            return dialect.read(body)
        return await self._model.run_in_thread(partial(dialect.read, body))


def _streaming(first: bytes, events: AsyncGenerator[bytes], stream: EventStream) -> Response:
    """Return the response of a stream whose first event is known. A later error becomes the last event."""

    async def body() -> AsyncIterator[bytes]:
        async with aclosing(events):
            yield first
            try:
                async for event in events:
                    yield event
            except RequestRefused as refused:
                yield stream.error(refused)
            except EtudeError as error:
                yield stream.error(from_error(error))

    return StreamingResponse(body(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

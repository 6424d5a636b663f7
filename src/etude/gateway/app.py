"""The ASGI app of the gateway: serves OpenAI's chat and text completions from one `Policy`.

    request → API key → body size → validation → running slot → tokens → context limit → policy → response

Each step can refuse the request, with an error in OpenAI's format. A text that is certainly too long for the context is
refused without being tokenised; others are tokenised in a thread. The gateway stores the tokens of conversations: a
client sends text, and the model gets exactly the tokens that it read and sampled before. A stream is sent while the
policy samples, or as one part if the policy cannot stream. When a client disconnects, its request is cancelled. Clients
execute tool calls."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from etude.capture import Chat, Prompt, TurnTree
from etude.errors import EtudeError
from etude.gateway.config import GatewayConfig
from etude.gateway.errors import RequestRefused, context_exceeded, from_error, invalid_request
from etude.gateway.http import HANDLERS, host, is_loopback, run_until_disconnect
from etude.gateway.requests import BaseRequest, ChatRequest, TextRequest, read_request, read_text_request
from etude.gateway.responses import ModelResponse, chat_body, make_response, text_body
from etude.gateway.streams import ChatStream, TextStream, error_event
from etude.records.completion import Completion, CompletionRequest, Sampling, StopReason, Traffic
from etude.records.wire import I32
from etude.seams import Policy, stream_or_complete

T = TypeVar("T")
TOKENISER_THREADS = 2
"""Number of tokeniser threads. Work of a disconnected client is not interrupted; later work waits for it."""
_SHORT_BYTES = 64 << 10  # a larger body is parsed in a thread
R = TypeVar("R", bound=BaseRequest)


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
    gateway = Gateway(policy, chat, model=model, context_tokens=context_tokens, config=config, key=key)
    routes = [
        Route("/health", gateway.health),
        Route("/v1/models", gateway.models),
        Route("/v1/models/{name:path}", gateway.one_model),
        Route("/v1/chat/completions", gateway.chat_completions, methods=["POST"]),
        Route("/v1/completions", gateway.completions, methods=["POST"]),
    ]
    app = Starlette(routes=routes, exception_handlers=HANDLERS)
    app.state.needs_key = key is not None
    return app


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A parsed request with its tokens, ready for the policy, and what is needed to make its response.

    `parsed` is the client's request and `request` the one for the policy. `signatures` are the tools; None means that
    the completion is not searched for tool calls. `prompt` is the place in the tree of conversations at which the
    completion is recorded; None for a text request. `created` is in Unix seconds."""

    parsed: BaseRequest
    request: CompletionRequest
    response_id: str
    created: int
    signatures: Any = None
    prompt: Prompt | None = None


class Gateway:
    """The app's request handlers, running requests and stored conversations. `create_app` makes one.

    The arguments are those of `create_app`."""

    def __init__(
        self,
        policy: Policy,
        chat: Chat,
        *,
        model: str,
        context_tokens: int,
        config: GatewayConfig | None = None,
        key: str | None = None,
    ) -> None:
        self.config = config or GatewayConfig()
        self.model, self.context_tokens = model, context_tokens
        self._policy, self._chat, self._key = policy, chat, key
        self._tree = TurnTree(chat, session_id=f"chat-{uuid.uuid4().hex}", max_tokens=self.config.remembered_tokens)
        self._running = asyncio.Semaphore(self.config.max_running)
        self._num_waiting = 0
        self._tokeniser_threads = ThreadPoolExecutor(TOKENISER_THREADS, thread_name_prefix="tokenise")
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """Answer GET /health with status 200. No API key is needed."""
        return JSONResponse({"status": "ok", "model": self.model})

    async def models(self, request: Request) -> Response:
        """Answer GET /v1/models with a list that has the one model."""
        self._admit(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        """Answer GET /v1/models/{name} with the model's description, or with 404 for another name."""
        self._admit(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    async def chat_completions(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions: sample the assistant's next message of a conversation."""
        return await self._serve(request, read_request, self._prepare_chat, chat_body, ChatStream)

    async def completions(self, request: Request) -> Response:
        """Answer POST /v1/completions: continue a prompt without a chat template."""
        return await self._serve(request, read_text_request, self._prepare_text, text_body, TextStream)

    async def _serve(
        self,
        request: Request,
        read: Callable[[bytes], R],
        prepare: Callable[[R], Awaitable[PendingRequest]],
        to_body: Callable[..., dict[str, Any]],
        stream: type[ChatStream],
    ) -> Response:
        self._admit(request)
        if not request.headers.get("content-type", "").startswith("application/json"):
            raise RequestRefused(415, "send the body as content-type: application/json", code="unsupported_media_type")
        try:
            async with asyncio.timeout(self.config.deadline_s):
                parsed = await self._read(read, await self._body(request))
                self._check_model(parsed.model)
                if parsed.stream:
                    events = self._events(parsed, prepare, stream)
                    first = await run_until_disconnect(request, anext(events))  # an error up to here has an HTTP status
                    return _streaming(first, events)
                answer = await run_until_disconnect(request, self._answer(parsed, prepare))
        except TimeoutError:
            raise self._timeout_refusal() from None
        except ClientDisconnect:
            return Response(status_code=499)
        return JSONResponse(to_body(answer, return_token_ids=parsed.return_token_ids))

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self._created,
            "owned_by": "etude",
            "max_model_len": self.context_tokens,
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
        if name != self.model:
            message = f"The model {name[:100]!r} does not exist; this is {self.model!r}."
            raise RequestRefused(404, message, code="model_not_found", param="model")

    async def _body(self, request: Request) -> bytes:
        limit, body = self.config.max_body_bytes, bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise RequestRefused(413, f"the body is larger than {limit} bytes", code="request_too_large")
        return bytes(body)

    async def _read(self, read: Callable[[bytes], R], body: bytes) -> R:
        return read(body) if len(body) <= _SHORT_BYTES else await self._run_in_thread(partial(read, body))

    async def _answer(self, parsed: R, prepare: Callable[[R], Awaitable[PendingRequest]]) -> ModelResponse:
        async with self._running_slot():
            pending = await prepare(parsed)
            return self._respond(pending, await self._policy.complete(pending.request))

    async def _events(
        self, parsed: R, prepare: Callable[[R], Awaitable[PendingRequest]], kind: type[ChatStream]
    ) -> AsyncGenerator[bytes]:
        end = time.monotonic() + self.config.deadline_s
        async with self._running_slot():
            pending = await prepare(parsed)
            stream = kind(
                self._chat,
                stop=parsed.stop,
                response_id=pending.response_id,
                model=self.model,
                created=pending.created,
                usage=parsed.include_usage,
            )
            async with aclosing(stream_or_complete(self._policy, self._policy.complete, pending.request)) as parts:
                while True:
                    try:
                        part = await asyncio.wait_for(anext(parts), max(0.0, end - time.monotonic()))
                    except TimeoutError:
                        raise self._timeout_refusal() from None
                    if isinstance(part, Completion):
                        answer = self._respond(pending, part)
                        break
                    for event in stream.tokens(part):
                        yield event
        for event in stream.end(answer):
            yield event

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokeniser_threads, work)

    async def _prepare_chat(self, parsed: ChatRequest) -> PendingRequest:
        """Tokenise a conversation; turns that were sampled here keep their tokens."""
        try:
            signatures = self._chat.signatures(parsed.tools)
        except ValueError as error:
            raise invalid_request(str(error), "tools") from None
        render = partial(
            self._tree.prompt, parsed.messages, signatures, tools=parsed.tools, max_tokens=self.context_tokens
        )
        prompt = await self._run_in_thread(render)
        request = self._request(parsed, prompt.session_id, prompt.token_ids, fork_from=prompt.fork_from, keep=True)
        return PendingRequest(parsed, request, f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), signatures, prompt)

    async def _prepare_text(self, parsed: TextRequest) -> PendingRequest:
        if isinstance(parsed.prompt, str):
            prompt_ids = await self._run_in_thread(
                partial(self._chat.encode, parsed.prompt, max_tokens=self.context_tokens)
            )
        elif all(0 <= token < self._chat.vocab_size for token in parsed.prompt):
            prompt_ids = np.array(parsed.prompt, np.int32)
        else:
            raise invalid_request(f"prompt has a token id outside of [0, {self._chat.vocab_size})", "prompt")
        request = self._request(parsed, f"text-{uuid.uuid4().hex}", prompt_ids, keep=False)
        return PendingRequest(parsed, request, f"cmpl-{uuid.uuid4().hex}", int(time.time()))

    def _request(
        self, parsed: BaseRequest, session_id: str, prompt_ids: I32, *, fork_from: str | None = None, keep: bool
    ) -> CompletionRequest:
        return CompletionRequest(
            request_id=f"{session_id}/{uuid.uuid4().hex}",
            session_id=session_id,
            prompt_ids=prompt_ids,
            sampling=Sampling(
                max_tokens=self._max_answer_tokens(parsed, len(prompt_ids)),
                stop_token_ids=self._chat.stop_token_ids,
                temperature=parsed.temperature,
                seed=secrets.randbits(63) if parsed.seed is None else parsed.seed & ((1 << 63) - 1),
            ),
            routes_from=None,
            deadline_s=self.config.deadline_s,
            keep_session=keep,
            fork_from=fork_from,
            traffic=Traffic.PRODUCTION,
        )

    def _respond(self, pending: PendingRequest, completion: Completion) -> ModelResponse:
        """Make the response to a completion. The completion of a chat is recorded as a turn."""
        if completion.stop_reason is StopReason.CANCELLED:
            raise RequestRefused(503, f"{completion.engine} cancelled the request", code="engine_unavailable")
        answer = make_response(
            completion,
            chat=self._chat,
            signatures=pending.signatures,
            stop=pending.parsed.stop,
            prompt_ids=pending.request.prompt_ids,
            response_id=pending.response_id,
            model=self.model,
            created=pending.created,
        )
        if pending.prompt is not None and not answer.stopped_by_text:  # a client cannot repeat text that it did not get
            self._tree.record(pending.prompt, completion, answer.canonical_message(), sampling=pending.request.sampling)
        return answer

    def _timeout_refusal(self) -> RequestRefused:
        return RequestRefused(504, f"no answer within {self.config.deadline_s:g} s", code="timeout")

    def _max_answer_tokens(self, parsed: BaseRequest, num_prompt: int) -> int:
        """Return the token limit of the answer. Raises `RequestRefused` when the request does not fit the context."""
        remaining = self.context_tokens - num_prompt
        if remaining < (parsed.max_tokens or 1):
            raise context_exceeded(self.context_tokens, num_prompt, parsed.max_tokens or 1)
        return parsed.max_tokens or min(remaining, self.config.answer_tokens)

    @asynccontextmanager
    async def _running_slot(self) -> AsyncIterator[None]:
        """Wait for a running slot; refuse the request (429) when the queue is full."""
        if self._running.locked() and self._num_waiting >= self.config.max_waiting:
            raise RequestRefused(429, "too many requests are waiting; try again", code="rate_limit_exceeded")
        self._num_waiting += 1
        try:
            await self._running.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._running.release()


def _streaming(first: bytes, events: AsyncGenerator[bytes]) -> Response:
    """Return the response of a stream whose first event is known. A later error becomes the last event."""

    async def body() -> AsyncIterator[bytes]:
        async with aclosing(events):
            yield first
            try:
                async for event in events:
                    yield event
            except RequestRefused as refused:
                yield error_event(refused)
            except EtudeError as error:
                yield error_event(from_error(error))

    return StreamingResponse(body(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

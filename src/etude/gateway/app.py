"""The product's door: OpenAI's chat API over one `Policy`.

    request → key → size → checks → tokens (known ones, then what is new) → room → policy → answer, whole or streamed

Every step can refuse, and says so in OpenAI's shape. The tokens of a conversation live here: a client sends text, and
the model is shown exactly the tokens it has seen and sampled before. A completion arrives whole from the policy; a
stream is sent token by token from it. Knows nothing of engines, weights or tools: calls go to the client.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from etude.errors import EtudeError
from etude.gateway.answers import Answer, chunks, make_answer, whole
from etude.gateway.config import GatewayConfig
from etude.gateway.refusal import Refused, context_exceeded, invalid, of_error
from etude.gateway.requests import ChatRequest, read_request
from etude.gateway.seam import Chat
from etude.gateway.tree import Node, TokenTree, chain
from etude.records.completion import CompletionRequest, Sampling, StopReason
from etude.records.wire import I32
from etude.seams import Policy

T = TypeVar("T")


def create_app(
    policy: Policy,
    chat: Chat,
    *,
    model: str,
    context_tokens: int,
    config: GatewayConfig | None = None,
    key: str | None = None,
) -> Starlette:
    """The ASGI app that serves one model under the name `model`. Without a `key` it answers loopback callers only."""
    gateway = Gateway(policy, chat, model=model, context_tokens=context_tokens, config=config, key=key)
    routes = [
        Route("/health", gateway.health),
        Route("/v1/models", gateway.models),
        Route("/v1/models/{name:path}", gateway.one_model),
        Route("/v1/chat/completions", gateway.chat_completions, methods=["POST"]),
    ]
    handlers: Any = {Refused: _refused, EtudeError: _failed, Exception: _broken, 404: _no_route, 405: _no_route}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.needs_key = key is not None
    return app


class Gateway:
    """The state behind the app: what is running, and the conversations it remembers."""

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
        self._tree = TokenTree(max_tokens=self.config.remembered_tokens)
        self._running = asyncio.Semaphore(self.config.max_running)
        self._num_waiting = 0
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """Whether the gateway answers; no key needed."""
        return JSONResponse({"status": "ok", "model": self.model})

    async def models(self, request: Request) -> Response:
        """The one model that is served."""
        self._admit(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        """The model by its name."""
        self._admit(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's chat completion."""
        self._admit(request)
        if not request.headers.get("content-type", "").startswith("application/json"):
            raise Refused(415, "send the body as content-type: application/json", code="unsupported_media_type")
        try:
            async with asyncio.timeout(self.config.deadline_s):
                asked = read_request(await self._body(request))
                self._check_model(asked.model)
                answer = await _until_gone(request, self._answer(asked))
        except TimeoutError:
            raise Refused(504, f"no answer within {self.config.deadline_s:g} s", code="timeout") from None
        except ClientDisconnect:
            return Response(status_code=499)
        if not asked.stream:
            return JSONResponse(whole(answer, return_token_ids=asked.return_token_ids))
        stream = _in_turn(chunks(answer, self._chat, include_usage=asked.include_usage))
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    # inside

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self._created,
            "owned_by": "etude",
            "max_model_len": self.context_tokens,
        }

    def _admit(self, request: Request) -> None:
        """The key; without one, only a caller that names this machine (a web page that was pointed here does not)."""
        if self._key is None:
            if not is_loopback(_host(request)):
                raise Refused(403, "without a key only localhost is answered", code="forbidden")
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._key.encode()):
            raise Refused(401, "the API key is missing or wrong", code="invalid_api_key")

    def _check_model(self, name: str) -> None:
        if name != self.model:
            message = f"The model {name[:100]!r} does not exist; this is {self.model!r}."
            raise Refused(404, message, code="model_not_found", param="model")

    async def _body(self, request: Request) -> bytes:
        limit, body = self.config.max_body_bytes, bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise Refused(413, f"the body is larger than {limit} bytes", code="request_too_large")
        return bytes(body)

    async def _answer(self, asked: ChatRequest) -> Answer:
        """Tokens, room, policy; the completion is remembered before it is told."""
        try:
            signatures = self._chat.signatures(asked.tools)
        except ValueError as error:
            raise invalid(str(error), "tools") from None
        keys = chain(asked.tools, asked.messages)
        known, prompt_ids, new_ids = self._tokens(asked, keys, signatures)
        session_id = known.session_id if known else f"chat-{uuid.uuid4().hex}"
        async with self._turn():
            completion = await self._policy.complete(
                CompletionRequest(
                    request_id=f"{session_id}/{uuid.uuid4().hex}",
                    session_id=session_id,
                    prompt_ids=prompt_ids,
                    sampling=Sampling(
                        max_tokens=self._room(asked, len(prompt_ids)),
                        stop_token_ids=self._chat.stop_token_ids,
                        temperature=asked.temperature,
                        seed=secrets.randbits(63) if asked.seed is None else asked.seed & ((1 << 63) - 1),
                    ),
                    routes_from=len(prompt_ids),
                    deadline_s=self.config.deadline_s,
                )
            )
        if completion.stop_reason is StopReason.CANCELLED:
            raise Refused(503, f"{completion.engine} cancelled the request", code="engine_unavailable")
        answer = make_answer(
            completion,
            chat=self._chat,
            signatures=signatures,
            stop=asked.stop,
            prompt_ids=prompt_ids,
            model=self.model,
            created=int(time.time()),
        )
        if not answer.cut:  # the client will not repeat what it was not told
            self._remember(asked, answer, keys, known, np.concatenate([new_ids, completion.token_ids]), session_id)
        return answer

    def _tokens(self, asked: ChatRequest, keys: list[bytes], signatures: Any) -> tuple[Node | None, I32, I32]:
        """The deepest known completion of this conversation, all tokens of the prompt, and those it adds."""
        known = self._tree.deepest(keys[:-1])
        if known is None:
            ids = self._chat.first(asked.messages, signatures)
            return None, ids, ids
        said = keys.index(known.key) + 1
        new_ids = self._chat.continuation(asked.messages[:said], asked.messages[said:], signatures, ended=known.ended)
        return known, np.concatenate([known.context(), new_ids]), new_ids

    def _remember(
        self, asked: ChatRequest, answer: Answer, keys: list[bytes], known: Node | None, added: I32, session_id: str
    ) -> None:
        calls = [{"type": "function", "function": c} for c in answer.calls]
        message = {"role": "assistant", "content": answer.text} | ({"tool_calls": calls} if calls else {})
        key = chain(asked.tools, [*asked.messages, message])[-1]
        ended = answer.completion.stop_reason is StopReason.STOP
        self._tree.add(key, known, added, session_id=session_id, ended=ended)

    def _room(self, asked: ChatRequest, num_prompt: int) -> int:
        """Tokens the answer may have. Raises `Refused` past the context."""
        room = self.context_tokens - num_prompt
        if room < (asked.max_tokens or 1):
            raise context_exceeded(self.context_tokens, num_prompt, asked.max_tokens or 1)
        return asked.max_tokens or min(room, self.config.answer_tokens)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One of the running completions; past the bounded queue a request is refused at once."""
        if self._running.locked() and self._num_waiting >= self.config.max_waiting:
            raise Refused(429, "too many requests are waiting; try again", code="rate_limit_exceeded")
        self._num_waiting += 1
        try:
            await self._running.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._running.release()


def _host(request: Request) -> str:
    try:
        return request.url.hostname or ""
    except ValueError:  # a Host header that is none
        return ""


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


async def _until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, unless the client goes away: then it is cancelled, and `ClientDisconnect` raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _in_turn(events: Any) -> AsyncIterator[bytes]:
    """The events of a stream, other requests served in between."""
    for event in events:
        yield event
        await asyncio.sleep(0)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error.response()


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, EtudeError)
    return of_error(error).response()


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return Refused(status, f"{request.method} {request.url.path} is not offered", code="not_found").response()


async def _broken(request: Request, error: Exception) -> Response:
    return Refused(500, "the gateway failed; its log says why", code="internal_error").response()

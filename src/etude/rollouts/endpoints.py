"""The HTTP endpoints of one rollout, through which an agent program calls the policy and uses its machine.

Outside of a machine the URL has the rollout's id and a secret: ``http://127.0.0.1:PORT/r/ROLLOUT/SECRET/v1``. A client
may instead send the secret as its API key to ``/v1``. Inside a machine no secret is needed: the listening socket exists
in this machine's network namespace only.

    GET  /v1/models, /v1/models/NAME
    POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens
    POST /machine/exec, /machine/read, /machine/write      (outside only)

Any model name is accepted and means the policy. An answer is sampled completely before the first event of a stream is
sent; until then, keep-alive events hold the connection open. After the end of the rollout every request gets an error
that clients do not retry."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import json
import secrets
import socket
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from etude.capture.short_work import ShortWork
from etude.errors import ContextFull, EngineError, EtudeError, MachineError
from etude.gateway import DIALECTS, Answer, ChatRequest, Dialect, RequestRefused
from etude.gateway.dialects import messages
from etude.gateway.errors import context_exceeded, from_error, invalid_request, invalid_tools, openai_error
from etude.gateway.http import json_response, nearest_path, read_body
from etude.harness.episode import Episode, EpisodeEnded, Refusal
from etude.http_server import bind, disconnected, run_http_server
from etude.rollouts.attribution import (
    MAX_ANSWERS,
    MAX_PARALLEL,
    AcceptedRequest,
    AgentRequest,
    Attribution,
    TooManyRequests,
)

MAX_BODY_BYTES = 16 << 20
BODY_S = 60.0
"""Seconds in which the body of a request must arrive."""
KEEP_ALIVE_S = 10.0
"""Seconds between two keep-alive events of a stream whose answer is not complete."""
MAX_OUTPUT_BYTES = 1 << 20
"""The maximum output of a command that `/machine/exec` returns, in bytes."""
ENDED = "rollout_ended"
"""The code of the error that a program gets after the end of its rollout."""
_SHORT_BYTES = 64 << 10  # a larger body is parsed in a thread
_BY_PATH = {dialect.path: dialect for dialect in DIALECTS.values() if dialect.name != "text"}
_MACHINE = ("/machine/exec", "/machine/read", "/machine/write")
_SAMPLING = {
    *("temperature", "seed", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "logit_bias", "min_tokens"),
}
"""Parameters for which the run's values are used, whatever a client requests."""
_KEPT = {
    *("messages", "input", "system", "instructions", "model", "tools", "mcp_servers", "stream", "max_tokens"),
    *("max_completion_tokens", "max_output_tokens", "previous_response_id", "conversation", "prompt"),
}
"""If a dialect refuses one of these parameters, the request is refused. All others are then left out and logged."""


class RolloutEndpoints:
    """The ASGI app with the endpoints of one rollout. `serve_rollout` makes and serves one.

    `secret`: clients send it in the URL's path or as the API key. None for a socket inside the machine: no secret is
    needed, and there is no `/machine/...`. `log` is called with lines for the rollout's log."""

    def __init__(
        self, episode: Episode, attribution: Attribution, *, secret: str | None, log: Callable[[str], None]
    ) -> None:
        self._episode, self._attribution, self._secret, self._log = episode, attribution, secret, log
        self._name = episode.options.session_id
        self._prefix = f"/r/{quote(self._name.replace('/', '.'), safe='')}/{secret}" if secret is not None else ""
        self._num_commands = 0
        self._short_work = ShortWork(_SHORT_BYTES)
        self.asked_sampling: dict[str, Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        dialect = next((d for path, d in _BY_PATH.items() if path in request.url.path), None)
        try:
            response = await self._respond(request, send)
        except RequestRefused as refused:
            self._note_refusal(request, refused)
            body = openai_error(refused) if dialect is None else dialect.error(refused)
            response = json_response(body, refused.status, refused.headers)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001  a bug of etude is not the agent's fault
            traceback.print_exc()
            facts = f"{type(error).__name__}: {error}"
            self._log(f"the endpoint failed: {facts}")
            failure = MachineError("the endpoints of the rollout failed", facts, hint="see the log of the worker")
            self._episode.failure = self._episode.failure or failure
            self._attribution.failed.set()
            ended = Ended("the endpoints failed, so the rollout ends", "", 500, "internal_error")
            response = json_response(openai_error(ended), ended.status, ended.headers)
        if response is not None:
            await response(scope, receive, send)

    async def _respond(self, request: Request, send: Send) -> Response | None:
        path = self._inner_path(request)
        if path == "/v1/models" and request.method == "GET":
            return json_response({"object": "list", "data": [self._card("etude")]})
        if path.startswith("/v1/models/") and request.method == "GET":
            return json_response(self._card(path.removeprefix("/v1/models/")))
        if path in _BY_PATH and request.method == "POST":
            await self._chat(_BY_PATH[path], request, send)
            return None
        if path == "/v1/messages/count_tokens" and request.method == "POST":
            chat = await self._read(messages.read_count, request)
            return json_response({"input_tokens": await self._count(chat)})
        if self._secret is not None and path.startswith("/machine/") and request.method == "POST":
            return await self._machine(path.removeprefix("/machine/"), request)
        raise _no_endpoint(request.method, path, machine=self._secret is not None)

    def _inner_path(self, request: Request) -> str:
        """Return the path without the rollout's id and secret. Raises `RequestRefused` if they are wrong."""
        path: str = request.scope["raw_path"].decode("latin-1").partition("?")[0]
        if self._secret is None:
            return path
        given, inner = path[: len(self._prefix)], path[len(self._prefix) :]
        if _same(given, self._prefix) and inner.startswith("/"):
            return inner
        if path.startswith("/r/"):
            what, facts = "no such rollout is running here", "it has ended, or its id or secret in the URL is wrong"
            hint = "take the base URL from the environment of the program, and stop if it has worked before"
            raise RequestRefused(404, what, facts, hint=hint, code="not_found")
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not _same(key, self._secret):
            facts = "it is not the one of this rollout" if key else "the request has none"
            hint = "take the API key from the environment of the program, or its base URL, which has the secret"
            raise RequestRefused(401, "the API key is missing or wrong", facts, hint=hint, code="invalid_api_key")
        return path

    def _note_refusal(self, request: Request, refused: RequestRefused) -> None:
        """Count a refused request in `Episode.refused`, and log the first of its kind. Those to the machine are not
        counted: a missing file is not an error of the program."""
        path = request.scope["raw_path"].decode("latin-1").partition("?")[0].removeprefix(self._prefix)
        if path.startswith("/machine/"):
            return
        kind = Refusal(f"{request.method} {path}"[:200], refused.status, refused.code, refused.message[:500])
        counts = self._episode.refused
        if kind not in counts and len(counts) < MAX_PARALLEL and not isinstance(refused, Ended):
            self._log(f"a request was refused: {kind.status} {kind.request}: {kind.message}")
        if kind in counts or len(counts) < MAX_PARALLEL:
            counts[kind] += 1

    def _card(self, name: str) -> dict[str, Any]:
        context = self._episode.limits.context_tokens
        return {"id": name, "object": "model", "created": 0, "owned_by": "etude", "max_model_len": context}

    async def _chat(self, dialect: Dialect, request: Request, send: Send) -> None:
        chat = await self._read(dialect.read, request)
        retry = request.headers.get("x-stainless-retry-count", "0")
        sent = AgentRequest(
            chat=chat,
            retry=retry.isdigit() and int(retry) > 0,
            idempotency_key=request.headers.get("idempotency-key", ""),
        )
        try:
            accepted = self._attribution.ask(sent)
        except (EpisodeEnded, TooManyRequests) as error:
            raise _refusal(error, self._episode) from None
        gone = asyncio.create_task(disconnected(request))
        accepted.num_clients += 1
        try:
            answered = await _wait(accepted, gone, KEEP_ALIVE_S if chat.stream else None)
            if gone.done():
                return
            answers = self._answers(accepted) if answered else ()  # an error has an HTTP status
            if chat.stream:
                events = self._events(dialect, request, accepted, chat, gone, answers=answers)
                headers = {"cache-control": "no-cache"}
                response: Response = StreamingResponse(events, media_type="text/event-stream", headers=headers)
                await response(request.scope, request.receive, send)
            else:
                response = json_response(dialect.body(chat, accepted.head, answers))
                await response(request.scope, request.receive, send)
                accepted.delivered = True
        finally:
            accepted.num_clients -= 1
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    def _answers(self, accepted: AcceptedRequest) -> tuple[Answer, ...]:
        """Return the answers of a request that has ended. Raises `RequestRefused` when there are none."""
        try:
            return accepted.answers.result()
        except (EtudeError, asyncio.CancelledError) as error:
            raise _refusal(error, self._episode) from None

    async def _events(
        self,
        dialect: Dialect,
        request: Request,
        accepted: AcceptedRequest,
        chat: ChatRequest,
        gone: asyncio.Task[None],
        *,
        answers: tuple[Answer, ...],
    ) -> AsyncIterator[bytes]:
        stream = dialect.stream(chat, accepted.head, self._episode.chat)
        while not answers:
            yield stream.ping
            answered = await _wait(accepted, gone, KEEP_ALIVE_S)
            if gone.done():
                return
            try:
                answers = self._answers(accepted) if answered else ()
            except RequestRefused as refused:
                self._note_refusal(request, refused)
                yield stream.error(refused)
                return
        for index, answer in enumerate(answers):
            for event in stream.finish(answer, index):
                yield event
        for event in stream.end():
            yield event
            if gone.done():
                return
        accepted.delivered = True

    async def _count(self, chat: ChatRequest) -> int:
        try:
            return await self._episode.num_tokens(chat.messages, tools=chat.tools)
        except EtudeError as error:
            raise _refusal(error, self._episode) from None

    async def _read(self, read: Callable[[bytes], ChatRequest], request: Request) -> ChatRequest:
        body = await _body(request)
        return await self._short_work.run(partial(self._parsed, read, body), len(body))

    def _parsed(self, read: Callable[[bytes], ChatRequest], body: bytes) -> ChatRequest:
        """Parse a request. Parameters that the policy does not support are left out and logged."""
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            return read(body)  # which refuses it
        n = fields.pop("n", None) or 1
        if type(n) is not int or not 1 <= n <= MAX_ANSWERS:
            raise invalid_request("n is out of range", hint=f"send a number from 1 to {MAX_ANSWERS}", param="n")
        asked = {name: fields.pop(name) for name in sorted(_SAMPLING & fields.keys())}
        while True:
            try:
                chat = replace(read(json.dumps(fields).encode()), n=n)
                break
            except RequestRefused as refused:
                if refused.param is None or refused.param not in fields or refused.param in _KEPT:
                    raise
                asked[refused.param] = fields.pop(refused.param)
        if chat.must_call:
            asked["tool_choice"] = fields.get("tool_choice")
        if chat.schema is not None:
            asked["schema"] = chat.schema
        try:
            self._episode.chat.signatures(chat.tools)
        except ValueError as error:
            raise invalid_tools(error) from None
        self._log_sampling({name: value for name, value in asked.items() if value is not None})
        return chat

    def _log_sampling(self, asked: Mapping[str, Any]) -> None:
        if asked and not self.asked_sampling:
            self.asked_sampling = dict(asked)
            used = f"temperature {self._episode.options.temperature:g}, all others neutral or left out"
            self._log(f"sampling asked: {json.dumps(asked, default=str)[:500]}; used: {used}")

    async def _machine(self, what: str, request: Request) -> Response:
        """Run a command, or read or write a file, in the machine of the rollout."""
        if self._episode.ending is not None:
            raise _refusal(EpisodeEnded(self._episode.ending), self._episode)
        try:
            order = msgspec.json.decode(await _body(request), type=_Order)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            hint = "exec needs command; read needs path; write needs path, and content in base64"
            raise invalid_request("the body is not a request to the machine", str(error), hint=hint) from None
        machine = self._episode.machine
        try:
            if what == "exec":
                return await self._exec(order)
            if what == "read":
                data = await machine.read(order.path, max_bytes=MAX_BODY_BYTES)
                return json_response({"content": base64.b64encode(data).decode()})
            if what == "write":
                await machine.write(order.path, base64.b64decode(order.content, validate=True))
                return json_response({})
        except (OSError, ValueError, binascii.Error) as error:
            code = "not_found" if isinstance(error, FileNotFoundError) else "refused"
            facts, hint = str(error) or type(error).__name__, f"check {_GIVEN[what]}"
            if isinstance(error, binascii.Error):
                hint = "send content in base64"
            raise RequestRefused(400, f"the machine could not {what}", facts, hint=hint, code=code) from None
        except MachineError as error:
            self._episode.failure = self._episode.failure or error
            self._attribution.failed.set()
            hint = "stop: the rollout ends, and its task is tried again"
            raise RequestRefused(503, "the machine failed", error.what, hint=hint, code="machine_failed") from None
        raise _no_endpoint("POST", f"/machine/{what}", machine=True)

    async def _exec(self, order: _Order) -> Response:
        argv = order.command if isinstance(order.command, list) else ["sh", "-c", order.command]
        self._num_commands += 1
        limit_s = self._episode.limits.tool_deadline_s
        result = await self._episode.machine.exec(
            argv,
            key=f"{self._name}/exec/{self._num_commands}",
            deadline_s=min(limit_s, order.timeout_s or limit_s),
            stdin=order.stdin.encode(),
            output_bytes=MAX_OUTPUT_BYTES,
            cwd=order.cwd,
            env=order.env,
        )
        return json_response(
            {
                "exit_code": result.exit_code,
                "output": result.output.decode(errors="replace"),
                "timed_out": result.timed_out,
                "truncated": result.truncated,
            }
        )


_GIVEN = {"exec": "command, cwd and env", "read": "the path", "write": "the path"}


class _Order(msgspec.Struct):
    """The body of a request to `/machine/...`; `content` is in base64."""

    command: str | list[str] = ""
    cwd: str = ""
    env: dict[str, str] = {}
    stdin: str = ""
    timeout_s: float = 0.0
    path: str = ""
    content: str = ""


@contextlib.asynccontextmanager
async def serve_rollout(
    episode: Episode,
    attribution: Attribution,
    listener: socket.socket | None,
    *,
    log: Callable[[str], None],
) -> AsyncIterator[tuple[str, str]]:
    """Serve the endpoints of a rollout while the block runs. Yields their base URL (without /v1) and the API key.

    `listener` is the listening socket inside the machine; None: a free port of this host, protected by a secret. `log`
    is called with lines for the rollout's log. At exit, running requests are cancelled."""
    secret = secrets.token_urlsafe(24) if listener is None else None
    app = RolloutEndpoints(episode, attribution, secret=secret, log=log)
    sock = bind("127.0.0.1", 0) if listener is None else listener
    sock.setblocking(False)
    server = run_http_server(app, sock, name="the endpoints of a rollout", grace_s=1, max_connections=4 * MAX_PARALLEL)
    async with server as url:
        try:
            yield url + app._prefix, secret or "inside"
        finally:
            await attribution.close()


def _same(given: str, right: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(given.encode("latin-1", "replace"), right.encode("latin-1"))


async def _body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await read_body(request, MAX_BODY_BYTES, hint="send a shorter conversation or file")
    except TimeoutError:
        what = f"the request body did not arrive within {BODY_S:g} s"
        raise RequestRefused(408, what, hint="send the request again", code="timeout") from None


async def _wait(accepted: AcceptedRequest, gone: asyncio.Task[None], timeout_s: float | None) -> bool:
    """Wait for the answers, for the end of the connection, or `timeout_s` seconds. Returns whether it is answered."""
    await asyncio.wait({accepted.answers, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return accepted.answers.done()


def _no_endpoint(method: str, path: str, *, machine: bool) -> RequestRefused:
    """Return the error for a path that does not exist (HTTP 404), or does not support this method (405)."""
    posts = [*_BY_PATH, "/v1/messages/count_tokens", *(_MACHINE if machine else ())]
    right = "POST" if path in posts else "GET" if path == "/v1/models" or path.startswith("/v1/models/") else ""
    what = f"{method} {path[:200]} is not supported by the endpoints of a rollout"
    if not right:
        offered = ["/v1/models", *posts]
        close = nearest_path(path, offered)
        hint = f"did you mean {close!r}?" if close else f"the paths are {', '.join(offered)}"
        return RequestRefused(404, what, hint=hint, code="not_found")
    facts, hint, code = f"this path takes only {right}", f"send {right}", "method_not_allowed"
    return RequestRefused(405, what, facts, hint=hint, code=code, allow=right)


def _refusal(error: BaseException, episode: Episode) -> RequestRefused:
    """Convert the exception that ended a request into the error that the program gets."""
    if isinstance(error, EpisodeEnded):
        return Ended("the rollout has ended", error.ending.value)
    if isinstance(error, TooManyRequests):
        what, facts = "too many requests of this rollout are running", f"at most {MAX_PARALLEL} may run at once"
        return RequestRefused(429, what, facts, hint="wait for some of them first", code="rate_limit_exceeded")
    if isinstance(error, ContextFull):
        limit = episode.limits.context_tokens
        facts = f"the request does not fit: {error.facts or error.what}"
        return context_exceeded(limit, limit + 1, 0, facts=facts, counted=False)
    if isinstance(error, EngineError):
        facts = f"{error.what}{': ' + error.facts if error.facts else ''}"
        return Ended("no engine answered, so the rollout ends", facts, 503, "engine_unavailable")
    if isinstance(error, EtudeError):
        return from_error(error)
    return Ended("the rollout has ended")


class Ended(RequestRefused):
    """The error after the end of a rollout, or of one that fails. OpenAI's and Anthropic's clients do not retry it."""

    def __init__(self, what: str, facts: str = "", status: int = 403, code: str = ENDED) -> None:
        super().__init__(status, what, facts, hint="send no further requests", code=code)

    @property
    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}

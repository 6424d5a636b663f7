"""The ASGI app of the gateway. It serves models over the APIs of several vendors, here called dialects.

Steps of a request, each of which can refuse it with an error in the dialect's format:

request → API key → body size → the dialect's validation → running slot → tokens → context limit → policy → response

- A text that is certainly too long for the context is refused without being tokenised. Others are tokenised in a
  thread.
- The gateway stores the tokens of conversations. A client sends text, and the model gets exactly the tokens that it
  read and sampled before.
- A stream is sent while the policy samples, or in one piece if the policy cannot stream.
- When a client disconnects, its request is cancelled.
- Tool calls are executed by the clients."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from etude.errors import EtudeError, nearest
from etude.gateway.access_log import Metrics, Record, logger
from etude.gateway.config import GatewayConfig
from etude.gateway.dialects import DIALECTS, Dialect, messages, new_head
from etude.gateway.errors import RequestRefused, broken, from_error, invalid_request, stopping
from etude.gateway.feedback import take_signals
from etude.gateway.http import (
    HANDLERS,
    REQUEST_IDS,
    error_response,
    is_local,
    json_response,
    no_route,
    read_body,
    run_until,
    run_until_disconnect,
    set_request_id,
)
from etude.gateway.keys import Keys, KeyUse
from etude.gateway.model import ServedModel
from etude.gateway.openapi import document
from etude.gateway.pump import EventPump, EventResponse
from etude.gateway.recording import offer_answers, offering, sender, user_of
from etude.gateway.requests import ChatRequest, check_names, check_results
from etude.http_server import disconnected
from etude.seams import AnswerRecorder, FeedbackReceiver

SUMMARIES = "x-etude-summaries"
"""The header with which a client allows summaries of its conversation ("on", the default) or not ("off")."""
Router = Callable[[str, str], str]
"""Returns the name of the served model that answers, given the model that the client names, and the user (without one,
the name of the key)."""
_SHORT_BYTES = 64 << 10  # a larger body is parsed in a thread, unless another of its size took less than `_SHORT_S`
_LONG_BYTES = 1 << 20  # a larger body is always parsed in a thread
_SHORT_S = 0.002
_PATHS = {dialect.path: name for name, dialect in DIALECTS.items()}


def create_app(
    models: Sequence[ServedModel],
    *,
    config: GatewayConfig | None = None,
    keys: Keys | None = None,
    recorder: AnswerRecorder | None = None,
    router: Router | None = None,
    feedback: FeedbackReceiver | None = None,
) -> Starlette:
    """Return the ASGI app that serves models over OpenAI's and Anthropic's APIs. Run it with `serving`.

    - `keys`: clients must send one of them. None: only requests to a loopback host name (such as localhost) are
      answered.
    - `recorder`: receives every complete answer.
    - `router`: chooses the model for each request with a user or an API key, once a request. None: the model that the
      client names answers.
    - `feedback`: makes the ids of responses, and receives signals about them (POST /v1/feedback). None: there is no
      such route."""
    gateway = Gateway(models, config=config, keys=keys, recorder=recorder, router=router, feedback=feedback)
    routes = [
        Route("/health", gateway.health),
        Route("/metrics", gateway.metrics_page),
        Route("/openapi.json", gateway.openapi),
        Route("/v1/models", gateway.list_models),
        Route("/v1/models/{name:path}", gateway.one_model),
        Route("/v1/messages/count_tokens", gateway.count_tokens, methods=["POST"]),
        Route("/v1/feedback", gateway.feedback, methods=["POST"]),
        *(
            Route(dialect.path, partial(gateway.complete, name=name), methods=["POST"], name=name)
            for name, dialect in DIALECTS.items()
        ),
    ]
    allowed = list(gateway.config.cors_origins)
    cors = Middleware(
        CORSMiddleware,
        allow_origins=allowed,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=REQUEST_IDS,
    )
    handlers = {**HANDLERS, 404: gateway.not_offered, 405: gateway.not_offered}
    app = _App(routes=routes, exception_handlers=handlers, middleware=[cors] if allowed else [])
    app.state.needs_key, app.state.gateway = keys is not None, gateway
    return app


class _App(Starlette):
    """An app whose completions bypass Starlette's middleware and router, unless CORS is enabled."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = _PATHS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if name is None or self.user_middleware:
            await super().__call__(scope, receive, send)
        else:
            response = await self.state.gateway.complete(Request(scope, receive, send), name)
            await response(scope, receive, send)


class Gateway:
    """The app's request handlers. `create_app` makes one, with the same arguments."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        config: GatewayConfig | None = None,
        keys: Keys | None = None,
        recorder: AnswerRecorder | None = None,
        router: Router | None = None,
        feedback: FeedbackReceiver | None = None,
    ) -> None:
        self.config, self._router = config or GatewayConfig(), router
        self.models = {model.name: model for model in models}
        self.metrics = Metrics()
        self.num_open = 0  # requests that are not answered to their end
        self._short_bytes = _SHORT_BYTES
        self._recorder, self._feedback = recorder, feedback
        self._recorders = [one for one in (recorder, feedback) if one is not None]
        self._keys, self._draining, self._empty = keys, False, asyncio.Event()

    async def drain(self, deadline_s: float) -> None:
        """Refuse new requests with status 503, and wait until the running ones have ended, at most `deadline_s`
        seconds."""
        self._draining = True
        if self.num_open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await self._empty.wait()

    async def health(self, request: Request) -> Response:
        """Answer GET /health with status 200, or 503 while the gateway drains. No API key is needed."""
        status = "draining" if self._draining else "ok"
        return json_response({"status": status, "models": list(self.models)}, 503 if self._draining else 200)

    async def metrics_page(self, request: Request) -> Response:
        """Answer GET /metrics with the metrics for Prometheus."""
        self._admit(request)
        if self.metrics.registry is None:
            hint = "pip install 'etude[prometheus]'"
            raise RequestRefused(404, "metrics need prometheus_client", hint=hint, code="not_found")
        captured = {} if self._recorder is None else self._recorder.counts()
        page, content_type = self.metrics.page(
            {m.name: (m.num_running, m.num_waiting, m.num_forgotten) for m in self.models.values()},
            captured=captured,
            signals={} if self._feedback is None else self._feedback.counts(),
        )
        return Response(page, headers={"content-type": content_type})

    async def openapi(self, request: Request) -> Response:
        """Answer GET /openapi.json with the OpenAPI document of this gateway. No API key is needed."""
        feedback = None if self._feedback is None else self._feedback.bodies
        return json_response(document(list(self.models), has_keys=self._keys is not None, feedback=feedback))

    async def list_models(self, request: Request) -> Response:
        """Answer GET /v1/models with the served models. The body suits clients of OpenAI and of Anthropic."""

        async def work(request: Request, record: Record) -> Response:
            names = list(self.models)
            of_anthropic = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
            return json_response({"object": "list", "data": [_card(m) for m in self.models.values()], **of_anthropic})

        return await self._recorded(request, "models", work, limited=False, has_body=False)

    async def one_model(self, request: Request) -> Response:
        """Answer GET /v1/models/{name} with the model's description, or with 404 for another name."""

        async def work(request: Request, record: Record) -> Response:
            return json_response(_card(self._model(request.path_params["name"])))

        return await self._recorded(request, "models", work, limited=False, has_body=False)

    async def not_offered(self, request: Request, error: Exception) -> Response:
        """Answer a request for an unknown path (status 404), or with a method that its path does not support (405)."""
        record = Record(request.method[:20], "none", path=request.scope["path"][:200])
        response = no_route(request, error, record.request_id)
        set_request_id(response, record.request_id)
        record.end(response.status_code, self.metrics)
        return response

    async def complete(self, request: Request, name: str) -> Response:
        """Answer a request in the dialect `name` ("chat", "text", "responses" or "messages"): sample the answers and
        return the response."""
        return await self._recorded(request, name, partial(self._complete, dialect=DIALECTS[name]))

    async def count_tokens(self, request: Request) -> Response:
        """Answer POST /v1/messages/count_tokens with the number of tokens of the prompt in the body."""
        return await self._recorded(request, "count_tokens", self._count_tokens)

    async def feedback(self, request: Request) -> Response:
        """Answer POST /v1/feedback: accept signals about answers. They do not count for the limits of the key."""
        return await self._recorded(request, "feedback", self._take_signals, limited=False)

    async def _take_signals(self, request: Request, record: Record) -> Response:
        return await take_signals(self._feedback, request, sender(request, record))

    async def _recorded(
        self,
        request: Request,
        dialect: str,
        work: Callable[..., Any],
        *,
        limited: bool = True,
        has_body: bool = True,
    ) -> Response:
        """Run a handler, log and count its request, and keep it open until its response has ended.

        `limited`: whether the request counts for the limits of its key.
        `has_body`: whether it must have a JSON body."""
        record = Record(request.method, dialect)
        self.num_open += 1

        def end(status: int) -> None:
            if not record.ended:
                self.num_open -= 1
                record.end(status, self.metrics)
                if self._draining and not self.num_open:
                    self._empty.set()

        status = 500
        response: Response | None = None
        try:
            record.key = record.spent.key = self._admit(request)
            if self._draining:
                raise stopping()
            if record.key is not None and limited:
                record.key.add_request()
            if has_body and not request.headers.get("content-type", "").startswith("application/json"):
                given = request.headers.get("content-type", "")
                facts = f"its content-type is {given[:100]!r}" if given else "it has no content-type"
                hint, code = "send JSON, with the header content-type: application/json", "unsupported_media_type"
                raise RequestRefused(415, "the body is not marked as JSON", facts, hint=hint, code=code)
            async with asyncio.timeout(self.config.deadline_s):
                response = await work(request, record)
        except TimeoutError:
            response = error_response(request, self._timeout(), record.request_id)
        except asyncio.CancelledError:  # by the server, which waits no longer for running requests
            if not self._draining:
                raise
            response = error_response(request, stopping(), record.request_id)
        except ClientDisconnect:
            response = Response(status_code=499)
        except EtudeError as error:
            response = error_response(request, from_error(error), record.request_id)
        except Exception:  # noqa: BLE001
            logger.exception("a request failed")
            response = error_response(request, broken(), record.request_id)
        finally:
            if response is not None:
                status = response.status_code
                set_request_id(response, record.request_id)
            if isinstance(response, EventResponse):
                response.at_end = end
            else:
                end(status)
        return response

    async def _complete(self, request: Request, record: Record, dialect: Dialect) -> Response:
        parsed, model = await self._parsed(request, record, dialect.read)
        named = ""
        if self._feedback is not None:
            named = self._feedback.new_id(*sender(request, record), model.name, parsed.n)
        head = new_head(parsed, named)
        record.response_id = dialect.prefix + head.id
        if not parsed.stream:
            answers = await run_until_disconnect(request, model.answer(parsed, record.spent))
            if self._recorders:
                offer_answers(self._recorders, request, record, parsed, head, enumerate(answers))
            return json_response(dialect.body(parsed, head, answers))
        parts = model.stream(parsed, record.spent)
        if self._recorders:
            parts = offering(parts, partial(offer_answers, self._recorders, request, record, parsed, head))
        pump = EventPump(parts, dialect.stream(parsed, head, model.chat), record)
        gone = asyncio.create_task(disconnected(request))
        try:
            end = record.began + self.config.deadline_s
            first = await run_until(gone, pump.first(self.config.ping_s))  # an error here has a status
            return EventResponse(pump, first, gone, end=end, ping_s=self.config.ping_s, late=self._timeout())
        except BaseException:
            gone.cancel()
            await pump.close()
            raise

    async def _count_tokens(self, request: Request, record: Record) -> Response:
        parsed, model = await self._parsed(request, record, messages.read_count)
        return json_response({"input_tokens": await run_until_disconnect(request, model.count(parsed))})

    async def _parsed(
        self, request: Request, record: Record, read: Callable[[bytes], ChatRequest]
    ) -> tuple[ChatRequest, ServedModel]:
        body = await read_body(request, self.config.max_body_bytes, hint="send a shorter conversation, or fewer tools")

        def timed() -> tuple[ChatRequest, float]:
            began = time.thread_time()
            return read(body), time.thread_time() - began

        if len(body) <= _SHORT_BYTES:
            parsed = read(body)
        else:
            on_loop = len(body) <= self._short_bytes
            parsed, cpu_s = timed() if on_loop else await next(iter(self.models.values())).run_in_thread(timed)
            quick = min(_LONG_BYTES, 5 * len(body) // 4)
            self._short_bytes = max(self._short_bytes, quick) if cpu_s < _SHORT_S else _SHORT_BYTES
        check_names(parsed.tools)
        check_results(parsed.messages, parsed.prompt_field)
        wish = request.headers.get(SUMMARIES, "on").lower()
        if wish not in ("on", "off"):
            raise invalid_request(f"the header {SUMMARIES} is {wish[:100]!r}", hint="send on or off", param=SUMMARIES)
        if wish == "off":
            parsed = replace(parsed, summaries=False)
        model = self._model(parsed.model)
        subject = user_of(request) or (record.key.name if record.key is not None else "")
        if self._router is not None and subject:
            model = self.models[self._router(model.name, subject)]
        record.model = model.name
        return parsed, model

    def _timeout(self) -> RequestRefused:
        what = f"the answer was not complete within {self.config.deadline_s:g} s"
        return RequestRefused(504, what, hint="ask for fewer tokens, or try again later", code="timeout")

    def _admit(self, request: Request) -> KeyUse | None:
        """Check the API key. Without keys, check that the Host header is loopback.

        The second check refuses a web page whose host name resolves to this machine."""
        if self._keys is None:
            if not is_local(request):
                host = request.headers.get("host", "")
                facts = f"this gateway has no API keys, and the Host header is {host[:100]!r}"
                hint = "send requests to http://localhost:PORT, or start the gateway with a key (--key or --keys)"
                what = "only requests to this machine are answered"
                raise RequestRefused(403, what, facts, hint=hint, code="forbidden")
            return None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = request.headers.get("x-api-key", "")
        return self._keys.find(given.strip().encode("latin-1"))

    def _model(self, name: str) -> ServedModel:
        if name not in self.models:
            names = list(self.models)
            listed, hint = ", ".join(map(repr, names[:8])), nearest(name[:100], names)
            if not hint.startswith("did you mean"):
                hint = "send one of these names"
            if len(names) > 8:
                listed, hint = f"{listed} (8 of {len(names)})", f"{hint}; GET /v1/models lists all"
            what = f"The model {name[:100]!r} does not exist; served are {listed}."
            raise RequestRefused(404, what, hint=hint, code="model_not_found", param="model")
        return self.models[name]


def _card(model: ServedModel) -> dict[str, Any]:
    of_anthropic = {
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.datetime.fromtimestamp(model.created, datetime.UTC).isoformat(),
        "max_input_tokens": model.context_tokens,
    }
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "etude",
        "max_model_len": model.context_tokens,
        **of_anthropic,
    }

"""Implements `seams.Engine` for a vLLM or SGLang server.

Everything runs in one event loop. Requests are passed on as they arrive; the server batches, orders and preempts them.
This module adds what etude's protocol needs and the server lacks: the version that a request demands, sessions that pin
a version, deadlines, a bound on requests, and the version of each token. A swap of weights (`weight_sync`) holds back
new requests while it writes. Running requests keep their KV cache, and their spans record that. A request that demands
a later version than the one swapped in (after a lost learner) fails.

All responses are streamed, since arriving tokens show that the server makes progress: a request is late when no token
of any request has arrived for its `deadline_s`. A server sends nothing while it computes prompts, so prompts extend the
deadline."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from etude.errors import EngineError, MalformedRequest
from etude.inference.admission import RequestChecks, VersionPins, behind
from etude.inference.config import EngineConfig
from etude.inference.errors import EngineBusy, EngineLate, InvalidGrammar
from etude.inference.external import answers
from etude.inference.external.answers import AnswerPart
from etude.inference.external.client import CONTROL_S, RouteSource, ServerClient
from etude.inference.metrics import Counters, exposition
from etude.models.config import ModelConfig
from etude.records.completion import Completion, CompletionRequest, Sampling, Traffic, Version
from etude.records.wire import Routes
from etude.seams import EngineInfo

CAPABILITIES = ("adopt", "pause-keep", "spans", "stream", "verify")  # and "routes" when available
MAX_VERSIONS = 4096  # remembered adoptions; a request must not live through more
PIN_POLL_S = 0.02  # interval at which a swap checks for pinned sessions
READ_TOKENS_PER_S = 100.0  # prompt tokens per second of a slow server
TRIAL_S = 300.0  # deadline of the first request: a server still loads much for it, which takes minutes on a busy host


@dataclass
class _SentRequest:
    """A request that was sent to the server: the adoption in force, its id there, and its state."""

    adoption: int
    name: str
    active: _ActiveRequest


@dataclass(eq=False)
class _ActiveRequest:
    request: CompletionRequest
    timeout: asyncio.Timeout  # expires without progress, or when `outdated`
    arrived: float
    unread: int  # tokens of its prompt, until its first token arrives
    outdated: bool = False
    ended: bool = False  # by the caller, before its last token
    next_check: asyncio.TimerHandle | None = None


class ExternalEngine:
    """An engine that serves with the vLLM or SGLang server of `client`.

    It implements `seams.Engine`, `seams.Streaming` and `seams.Ending`.

    Call `start` first. `version` is the version that the server has loaded, `kv_tokens` the size of its KV cache in
    tokens, and `parity` the class of processes that compute the same bits."""

    def __init__(
        self,
        client: ServerClient,
        *,
        name: str,
        model: ModelConfig,
        config: EngineConfig,
        version: Version,
        kv_tokens: int,
        parity: str,
    ) -> None:
        self.name, self.config, self.version, self.kv_tokens, self.parity = name, config, version, kv_tokens, parity
        self.counters, self.trouble, self.routes = Counters(), "", RouteSource()
        self.model, self.client, self._dialect = model, client, client.dialect
        self._checks = RequestChecks(name, model.vocab_size, config.context_tokens)
        self._pins = VersionPins(lease_s=config.pin_lease_s)
        self._versions, self.adoption = {0: version}, 0
        self._salt = uuid.uuid4().hex[:8]
        self._num = Counter[Traffic]()  # requests by class
        self._tokens = 0  # tokens of these requests, including those still to sample
        self._active = set[_ActiveRequest]()
        self._sent: dict[str, _SentRequest] = {}  # streamed requests by their id
        self._last_progress = time.monotonic()  # when the latest token arrived or swap ended, monotonic
        self._paused = self._swapping = False
        self._accepting = asyncio.Event()  # cleared during a swap
        self._accepting.set()
        self._scoring = asyncio.Lock()  # held while a text is scored, and during a swap
        self._version_changed = asyncio.Condition()
        self._last_healthy = time.monotonic()

    async def start(self) -> None:
        """Make the server label each token with the weights that sampled it, and test it with a trial request.

        Raises `EngineError` when the server lacks a capability that every engine needs."""
        await self._label()
        self.routes = await self.client.route_source(self.model.num_moe_layers)
        prompt, num_tokens = list(range(1, min(8, self.model.vocab_size))), 3
        trial = await self.generate(_trial(prompt, num_tokens, self.version))
        version, logprobs = await self.verify(prompt)
        if self.routes.available and answers.any_missing(trial.routes):
            self.routes = RouteSource(missing="the trial request returned no routes")
        if version != self.version or len(logprobs) != len(prompt) - 1 or len(trial.token_ids) != num_tokens:
            raise EngineError(
                f"{self.name} lacks a capability that every engine needs",
                f"the trial gave {len(trial.token_ids)} of {num_tokens} tokens, {len(logprobs)} of {len(prompt) - 1} "
                f"log-probabilities, and version {version}",
                hint=f"test this installation: etude engines check {self.client.server.lower()}",
            )
        self.counters = Counters()

    # seams.Engine

    async def generate(self, request: CompletionRequest) -> Completion:
        """Sample a completion for the request, under the contract of `seams.Engine.generate`.

        Also raises `MalformedRequest` for an invalid request, and `EngineBusy` when the queue is full."""
        return await self._serve(request, None)

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[list[int] | Completion]:
        """Sample a completion and yield lists of token ids as they are sampled, at the end the `Completion`.

        Closing the generator early cancels the request."""
        parts: asyncio.Queue[list[int] | None] = asyncio.Queue()  # at most one part per token
        work = asyncio.ensure_future(self._serve(request, parts.put_nowait))
        work.add_done_callback(lambda _: parts.put_nowait(None))
        try:
            while (ids := await parts.get()) is not None:
                yield ids
            yield work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def end(self, request_id: str) -> None:
        if (sent := self._sent.get(request_id)) is not None:
            sent.active.ended = True
            with contextlib.suppress(EngineError):
                await self.client.end(sent.name)

    async def pause(self) -> None:
        self._paused = True
        await self.freeze()

    async def resume(self) -> None:
        self._paused = False
        if self._accepting.is_set():  # otherwise the running swap resumes
            await self.thaw()

    async def adopt(self, min_step: int, *, deadline_s: float) -> Version:
        """Wait until the server has a version of at least step `min_step`, and return its version.

        An `ExternalWeightSync` fetches the versions and swaps them in. Raises `EngineError` after `deadline_s`
        seconds."""
        try:
            async with asyncio.timeout(deadline_s), self._version_changed:
                await self._version_changed.wait_for(lambda: self.version.step >= min_step)
                return self.version
        except TimeoutError:
            raise EngineError(
                f"{self.name} did not reach step {min_step} within {deadline_s:g} s",
                f"its version is {self.version}{'; ' + self.trouble if self.trouble else ''}",
                hint="check that the learner published this step; if it did, see the engine's log",
            ) from None

    async def hold(self, seconds: float) -> Version:
        """Raise `MalformedRequest`: an external engine cannot keep a version.

        The server could not score texts while a newer version waits to be loaded."""
        facts = f"{self.name} serves with {self.client.server}"
        hint = "send the request to an engine of kind reference"
        raise MalformedRequest("only reference engines can hold a version", facts, hint=hint)

    async def info(self, *, deadline_s: float = 5.0) -> EngineInfo:
        """Return the current state and load. Never waits for the server, so a hanging one can still be inspected."""
        running = min(self.num_requests, self.config.max_sequences)
        return EngineInfo(
            name=self.name,
            version=self.version,
            paused=self._paused,
            context_tokens=self.config.context_tokens,
            max_sequences=self.config.max_sequences,
            num_running=running,
            num_waiting=self.num_requests - running,
            kv_tokens_free=max(0, self.kv_tokens - self._tokens),
            capabilities=(*CAPABILITIES, "routes") if self.routes.available else CAPABILITIES,
            parity=self.parity,
            trouble=self.trouble,
        )

    async def verify(self, token_ids: Sequence[int]) -> tuple[Version, list[float]]:
        ids = self._checks.text(token_ids)
        async with self._scoring:
            body = self._dialect.encode_scoring_request(ids, f"text-{uuid.uuid4().hex}", salt=self._cache_salt())
            status, data = await self.client.post(self._dialect.GENERATE, body, deadline_s=CONTROL_S)
            if status != 200:
                raise answers.read_error(self.client.server, status, data, engine=self.name)
            adoption, logprobs = self._dialect.read_scores(data, ids, engine=self.name)
            if adoption not in self._versions:
                raise self._broken(f"a text of adoption {adoption}, which is not known")
            return self._versions[adoption], logprobs

    # app.ServedEngine

    @property
    def alive(self) -> bool:
        """Whether the server runs."""
        return self.client.alive

    @property
    def stalled_s(self) -> float:
        """Seconds since the last successful `check_health`."""
        return time.monotonic() - self._last_healthy

    async def check_health(self, *, deadline_s: float) -> None:
        """Send a health check to the server, and record the time if it succeeds."""
        with contextlib.suppress(EngineError):
            if (await self.client.get("/health", deadline_s=deadline_s))[0] == 200:
                self._last_healthy = time.monotonic()

    async def metrics(self) -> str:
        """Return the engine's metrics, then the server's own, in Prometheus' format."""
        own_metrics = exposition(self.counters, await self.info())
        try:
            status, server_metrics = await self.client.get("/metrics", deadline_s=5.0)
        except EngineError:
            return own_metrics
        return own_metrics + server_metrics.decode(errors="replace") if status == 200 else own_metrics

    # for `weight_sync`

    @contextlib.asynccontextmanager
    async def swapping(self) -> AsyncIterator[None]:
        """Context manager that stops decoding while its block replaces the weights and calls `set_version`.

        It first waits until no session pins the version. New requests wait until the block ends, then decoding
        continues. When the block raises, the engine stays frozen, since the weights may be a mix of two versions."""
        async with self._scoring:
            while self._pins.held(now=time.monotonic()):  # noqa: ASYNC110 - leases expire by the clock
                await asyncio.sleep(PIN_POLL_S)
            self._accepting.clear()
            self._swapping = True
            try:
                await self.freeze()
                yield
                await self._label()
                if not self._paused:
                    await self.thaw()
                self._accepting.set()
            finally:
                self._swapping, self._last_progress = False, time.monotonic()
        async with self._version_changed:
            self._version_changed.notify_all()

    def set_version(self, version: Version) -> None:
        """Set the version of the weights. Call it only inside a `swapping` block.

        Requests in the engine that demand a later version fail."""
        self.adoption, self.version = self.adoption + 1, version
        self._versions[self.adoption] = version
        self._versions.pop(self.adoption - MAX_VERSIONS, None)
        self.counters.swaps += 1
        for active in self._active:
            if active.request.min_step > version.step:
                active.outdated = True
                if not active.timeout.expired():
                    active.timeout.reschedule(asyncio.get_running_loop().time())

    @property
    def num_requests(self) -> int:
        """The number of requests in this engine, running or waiting."""
        return self._num.total()

    async def freeze(self) -> None:
        """Stop decoding. Running requests keep their KV cache."""
        await self.client.freeze()

    async def thaw(self) -> None:
        """Continue decoding after `freeze`."""
        await self.client.thaw()

    # one request

    async def _serve(self, request: CompletionRequest, on_tokens: Callable[[list[int]], None] | None) -> Completion:
        async with self._admit(request) as sent:
            answer = answers.JoinedAnswer()
            if on_tokens is not None:
                self._sent[request.request_id] = sent
            try:
                async with contextlib.aclosing(self._answer_parts(request, sent)) as answer_parts:
                    async for part in answer_parts:
                        self._last_progress, sent.active.unread = time.monotonic(), 0
                        answer.add(part)
                        if on_tokens is not None and part.token_ids:
                            on_tokens(part.token_ids)
            finally:
                self._sent.pop(request.request_id, None)
            return await self._finish(request, sent, answer.part)

    @contextlib.asynccontextmanager
    async def _admit(self, request: CompletionRequest) -> AsyncIterator[_SentRequest]:
        """Admit a request and count it while the block runs.

        Raises `EngineBusy`, `EngineBehind`, `EngineLate`, and what the checks raise."""
        self._checks.request(request)
        num_requests = self._num[request.traffic]
        if num_requests >= self.config.max_sequences + self.config.max_waiting:
            facts = f"it has {num_requests} requests of {request.traffic}"
            raise EngineBusy(f"{self.name} is full", facts, hint="send it to another engine, or again later")
        num_tokens = len(request.prompt_ids) + request.sampling.max_tokens
        self._num[request.traffic] += 1
        self._tokens += num_tokens
        pinned = done = False
        active = _ActiveRequest(request, asyncio.timeout(None), time.monotonic(), len(request.prompt_ids))
        self._active.add(active)
        try:
            async with active.timeout:
                self._check_progress(active)
                while not self._accepting.is_set():
                    await self._accepting.wait()
                self._checks.version(request, self.version)
                if request.pin_step is not None:
                    self._pins.enter(request.session_id)
                    pinned = True
                wants = request.routes_from is not None and self.routes.kept
                name = f"{answers.ROUTES_PREFIX}.{uuid.uuid4().hex}" if wants else uuid.uuid4().hex
                yield _SentRequest(self.adoption, name, active)
                done = True
        except TimeoutError:
            if active.outdated:
                raise behind(request, self.name, self.version) from None
            raise EngineLate(
                f"request {request.request_id} passed its deadline of {request.deadline_s:g} s without a token",
                f"{self.name} has {self.num_requests} requests{', and is paused' if self._paused else ''}",
                hint="resume the engine if it is paused, restart it if it hangs, or raise the request's deadline_s",
            ) from None
        finally:
            self._active.discard(active)
            if active.next_check is not None:
                active.next_check.cancel()
            self._num[request.traffic] -= 1
            self._tokens -= num_tokens
            self.counters.requests += done
            self.counters.production_requests += done and request.traffic is Traffic.PRODUCTION
            self.counters.failed += not done
            if pinned:
                self._pins.leave(request.session_id, now=time.monotonic(), may_return=request.keep_session)

    def _check_progress(self, active: _ActiveRequest) -> None:
        """Expire a request without progress; otherwise schedule the next check."""
        now, timeout_s = time.monotonic(), active.request.deadline_s
        timeout_s += sum(one.unread for one in self._active) / READ_TOKENS_PER_S
        since = now if self._swapping else max(active.arrived, self._last_progress)
        loop = asyncio.get_running_loop()
        if now - since >= timeout_s:
            active.timeout.reschedule(loop.time())
        else:
            active.next_check = loop.call_later(since + timeout_s - now + PIN_POLL_S, self._check_progress, active)

    async def _answer_parts(self, request: CompletionRequest, sent: _SentRequest) -> AsyncGenerator[AnswerPart]:
        """Send a request to the server and yield the parts of its response."""
        dialect, native, done = self._dialect, self.routes.native, False
        body = dialect.encode_request(request, sent.name, salt=self._cache_salt(), native_routes=native)
        try:
            async with self.client.answer(dialect.GENERATE, body, deadline_s=None) as answer:
                if answer.status != 200:
                    error = answers.read_error(self.client.server, answer.status, await answer.read(), engine=self.name)
                    raise _explained(error, request)
                async for line in answer.content:
                    if done := answers.is_end(line):
                        return
                    if (part := self._read_event(line, request)) is not None:
                        yield part
                raise self._broken("a stream without an end")
        finally:
            if not done:
                self.client.forget(sent.name)

    def _read_event(self, line: bytes, request: CompletionRequest) -> AnswerPart | None:
        """Parse one line of the response to a request.

        Raises `EngineError`, and `InvalidGrammar` if the server refused or could not follow the request's grammar.
        Another engine would fail, too."""
        try:
            return self._dialect.read_event(line, engine=self.name)
        except EngineError as error:
            raise _explained(error, request) from None

    async def _finish(self, request: CompletionRequest, sent: _SentRequest, answer: AnswerPart) -> Completion:
        if answer.finish_reason == "abort" and not sent.active.ended:
            what = f"{self.client.server} of {self.name} aborted request {request.request_id}"
            hint = "send it again; the engine's log may say why it was aborted"
            raise EngineError(what, answer.message, hint=hint)
        routes = await self._routes(request, sent, answer)
        self.counters.tokens += len(answer.token_ids)
        self.counters.production_tokens += len(answer.token_ids) * (request.traffic is Traffic.PRODUCTION)
        self.counters.cached_requests += answer.num_cached > 0
        self.counters.cached_tokens += answer.num_cached
        self.counters.prefill_tokens += len(request.prompt_ids) - answer.num_cached
        return answers.make_completion(
            request,
            answer,
            server=self.client.server,
            engine=self.name,
            versions=self._versions,
            adoption=sent.adoption,
            routes=routes,
        )

    async def _routes(self, request: CompletionRequest, sent: _SentRequest, answer: AnswerPart) -> Routes:
        start, stop = request.routes_from, len(request.prompt_ids) + len(answer.token_ids) - 1
        if start is None:
            return answers.decode_kept_routes(None, self.model, start=stop, stop=stop)
        data = await self.client.take_routes(sent.name) if self.routes.kept else None
        try:
            if self.routes.native:
                return self._dialect.decode_routes(answer.routed, self.model, count=stop - start)
            return answers.decode_kept_routes(data, self.model, start=start, stop=stop)
        except ValueError as error:
            raise self._broken(str(error)) from None

    def _broken(self, facts: str) -> EngineError:
        return answers.broken_answer(self.client.server, self.name, facts)

    async def _label(self) -> None:
        """Have the server label tokens with the number of the current adoption."""
        await self.client.label(str(self.adoption))

    def _cache_salt(self) -> str:
        """Return the cache salt of the current adoption: requests share cached prefixes only within one adoption."""
        return f"{self._salt}-{self.adoption}"


_OF_GRAMMARS = re.compile(r"grammar|schema|regex|structured|guid(ed|ance)|constrain", re.IGNORECASE)
"""Words of which vLLM and SGLang write one when they refuse a request for its grammar."""


def _explained(error: EngineError, request: CompletionRequest) -> EngineError:
    """Return the error of a request that a server refused or failed: `InvalidGrammar` if its grammar is the cause."""
    if request.sampling.grammar and isinstance(error, MalformedRequest) and _OF_GRAMMARS.search(error.facts):
        hint = "simplify the grammar; or start the server with its tokeniser: see docs/guides/sampling.md"
        return InvalidGrammar(error.what, error.facts, hint=hint)
    if request.sampling.grammar and error.facts == answers.FAILED:
        what = f"the engine failed to follow the grammar of request {request.request_id}"
        hint = "simplify the grammar, or send the request without it"
        return InvalidGrammar(what, f"{error.what}: {error.facts}", hint=hint)
    return error


def _trial(prompt: list[int], num_tokens: int, held: Version) -> CompletionRequest:
    sampling = Sampling(max_tokens=num_tokens, stop_token_ids=())
    ids = np.array(prompt, np.int32)
    return CompletionRequest(
        request_id="trial",
        session_id="trial",
        prompt_ids=ids,
        sampling=sampling,
        min_step=held.step,
        deadline_s=TRIAL_S,
    )

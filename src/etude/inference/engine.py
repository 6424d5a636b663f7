"""The reference engine: one thread (`step_thread`) computes the model, behind the asyncio interface `seams.Engine`.

Only this thread uses the scheduler, the KV cache and the weights. So pauses, swaps of weights and cancellations happen
between two tokens. A swap waits until no session pins the current version (`admission.VersionPins`).

A request is late when the engine has made no step for the request's `deadline_s`. A request that is being computed, or
waits while others are, is not late, however slow the steps are. The thread drops a late request with an error that says
in which phase it was. If the thread itself hangs, the waiting coroutine raises an error with the time since its last
step."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from etude.errors import EngineError, MalformedRequest, WeightsError
from etude.inference.admission import RequestChecks, VersionPins, behind
from etude.inference.compiled_grammars import CompiledGrammars
from etude.inference.config import EngineConfig, Speculation
from etude.inference.device_runner import runner_for
from etude.inference.look_up import Drafter
from etude.inference.metrics import Counters, exposition
from etude.inference.operator_trace import as_wire, engine_results
from etude.inference.ranks import Ranks
from etude.inference.runner import Runner
from etude.inference.scheduler import Plan, Scheduler
from etude.inference.scheduler import Sequence as Running
from etude.inference.shaping import Shaping
from etude.inference.speculation import Speculator, drafter_for
from etude.inference.step_thread import StepThread, fail
from etude.inference.wire import OperatorResult
from etude.models import Transformer
from etude.records.completion import Completion, CompletionRequest, StopReason, Version
from etude.records.wire import Routes
from etude.seams import EngineInfo
from etude.weights.follow.targets import Swap

T = TypeVar("T")

CAPABILITIES = ("adopt", "pause-keep", "routes", "spans", "stream", "verify")  # "exact" is added for exact operators
GRACE_S = 0.5  # after a request's deadline, so that a thread that does not hang reports it first


@dataclass(frozen=True)
class SwapResult:
    """The result of replacing an engine's weights (`ReferenceEngine.swap`).

    `version` is the new version. `pause_s` is how long the engine could not run a step because of the swap, in seconds.
    `num_running` is the number of requests that were running at that time."""

    version: Version
    pause_s: float
    num_running: int


class ReferenceEngine:
    """etude's own inference engine: serves a model in this process. It implements `seams.Engine`, `seams.Streaming`
    and `seams.Ending`.

    Use it as an async context manager, or call `start` and `close`. From `start` on, nothing else may use the model.
    Its weights may be replaced by `swap` only. The attribute `version` identifies the weights that the model has now.
    `tokenizer` is the tokenizer.json of the checkpoint, which grammars need. With `share_prefixes` False no KV is
    reused and every prompt is computed completely, for comparisons. `drafter` replaces the drafter that `config` names.
    `ranks`: the other ranks, if `model` is rank 0's part of one; the engine closes them.
    Raises `EngineError` when the context of `config` is longer than the model's."""

    def __init__(
        self,
        model: Transformer,
        *,
        version: Version,
        name: str = "engine",
        config: EngineConfig | None = None,
        tokenizer: Path | None = None,
        share_prefixes: bool = True,
        drafter: Drafter | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.name, self.version, self.config = name, version, config or EngineConfig()
        self._ranks = ranks
        if self.config.context_tokens > model.config.context_tokens:
            raise EngineError(
                f"context_tokens = {self.config.context_tokens} of the engine is too large",
                f"the model has positions for {model.config.context_tokens} tokens",
                hint="lower context_tokens (option --context-tokens N), or use a model with a longer context",
            )
        if model.config.linear_layers and (drafter or self.config.speculation is not Speculation.OFF):
            raise EngineError(
                f"engine.speculation = {str(self.config.speculation)!r} is not possible",
                f"the model, a {model.config.family}, has gated delta layers: rejected tokens cannot be removed from "
                "their states",
                hint="set engine.speculation = 'off'",
            )
        self.counters = Counters()
        self.trouble = ""  # why the latest adoption failed; "" when it did not fail
        self._checks = RequestChecks(name, model.config.vocab_size, self.config.context_tokens)
        self._grammars = CompiledGrammars(name, tokenizer, vocab_size=model.config.vocab_size)
        self._scheduler = Scheduler(
            num_slots=self.config.max_sequences,
            context_tokens=self.config.context_tokens,
            chunk_tokens=self.config.chunk_tokens,
            step_tokens=self.config.step_tokens,
            max_waiting=self.config.max_waiting,
            share=share_prefixes,
            grain=self.config.chunk_tokens if model.config.linear_layers else 1,
            on_preempt=self._keep,
        )
        slots, length = self.config.max_sequences, self.config.context_tokens
        drafts = drafter is None and self.config.speculation is Speculation.HEADS
        every = self.config.chunk_tokens if share_prefixes else 0
        self._runner = runner_for(model, num_slots=slots, context_tokens=length, drafts=drafts, state_every=every)
        heads = self._runner.heads if isinstance(self._runner, Runner) else None
        chosen = drafter or heads or drafter_for(self.config.speculation)
        self._speculator = Speculator(chosen, num_slots=slots, vocab_size=model.config.vocab_size) if chosen else None
        self.capabilities = (*CAPABILITIES, "exact") if model.operators.exact else CAPABILITIES
        self.parity = model.parity
        self._pins = VersionPins(lease_s=self.config.pin_lease_s)
        self._paused = False
        self._stepped = time.monotonic()  # end of the latest step or swap, monotonic
        self._swaps: deque[tuple[Swap, Future[SwapResult]]] = deque()
        self._awaiting: list[tuple[int, Future[Version]]] = []  # (step, future)
        max_calls = self.config.max_waiting + self.config.max_sequences
        self._thread = StepThread(name, self._advance, self._fail_all, max_calls=max_calls)

    def start(self) -> None:
        """Start the thread that computes."""
        self._thread.start()

    def close(self) -> None:
        """Fail the running requests and stop the thread. Further calls of `close` do nothing.

        Raises `EngineError` when the thread does not end."""
        self._grammars.close()
        self._thread.close()
        if self._ranks is not None:
            self._ranks.close()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def alive(self) -> bool:
        """Whether the thread that computes runs."""
        return self._thread.alive

    @property
    def stalled_s(self) -> float:
        """Seconds since the thread last started a loop iteration."""
        return self._thread.stalled_s

    async def generate(self, request: CompletionRequest) -> Completion:
        """Sample a completion for the request, under the contract of `seams.Engine.generate`.

        Also raises `MalformedRequest` for an invalid request, and `EngineBusy` when the queue is full."""
        return await self._serve(await self._running(request))

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[list[int] | Completion]:
        """Sample a completion and yield lists of token ids as they are sampled, at the end the `Completion`.

        Closing the generator early cancels the request."""
        running, new_tokens = await self._running(request), asyncio.Event()
        running.on_tokens = functools.partial(_notify, asyncio.get_running_loop(), new_tokens)
        work = asyncio.ensure_future(self._serve(running))
        work.add_done_callback(lambda _: new_tokens.set())
        num_sent = 0
        try:
            while not work.done():
                await new_tokens.wait()
                new_tokens.clear()
                if ids := running.token_ids[num_sent:]:
                    num_sent += len(ids)
                    yield ids
            completion = work.result()
            if len(completion.token_ids) > num_sent:
                yield completion.token_ids[num_sent:].tolist()
            yield completion
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def end(self, request_id: str) -> None:
        with contextlib.suppress(EngineError):
            await self._thread.call(lambda: self._end(request_id), "end")

    async def _running(self, request: CompletionRequest) -> Running:
        """Check a request and compile its grammar."""
        self._checks.request(request)
        sampling = request.sampling
        if sampling.plain:
            return Running(request, arrived=time.monotonic())
        matcher = await self._grammars.matcher(request)
        shaping = Shaping(request, matcher, vocab_size=self._checks.vocab_size)
        return Running(request, arrived=time.monotonic(), shaping=shaping)

    async def _serve(self, running: Running) -> Completion:
        request = running.request
        self._thread.post(lambda: self._submit(running), running.future)
        work, timeout_s = asyncio.wrap_future(running.future), request.deadline_s + GRACE_S
        try:
            while not (await asyncio.wait({work}, timeout=timeout_s))[0]:
                if self._thread.stalled_s >= request.deadline_s:
                    what = f"request {request.request_id} passed its deadline of {request.deadline_s:g} s"
                    raise self._thread.hang_error(what)
            return work.result()
        finally:
            work.cancel()

    async def pause(self) -> None:
        await self._thread.call(lambda: setattr(self, "_paused", True), "pause")

    async def resume(self) -> None:
        await self._thread.call(lambda: setattr(self, "_paused", False), "resume")

    async def adopt(self, min_step: int, *, deadline_s: float) -> Version:
        """Wait until the engine has a version of at least step `min_step`, and return its version.

        A `weight_sync.WeightSync` fetches the versions and swaps them in. Raises `EngineError` after `deadline_s`
        seconds."""
        future: Future[Version] = Future()
        self._thread.post(lambda: self._await_step(min_step, future), future)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), deadline_s)
        except TimeoutError:
            held = "; a newer one waits for sessions that pin it" if self._swaps else ""
            raise EngineError(
                f"{self.name} did not reach step {min_step} within {deadline_s:g} s",
                f"its version is {self.version}{held}{'; ' + self.trouble if self.trouble else ''}",
                hint="check that the learner published this step; if it did, see the engine's log",
            ) from None

    async def info(self, *, deadline_s: float = 5.0) -> EngineInfo:
        """Return the current state and load. Does not wait for the thread, so a hung engine responds too."""
        return EngineInfo(
            name=self.name,
            version=self.version,
            paused=self._paused,
            context_tokens=self.config.context_tokens,
            max_sequences=self.config.max_sequences,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_tokens_free=self._scheduler.slots.num_available * self.config.context_tokens,
            capabilities=self.capabilities,
            parity=self.parity,
            trouble=self.trouble,
        )

    async def metrics(self) -> str:
        return exposition(self.counters, await self.info())

    async def hold(self, seconds: float) -> Version:
        """Keep the loaded version for the next `seconds`, and return it. Each call replaces the time of the last one; 0
        allows new versions at once."""

        def work() -> Version:
            self._pins.hold(until=time.monotonic() + seconds)
            return self.version

        return await self._thread.call(work, "hold")

    async def verify(self, token_ids: Sequence[int]) -> tuple[Version, list[float]]:
        """Return the loaded version, and the log-probability of each token of a text except the first.

        Raises `MalformedRequest` for invalid token ids."""
        ids = self._checks.text(token_ids)
        return await self._thread.call(lambda: (self.version, self._score(ids)), "verify")

    async def operators(self, token_ids: Sequence[int], *, prompt_tokens: int) -> list[OperatorResult]:
        """Compute a text and return the results of every operator of the model.

        An operator is for example a norm or a matrix product. The first `prompt_tokens` of `token_ids` are computed as
        a prompt, the others one by one. Requests wait meanwhile. Raises `MalformedRequest` for invalid arguments."""
        self._checks.ids(np.array(token_ids), min_tokens=2, max_tokens=self.config.context_tokens)
        if self._ranks is not None:
            raise MalformedRequest(
                f"{self.name} does not return the results of its operators",
                "each rank computes only a part of them",
                hint="ask an engine with engine.tensor_parallel = 1",
            )
        if not 1 <= prompt_tokens <= len(token_ids):
            raise MalformedRequest(
                f"prompt_tokens = {prompt_tokens} is invalid",
                f"the text has {len(token_ids)} tokens",
                hint=f"give a number from 1 to {len(token_ids)}",
            )
        return await self._thread.call(
            lambda: as_wire(engine_results(self._runner.model, token_ids, prompt_tokens=prompt_tokens)),
            "operators",
        )

    def swap(self, swap: Swap) -> Future[SwapResult]:
        """Replace the weights by a prepared version, between two steps. Waits until no session pins the current
        version.

        May be called from any thread.

        If a write fails, it is undone: the future gets the error, and the engine serves the old version. If undoing
        fails too, the engine stops, since its weights are then a mix of two versions."""
        future: Future[SwapResult] = Future()
        self._thread.post(lambda: self._swaps.append((swap, future)), future)
        return future

    def between_steps(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` on the engine's thread before its next step, and return a future of its result.

        May be called from any thread."""
        return self._thread.between_steps(call)

    # The methods from here on run on the thread.

    def _advance(self) -> bool:
        if self._ranks is not None:
            self._ranks.check()
        self._apply_swaps()
        for gone in self._scheduler.remove_departed(time.monotonic(), stepped=self._stepped):
            self._count_end(gone, failed=True)
        plan = Plan([], []) if self._paused else self._scheduler.plan()
        if plan:
            self._step(plan)
        return bool(plan)

    def _step(self, plan: Plan) -> None:
        begin, counters = time.perf_counter(), self.counters
        if self._speculator is not None:
            plan = self._speculator.with_drafts(plan)
        for chunk in plan.chunks:
            counters.prefill_tokens += chunk.stop - chunk.start
            if chunk.start == chunk.sequence.num_cached > 0:
                counters.cached_requests += 1
                counters.cached_tokens += chunk.start
        with self._computing_together(lambda ranks: ranks.step(plan)):
            sampled = self._runner.step(plan)
        if self._speculator is not None:
            self._speculator.record(plan, time.perf_counter() - begin)
        for draft in plan.drafts:
            counters.drafted_tokens += draft.num_drafted
            counters.accepted_tokens += draft.num_accepted
            counters.tokens += draft.num_accepted
            counters.production_tokens += draft.num_accepted * draft.sequence.production
        counters.tokens += len(sampled)
        counters.steps += 1
        counters.rollouts_preempted = self._scheduler.num_preempted
        for running in sampled:
            if running.production:
                counters.production_tokens += 1
                if len(running.token_ids) == 1:
                    counters.production_wait_s += time.monotonic() - running.arrived
            if running.shaping is not None and running.shaping.failure is not None:
                self._scheduler.finish(running)
                self._count_end(running, failed=True)
                fail(running.future, running.shaping.failure)
            elif running.finished:
                self._finish(running)
            elif running.on_tokens is not None:
                running.on_tokens()
        counters.busy_s += time.perf_counter() - begin
        self._stepped = time.monotonic()

    def _score(self, token_ids: list[int]) -> list[float]:
        with self._computing_together(lambda ranks: ranks.score(token_ids)):
            return self._runner.score(token_ids)

    def _computing_together(self, tell: Callable[[Ranks], None]) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for a forward pass of all ranks, after `tell` has told the others of it."""
        if self._ranks is None:
            return contextlib.nullcontext()
        tell(self._ranks)
        return self._ranks.watched()

    def _submit(self, running: Running) -> None:
        request = running.request
        try:
            self._checks.version(request, self.version)
            self._scheduler.submit(running)
        except EngineError as error:
            self.counters.failed += 1
            fail(running.future, error)
            return
        if request.pin_step is not None:
            self._pins.enter(request.session_id)

    def _end(self, request_id: str) -> None:
        """Complete a streamed request with the tokens that it has."""
        for running in (*self._scheduler.running, *self._scheduler.waiting):
            streamed = running.on_tokens is not None and not running.future.cancelled()
            if streamed and running.token_ids and running.request.request_id == request_id:
                self._finish(running)

    def _keep(self, running: Running) -> None:
        """Keep what a rollout has sampled and loses with its slot: the routes, and the version of the tokens."""
        if running.token_ids:
            running.kept_routes = self._routes(running)
            running.close_span(self.version)

    def _routes(self, running: Running) -> Routes:
        """Return the routes that a request wants. Each token has those with which it was sampled, also if its keys were
        computed again by other weights."""
        kept = running.kept_routes
        now = self._runner.routes(running) if running.slot is not None else kept
        assert now is not None, "a request that waits and has tokens was preempted"
        return now if kept is None else np.concatenate([kept, now[len(kept) :]])

    def _finish(self, running: Running, *, cut: bool = False) -> None:
        """Complete a request. `cut`: the engine ends it, and another one can go on."""
        request, ids = running.request, running.token_ids
        if len(ids) > running.num_spanned:
            running.close_span(self.version)
        routes = self._routes(running)
        reason = StopReason.STOP if ids[-1] in request.sampling.stop_token_ids else StopReason.LENGTH
        completion = Completion(
            request_id=request.request_id,
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(running.logprobs, np.float32),
            routes=routes,
            routes_start=running.num_prompt + len(ids) - 1 - len(routes),
            spans=tuple(running.spans),
            stop_reason=StopReason.CANCELLED if cut else reason,
            engine=self.name,
            num_cached=min(running.num_cached, running.num_prompt),
            **_likeliest(running),
        )
        self._scheduler.finish(running)
        self._count_end(running, failed=False)
        if running.future.set_running_or_notify_cancel():
            running.future.set_result(completion)

    def _count_end(self, running: Running, *, failed: bool) -> None:
        request = running.request
        self.counters.failed += failed
        self.counters.requests += not failed
        self.counters.production_requests += running.production and not failed
        if request.pin_step is not None:
            self._pins.leave(request.session_id, now=time.monotonic(), may_return=request.keep_session)

    def _apply_swaps(self) -> None:
        while self._swaps and not self._pins.held(now=time.monotonic()):
            swap, future = self._swaps.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            begin = time.perf_counter()
            try:
                swap.apply()
                self._runner.synchronize()
            except WeightsError as error:
                future.set_exception(error)
                if swap.applied:
                    raise
                continue
            if swap.version.incarnation == self.version.incarnation:
                self._end_outdated(swap.version.step)
            self._scheduler.swapped(self.version)
            self.version = swap.version
            for gone in self._scheduler.remove_outdated(self.version.step):
                self._count_end(gone, failed=True)
                fail(gone.future, behind(gone.request, self.name, self.version))
            pause_s, self._stepped = time.perf_counter() - begin, time.monotonic()
            self.counters.swaps += 1
            future.set_result(SwapResult(swap.version, pause_s, len(self._scheduler.running)))
            reached = [f for step, f in self._awaiting if self.version.step >= step]
            self._awaiting = [(step, f) for step, f in self._awaiting if self.version.step < step and not f.done()]
            for waiter in reached:
                if waiter.set_running_or_notify_cancel():
                    waiter.set_result(self.version)

    def _end_outdated(self, step: int) -> None:
        """Complete the plain requests that require a later version than one to which the engine goes back, with the
        tokens that they have. The client goes on elsewhere (`partial_completions`)."""
        for running in (*self._scheduler.running, *self._scheduler.waiting):
            request = running.request
            if request.min_step > step and running.token_ids and request.sampling.plain:
                self._finish(running, cut=True)

    def _await_step(self, min_step: int, future: Future[Version]) -> None:
        if self.version.step < min_step:
            self._awaiting.append((min_step, future))
        elif future.set_running_or_notify_cancel():
            future.set_result(self.version)

    def _fail_all(self, error: EngineError) -> None:
        futures: list[Future[Any]] = [r.future for r in (*self._scheduler.waiting, *self._scheduler.running)]
        futures += [swap for _, swap in self._swaps]
        futures += [waiter for _, waiter in self._awaiting]
        for future in futures:
            fail(future, error)


def _likeliest(running: Running) -> dict[str, Any]:
    """The fields `top_ids` and `top_logprobs` of a completion; none when the request did not want them."""
    if not running.likeliest:
        return {}
    pairs = np.array(running.likeliest, np.float64)  # [T, K, 2], represents both exactly
    return {"top_ids": pairs[:, :, 1].astype(np.int32), "top_logprobs": pairs[:, :, 0].astype(np.float32)}


def _notify(loop: asyncio.AbstractEventLoop, new_tokens: asyncio.Event) -> None:
    """Set an event of an event loop from the thread. A closed loop is ignored."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(new_tokens.set)

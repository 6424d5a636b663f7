"""One served model: turns requests into tokens, samples answers, and records the turns of conversations."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from etude.capture import Chat, Prompt, TurnTree
from etude.gateway.answers import Answer, make_answer
from etude.gateway.config import GatewayConfig
from etude.gateway.errors import RequestRefused, context_exceeded, invalid_request
from etude.gateway.requests import ChatRequest
from etude.records.completion import Completion, CompletionRequest, Sampling, StopReason, Traffic
from etude.records.wire import I32
from etude.seams import Policy, stream_or_complete

T = TypeVar("T")
TOKENISER_THREADS = 2
"""Number of tokeniser threads. Work of a disconnected client is not interrupted; later work waits for it."""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request with its tokens, ready for the policy.

    `parsed` is the client's request and `request` the one for the policy. `signatures` are the tools; None means that
    the completion is not searched for tool calls. `prompt` is the place in the tree of conversations at which the
    completion is recorded; None for a text request."""

    parsed: ChatRequest
    request: CompletionRequest
    signatures: Any = None
    prompt: Prompt | None = None


class ServedModel:
    """A model that the gateway serves: its policy, its chat format, and the conversations with it.

    `policy` samples the completions and `chat` converts messages to tokens and back. `name` is the name that clients
    send. `context_tokens` is the largest number of tokens of prompt and answer together."""

    def __init__(
        self, policy: Policy, chat: Chat, *, name: str, context_tokens: int, config: GatewayConfig | None = None
    ) -> None:
        self.policy, self.chat, self.name, self.context_tokens = policy, chat, name, context_tokens
        self.config = config or GatewayConfig()
        self.created = int(time.time())
        self._tree = TurnTree(chat, session_id=f"chat-{uuid.uuid4().hex}", max_tokens=self.config.remembered_tokens)
        self._running = asyncio.Semaphore(self.config.max_running)
        self._num_waiting = 0
        self._tokeniser_threads = ThreadPoolExecutor(TOKENISER_THREADS, thread_name_prefix="tokenise")

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Run a function in a tokeniser thread, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._tokeniser_threads, work)

    async def answer(self, parsed: ChatRequest) -> list[Answer]:
        """Sample the answers to a request. Raises `RequestRefused`, and what the policy raises."""
        async with self._running_slot():
            pending = await self._prepare(parsed)
            return [self._record(pending, await self.policy.complete(pending.request))]

    async def stream(self, parsed: ChatRequest) -> AsyncGenerator[tuple[int, list[int] | Answer]]:
        """Sample the answers to a request: yields (number of the answer, newly sampled token ids or complete answer).

        Raises `RequestRefused`, and what the policy raises."""
        end = time.monotonic() + self.config.deadline_s
        async with self._running_slot():
            pending = await self._prepare(parsed)
            async with aclosing(stream_or_complete(self.policy, self.policy.complete, pending.request)) as parts:
                while True:
                    try:
                        part = await asyncio.wait_for(anext(parts), max(0.0, end - time.monotonic()))
                    except TimeoutError:
                        raise self.timeout_refusal() from None
                    if isinstance(part, Completion):
                        answer = self._record(pending, part)
                        break
                    yield 0, part
        yield 0, answer

    def timeout_refusal(self) -> RequestRefused:
        """Return the error of a request that was not answered in time."""
        return RequestRefused(504, f"no answer within {self.config.deadline_s:g} s", code="timeout")

    async def _prepare(self, parsed: ChatRequest) -> PendingRequest:
        return await (self._prepare_chat(parsed) if parsed.prompt is None else self._prepare_text(parsed))

    async def _prepare_chat(self, parsed: ChatRequest) -> PendingRequest:
        """Tokenise a conversation; turns that were sampled here keep their tokens."""
        try:
            signatures = self.chat.signatures(parsed.tools)
        except ValueError as error:
            raise invalid_request(str(error), "tools") from None
        render = partial(
            self._tree.prompt, parsed.messages, signatures, tools=parsed.tools, max_tokens=self.context_tokens
        )
        prompt = await self.run_in_thread(render)
        request = self._request(parsed, prompt.session_id, prompt.token_ids, fork_from=prompt.fork_from, keep=True)
        return PendingRequest(parsed, request, signatures, prompt)

    async def _prepare_text(self, parsed: ChatRequest) -> PendingRequest:
        assert parsed.prompt is not None, "a text request"
        if isinstance(parsed.prompt, str):
            prompt_ids = await self.run_in_thread(
                partial(self.chat.encode, parsed.prompt, max_tokens=self.context_tokens)
            )
        elif all(0 <= token < self.chat.vocab_size for token in parsed.prompt):
            prompt_ids = np.array(parsed.prompt, np.int32)
        else:
            raise invalid_request(f"prompt has a token id outside of [0, {self.chat.vocab_size})", "prompt")
        return PendingRequest(parsed, self._request(parsed, f"text-{uuid.uuid4().hex}", prompt_ids, keep=False))

    def _request(
        self, parsed: ChatRequest, session_id: str, prompt_ids: I32, *, fork_from: str | None = None, keep: bool
    ) -> CompletionRequest:
        return CompletionRequest(
            request_id=f"{session_id}/{uuid.uuid4().hex}",
            session_id=session_id,
            prompt_ids=prompt_ids,
            sampling=Sampling(
                max_tokens=self._max_answer_tokens(parsed, len(prompt_ids)),
                stop_token_ids=self.chat.stop_token_ids,
                temperature=parsed.temperature,
                seed=secrets.randbits(63) if parsed.seed is None else parsed.seed & ((1 << 63) - 1),
            ),
            routes_from=None,
            deadline_s=self.config.deadline_s,
            keep_session=keep,
            fork_from=fork_from,
            traffic=Traffic.PRODUCTION,
        )

    def _record(self, pending: PendingRequest, completion: Completion) -> Answer:
        """Make the answer of a completion. The completion of a chat is recorded as a turn."""
        if completion.stop_reason is StopReason.CANCELLED:
            raise RequestRefused(503, f"{completion.engine} cancelled the request", code="engine_unavailable")
        answer = make_answer(
            completion,
            chat=self.chat,
            signatures=pending.signatures,
            stop=pending.parsed.stop,
            prompt_ids=pending.request.prompt_ids,
        )
        if pending.prompt is not None and answer.stop_text is None:  # a client cannot repeat text that it did not get
            self._tree.record(pending.prompt, completion, answer.message(), sampling=pending.request.sampling)
        return answer

    def _max_answer_tokens(self, parsed: ChatRequest, num_prompt: int) -> int:
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

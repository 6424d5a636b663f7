"""One served model. It tokenises requests, samples answers, and records the turns of conversations."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from etude import grammars
from etude.capture import Chat, KeptTools, Prompt, Summaries, SummaryLimits, TurnTree
from etude.capture.context import served_trigger
from etude.capture.short_work import ShortWork
from etude.capture.stops import complete_until_stop, stop_watch
from etude.capture.summaries import Shortened
from etude.errors import ContextFull, MalformedRequest
from etude.gateway.answers import Answer, Spent, SummaryUse, make_answer
from etude.gateway.config import GatewayConfig
from etude.gateway.errors import RequestRefused, cancelled, context_exceeded, invalid_request, invalid_tools
from etude.gateway.requests import ChatRequest, check_range
from etude.gateway.schemas import check_schemas
from etude.gateway.summary_writer import SummaryWriter
from etude.records.completion import Completion, CompletionRequest, Sampling, StopReason, Traffic
from etude.records.wire import I32
from etude.seams import Policy, stream_or_complete

T = TypeVar("T")
StreamPart = I32 | tuple[int, list[int] | Answer]
"""The token ids of the prompt; or the number of an answer with newly sampled token ids, or with the whole answer."""
_MAX_QUEUED = 64
MAX_CALLS = 16  # calls of an answer that must have one
TOKENISER_THREADS = 2
"""Number of tokeniser threads. Work of a disconnected client is not interrupted; later work waits for it."""
_SHORT_CHARS = 16_384  # new text that is rendered and tokenised without a thread


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A tokenised request, ready for the policy.

    - `parsed`: the client's request; `request`: the request to the policy.
    - `signatures`: the tools; None: the completion is not searched for tool calls.
    - `prompt`: the place in the tree of conversations at which the completion is recorded; None for a text request.
    - `summaries`: the summaries in the prompt."""

    parsed: ChatRequest
    request: CompletionRequest
    signatures: Any = None
    prompt: Prompt | None = None
    summaries: SummaryUse = field(default_factory=SummaryUse)


class ServedModel:
    """A model that the gateway serves: its policy, its chat format, and the conversations with it.

    - `policy`: samples the completions.
    - `chat`: converts messages to tokens and back.
    - `name`: the model name that clients send.
    - `context_tokens`: the maximum number of tokens of prompt and answer together.
    - `summaries`: the limits with which the model was trained to summarise long conversations. It then summarises
      conversations of clients too. None: it was not trained to summarise."""

    def __init__(
        self,
        policy: Policy,
        chat: Chat,
        *,
        name: str,
        context_tokens: int,
        config: GatewayConfig | None = None,
        summaries: SummaryLimits | None = None,
    ) -> None:
        self.policy, self.chat, self.name, self.context_tokens = policy, chat, name, context_tokens
        self.config = config or GatewayConfig()
        self.created = int(time.time())
        self._tree = TurnTree(chat, session_id=f"chat-{uuid.uuid4().hex}", max_tokens=self.config.remembered_tokens)
        self._summaries: Summaries | None = None
        if summaries is not None and self.config.summaries:
            trigger = served_trigger(summaries.context_tokens)
            self._summaries = Summaries(self._tree, chat, summaries, trigger=trigger)
        self._running = asyncio.Semaphore(self.config.max_running)
        self._num_running = self._num_waiting = 0
        self._tokeniser_threads = ThreadPoolExecutor(TOKENISER_THREADS, thread_name_prefix="tokenise")
        self._short_work = ShortWork(_SHORT_CHARS, self.run_in_thread)
        self._signatures_of = lru_cache(maxsize=64)(self._read_signatures)
        self._check_tools = lru_cache(maxsize=64)(lambda tools: check_schemas(ChatRequest(model=name, tools=tools)))

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in one of the model's tokeniser threads, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._tokeniser_threads, work)

    @property
    def num_running(self) -> int:
        """The number of answers that are being sampled."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """The number of answers that wait to be sampled."""
        return self._num_waiting

    @property
    def num_forgotten(self) -> int:
        """The number of prompts whose conversation was evicted from memory, and tokenised again from its text."""
        return self._tree.num_forgotten

    async def answer(self, parsed: ChatRequest, spent: Spent | None = None) -> list[Answer]:
        """Sample the `n` answers to a request. The number of tokens that they use is added to `spent`.

        Raises `RequestRefused`, and the errors of the policy."""
        spent = spent or Spent()
        await self._check(parsed)
        if parsed.n == 1:
            return [await self._answer(parsed, 0, spent)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(parsed, index, spent)) for index in range(parsed.n)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _check(self, parsed: ChatRequest) -> None:
        """Check the schemas of a request, those of known tools once, and in a thread if they are compiled."""
        compiled = parsed.must_call or parsed.schema is not None
        if isinstance(parsed.tools, KeptTools) and not compiled:
            self._check_tools(parsed.tools)
        elif compiled:
            await self.run_in_thread(partial(check_schemas, parsed))
        else:
            check_schemas(parsed)

    async def _answer(self, parsed: ChatRequest, index: int, spent: Spent) -> Answer:
        async with self._running_slot():
            pending = await self._prepare(parsed, index, spent)
            try:
                with _named_grammar(parsed):
                    completion = await complete_until_stop(
                        self.policy, pending.request, self.chat, parsed.stop, in_reasoning=self._in_reasoning(pending)
                    )
            except asyncio.CancelledError:
                spent.prompt = spent.prompt or len(pending.request.prompt_ids)
                raise
            return self._record(pending, completion, spent)

    def stream(self, parsed: ChatRequest, spent: Spent | None = None) -> AsyncGenerator[StreamPart]:
        """Sample the `n` answers to a request, and yield their parts meanwhile. Adds the number of tokens to `spent`.

        The first part is the token ids of the prompt, [P] int32. Each other part is (number of the answer, X), where X
        is a list of newly sampled token ids or, at the end of an answer, the complete `Answer`. Raises
        `RequestRefused`, and the errors of the policy."""
        spent = spent or Spent()
        return self._stream(parsed, 0, spent) if parsed.n == 1 else self._stream_all(parsed, spent)

    async def _stream_all(self, parsed: ChatRequest, spent: Spent) -> AsyncGenerator[StreamPart]:
        await self._check(parsed)
        queue: asyncio.Queue[StreamPart | Exception | None] = asyncio.Queue(_MAX_QUEUED)

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._stream(parsed, index, spent)) as parts:
                    async for part in parts:
                        await queue.put(part)
                await queue.put(None)
            except Exception as error:  # noqa: BLE001  the reader of the queue raises it
                await queue.put(error)

        tasks = [asyncio.create_task(pump(index)) for index in range(parsed.n)]
        try:
            left = parsed.n
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, parsed: ChatRequest, index: int, spent: Spent) -> AsyncGenerator[StreamPart]:
        if parsed.n == 1:  # of several answers, the caller has checked the request once
            await self._check(parsed)
        num_streamed = 0
        async with self._running_slot():
            pending = await self._prepare(parsed, index, spent)
            yield pending.request.prompt_ids
            enough = stop_watch(self.chat, parsed.stop, in_reasoning=self._in_reasoning(pending))
            sampled = stream_or_complete(self.policy, self.policy.complete, pending.request, enough=enough)
            with _named_grammar(parsed):
                async with aclosing(sampled) as parts:
                    async for part in parts:
                        if isinstance(part, Completion):
                            answer = self._record(pending, part, spent, num_streamed)
                            break
                        spent.prompt = spent.prompt or len(pending.request.prompt_ids)
                        spent.sampled += len(part)
                        num_streamed += len(part)
                        yield index, part
        yield index, answer

    async def count(self, parsed: ChatRequest) -> int:
        """Return the number of tokens of a conversation's prompt. Nothing is sampled or recorded."""
        signatures = self._signatures(parsed)
        return await self.run_in_thread(
            partial(self._tree.prompt_tokens, parsed.messages, signatures, tools=parsed.tools)
        )

    async def _prepare(self, parsed: ChatRequest, index: int, spent: Spent) -> PendingRequest:
        """Tokenise a request for its answer `index`. The first one reserves the tokens that all answers may take."""
        try:
            if parsed.prompt is None:
                pending = await self._prepare_chat(parsed, index, spent)
            else:
                pending = await self._prepare_text(parsed, index)
        except ContextFull as full:  # certainly too long, so it was not tokenised
            raise self._too_long(parsed, self.context_tokens + 1, 0, full.facts, counted=False) from None
        if not spent.is_reserved:
            request = pending.request
            spent.reserve(len(request.prompt_ids) + parsed.n * request.sampling.max_tokens)
            spent.is_reserved = True
        return pending

    def _too_long(
        self, parsed: ChatRequest, num_prompt: int, num_answer: int, facts: str = "", *, counted: bool = True
    ) -> RequestRefused:
        field = parsed.prompt_field
        return context_exceeded(self.context_tokens, num_prompt, num_answer, facts=facts, field=field, counted=counted)

    def _signatures(self, parsed: ChatRequest) -> Any:
        tools = parsed.tools
        return self._signatures_of(tools) if isinstance(tools, KeptTools) else self._read_signatures(tools)

    def _read_signatures(self, tools: list[dict[str, Any]]) -> Any:
        try:
            return self.chat.signatures(tools)
        except ValueError as error:
            raise invalid_tools(error) from None

    async def _prepare_chat(self, parsed: ChatRequest, index: int, spent: Spent) -> PendingRequest:
        """Tokenise a conversation; turns that were sampled here keep their tokens."""
        signatures = self._signatures(parsed)
        shortened = await self._shortened(parsed, signatures, spent)
        messages, tools = shortened.messages, parsed.tools
        render = partial(self._tree.prompt, messages, signatures, tools=tools, max_tokens=self.context_tokens)
        prompt = await self._short_work.run(render, self._tree.num_new_chars(messages, tools))
        num_tokens = len(prompt.token_ids)
        if shortened.fault is not None and num_tokens + _least_tokens(parsed) > self.context_tokens:
            least = _least_tokens(parsed)
            facts = f"the conversation has {num_tokens} tokens, {least} are requested for the answer, and its summary "
            facts += f"was refused: {shortened.fault}"
            if least > 1 and num_tokens < self.context_tokens:
                facts += f"\n  hint: ask for an answer of at most {self.context_tokens - num_tokens} tokens"
            raise self._too_long(parsed, num_tokens, least, facts)
        request = self._request(
            parsed, index, prompt.session_id, prompt.token_ids, fork_from=prompt.fork_from, keep=True
        )
        return PendingRequest(parsed, request, signatures, prompt, SummaryUse.of(shortened))

    async def _shortened(self, parsed: ChatRequest, signatures: Any, spent: Spent) -> Shortened:
        """Return the conversation with its beginning replaced by a summary. A new summary is written if one is due."""
        if self._summaries is None or not parsed.summaries:
            return Shortened(parsed.messages)
        writer = SummaryWriter(
            self.policy,
            self.chat,
            self._tree,
            self._summaries.limits,
            parsed.tools,
            signatures,
            deadline_s=self.config.deadline_s,
            run=self.run_in_thread,
            spent=spent,
        )
        room = _least_tokens(parsed)
        return await self._summaries.shorten(
            writer, parsed.messages, parsed.tools, room=room, context_tokens=self.context_tokens
        )

    async def _prepare_text(self, parsed: ChatRequest, index: int) -> PendingRequest:
        assert parsed.prompt is not None, "a text request"
        if isinstance(parsed.prompt, str):
            encode = partial(self.chat.encode, parsed.prompt, max_tokens=self.context_tokens)
            prompt_ids = await self._short_work.run(encode, len(parsed.prompt))
        elif all(0 <= token < self.chat.vocab_size for token in parsed.prompt):
            prompt_ids = np.array(parsed.prompt, np.int32)
        else:
            hint = f"send ids from 0 to {self.chat.vocab_size - 1}"
            raise invalid_request("prompt has an unknown token id", hint=hint, param="prompt")
        return PendingRequest(parsed, self._request(parsed, index, f"text-{uuid.uuid4().hex}", prompt_ids, keep=False))

    def _request(
        self,
        parsed: ChatRequest,
        index: int,
        session_id: str,
        prompt_ids: I32,
        *,
        fork_from: str | None = None,
        keep: bool,
    ) -> CompletionRequest:
        if any(token >= self.chat.vocab_size for token, _ in parsed.sampling.get("logit_bias", ())):
            hint = f"send ids from 0 to {self.chat.vocab_size - 1}"
            raise invalid_request("logit_bias has an unknown token id", hint=hint, param="logit_bias")
        grammar, max_tokens = self._grammar(parsed, prompt_ids), self._max_answer_tokens(parsed, len(prompt_ids))
        check_range("min_tokens", parsed.sampling.get("min_tokens"), 0, max_tokens)
        return CompletionRequest(
            request_id=f"{session_id}/{uuid.uuid4().hex}",
            session_id=session_id,
            prompt_ids=prompt_ids,
            sampling=Sampling(
                max_tokens=max_tokens,
                stop_token_ids=self.chat.stop_token_ids,
                temperature=parsed.temperature,
                seed=secrets.randbits(63) if parsed.seed is None else (parsed.seed + index) & ((1 << 63) - 1),
                grammar=grammar,
                top_logprobs=parsed.top_logprobs or 0,
                **parsed.sampling,
            ),
            routes_from=None,
            deadline_s=self.config.deadline_s,
            keep_session=keep,
            fork_from=fork_from,
            traffic=Traffic.PRODUCTION,
        )

    def _in_reasoning(self, pending: PendingRequest) -> bool | None:
        """Whether the answer begins with reasoning (only needed for stop texts). None: it has no reasoning."""
        if pending.signatures is None or not pending.parsed.stop:
            return None
        return self.chat.in_reasoning(pending.request.prompt_ids)

    def _record(self, pending: PendingRequest, completion: Completion, spent: Spent, num_streamed: int = 0) -> Answer:
        """Make the answer of a completion, and add its tokens to `spent`, of which `num_streamed` were added before.

        The completion of a chat is recorded as a turn."""
        spent.cached = spent.cached or completion.num_cached
        spent.prompt = spent.prompt or len(pending.request.prompt_ids)
        if completion.stop_reason is StopReason.CANCELLED:
            spent.sampled += len(completion.token_ids) - num_streamed
            raise cancelled(completion.engine)
        answer = make_answer(
            completion,
            chat=self.chat,
            signatures=pending.signatures,
            stop=pending.parsed.stop,
            prompt_ids=pending.request.prompt_ids,
            sampling=pending.request.sampling,
            logprobs=pending.parsed.top_logprobs is not None,
            summaries=pending.summaries,
        )
        spent.sampled += len(answer.completion.token_ids) - num_streamed
        if pending.prompt is not None:
            sampling = pending.request.sampling
            self._tree.record(pending.prompt, completion, answer.message(), sampling=sampling, cut=answer.cut)
        return answer

    def _grammar(self, parsed: ChatRequest, prompt_ids: I32) -> str:
        """Return the grammar of an answer that must be a call, JSON, or either of them; "" for any text."""
        if not parsed.must_call and parsed.schema is None:
            return ""
        name = "tool_choice" if parsed.must_call else parsed.schema_field
        if parsed.prompt is None and self.chat.in_reasoning(prompt_ids):
            facts = "answers of this model begin with reasoning, which a grammar does not allow"
            raise invalid_request(f"{name} cannot be followed", facts, hint=f"leave {name} out", param=name)
        if parsed.must_call and not parsed.tools:
            hint = "send tools, or leave tool_choice out"
            raise invalid_request("tool_choice requires a call, and there are no tools", hint=hint, param="tool_choice")
        schema = True if parsed.schema is None else parsed.schema
        if not parsed.tools:
            return grammars.from_json_schema(schema)
        try:
            calls = self.chat.call_grammar(self._signatures(parsed), max_calls=MAX_CALLS if parsed.parallel else 1)
            return calls if parsed.must_call else grammars.with_answer(calls, schema)
        except grammars.GrammarError as error:
            raise invalid_request(f"{name}: {error.what}", error.facts, hint=error.hint, param=name) from None
        except ValueError as error:
            hint = "use tool_choice = auto" if parsed.must_call else "leave the tools out, or forbid calls"
            raise invalid_request(f"{name} cannot be followed", str(error), hint=hint, param=name) from None

    def _max_answer_tokens(self, parsed: ChatRequest, num_prompt: int) -> int:
        """Return the token limit of the answer. Raises `RequestRefused` when the request does not fit the context."""
        remaining, least = self.context_tokens - num_prompt, _least_tokens(parsed)
        if remaining < least:
            asked = 0 if parsed.clamp else parsed.max_tokens or 0
            raise self._too_long(parsed, num_prompt, asked)
        if parsed.clamp and parsed.max_tokens:
            return min(remaining, parsed.max_tokens)
        return parsed.max_tokens or min(remaining, self.config.answer_tokens)

    @asynccontextmanager
    async def _running_slot(self) -> AsyncIterator[None]:
        """Wait for one of `max_running` slots, and hold it while the block runs.

        Raises `RequestRefused` (HTTP status 429) if `max_waiting` requests wait already."""
        if self._running.locked() and self._num_waiting >= self.config.max_waiting:
            facts = f"{self._num_waiting} wait for one of {self.config.max_running} running slots"
            what, hint = "too many requests are waiting", "try again after the seconds in retry-after"
            raise RequestRefused(429, what, facts, hint=hint, code="rate_limit_exceeded")
        self._num_waiting += 1
        try:
            await self._running.acquire()
        finally:
            self._num_waiting -= 1
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._running.release()


@contextmanager
def _named_grammar(parsed: ChatRequest) -> Iterator[None]:
    """Name the field of a request whose grammar the engine refuses in the block, in place of the engine's request."""
    try:
        yield
    except MalformedRequest as error:
        if not (parsed.must_call or parsed.schema is not None) or "grammar" not in error.what + error.hint:
            raise
        field = "tools" if parsed.must_call else parsed.schema_field
        what = f"the engine cannot follow the schema of {field}"
        raise invalid_request(what, error.facts, hint=error.hint, param=field) from None


def _least_tokens(parsed: ChatRequest) -> int:
    """Return how many tokens must be left in the context for the answer: the client's `max_tokens`, or 1 if the client
    sent none or the gateway may lower it (`ChatRequest.clamp`)."""
    return 1 if parsed.clamp else parsed.max_tokens or 1

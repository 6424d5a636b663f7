"""Attributes each model request of an agent program: it is a new turn, a retry of an earlier request, or a side call.

A request becomes a turn of the episode (`Episode.ask`), sampled with the run's parameters. Clients repeat requests:
their library retries after a timeout, or they lost the connection. A repeated request samples nothing: it waits for the
first one, or gets its answer. A request is taken as repeated if

- it equals an earlier request, and says that it is a retry (`AgentRequest.retry`) or has the same idempotency key;
- it equals an earlier request whose client disconnected before the answer was delivered.

Requests are equal if all is equal that decides the answer or its kind (`_digest`). An idempotency key that comes with
another request is refused. Any other equal request is sampled anew, since a program may want several samples. When a
client disconnects, its turn is sampled to the end and recorded."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from etude.capture import Summaries
from etude.capture.context import HISTORY, MAX_ATTEMPTS, Carried, trigger_tokens
from etude.capture.digests import conversation_keys
from etude.capture.summaries import Shortened
from etude.capture.tree import Node
from etude.errors import ContextFull, EtudeError
from etude.gateway import Answer, ChatRequest, RequestRefused, ResponseHead, make_answer
from etude.gateway.answers import SummaryUse
from etude.harness.chat import Message, Reply
from etude.harness.compaction import write_history
from etude.harness.episode import Episode, EpisodeEnded, ModelTurn, plain_argument
from etude.harness.tools import clip
from etude.records.rollout import Ending, ToolCall, TurnKind

MAX_ANSWERS = 16
"""The maximum number of answers to one request (`n`)."""
MAX_PARALLEL = 64
"""The maximum number of requests of one rollout that run at the same time."""
SIDE_TOKENS = 1024
"""The maximum token limit (`max_tokens`) of a side call."""
_OUTPUT_CHARS = 10_000  # of a tool's output in the trace


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A request of an agent program: its content, and the fields by which a repetition of an earlier request is
    recognised.

    `retry`: the client says that it is a retry. `idempotency_key`: the same for all attempts of one request; "" for
    none."""

    chat: ChatRequest
    retry: bool = False
    idempotency_key: str = ""


@dataclass(slots=True, eq=False)
class AcceptedRequest:
    """An accepted request and its answers. All attempts of a client to send it share one instance.

    - `key`: the digest of the request, equal for equal requests.
    - `head`: id, model and time, the same in all responses.
    - `answers`: the asyncio task that samples the answers.
    - `num_clients`: the connections that wait for the answers now.
    - `delivered`: whether one connection has received the complete answer."""

    key: bytes
    head: ResponseHead
    answers: asyncio.Task[tuple[Answer, ...]]
    num_clients: int = 0
    delivered: bool = False


@dataclass(slots=True, eq=False)
class Call:
    """A recorded turn, with the properties of its request by which a side call is recognised.

    `max_tokens` is the client's limit of the answer (None: no limit), `tools` says whether it sent tools, and `first`
    is a digest of the first message. `shortened` is the conversation as the model got it."""

    model: str
    max_tokens: int | None
    tools: bool
    first: bytes  # key of the first message
    turn: ModelTurn
    shortened: Shortened


class Attribution:
    """The model requests of one rollout. `ask` returns the answers, and `finish` decides which turns were side calls.

    A side call is a request outside of the agent's conversations, such as one for a title. It is not trained on.
    Requests are side calls if their model name, or a system message, matches one of the patterns `side` (as in
    `fnmatch`). `log` is called with lines for the rollout's log. `max_requests` limits all requests, refused ones
    included."""

    def __init__(self, episode: Episode, *, side: Sequence[str] = (), log: Callable[[str], None]) -> None:
        self.episode, self.calls = episode, list[Call]()
        self.num_requests = self.num_joined = 0
        self.max_requests = 4 * episode.limits.max_turns + 16
        self.context_full = False  # the last request did not fit into the context
        self.failed = asyncio.Event()  # the episode has failed or ended: the program should stop
        self._side, self._log = tuple(side), log
        self._by_key: dict[bytes, list[AcceptedRequest]] = {}
        self._by_idempotency: dict[str, AcceptedRequest] = {}
        self._running = set[asyncio.Task[tuple[Answer, ...]]]()
        self._logged, self._closed = set[str](), False
        self._conversations: dict[bytes, int] = {}  # by their first message
        limits = episode.limits.summaries
        trigger = trigger_tokens(episode.options.group_seed, context_tokens=episode.limits.context_tokens)
        self._summaries = Summaries(episode.tree, episode.chat, limits, trigger=trigger) if limits else None

    def ask(self, request: AgentRequest) -> AcceptedRequest:
        """Accept a request and begin to sample its answers. If it repeats an earlier request, return that one instead.

        Raises `EpisodeEnded` when the rollout has ended or has used `max_requests`, `TooManyRequests`, and
        `RequestRefused` (HTTP 422) for the idempotency key of another request."""
        self.num_requests += 1
        if self.num_requests > self.max_requests and self.episode.ending is None:
            self._log(f"more than {self.max_requests} requests: the rollout ends")
            self.episode.ending = Ending.TURNS
        if self._closed or self.episode.ending is not None:
            self.failed.set()
            raise EpisodeEnded(self.episode.ending or Ending.STOPPED)
        key = _digest(request.chat)
        if (earlier := self._repeated(key, request)) is not None:
            self.num_joined += 1
            return earlier
        if len(self._running) >= MAX_PARALLEL:
            raise TooManyRequests
        identity = hashlib.sha256(f"{self.episode.options.session_id}|{self.num_requests}".encode()).hexdigest()[:32]
        head = ResponseHead(identity, request.chat.model, int(time.time()))
        accepted = AcceptedRequest(key, head, asyncio.create_task(self._sample(request), name="ask the policy"))
        self._running.add(accepted.answers)
        accepted.answers.add_done_callback(lambda _: self._ended(accepted))
        self._by_key.setdefault(key, []).append(accepted)
        if request.idempotency_key:
            self._by_idempotency[request.idempotency_key] = accepted
        return accepted

    def _repeated(self, key: bytes, request: AgentRequest) -> AcceptedRequest | None:
        if request.idempotency_key and (known := self._by_idempotency.get(request.idempotency_key)) is not None:
            if known.key != key:
                what = "the Idempotency-Key is that of an earlier request with another model, conversation or limit"
                hint = "send a new key with each new request, and the same key only with the same request"
                raise RequestRefused(422, what, hint=hint, code="idempotency_key_reused")
            return known
        equal = [one for one in self._by_key.get(key, ()) if not one.delivered]
        lost = next((one for one in equal if not one.num_clients), None)  # nobody waits for it any more
        if lost is not None or not request.retry:
            return lost
        return next(iter(equal or self._by_key.get(key, [])[-1:]), None)

    def _ended(self, accepted: AcceptedRequest) -> None:
        self._running.discard(accepted.answers)
        if accepted.answers.cancelled() or accepted.answers.exception() is not None:  # a repetition is sampled anew
            self._by_key[accepted.key].remove(accepted)
            self._by_idempotency = {k: v for k, v in self._by_idempotency.items() if v is not accepted}
        if self.episode.failure is not None or self.episode.ending is not None:
            self.failed.set()

    async def _sample(self, request: AgentRequest) -> tuple[Answer, ...]:
        try:
            answers = [await self._turn(request.chat) for _ in range(request.chat.n)]
        except ContextFull as error:
            self.context_full = True
            self._once(f"a request did not fit: {error.facts}")
            raise
        except EtudeError as error:
            self._once(f"a request was not answered: {error.what}: {error.facts}")
            raise
        self.context_full = False
        return tuple(answers)

    async def _turn(self, chat: ChatRequest) -> Answer:
        episode = self.episode
        kind = TurnKind.SIDE if self._is_side(chat) else TurnKind.ACT
        limit = min(chat.max_tokens or episode.limits.turn_tokens, episode.limits.turn_tokens)
        shortened = await self._shortened(chat) if kind is TurnKind.ACT else Shortened(chat.messages)
        messages = list(shortened.messages)
        turn = await episode.ask(messages, tools=chat.tools, kind=kind, max_tokens=limit, strict=False, stops=chat.stop)
        node = turn.node
        node.calls = tuple(
            ToolCall(name=call.name, arguments={k: plain_argument(v) for k, v in call.arguments.items()}, output="")
            for call in turn.reply.calls
        )
        add_outputs(node, chat.messages)
        first = conversation_keys((), chat.messages[:1])[0]
        self.calls.append(Call(chat.model, chat.max_tokens, bool(chat.tools), first, turn, shortened))
        return make_answer(
            turn.completion,
            chat=episode.chat,
            signatures=episode.chat.signatures(chat.tools),
            stop=chat.stop,
            prompt_ids=node.prompt_context(),
            sampling=node.sampling,
            reply=turn.reply,
            summaries=SummaryUse.of(shortened),
            cut=turn.cut,
        )

    async def _shortened(self, chat: ChatRequest) -> Shortened:
        """Return the conversation with its beginning replaced by a summary. A new summary is written if one is due.

        Raises `ContextFull` if all attempts at a summary were refused; the built-in program ends in this case."""
        if self._summaries is None:
            return Shortened(chat.messages)
        first = conversation_keys((), chat.messages[:1])[0]
        number = self._conversations.setdefault(first, len(self._conversations))
        path = HISTORY if not number else f"{HISTORY.removesuffix('.txt')}-{number + 1}.txt"
        writer = EpisodeWriter(self.episode, chat.tools, path)
        shortened = await self._summaries.shorten(writer, chat.messages, chat.tools)
        if shortened.fault is not None:
            facts = f"its summary was refused: {shortened.fault}"
            raise ContextFull("the conversation is too long", facts, hint="send fewer messages")
        return shortened

    def _is_side(self, chat: ChatRequest) -> bool:
        texts = [chat.model, *(m["content"] for m in chat.messages if m["role"] == "system")]
        return any(fnmatch.fnmatchcase(text, pattern) for text in texts for pattern in self._side)

    def finish(self) -> None:
        """Mark the turns that were side calls. Call it when the program has ended.

        A turn is a side call if its answer is limited to `SIDE_TOKENS`, its conversation has no other turn and no
        tools, and its first message differs from those of all conversations with tools. If a program never sends tools,
        only the patterns decide."""
        working = {call.first for call in self.calls if call.tools}
        parents = {call.turn.node.parent for call in self.calls}
        parents |= {node.parent for call in self.calls for node in call.shortened.written}
        for call in self.calls:
            node, short = call.turn.node, call.max_tokens is not None and call.max_tokens <= SIDE_TOKENS
            alone = node.parent is None and node not in parents and not call.shortened.number
            if working and short and alone and not call.tools and call.first not in working:
                node.kind = TurnKind.SIDE

    async def close(self) -> None:
        """Refuse further requests, cancel the running ones, and wait until they have ended."""
        self._closed = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _once(self, line: str) -> None:
        """Log a line, the first time only."""
        if line not in self._logged and len(self._logged) < MAX_PARALLEL:
            self._logged.add(line)
            self._log(line)


def _digest(chat: ChatRequest) -> bytes:
    """Return a digest of everything that decides the answers to a request and their kind. Not in it: sampling
    parameters, which are the run's, and how answers are sent (dialect, stream)."""
    reasoning = [message.get("reasoning_content") for message in chat.messages]  # not in `conversation_keys`
    more = [chat.model, chat.n, chat.max_tokens, chat.stop, reasoning]
    return hashlib.sha256(conversation_keys(chat.tools, chat.messages)[-1] + json.dumps(more).encode()).digest()


class TooManyRequests(Exception):
    """Raised when `MAX_PARALLEL` requests of one rollout are running already."""


@dataclass(frozen=True)
class EpisodeWriter:
    """Samples summaries as turns of an episode (`etude.capture.summaries.Writer`).

    `tools` are the tools of the request. `path` is the file in the machine to which the messages before a summary are
    written."""

    episode: Episode
    tools: Sequence[dict[str, Any]]
    path: str

    @property
    def payer(self) -> str:
        return ""

    @property
    def max_attempts(self) -> int:
        """The number of summaries that may be sampled now, so that a turn is left for the agent's next request."""
        return min(MAX_ATTEMPTS, self._turns_left - 1)

    @property
    def _turns_left(self) -> int:
        return self.episode.limits.max_turns - self.episode.num_turns

    async def num_tokens(self, messages: list[Message]) -> int:
        """Return the number of tokens of a prompt."""
        return await self.episode.num_tokens(messages, tools=self.tools)

    async def ask(self, messages: list[Message], attempt: int) -> tuple[Node, Reply]:
        """Sample a summary and return (its node, the parsed completion). Raises the errors of `Episode.ask`."""
        limit = self.episode.limits.summary_tokens
        asked = list(messages)
        turn = await self.episode.ask(asked, tools=self.tools, kind=TurnKind.SUMMARY, max_tokens=limit)
        add_outputs(turn.node, messages)
        return turn.node, turn.reply

    async def carry(self, summary: str, number: int, covered: Sequence[Message]) -> Carried:
        """Write the summarised messages into the history file, and return the summary and the numbers with which the
        conversation continues.

        Raises `MachineError` if the machine has failed."""
        path = await write_history(self.episode, covered, self.path)
        return Carried(summary, number, max(0, self._turns_left), path)


def add_outputs(node: Node, messages: Sequence[Message]) -> None:
    """Copy the tool outputs at the end of a conversation to the recorded turn before `node`, which made the calls."""
    if node.parent is not None:
        node.parent.calls = _with_outputs(node.parent.calls, messages)


def _with_outputs(calls: tuple[ToolCall, ...], messages: Sequence[Message]) -> tuple[ToolCall, ...]:
    """Return the calls of a turn with the outputs that follow it in a conversation, where they have none yet."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    outputs = [str(m["content"]) for m in messages[last + 1 :] if m["role"] == "tool"]
    padded = [*outputs, *[""] * len(calls)]
    return tuple(
        call if call.output else ToolCall(name=call.name, arguments=call.arguments, output=clip(text, _OUTPUT_CHARS))
        for call, text in zip(calls, padded, strict=False)
    )

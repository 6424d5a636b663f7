"""Summarises conversations that clients send in full with each request, by the rules of `etude.capture.context`.

Clients do not know of summaries. So for each request the stored summaries are searched for one of the beginning of the
conversation. If there is one, it replaces that beginning. If a further summary is due, the model writes it first. A
summary that was lost is written anew at the same position, with another text: only the client's messages are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from etude.capture.chat import Chat, Message, ParsedReply
from etude.capture.context import (
    MAX_ATTEMPTS,
    MESSAGE_TOKENS,
    REQUEST,
    Carried,
    SummaryFault,
    SummaryLimits,
    go_on,
    instructions_of,
    is_due,
    joined,
    longest_exchange,
    stops_of,
    summary_fault,
    with_request,
)
from etude.capture.digests import conversation_keys
from etude.capture.tree import Node, TurnTree
from etude.errors import ContextFull
from etude.records.completion import StopReason
from etude.records.rollout import TurnKind

_TOO_MANY = 1 << 40  # tokens of a prompt that certainly does not fit


class Writer(Protocol):
    """The interface through which `Summaries` counts tokens and samples summaries for one request of a client.

    `max_attempts`: how many summaries may be sampled now; 0: none. `payer`: the name of the API key whose quota counts
    their tokens, "" without quotas; only requests of one payer share a summary that is being written."""

    @property
    def max_attempts(self) -> int: ...

    @property
    def payer(self) -> str: ...

    async def num_tokens(self, messages: list[Message]) -> int:
        """Return the number of tokens of a prompt. May raise `ContextFull` for one that is certainly too long."""
        ...

    async def ask(self, messages: list[Message], attempt: int) -> tuple[Node, ParsedReply]:
        """Sample a summary, record it as a turn of kind SUMMARY, and return (its node, the parsed completion).

        `attempt`: how often a summary of the same messages was sampled before."""
        ...

    async def carry(self, summary: str, number: int, covered: Sequence[Message]) -> Carried:
        """Return the summary and the numbers with which the conversation continues after summary number `number`.

        `summary` is its text, and `covered` are the client's messages that it replaces."""
        ...


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored summary. All conversations that begin with the summarised messages continue from it.

    `messages` replace the beginning. `number`: how many summaries there were, this one included. `exchange`: tokens of
    the longest exchange before it."""

    messages: list[Message]
    number: int
    exchange: int


@dataclass(frozen=True, slots=True)
class Shortened:
    """A client's conversation in the form in which the model gets it.

    - `messages`: the messages after the last summary, with the summary.
    - `number`: how many summaries they contain.
    - `written`: the turns that were sampled for summaries in this call, refused ones included.
    - `fault`: why a summary that was due is missing; None if no summary is missing."""

    messages: list[Message]
    number: int = 0
    written: tuple[Node, ...] = ()
    fault: SummaryFault | None = None


class Summaries:
    """The summaries of all conversations in a tree of turns. One is forgotten when its turn is evicted from the tree.

    `trigger` is the length in tokens from which a conversation is summarised."""

    def __init__(self, tree: TurnTree, chat: Chat, limits: SummaryLimits, *, trigger: int) -> None:
        self.limits, self.trigger = limits, trigger
        self._tree = tree
        self._reserved = len(chat.encode(REQUEST)) + MESSAGE_TOKENS + limits.summary_tokens
        self._running: dict[tuple[str, bytes], _Running] = {}
        # by the key of the beginning, as clients send it: its turn, and the summary or why it was refused
        self._stored: dict[bytes, tuple[Node, Kept | SummaryFault]] = {}

    async def shorten(
        self,
        writer: Writer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        room: int = 0,
        context_tokens: int | None = None,
    ) -> Shortened:
        """Return a client's conversation with its beginning replaced by a summary, which is written first if it is due.

        `tools`: in OpenAI's format. `room`: tokens that the answer needs, in a context of `context_tokens` (None: that
        of the limits). Raises the errors of the writer. Requests with the same beginning wait for the same summary. It
        is cancelled when all of them are cancelled."""
        keys = conversation_keys(tools, messages)
        inside = [i + 1 < len(messages) and messages[i + 1]["role"] == "tool" for i in range(len(messages))]
        known = self._longest_known([b"" if more else key for key, more in zip(keys, inside, strict=True)])
        written: tuple[Node, ...] = ()
        refused: dict[int, SummaryFault] = {}
        context_tokens = self.limits.context_tokens if context_tokens is None else context_tokens
        while True:
            work = _Work(self, writer, messages, known, room, context_tokens)
            for stop in work.stops:
                if stop not in refused and isinstance(fault := self._known(keys[stop - 1]), SummaryFault):
                    refused[stop] = fault
            place, due = await work.place(refused) if writer.max_attempts > 0 else (None, False)
            if place is None:
                fault = next(reversed(refused.values()), None) if due else None
                return Shortened(work.talk(len(messages)), known[1].number if known else 0, written, fault)
            kept, nodes = await self._once(keys[place - 1], work, place)
            written += nodes
            if isinstance(kept, Kept):
                known, refused = (place, kept), {}
            else:
                refused[place] = kept

    def _longest_known(self, keys: Sequence[bytes]) -> tuple[int, Kept] | None:
        """Return (number of messages that it replaces, stored summary) of the longest beginning with one, or None.

        `keys`: the digests of all prefixes of a conversation."""
        for i in range(len(keys) - 1, -1, -1):
            if isinstance(kept := self._known(keys[i]), Kept):
                self._tree.touch(self._stored[keys[i]][0])
                return i + 1, kept
        return None

    def _known(self, key: bytes) -> Kept | SummaryFault | None:
        """Return the stored summary of a beginning, or why it was refused; None if none was requested."""
        node, kept = self._stored.get(key, (None, None))
        return kept if node is not None and node in self._tree else None

    def _store(self, key: bytes, node: Node, kept: Kept | SummaryFault) -> None:
        self._stored = {at: one for at, one in self._stored.items() if one[0] in self._tree}
        self._stored[key] = node, kept

    async def _once(self, key: bytes, work: _Work, stop: int) -> tuple[Kept | SummaryFault, tuple[Node, ...]]:
        """Write a summary, or wait until another request has written it. Only the writer gets the sampled turns."""
        at = (work.writer.payer, key)
        running = self._running.get(at)
        first = running is None
        if running is None:
            running = self._running[at] = _Running(asyncio.create_task(self._write(key, work, stop), name="summarise"))
            running.task.add_done_callback(lambda task: self._ended(at, task))
        running.num_waiting += 1
        try:
            kept, nodes = await asyncio.shield(running.task)
        finally:
            running.num_waiting -= 1
            if not running.num_waiting and not running.task.done():
                self._ended(at, running.task)
                running.task.cancel()
                await asyncio.gather(running.task, return_exceptions=True)
        return kept, nodes if first else ()

    def _ended(self, at: tuple[str, bytes], task: asyncio.Task[Any]) -> None:
        if (running := self._running.get(at)) is not None and running.task is task:
            del self._running[at]

    async def _write(self, key: bytes, work: _Work, stop: int) -> tuple[Kept | SummaryFault, tuple[Node, ...]]:
        writer, limit = work.writer, self.limits.summary_tokens
        asked, nodes = with_request(work.talk(stop)), list[Node]()
        fault: SummaryFault | None = None
        while len(nodes) < MAX_ATTEMPTS and (not nodes or writer.max_attempts > 0):
            node, reply = await writer.ask(list(asked), len(nodes))
            nodes.append(node)
            completion = node.completion
            fault = summary_fault(
                reply,
                ended=completion.stop_reason is StopReason.STOP,
                num_tokens=len(completion.token_ids),
                max_tokens=limit,
            )
            if fault is None:
                covered, number = work.messages[:stop], work.number + 1
                carried = await writer.carry(reply.text, number, covered)
                kept = Kept(go_on(instructions_of(covered), carried), number, await work.exchange(stop))
                self._store(key, node, kept)
                return kept, tuple(nodes)
            node.kind = TurnKind.REFUSED
        assert fault is not None, "at least one attempt"
        self._store(key, nodes[-1], fault)
        return fault, tuple(nodes)


@dataclass(slots=True)
class _Running:
    """A summary that is being written, and how many requests wait for it."""

    task: asyncio.Task[tuple[Kept | SummaryFault, tuple[Node, ...]]]
    num_waiting: int = 0


class _Work:
    """Finds the position of the next summary in one conversation, after its last known summary."""

    def __init__(
        self,
        summaries: Summaries,
        writer: Writer,
        messages: Sequence[Message],
        known: tuple[int, Kept] | None,
        room: int,
        context_tokens: int,
    ) -> None:
        self.writer, self.messages = writer, messages
        self._summaries, self._room, self._context_tokens = summaries, room, context_tokens
        self._kept: Kept | None
        self._start, self._kept = known if known is not None else (0, None)
        self.number = self._kept.number if self._kept else 0
        has_user = any(message["role"] == "user" for message in messages)
        self.stops = stops_of(messages, self._start) if has_user else []

    def talk(self, stop: int) -> list[Message]:
        """Return the first `stop` messages of the client as the model gets them."""
        return joined(self._kept.messages if self._kept else (), self.messages[self._start : stop])

    async def exchange(self, stop: int, num_tokens: int | None = None) -> int:
        """Return the tokens of the longest exchange before a place, in this conversation and before its summaries."""
        if num_tokens is None:
            num_tokens = await self._count(self.talk(stop))
        before = self._kept.exchange if self._kept else self._summaries.limits.turn_tokens
        return max(before, longest_exchange(self.talk(stop), num_tokens))

    async def place(self, refused: Mapping[int, SummaryFault]) -> tuple[int | None, bool]:
        """Return where to summarise next: the length of that beginning, or None; and whether a summary is due.

        It is the first place where one is due. If there its request does not fit, since a message is very long, it is
        the one before. Later ones follow if it was `refused`."""
        stops = self.stops
        if not stops or not await self._is_due(stops[-1]):
            return None, False
        low, high = 0, len(stops) - 1  # of the first place where it is due; from there on it is everywhere
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if await self._is_due(stops[middle]) else (middle + 1, high)
        for stop in stops[high:]:
            if not await self._fits(stop):
                break
            if stop not in refused:
                return stop, True
        if high and not await self._fits(stops[high]):
            before = stops[high - 1]
            if before not in refused and await self._fits(before):
                return before, True
        return None, True

    async def _is_due(self, stop: int) -> bool:
        num_tokens = await self._count(self.talk(stop))
        if stop == len(self.messages) and num_tokens + self._room > self._context_tokens:
            return True
        return is_due(
            num_tokens,
            trigger=self._summaries.trigger,
            exchange=await self.exchange(stop, num_tokens),
            reserved=self._summaries._reserved,
            context_tokens=self._summaries.limits.context_tokens,
        )

    async def _fits(self, stop: int) -> bool:
        limits = self._summaries.limits
        return await self._count(with_request(self.talk(stop))) + limits.summary_tokens <= limits.context_tokens

    async def _count(self, messages: list[Message]) -> int:
        try:
            return await self.writer.num_tokens(messages)
        except ContextFull:
            return _TOO_MANY

"""A tree of turns: the tokens that the model read and sampled in conversations, each stored once.

A turn is one completion of the model with the messages before it. A request repeats its whole conversation as messages.
The tree finds the deepest recorded turn that the messages repeat, and tokenises only the messages after it. So a
sampled token is never tokenised again. Messages are compared by content (`message_digest`): clients may leave out the
reasoning, and write a call's arguments in another order. A changed history becomes a branch, or a new root when none of
its turns is known.

Each turn is a separate node, also when two siblings have the same tokens. The first request that continues a turn uses
the turn's engine session (an id under which an engine keeps the KV cache of a conversation). Every further one is a
branch with a new session, whose KV cache starts as a copy (`CompletionRequest.fork_from`). Of several equal turns a
request continues one without a continuation, so that equal siblings stay separate.

The tree of a rollout keeps all turns. The tree of a gateway keeps at most `max_tokens` tokens. It evicts the least
recently used turn first, and children always before their parent."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from etude.capture.chat import Chat, Message
from etude.capture.context import SummaryFault
from etude.capture.stops import Cut
from etude.records.completion import Completion, Sampling, StopReason
from etude.records.rollout import Start, ToolCall, Trace, Turn, TurnKind
from etude.records.wire import I32

_MAX_RENDERED = 16  # prompts whose tokens are kept until they are asked
_NONE: I32 = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class Node:
    """A recorded turn and its position in the tree. `TurnTree.record` makes one.

    - `parent`, `prompt_ids`, `completion`, `sampling`, `calls`, `kind`, `start`: as in `records.rollout.Turn`, with a
      node as parent.
    - `key`: a digest of the tools and all messages, this turn's included. `reply_digest`: one of the model's message.
    - `number`: the place in the order of recording. `num_tokens`: tokens of the context, this turn's completion
      included.
    - `continued`: whether a request has continued its session.
    - `tail`: the sampled tokens of the stop text that cut the turn off, which are in no context; None: not cut off.
    - `rest_ids`: token ids of the characters in the first token of `tail` that belong to the reply, [R] int32."""

    parent: Node | None
    prompt_ids: I32
    completion: Completion
    sampling: Sampling
    calls: tuple[ToolCall, ...]
    kind: TurnKind
    key: bytes  # digest of the tools and of all messages, including the model's of this turn
    reply_digest: bytes  # `message_digest` of the model's message
    session_id: str  # engine session of this turn
    number: int  # number of turns that the tree recorded before
    num_tokens: int  # tokens of the context, including this turn
    start: Start
    tail: Completion | None = None
    rest_ids: I32 = field(default_factory=lambda: _NONE)
    continued: bool = False  # whether a request has taken over its session
    stands_for: bytes = b""  # of a summary: key of the conversation in whose place it is, as `TurnTree.keep_summary`

    @property
    def num_added(self) -> int:
        """The number of tokens that the turn adds to its parent's context: of new messages, and sampled ones."""
        return len(self.prompt_ids) + len(self.completion.token_ids)

    def has_tokens_of(self, completion: Completion) -> bool:
        """Return whether `completion` has the same sampled tokens as the turn."""
        return np.array_equal(self.completion.token_ids, completion.token_ids)

    def ancestry(self) -> Iterator[Node]:
        """Yield the turn, its parent, and so on up to the root."""
        at: Node | None = self
        while at is not None:
            yield at
            at = at.parent

    def prompt_context(self) -> I32:
        """Return the token ids that the model read for this turn: the context without its sampled tokens, int32."""
        return self.context()[: self.num_tokens - len(self.completion.token_ids)]

    def context(self) -> I32:
        """Return the token ids that the model has read and sampled up to the end of this turn, [num_tokens] int32."""
        parts = [ids for node in self.ancestry() for ids in (node.completion.token_ids, node.prompt_ids)]
        return np.concatenate(parts[::-1])


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The tokens of a request, and the tree position of its completion. `TurnTree.prompt` makes one.

    - `parent`: the deepest recorded turn that the messages repeat. None: the completion becomes a root of the tree.
    - `token_ids`: all tokens of the prompt, [C] int32.
    - `new_ids`: the part of `token_ids` after the parent's context, [P] int32.
    - `key`: a digest of the tools and the messages.
    - `session_id`, `fork_from`: as in `CompletionRequest`."""

    parent: Node | None
    token_ids: I32
    new_ids: I32
    key: bytes
    session_id: str
    fork_from: str | None  # as in `CompletionRequest`
    start: Start
    num_resampled: int = 0  # replies of the model among the new messages that are tokenised from their text

    @property
    def routes_from(self) -> int:
        """The position of the first token whose routes (experts chosen by the MoE routers) no earlier turn has.

        It is the value for `CompletionRequest.routes_from`."""
        if self.parent is None:
            return 0
        return self.parent.completion.routes_start + len(self.parent.completion.routes)


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored summary, with which all conversations with a common beginning continue.

    `messages` replace the beginning. `number`: how many summaries there were, this one included. `exchange`: tokens of
    the longest exchange before it."""

    messages: list[Message]
    number: int
    exchange: int


class TurnTree:
    """The recorded turns of one or many conversations, found by their messages. Thread-safe.

    `session_id` names the engine session of the first conversation; further sessions get a number: "s", "s+1", "s+2".
    `max_tokens` is the most tokens to keep; None keeps all."""

    def __init__(self, chat: Chat, *, session_id: str, max_tokens: int | None = None) -> None:
        self.max_tokens, self.num_tokens = max_tokens, 0
        self._chat, self._session_id = chat, session_id
        self._num_sessions = self._num_recorded = 0
        self._nodes: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self._by_key: dict[bytes, list[Node]] = {}
        self._tools: set[bytes] = set()  # digests of the tools of all requests
        self._first_messages: set[bytes] = set()  # keys of the tools and the first message of all requests
        self._summaries: dict[bytes, tuple[Node, Kept | SummaryFault]] = {}  # by `Node.stands_for`
        self._rendered: deque[tuple[Node | None, list[Message], Mapping[str, Any], I32]] = deque(maxlen=_MAX_RENDERED)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._nodes)

    def prompt(
        self,
        messages: Sequence[Message],
        signatures: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> Prompt:
        """Encode a request: the tokens of the deepest recorded turn, then those of the messages after it.

        The last message must not be the model's. `signatures`: the tools as the chat format takes them. `tools`: the
        same tools in OpenAI's format, needed when the tools may change within the tree. Raises `ContextFull`, before it
        tokenises, for a prompt that certainly has more than `max_tokens` tokens, and what the chat format raises."""
        keys = conversation_keys(tools, messages)
        with self._lock:
            parent = self._deepest(keys[:-1])
            start = self._start(parent, tools, keys[0])
            session_id, fork_from = self._session(parent)
            known = 0 if parent is None else keys.index(parent.key) + 1
            replies = [message_digest(m) for m in messages[known:] if m["role"] == "assistant"]
            recorded = {node.reply_digest for node in self._nodes} if replies else set()
        num_resampled = sum(reply in recorded for reply in replies)
        new_ids = self._new_ids(parent, messages, known, signatures, max_tokens)
        token_ids = new_ids if parent is None else np.concatenate([parent.context(), new_ids])
        return Prompt(parent, token_ids, new_ids, keys[-1], session_id, fork_from, start, num_resampled)

    def prompt_tokens(
        self,
        messages: Sequence[Message],
        signatures: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> int:
        """Return how many tokens the prompt of a request would have. Nothing is recorded, and no session is taken.

        The arguments are those of `prompt`. Raises what the chat format raises."""
        keys = conversation_keys(tools, messages)
        with self._lock:
            parent = self._deepest(keys[:-1])
        known = 0 if parent is None else keys.index(parent.key) + 1
        num_before = 0 if parent is None else parent.num_tokens
        return num_before + len(self._new_ids(parent, messages, known, signatures, max_tokens))

    def record(
        self,
        prompt: Prompt,
        completion: Completion,
        message: Message,
        *,
        sampling: Sampling,
        calls: tuple[ToolCall, ...] = (),
        kind: TurnKind = TurnKind.ACT,
        cut: Cut | None = None,
    ) -> Node:
        """Record a completion as the turn that follows `prompt`, and return its node.

        `message`: the model's message, as later requests will repeat it. `cut`: how a stop text cuts the completion
        off; only the kept tokens are in the context of later turns. Recording the same turn again (same prompt,
        sampling and tokens) returns the existing node."""
        digest, num_before = message_digest(message), prompt.parent.num_tokens if prompt.parent else 0
        completion = completion if cut is None else cut.kept
        rest = "" if cut is None else cut.rest.rstrip()  # blanks at the end of a reply do not count
        key = _extend_key(prompt.key, digest)
        with self._lock:
            for node in self._by_key.get(key, ()):
                if node.parent is prompt.parent and node.sampling == sampling and node.has_tokens_of(completion):
                    return node
            node = Node(
                parent=prompt.parent,
                prompt_ids=prompt.new_ids,
                completion=completion,
                sampling=sampling,
                calls=calls,
                kind=kind,
                key=key,
                reply_digest=digest,
                session_id=prompt.session_id,
                number=self._num_recorded,
                num_tokens=num_before + len(prompt.new_ids) + len(completion.token_ids),
                start=prompt.start,
                tail=None if cut is None else cut.tail,
                rest_ids=self._chat.encode(rest) if rest else _NONE,
            )
            self._num_recorded += 1
            self._touch(node)
            while self.max_tokens is not None and self.num_tokens > self.max_tokens:
                self._evict(next(iter(self._nodes)))
        return node

    def trace(self) -> Trace:
        """Return all turns that are in the tree, in the order in which they were recorded.

        After them come the sampled stop texts that cut turns off, each as a turn without a prompt and a
        continuation."""
        with self._lock:
            nodes = sorted(self._nodes, key=lambda node: node.number)
        index = {node: i for i, node in enumerate(nodes)}
        turns = [
            Turn(
                parent=None if node.parent is None else index[node.parent],
                prompt_ids=node.prompt_ids,
                completion=node.completion,
                sampling=node.sampling,
                calls=node.calls,
                kind=node.kind,
                start=node.start,
            )
            for node in nodes
        ]
        tails = [
            Turn(
                parent=index[node],
                prompt_ids=_NONE,
                completion=node.tail,
                sampling=node.sampling,
                calls=(),
                kind=node.kind,
            )
            for node in nodes
            if node.tail is not None
        ]
        return Trace((*turns, *tails))

    def keep_summary(self, key: bytes, node: Node, kept: Kept | SummaryFault) -> None:
        """Store the summary of the beginning of a conversation, or why it was refused, as long as the turn `node` is
        kept.

        `key` identifies the beginning, as its clients send it (an element of `conversation_keys`)."""
        with self._lock:
            if node in self._nodes:
                node.stands_for = key
                self._summaries[key] = node, kept

    def find_summary(self, keys: Sequence[bytes]) -> tuple[int, Kept] | None:
        """Return the stored summary of the longest beginning of a conversation, or None.

        `keys` are the conversation's `conversation_keys`. The result is (number of messages that it replaces,
        summary)."""
        with self._lock:
            for i in range(len(keys) - 1, -1, -1):
                node, kept = self._summaries.get(keys[i], (None, None))
                if node is not None and isinstance(kept, Kept):
                    self._touch(node)
                    return i + 1, kept
        return None

    def refused_summary(self, key: bytes) -> SummaryFault | None:
        """Return why the summary of the beginning `key` was refused; None if none was."""
        with self._lock:
            _, kept = self._summaries.get(key, (None, None))
        return kept if isinstance(kept, SummaryFault) else None

    def _new_ids(
        self,
        parent: Node | None,
        messages: Sequence[Message],
        known: int,
        signatures: Mapping[str, Any],
        max_tokens: int | None,
    ) -> I32:
        """Encode the messages after the first `known` ones, which are the context of `parent`.

        The last few results are kept, since a prompt is usually counted before it is asked."""
        new = list(messages[known:])
        with self._lock:
            for before, same, tools, ids in self._rendered:
                if before is parent and same == new and tools == signatures:
                    return ids
        if parent is None:
            ids = self._chat.encode_prompt(messages, signatures, max_tokens=max_tokens)
        else:
            remaining = None if max_tokens is None else max(0, max_tokens - parent.num_tokens)
            ended = parent.completion.stop_reason is StopReason.STOP
            ids = self._chat.continuation(messages[:known], new, signatures, ended=ended, max_tokens=remaining)
            ids = np.concatenate([parent.rest_ids, ids]) if len(parent.rest_ids) else ids
        with self._lock:
            self._rendered.append((parent, [dict(message) for message in new], signatures, ids))
        return ids

    # The caller of these methods holds the lock.

    def _deepest(self, keys: Sequence[bytes]) -> Node | None:
        """Return the turn of the longest known prefix of a conversation.

        Of equal turns it is the newest one without a continuation, or else the newest."""
        same = next((self._by_key[key] for key in reversed(keys) if key in self._by_key), None)
        if same is None:
            return None
        node = next((node for node in reversed(same) if not node.continued), same[-1])
        self._touch(node)
        return node

    def _start(self, parent: Node | None, tools: Sequence[Mapping[str, Any]], first: bytes) -> Start:
        """Why a request continues `parent`, or starts a root (None). `first`: key of the tools and first message."""
        if self.max_tokens is not None:  # only of interest for one rollout; the sets would grow without bound
            return Start.NEXT if parent is not None else Start.FIRST
        digest = _tools_digest(tools)
        any_before, same_tools, same_first = bool(self._tools), digest in self._tools, first in self._first_messages
        self._tools.add(digest)
        self._first_messages.add(first)
        if parent is not None:
            return Start.FORK if parent.continued else Start.NEXT
        if not any_before:
            return Start.FIRST
        return Start.HISTORY if same_first else Start.SYSTEM if same_tools else Start.TOOLS

    def _session(self, parent: Node | None) -> tuple[str, str | None]:
        """Return the engine session for a request that continues `parent`, and the session to fork it from."""
        if parent is not None and not parent.continued:
            parent.continued = True
            return parent.session_id, None
        number, self._num_sessions = self._num_sessions, self._num_sessions + 1
        session_id = f"{self._session_id}+{number}" if number else self._session_id
        return session_id, parent.session_id if parent else None

    def _touch(self, node: Node) -> None:
        """Mark a turn and its ancestors as recently used.

        Each ancestor becomes more recent than its children, and so is evicted after them."""
        for at in node.ancestry():
            if at not in self._nodes:
                self._nodes[at] = None
                self._by_key.setdefault(at.key, []).append(at)
                self.num_tokens += at.num_added
            self._nodes.move_to_end(at)

    def _evict(self, node: Node) -> None:
        del self._nodes[node]
        self._summaries.pop(node.stands_for, None)
        self.num_tokens -= node.num_added
        same = self._by_key[node.key]
        same.remove(node)
        if not same:
            del self._by_key[node.key]


class KeptMessage(dict[str, Any]):
    """A message that never changes, so that its digest (`message_digest`) is computed only once."""

    __slots__ = ("digest",)

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self.digest = b""


def conversation_keys(tools: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> list[bytes]:
    """Return a digest for each prefix of a conversation.

    Element i is the SHA-256 digest (32 bytes) of the tools and ``messages[: i + 1]``. The order of keys in a dict does
    not matter.

    >>> one, same = {"role": "user", "content": "a"}, {"content": "a", "role": "user"}
    >>> conversation_keys([], [one]) == conversation_keys([], [same])
    True
    """
    key = _tools_digest(tools)
    keys = []
    for message in messages:
        key = _extend_key(key, message_digest(message))
        keys.append(key)
    return keys


def message_digest(message: Message) -> bytes:
    """Return a digest of the content of a message. Messages with equal digests count as the same message.

    Clients change details when they repeat a conversation. So the digest ignores reasoning, ids and names, and in the
    model's messages also whitespace around the text and the order of a call's arguments.

    >>> call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": 2}}}
    >>> same = {"function": {"name": "f", "arguments": '{"b": 2, "a": 1}'}}
    >>> reply = {"role": "assistant", "content": "so\\n", "tool_calls": [call], "reasoning_content": "hm"}
    >>> message_digest(reply) == message_digest({"role": "assistant", "content": "so", "tool_calls": [same]})
    True
    """
    if isinstance(message, KeptMessage) and message.digest:
        return message.digest
    content = message.get("content") or ""
    if message["role"] == "assistant" and isinstance(content, str):
        content = content.strip()
    calls = [_call_identity(call) for call in message.get("tool_calls") or ()]
    digest = hashlib.sha256(_canonical([message["role"], content, calls])).digest()
    if isinstance(message, KeptMessage):
        message.digest = digest
    return digest


def _call_identity(call: Mapping[str, Any]) -> list[Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [function["name"], arguments]


def _tools_digest(tools: Sequence[Mapping[str, Any]]) -> bytes:
    return hashlib.sha256(_canonical(list(tools))).digest()


def _extend_key(key: bytes, digest: bytes) -> bytes:
    return hashlib.sha256(key + digest).digest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

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
recently used turn first, and children always before their parent.

The time of a request depends on its new messages: of the messages before them only the digests are compared."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from etude.capture.chat import Chat, Message
from etude.capture.digests import conversation_keys, extend_key, message_digest, num_chars_of, tools_digest
from etude.capture.stops import Cut
from etude.records.completion import Completion, Sampling, StopReason
from etude.records.rollout import Start, ToolCall, Trace, Turn, TurnKind
from etude.records.wire import I32

_MAX_RENDERED = 16  # prompts whose tokens are kept until they are requested
_KEPT_CONTEXTS = 64  # conversations whose context is in memory as one array; that of others is joined from their turns
_MAX_FORGOTTEN = 65_536  # evicted turns whose keys are kept
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
    num_children: int = 0  # turns in the tree that continue it
    kept_context: I32 | None = None  # the result of `context` while it is in memory

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
        """Return all token ids from the root to the end of this turn, read and sampled ones: [num_tokens] int32."""
        return np.concatenate(self.context_parts())

    def context_parts(self) -> list[I32]:
        """Return `context` as arrays in their order. For a recently recorded turn it is a single array."""
        parts: list[I32] = []
        for node in self.ancestry():
            if (kept := node.kept_context) is not None:
                parts.append(kept)
                break
            parts += [node.completion.token_ids, node.prompt_ids]
        return parts[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The tokens of a request, and the tree position of its completion. `TurnTree.prompt` makes one.

    - `parent`: the deepest recorded turn that the messages repeat. None: the completion becomes a root of the tree.
    - `token_ids`: all tokens of the prompt, [C] int32.
    - `new_ids`: the part of `token_ids` after the parent's context, [P] int32.
    - `key`: a digest of the tools and the messages.
    - `session_id`, `fork_from`: as in `CompletionRequest`.
    - `start`: why the request continues `parent`, or begins a new root. `num_resampled`: the number of the model's
      replies among the new messages, which are tokenised from their text."""

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


class TurnTree:
    """The recorded turns of one or many conversations, found by their messages. Thread-safe.

    `session_id` names the engine session of the first conversation; further sessions get a number: "s", "s+1", "s+2".
    `max_tokens` is the maximum number of tokens to keep; None keeps all. `num_forgotten`: the number of prompts with a
    turn that was recorded and evicted, so that its sampled tokens were tokenised again from their text."""

    def __init__(self, chat: Chat, *, session_id: str, max_tokens: int | None = None) -> None:
        self.max_tokens, self.num_tokens = max_tokens, 0
        self._chat, self._session_id = chat, session_id
        self._num_sessions = self._num_recorded = 0
        self._nodes = set[Node]()
        self._leaves: OrderedDict[Node, None] = OrderedDict()  # turns without children, least recently used first
        self._contexts: OrderedDict[Node, None] = OrderedDict()  # turns with a `kept_context`, oldest first
        self._by_key: dict[bytes, list[Node]] = {}
        self._replies = Counter[bytes]()  # turns by `Node.reply_digest`
        self._tools: set[bytes] = set()  # digests of the tools of all requests
        self._first_messages: set[bytes] = set()  # keys of the tools and the first message of all requests
        self._rendered: deque[tuple[Node | None, list[Message], Mapping[str, Any], I32]] = deque(maxlen=_MAX_RENDERED)
        self.num_forgotten = 0
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()  # keys of evicted turns, oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: Node) -> bool:
        """Return whether a turn is kept, that is, not evicted."""
        return node in self._nodes

    def touch(self, node: Node) -> None:
        """Mark a turn as recently used, if it is kept."""
        with self._lock:
            self._touch(node)

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
        tokenises, for a prompt that certainly has more than `max_tokens` tokens, and the errors of the chat format."""
        keys = conversation_keys(tools, messages)
        with self._lock:
            parent, known = self._deepest(keys)
            start = self._start(parent, tools, keys[0])
            session_id, fork_from = self._session(parent)
            replies = [message_digest(m) for m in messages[known:] if m["role"] == "assistant"]
            num_resampled = sum(reply in self._replies for reply in replies)
            self.num_forgotten += any(key in self._forgotten for key in keys[known:-1])
        new_ids = self._new_ids(parent, messages, known, signatures, max_tokens)
        token_ids = new_ids if parent is None else np.concatenate([*parent.context_parts(), new_ids])
        return Prompt(parent, token_ids, new_ids, keys[-1], session_id, fork_from, start, num_resampled)

    def num_new_chars(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Estimate how many characters `prompt` would tokenise: those of the messages after the deepest recorded turn.

        `tools` is as in `prompt`. No session begins."""
        keys = conversation_keys(tools, messages)
        with self._lock:
            _, known = self._deepest(keys)
        return sum(map(num_chars_of, messages[known:]))

    def prompt_tokens(
        self,
        messages: Sequence[Message],
        signatures: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> int:
        """Return how many tokens the prompt of a request would have. Nothing is recorded, and no session begins.

        The arguments are those of `prompt`. Raises the errors of the chat format."""
        keys = conversation_keys(tools, messages)
        with self._lock:
            parent, known = self._deepest(keys)
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
        key = extend_key(prompt.key, digest)
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
            self._add(node)
            self._keep_context(node, np.concatenate([prompt.token_ids, completion.token_ids]))
            while self.max_tokens is not None and self.num_tokens > self.max_tokens:
                self._evict(next(iter(self._leaves)))
        return node

    def trace(self) -> Trace:
        """Return all turns that are in the tree, in the order in which they were recorded.

        After them come the sampled stop texts that cut turns off. Each is a separate turn, without a prompt and
        without a continuation."""
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

    def _new_ids(
        self,
        parent: Node | None,
        messages: Sequence[Message],
        known: int,
        signatures: Mapping[str, Any],
        max_tokens: int | None,
    ) -> I32:
        """Encode the messages after the first `known` ones, which are the context of `parent`.

        The last few results are kept, since the tokens of a prompt are usually counted before it is sampled."""
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

    def _deepest(self, keys: Sequence[bytes]) -> tuple[Node | None, int]:
        """Return the turn of the longest known prefix of a conversation, and the number of messages in it.

        `keys`: of all its prefixes. Of equal turns it is the newest one without a continuation, or else the newest."""
        for known in range(len(keys) - 1, 0, -1):
            if (same := self._by_key.get(keys[known - 1])) is not None:
                node = next((node for node in reversed(same) if not node.continued), same[-1])
                self._touch(node)
                return node, known
        return None, 0

    def _start(self, parent: Node | None, tools: Sequence[Mapping[str, Any]], first: bytes) -> Start:
        """Why a request continues `parent`, or starts a root (None). `first`: key of the tools and first message."""
        if self.max_tokens is not None:  # only of interest for one rollout; the sets would grow without bound
            return Start.NEXT if parent is not None else Start.FIRST
        digest = tools_digest(tools)
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
        """Mark a turn as recently used. One with children is kept as long as they are."""
        if node in self._leaves:
            self._leaves.move_to_end(node)

    def _add(self, node: Node) -> None:
        """Add a turn, and those of its ancestors that were evicted."""
        self._leaves[node] = None
        for at in node.ancestry():
            if at in self._nodes:
                break
            self._nodes.add(at)
            self._by_key.setdefault(at.key, []).append(at)
            self._replies[at.reply_digest] += 1
            self.num_tokens += at.num_added
            if at.parent is not None:
                at.parent.num_children += 1
                self._leaves.pop(at.parent, None)

    def _evict(self, node: Node) -> None:
        """Remove a turn without children. Its parent is as old as its last child was."""
        del self._leaves[node]
        self._nodes.remove(node)
        self.num_tokens -= node.num_added
        self._drop_context(node)
        same = self._by_key[node.key]
        same.remove(node)
        if not same:
            del self._by_key[node.key]
            self._forgotten[node.key] = None
            if len(self._forgotten) > _MAX_FORGOTTEN:
                self._forgotten.popitem(last=False)
        self._replies[node.reply_digest] -= 1
        if not self._replies[node.reply_digest]:
            del self._replies[node.reply_digest]
        if (parent := node.parent) is not None:
            parent.num_children -= 1
            if not parent.num_children:
                self._leaves[parent] = None
                self._leaves.move_to_end(parent, last=False)

    def _keep_context(self, node: Node, context: I32) -> None:
        """Keep the context of a new turn in place of its parent's."""
        if node.parent is not None:
            self._drop_context(node.parent)
        node.kept_context = context
        self._contexts[node] = None
        if len(self._contexts) > _KEPT_CONTEXTS:
            self._drop_context(next(iter(self._contexts)))

    def _drop_context(self, node: Node) -> None:
        self._contexts.pop(node, None)
        node.kept_context = None

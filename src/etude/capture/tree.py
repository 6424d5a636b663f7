"""A tree of turns: what the model read and sampled in one or many conversations, each token once. Append-only.

A request repeats its whole conversation as messages. The tree finds the deepest turn that the messages repeat. Only the
messages after it are rendered and tokenised, so a sampled token is never tokenised again. Messages are compared by
content (the tools, then each message, as canonical JSON), not by their text: a client may write the arguments of a call
in another order. A changed history is a branch, or a new root where no turn of it is known.

Each turn is a node of its own, also where two siblings give the same answer. The first request that continues a turn
takes over its session of the engine. Any further one is a branch, with a session that begins as a copy of it
(`CompletionRequest.fork_from`). Of equal turns a request continues one that nobody has continued, so that equal
siblings stay apart.

The tree of a rollout holds all its turns. A gateway's holds at most `max_tokens`: it forgets the turn that was not used
for longest, and a turn always before its parent. Knows nothing of machines, rewards and the ledger.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etude.capture.chat import Chat, Message
from etude.records.completion import Completion, Sampling, StopReason
from etude.records.rollout import ToolCall, Trace, Turn, TurnKind
from etude.records.wire import I32


@dataclass(slots=True, eq=False)
class Node:
    """A turn and its place in a tree; the fields without a comment are those of `Turn`."""

    parent: Node | None
    prompt_ids: I32
    completion: Completion
    sampling: Sampling
    calls: tuple[ToolCall, ...]
    kind: TurnKind
    key: bytes  # digest of the tools and all messages, the model's own included
    session_id: str  # of the engine
    number: int  # turns that the tree recorded before
    num_tokens: int  # of the context, this turn included
    continued: bool = False  # a request has taken over its session

    @property
    def num_added(self) -> int:
        """Tokens that the turn adds to its parent's context."""
        return len(self.prompt_ids) + len(self.completion.token_ids)

    def has_tokens_of(self, completion: Completion) -> bool:
        """Whether the turn sampled the same tokens."""
        return np.array_equal(self.completion.token_ids, completion.token_ids)

    def ancestry(self) -> Iterator[Node]:
        """The turn, its parent, and so on to the root."""
        at: Node | None = self
        while at is not None:
            yield at
            at = at.parent

    def context(self) -> I32:
        """[num_tokens] everything that the model has read and sampled up to here."""
        parts = [ids for node in self.ancestry() for ids in (node.completion.token_ids, node.prompt_ids)]
        return np.concatenate(parts[::-1])


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The tokens of a request, and where its completion belongs."""

    parent: Node | None  # the deepest turn that the messages repeat
    token_ids: I32  # [context + P]
    new_ids: I32  # [P] tokens of the messages behind the parent, and of the generation prompt
    key: bytes  # digest of the tools and the messages
    session_id: str
    fork_from: str | None  # as in `CompletionRequest`

    @property
    def routes_from(self) -> int:
        """The first context position whose routes no turn before has."""
        if self.parent is None:
            return 0
        return self.parent.completion.routes_start + len(self.parent.completion.routes)


class TurnTree:
    """Turns by what was said. May be used from any thread.

    `session_id` names the engine session of the first conversation; others get it with a number: "s", "s+1", "s+2".
    """

    def __init__(self, chat: Chat, *, session_id: str, max_tokens: int | None = None) -> None:
        self.max_tokens, self.num_tokens = max_tokens, 0
        self._chat, self._session_id = chat, session_id
        self._num_sessions = self._num_recorded = 0
        self._nodes: OrderedDict[Node, None] = OrderedDict()  # the one unused for longest first
        self._by_key: dict[bytes, list[Node]] = {}
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
        """Render a request: the tokens of the deepest known turn, then those of the messages behind it. The last
        message is not the model's.

        `tools`: what the signatures were made of, where they may change within the tree. Raises `ContextFull`, before
        it tokenises, for a prompt that surely has more than `max_tokens` tokens, and what the chat format raises.
        """
        keys = conversation_keys(tools, messages)
        with self._lock:
            parent = self._deepest(keys[:-1])
            session_id, fork_from = self._session(parent)
        if parent is None:
            new_ids = self._chat.encode_prompt(messages, signatures, max_tokens=max_tokens)
            return Prompt(None, new_ids, new_ids, keys[-1], session_id, fork_from)
        known = keys.index(parent.key) + 1
        remaining = None if max_tokens is None else max(0, max_tokens - parent.num_tokens)
        ended = parent.completion.stop_reason is StopReason.STOP
        new_ids = self._chat.continuation(
            messages[:known], messages[known:], signatures, ended=ended, max_tokens=remaining
        )
        token_ids = np.concatenate([parent.context(), new_ids])
        return Prompt(parent, token_ids, new_ids, keys[-1], session_id, fork_from)

    def record(
        self,
        prompt: Prompt,
        completion: Completion,
        message: Message,
        *,
        sampling: Sampling,
        calls: tuple[ToolCall, ...] = (),
        kind: TurnKind = TurnKind.ACT,
    ) -> Node:
        """Add the turn of a prompt and its completion. `message`: the model's message, as later requests repeat it. A
        request that was sent twice (same prompt, sampling and completion) gives the turn that is there."""
        key, num_before = _extend_key(prompt.key, message), prompt.parent.num_tokens if prompt.parent else 0
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
                session_id=prompt.session_id,
                number=self._num_recorded,
                num_tokens=num_before + len(prompt.new_ids) + len(completion.token_ids),
            )
            self._num_recorded += 1
            self._touch(node)
            while self.max_tokens is not None and self.num_tokens > self.max_tokens:
                self._evict(next(iter(self._nodes)))
        return node

    def trace(self) -> Trace:
        """All turns that the tree holds, in the order in which they were recorded."""
        with self._lock:
            nodes = sorted(self._nodes, key=lambda node: node.number)
        index = {node: i for i, node in enumerate(nodes)}
        return Trace(
            tuple(
                Turn(
                    parent=None if node.parent is None else index[node.parent],
                    prompt_ids=node.prompt_ids,
                    completion=node.completion,
                    sampling=node.sampling,
                    calls=node.calls,
                    kind=node.kind,
                )
                for node in nodes
            )
        )

    # with the lock held

    def _deepest(self, keys: Sequence[bytes]) -> Node | None:
        """The turn of the longest known beginning of a conversation; of equal ones the newest that nobody continued."""
        same = next((self._by_key[key] for key in reversed(keys) if key in self._by_key), None)
        if same is None:
            return None
        node = next((node for node in reversed(same) if not node.continued), same[-1])
        self._touch(node)
        return node

    def _session(self, parent: Node | None) -> tuple[str, str | None]:
        """The session of a request that continues a turn, and the session that it is forked from."""
        if parent is not None and not parent.continued:
            parent.continued = True
            return parent.session_id, None
        number, self._num_sessions = self._num_sessions, self._num_sessions + 1
        session_id = f"{self._session_id}+{number}" if number else self._session_id
        return session_id, parent.session_id if parent else None

    def _touch(self, node: Node) -> None:
        """Hold a turn and its ancestors. Each is then more recent than its children, and is forgotten after them."""
        for at in node.ancestry():
            if at not in self._nodes:
                self._nodes[at] = None
                self._by_key.setdefault(at.key, []).append(at)
                self.num_tokens += at.num_added
            self._nodes.move_to_end(at)

    def _evict(self, node: Node) -> None:
        del self._nodes[node]
        self.num_tokens -= node.num_added
        same = self._by_key[node.key]
        same.remove(node)
        if not same:
            del self._by_key[node.key]


def conversation_keys(tools: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> list[bytes]:
    """A digest of each beginning of a conversation: keys[i] is that of messages[: i + 1] under these tools.

    >>> conversation_keys([], [{"role": "user", "content": "a"}]) == conversation_keys([], [{"content": "a", "role": "user"}])
    True
    """
    key = hashlib.sha256(_canonical(list(tools))).digest()
    keys = []
    for message in messages:
        key = _extend_key(key, message)
        keys.append(key)
    return keys


def _extend_key(key: bytes, message: Message) -> bytes:
    return hashlib.sha256(key + _canonical(message)).digest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

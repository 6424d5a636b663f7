"""The tokens of known conversations, as an append-only tree, so that nothing is ever tokenised twice.

A node is a completion: it adds the prompt's new tokens and what was sampled. Its key is the chain of everything said
up to it (tools, then each message, canonically), so a client that sends the whole conversation again, as OpenAI's
protocol demands, is met at the deepest completion that it repeats word for word. Another answer to the same message,
or a changed history, is another branch. Forgotten least recently used first, a node always before its parent.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from etude.records.wire import I32


class Node:
    """A completion in a conversation. `ended`: the model sampled the stop token itself."""

    __slots__ = ("added", "ended", "key", "num_tokens", "parent", "session_id")

    def __init__(self, key: bytes, parent: Node | None, added: I32, *, session_id: str, ended: bool) -> None:
        self.key, self.parent, self.added = key, parent, added
        self.session_id, self.ended = session_id, ended
        self.num_tokens: int = len(added) + (parent.num_tokens if parent else 0)

    def context(self) -> I32:
        """[num_tokens] everything the model has seen and said up to here."""
        parts: list[I32] = []
        node: Node | None = self
        while node is not None:
            parts.append(node.added)
            node = node.parent
        return np.concatenate(parts[::-1])


class TokenTree:
    """Nodes by key; holds at most `max_tokens` tokens.

    >>> tree = TokenTree(max_tokens=100)
    >>> keys = chain([], [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}])
    >>> node = tree.add(keys[-1], None, np.array([1, 2, 3], np.int32), session_id="s", ended=True)
    >>> tree.deepest(keys).context().tolist()
    [1, 2, 3]
    """

    def __init__(self, *, max_tokens: int) -> None:
        self.max_tokens, self.num_tokens = max_tokens, 0
        self._nodes: OrderedDict[bytes, Node] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def deepest(self, keys: Sequence[bytes]) -> Node | None:
        """The node of the longest known beginning of a conversation."""
        node = next((self._nodes[k] for k in reversed(keys) if k in self._nodes), None)
        if node is not None:
            self._touch(node)
        return node

    def add(self, key: bytes, parent: Node | None, added: I32, *, session_id: str, ended: bool) -> Node:
        """Remember a completion. The same words said again replace the node: the newest tokens are the client's."""
        node = Node(key, parent, added, session_id=session_id, ended=ended)
        before = self._nodes.pop(key, None)
        if before is not None:
            self.num_tokens -= len(before.added)
        self._nodes[key] = node
        self.num_tokens += len(added)
        self._touch(node)
        while self.num_tokens > self.max_tokens and self._nodes:
            _, oldest = self._nodes.popitem(last=False)
            self.num_tokens -= len(oldest.added)
        return node

    def _touch(self, node: Node) -> None:
        """A node, then its ancestors: so an ancestor is always the more recent one, and is forgotten later."""
        at: Node | None = node
        while at is not None:
            if self._nodes.get(at.key) is at:
                self._nodes.move_to_end(at.key)
            at = at.parent


def chain(tools: Sequence[dict[str, Any]], messages: Sequence[dict[str, Any]]) -> list[bytes]:
    """A key for each beginning of a conversation: keys[i] stands for messages[: i + 1] under these tools."""
    key = hashlib.sha256(_canonical(list(tools))).digest()
    keys = []
    for message in messages:
        key = hashlib.sha256(key + _canonical(message)).digest()
        keys.append(key)
    return keys


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

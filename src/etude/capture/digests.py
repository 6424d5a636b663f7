"""Digests by which messages and conversations are recognised when clients send them again."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

from etude.capture.chat import Message


class KeptMessage(dict[str, Any]):
    """A message with its digest (`message_digest`) and number of characters, computed once. It must not be modified."""

    __slots__ = ("digest", "num_chars")

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self.digest, self.num_chars = message_digest(message), num_chars_of(message)


class KeptTools(list[dict[str, Any]]):
    """A list of tools with its digest, computed once. It must not be modified.

    It can be the key of a dict, where only the same object is found."""

    __slots__ = ("digest",)
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(tools)
        self.digest = tools_digest(tools)


class KeptMessages(list[Message]):
    """The messages of a request with their `conversation_keys`, each computed once. They must not be modified.

    `earlier`: the messages of an earlier request, if these messages begin with them; None: no such request is known.
    `known`: the number of messages in `earlier`."""

    __slots__ = ("_keys", "known")

    def __init__(self, messages: Iterable[Message], earlier: KeptMessages | None = None) -> None:
        super().__init__(messages)
        self.known = 0 if earlier is None else len(earlier)
        self._keys: tuple[bytes, list[bytes]] = (b"", []) if earlier is None else earlier._keys

    def keys(self, tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """Return `conversation_keys`. They are computed once; the keys of messages in `earlier` are taken from
        there."""
        (of_tools, known), digest = self._keys, tools_digest(tools)
        if of_tools != digest or len(known) < len(self):
            known = known if of_tools == digest else []
            new = accumulate(map(message_digest, self[len(known) :]), extend_key, initial=(known or [digest])[-1])
            known = [*known, *islice(new, 1, None)]
            self._keys = digest, known
        return known


def conversation_keys(tools: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> list[bytes]:
    """Return a digest for each prefix of a conversation.

    Element i is the SHA-256 digest (32 bytes) of the tools and ``messages[: i + 1]``. The order of keys in a dict does
    not matter.

    >>> one, same = {"role": "user", "content": "a"}, {"content": "a", "role": "user"}
    >>> conversation_keys([], [one]) == conversation_keys([], [same])
    True
    """
    return (messages if isinstance(messages, KeptMessages) else KeptMessages(messages)).keys(tools)


def message_digest(message: Message) -> bytes:
    """Return the SHA-256 digest (32 bytes) of a message's content. Messages with equal digests count as the same.

    Clients change details when they repeat a conversation. So the digest ignores reasoning, the ids of calls and
    the field `name`; in the model's messages also whitespace around the text and the order of a call's arguments.

    >>> call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": 2}}}
    >>> same = {"function": {"name": "f", "arguments": '{"b": 2, "a": 1}'}}
    >>> reply = {"role": "assistant", "content": "so\\n", "tool_calls": [call], "reasoning_content": "hm"}
    >>> message_digest(reply) == message_digest({"role": "assistant", "content": "so", "tool_calls": [same]})
    True
    """
    if isinstance(message, KeptMessage):
        return message.digest
    content = message.get("content") or ""
    if message["role"] == "assistant" and isinstance(content, str):
        content = content.strip()
    calls = [_call_identity(call) for call in message.get("tool_calls") or ()]
    return hashlib.sha256(_canonical([message["role"], content, calls])).digest()


def _call_identity(call: Mapping[str, Any]) -> list[Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [function["name"], arguments]


def num_chars_of(message: Message) -> int:
    """Estimate the number of characters of a message that a template renders: of its text, reasoning and tool calls."""
    if isinstance(message, KeptMessage):
        return message.num_chars
    texts = (message.get(name) for name in ("content", "reasoning_content"))
    return sum(len(text) for text in texts if text) + len(_canonical(message.get("tool_calls") or []))


def tools_digest(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the SHA-256 digest of a list of tools. The order of keys in a dict does not matter."""
    if isinstance(tools, KeptTools):
        return tools.digest
    return hashlib.sha256(_canonical(list(tools))).digest()


_encoder = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def extend_key(key: bytes, digest: bytes) -> bytes:
    """Return the digest of a conversation that is extended by one message, from the digests of both."""
    return hashlib.sha256(key + digest).digest()


def _canonical(value: Any) -> bytes:
    return _encoder.encode(value).encode()

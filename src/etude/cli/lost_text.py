"""Finds the parts of a request that the model did not read, because the chat template leaves them out.

Templates write the same text in many ways: in JSON with escapes, in comments, with other whitespace. So only letters,
digits and underscores are compared."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etude.harness.chat import Message
from etude.harness.template import REASONING

_PIECE = 40  # characters of a long text that are looked for at once
_SHOWN = 40  # characters of a text in a report
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def lost_parts(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], rendered: str) -> list[str]:
    """Return the parts of a request that are not in `rendered`, the text of the tokens that the model read.

    Each entry describes one part, such as "tool 'edit'", "description of tool 'edit'" or "780 of 800 characters of
    the system message 'You are …', from 'Never'"."""
    read = _Read(rendered)
    found = [part for tool in tools for part in _of_tool(tool["function"], read)]
    return [*found, *(part for message in messages for part in _of_message(message, read))]


class _Read:
    """The text that the model read, normalised for searches."""

    def __init__(self, rendered: str) -> None:
        once = _unescaped(rendered)
        self._text = rendered
        self._packed = tuple(dict.fromkeys(_packed(text) for text in (rendered, once, _unescaped(once))))

    def has(self, text: str) -> bool:
        packed = _packed(text)
        return any(packed in one for one in self._packed)

    def has_name(self, name: str) -> bool:
        """Whether a name is there as that of an argument or tool, with a sign of some notation beside it."""
        word = re.escape(name)
        pattern = rf"""["'`*>=/.]{word}(?!\w)|(?<!\w){word}(?:\\?["'`*<=]|\s*[:?(])|^\W*{word}\W*$"""
        return re.search(pattern, self._text, re.MULTILINE) is not None

    def missing(self, text: str) -> tuple[int, str]:
        """Return how many characters of a text are not there, in pieces of `_PIECE`, and the first of these pieces."""
        if self.has(text):
            return 0, ""
        pieces = [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
        lost = [piece for piece in pieces if not self.has(piece)]
        return (sum(map(len, lost)), lost[0]) if lost else (len(text), text)  # all pieces, but not in one text


def _of_tool(function: Mapping[str, Any], read: _Read) -> Iterator[str]:
    name = str(function["name"])
    if not read.has_name(name):
        yield f"tool {name!r}"
        return
    if not read.has(str(function.get("description") or "")):
        yield f"description of tool {name!r}"
    arguments = list(_arguments(function.get("parameters")))
    if lost := [one for one, _ in arguments if not read.has_name(one)]:
        yield f"arguments {', '.join(lost)} of tool {name!r}"
    if lost := [one for one, text in arguments if one not in lost and not read.has(text)]:
        yield f"descriptions of arguments {', '.join(lost)} of tool {name!r}"


def _arguments(schema: Any) -> Iterator[tuple[str, str]]:
    """Yield name and description of all properties of a JSON schema, the nested ones too."""
    if not isinstance(schema, Mapping):
        return
    properties = schema.get("properties")
    for name, one in (properties if isinstance(properties, Mapping) else {}).items():
        about = one.get("description") if isinstance(one, Mapping) else None
        yield str(name), about if isinstance(about, str) else ""
        yield from _arguments(one)
    yield from _arguments(schema.get("items"))


def _of_message(message: Message, read: _Read) -> Iterator[str]:
    role, content = message["role"], str(message.get("content") or "")
    yield from _of_text(content, f"the {role} message", read)
    reasoning = next((message[name] for name in REASONING if message.get(name)), "")
    yield from _of_text(str(reasoning), "the reasoning", read)
    for call in message.get("tool_calls") or ():
        function = call["function"]
        name, arguments = str(function["name"]), function["arguments"]
        if not read.has(name):
            yield f"a call of {name!r}"
            continue
        values = arguments if isinstance(arguments, Mapping) else {"": arguments}
        for argument, value in values.items():
            if any(read.missing(leaf)[0] for leaf in _leaves(value)):
                yield f"argument {argument!r} of a call of {name!r}"


def _of_text(text: str, what: str, read: _Read) -> Iterator[str]:
    num, first = read.missing(text)
    if num == len(text) > 0:
        yield f"{what} {_short(text)}"
    elif num:
        yield f"{num} of {len(text)} characters of {what} {_short(text)}, from {_short(first)}"


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts in the value of an argument."""
    if isinstance(value, Mapping):
        yield from (leaf for one in value.values() for leaf in _leaves(one))
    elif isinstance(value, list | tuple):
        yield from (leaf for one in value for leaf in _leaves(one))
    elif value is not None:
        yield value if isinstance(value, str) else json.dumps(value)


def _short(text: str) -> str:
    return repr(text[:_SHOWN] + "…" if len(text) > _SHOWN else text)


def _packed(text: str) -> str:
    return re.sub(r"\W+", "", unicodedata.normalize("NFKC", text)).lower()


def _unescaped(text: str) -> str:
    """Replace the escapes of JSON strings."""
    return _ESCAPE.sub(lambda m: chr(int(m[1], 16)) if m[1] else _CONTROLS.get(m[2], m[2]), text)

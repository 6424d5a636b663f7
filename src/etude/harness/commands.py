"""Tool calls as command lines: ``edit calc.py 3 return a + b``.

A call is the tool's name and then its arguments in the order of its signature, with one space between them. The last
argument takes the rest of the text, newlines included, so code needs no quotes. Any earlier argument is a bare word. If
it is empty, has a space in it, or is not text, it is written as JSON. A word that starts with ``"``, ``[`` or ``{`` is
parsed as JSON. The format is this short because every token costs: the same edit as a JSON object is three times as
long, and a model of a million parameters fails to close the brackets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ABSENT = "null"
MAX_LEVELS = 64
"""The deepest nesting of lists and objects in an argument: writing one recurses once per level."""
_JSON_STARTS = ('"', "[", "{")
_decoder = json.JSONDecoder()
_LAST_WORD = r"/[^\x00]+/"
_WORDS = {
    "string": r'/[^ \n"\[{\x00][^ \n\x00]*/',
    "integer": "/-?(0|[1-9][0-9]{0,14})/",
    "number": r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?/",
    "boolean": "/true|false/",
    "array": '%json {"type": "array"}',
    "object": '%json {"type": "object"}',
}
"""Lark of a word by the kind of its parameter."""
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool, as the model sees it. `kind` is its JSON schema type, such as "string" or "integer".

    `choices`: the texts of which a forced call has one, from `enum` or `const` of its schema; (): any text."""

    name: str
    description: str = ""
    kind: str = "string"
    required: bool = True
    choices: tuple[str, ...] = ()

    def takes(self, value: Any) -> bool:
        """Return whether a value has this parameter's type. A parameter of an unknown type accepts any value."""
        if isinstance(value, bool) and self.kind in ("integer", "number"):
            return False
        return isinstance(value, _KINDS.get(self.kind, (object,)))


@dataclass(frozen=True, slots=True)
class Signature:
    """A tool as the model sees it: name, description, and parameters in order.

    `given` is the entry of OpenAI's `tools` list that `from_openai` parsed, or None for a tool written in Python.

    >>> edit = Signature("edit", "Replace a line.", (Parameter("path"), Parameter("line"), Parameter("text")))
    >>> read_call("edit calc.py 3 return a + b", {"edit": edit})
    Call(name='edit', arguments={'path': 'calc.py', 'line': '3', 'text': 'return a + b'})
    """

    name: str
    description: str
    parameters: tuple[Parameter, ...] = ()
    given: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def to_openai(self) -> dict[str, Any]:
        """Return the tool as an entry of OpenAI's `tools` list. What `from_openai` parsed is returned unchanged."""
        if self.given is not None:
            return dict(self.given)
        properties = {p.name: {"type": p.kind, "description": p.description} for p in self.parameters}
        required = [p.name for p in self.parameters if p.required]
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}

    @classmethod
    def from_openai(cls, tool: Mapping[str, Any]) -> Signature:
        """Parse an entry of OpenAI's `tools` list. Raises `ValueError` for an invalid entry."""
        try:
            function = tool["function"]
            schema = function.get("parameters") or {}
            properties, required = schema.get("properties") or {}, schema.get("required") or ()
            name, description = function["name"], function.get("description") or ""
            parameters = tuple(
                Parameter(p, str(s.get("description") or ""), _kind(s), p in required, _choices(s))
                for p, s in properties.items()
            )
        except (KeyError, TypeError, AttributeError) as error:
            facts = f"this one has no key {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"a tool is {{type, function: {{name, parameters}}}}: {facts}") from None
        if not isinstance(name, str) or not name or any(c.isspace() for c in name):
            raise ValueError(f"a tool's name is a word, not {name!r}")
        return cls(name, str(description), parameters, tool)


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed tool call: arguments by name, in the signature's order."""

    name: str
    arguments: dict[str, Any]


def read_call(line: str, signatures: Mapping[str, Signature], *, strict: bool = True) -> Call | str:
    """Parse a command line such as "cat a.py". Returns the `Call`, or a short error message for the model.

    `signatures` are the tools by name. Arguments are checked against the types of the tool's parameters. With `strict`,
    a missing required argument is an error."""
    name, space, rest = line.partition(" ")
    signature = signatures.get(name.rstrip())
    if signature is None:
        return f"no such tool: {name[:40].strip()}"
    words = _split(rest, len(signature.parameters)) if space or rest else []
    if words is None:
        return usage(signature)
    arguments: dict[str, Any] = {}
    for parameter, (word, last) in zip(signature.parameters, words, strict=False):
        if word == ABSENT and not (parameter.required or last):
            continue
        try:
            arguments[parameter.name] = _value(word, parameter, last=last)
        except ValueError:
            return f"{parameter.name} is not of type {parameter.kind}"
    missing = any(p.required and p.name not in arguments for p in signature.parameters)
    if len(words) > len(signature.parameters) or (missing and strict):
        return usage(signature)
    if wrong := unwritable(arguments):
        return wrong
    return Call(signature.name, arguments)


def write_words(arguments: Mapping[str, Any], signature: Signature | None = None) -> dict[str, str]:
    """Return the arguments of a call as words by name, in the signature's order.

    The tool's name and these words, joined with spaces, are a command line that `read_call` parses. Without a signature
    (the tool is no longer offered) the order of `arguments` is kept.

    >>> write_words({"line": 3, "path": "a b.py"}, Signature("cat", "", (Parameter("path"), Parameter("line"))))
    {'path': '"a b.py"', 'line': '3'}
    >>> write_words({"path": "a b.py"}, Signature("cat", "", (Parameter("path"), Parameter("line", required=False))))
    {'path': '"a b.py"'}
    """
    names = list(arguments) if signature is None else [p.name for p in signature.parameters]
    last = names[-1] if names else ""  # it is the rest of the line: no other may be written without quotes
    while names and names[-1] not in arguments:
        names.pop()
    words = {n: _word(arguments.get(n), last=n == last) for n in names}
    words.update({n: _word(v, last=False) for n, v in arguments.items() if n not in words})
    return words


def words_grammar(signature: Signature) -> str:
    """Return the part of a Lark grammar for the arguments of a call, each with the space before it."""
    rest = ""
    for i, parameter in reversed(list(enumerate(signature.parameters))):
        last = i == len(signature.parameters) - 1
        kind = parameter.kind if parameter.kind in _WORDS else "string"
        word = _LAST_WORD if last and kind == "string" else _WORDS[kind]
        if kind == "string" and parameter.choices:
            words = [_word(choice, last=last) for choice in parameter.choices]
            words += [] if last or parameter.required else [ABSENT]
            word = f"( {' | '.join(json.dumps(one, ensure_ascii=False) for one in words)} )"
        optional = not parameter.required and not any(p.required for p in signature.parameters[i:])
        rest = f' ( " " {word}{rest} )?' if optional else f' " " {word}{rest}'
    return rest


def unwritable(arguments: Mapping[str, Any]) -> str:
    """Return why a call with these arguments could not be written as text again, or "" if it could.

    JSON can hold one half of a surrogate pair (``"\\ud800"``), which has no UTF-8 encoding, and it can be nested too
    deeply.

    >>> unwritable({"path": "a.py"}), unwritable({"path": ["\\ud800"]})
    ('', 'path holds half of a character')
    """
    for name, value in arguments.items():
        left, levels = [value], 0
        while left:
            for text in (one for one in left if isinstance(one, str)):
                try:
                    text.encode()
                except UnicodeEncodeError:
                    return f"{name} holds half of a character"
            lists = [one for one in left if isinstance(one, list)]
            objects = [one for one in left if isinstance(one, dict)]
            left = [x for one in lists for x in one] + [x for one in objects for item in one.items() for x in item]
            levels += bool(left)
            if levels > MAX_LEVELS:
                return f"{name} is nested too deeply"
    return ""


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the JSON schema type of a parameter. Of several (["string", "null"]) it is the first that is not null.

    In place of `type` a schema may have `anyOf` with null and one other type, as pydantic writes optional values."""
    declared, any_of = schema.get("type"), schema.get("anyOf")
    if declared is None and isinstance(any_of, list):
        others = [one.get("type") if isinstance(one, Mapping) else None for one in any_of]
        others = [kind for kind in others if kind != "null"]
        declared = others[0] if len(others) == 1 else None
    kinds = declared if isinstance(declared, list) else [declared]
    return next((k for k in kinds if isinstance(k, str) and k != "null"), "string")


def _choices(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts that a schema allows by `const` or `enum`; () if it allows others, too, or any value."""
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(allowed, list) or not all(one is None or isinstance(one, str) for one in allowed):
        return ()
    return tuple(one for one in allowed if one is not None)


def usage(signature: Signature) -> str:
    """Return a tool's usage message, which the model gets after a call with wrong arguments."""
    if not signature.parameters:
        return f"{signature.name} takes nothing"
    return f"usage: {signature.name} {' '.join(p.name.upper() for p in signature.parameters)}"


def _split(rest: str, num_parameters: int) -> list[tuple[str, bool]] | None:
    """Split into up to `num_parameters` words, each with whether it is the last parameter's. None: invalid JSON."""
    if num_parameters == 0:
        return [(rest, True)] if rest.strip() else []
    words: list[tuple[str, bool]] = []
    while len(words) < num_parameters - 1:
        if rest.startswith(_JSON_STARTS):
            try:
                _, end = _decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return None
            if rest[end : end + 1] not in ("", " "):
                return None
            word, space, rest = rest[:end], rest[end : end + 1], rest[end + 1 :]
        else:
            word, space, rest = rest.partition(" ")
        words.append((word, False))
        if not space:
            return words
    words.append((rest, True))
    return words


def _value(word: str, parameter: Parameter, *, last: bool) -> Any:
    if parameter.kind == "string":
        if last or not word.startswith('"'):
            return word
        return str(_decoder.decode(word))
    try:
        value = _decoder.decode(word)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not parameter.takes(value):
        raise ValueError(parameter.kind)
    return value


def _word(value: Any, *, last: bool) -> str:
    if value is None:
        return ABSENT
    if not isinstance(value, str):
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if last:
        return value
    plain = value and value != ABSENT and " " not in value and not value.startswith(_JSON_STARTS)
    return value if plain else json.dumps(value, ensure_ascii=False)

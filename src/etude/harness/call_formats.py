"""Tool-call formats of published checkpoints: Hermes/Qwen, DeepSeek, Kimi, Llama 3, GLM-4.5 and MiniMax-M2.

The arguments of a call are JSON, or (GLM, MiniMax) one element for each argument. Llama's calls need no special token;
all others are recognised by a token. The tokeniser's tokens show which format a checkpoint uses. etude's own format is
a command line (`commands`). The calls of earlier turns are rendered by the chat template. This module parses calls in
completions, and writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from etude.grammars import json_value, literal, text_before
from etude.harness.commands import Call, Signature, unwritable, usage

_decoder = json.JSONDecoder()


@dataclass(frozen=True)
class CallFormat:
    """A format in which checkpoints write tool calls, such as `HERMES`.

    - `opening_tokens`: tokens with which a call, or a list of calls, begins.
    - `begin`: the text with which each call begins.
    - `pattern`: matches one complete call. Its groups are `name` and `arguments`, or `both`, a JSON object with both.
    - `call`: a template for the text of a call. `write` replaces the words NAME, ARGUMENTS (a JSON object) and BOTH in
      it.
    - `opening`, `closing`: the texts around a list of calls; `between`: the text between two calls.
    - `argument`: a template for one argument, with the words KEY and VALUE; ARGUMENTS is then a list of such texts. A
      string value is written as it is, any other value as JSON. "": ARGUMENTS is a JSON object.
    - `bare`: beginnings of a JSON object, without whitespace. A completion that begins with one of them is a call
      without an opening token.
    - `is_single`: whether a completion has at most one call."""

    name: str
    opening_tokens: tuple[str, ...]
    begin: str
    pattern: re.Pattern[str]
    call: str
    opening: str = ""
    closing: str = ""
    between: str = "\n"
    argument: str = ""
    bare: tuple[str, ...] = ()
    is_single: bool = False

    def read(
        self, text: str, signatures: Mapping[str, Signature], *, strict: bool = True
    ) -> tuple[str, tuple[Call, ...] | str]:
        """Split the text of a completion into the text before its first tool call, and the calls.

        When a call cannot be parsed, return the whole text and an error message for the model. With `strict`, do so too
        when a call does not fit its tool's signature. Values of `argument` get the type of their parameter; they are
        strings if the tool is not known, or if they are not JSON."""
        start = min((at for token in self.opening_tokens if (at := text.find(token)) >= 0), default=-1)
        if start < 0 and self.bare and _squeezed(text).startswith(self.bare):
            start = 0
        if start < 0:
            return text, ()
        calls: list[Call] = []
        at = max(start, text.find(self.begin, start))
        while at >= 0:
            found = self.pattern.match(text, at)
            if found is None:
                return text, "the call cannot be read"
            call = self._read_one(found.groupdict(), signatures, strict=strict)
            if isinstance(call, str):
                return text, call
            calls.append(call)
            at = text.find(self.begin, found.end())
        if self.is_single and len(calls) > 1:
            return text, "one call a turn"
        return text[:start], tuple(calls)

    def may_be_bare(self, beginning: str) -> bool:
        """Return whether a completion with this beginning may become a call without an opening token.

        >>> [LLAMA.may_be_bare(text) for text in ("", '{ "name', '{"names', "so {")]
        [True, True, False, False]
        """
        squeezed = _squeezed(beginning)
        return any(squeezed.startswith(bare) or bare.startswith(squeezed) for bare in self.bare)

    def _read_one(self, parts: Mapping[str, str], signatures: Mapping[str, Signature], *, strict: bool) -> Call | str:
        name: Any = parts.get("name", "").strip()
        arguments: Any
        try:
            if "both" in parts:
                both, end = _decoder.raw_decode(parts["both"])
                if rest := parts["both"][end:].lstrip("; \n"):
                    return "one call a turn" if rest.startswith("{") else "the call's arguments are no JSON"
                name, arguments = both.get("name"), both.get("parameters" if self.bare else "arguments")
            elif self.argument:
                arguments = self._read_arguments(parts["arguments"], signatures.get(name))
            else:
                arguments = json.loads(parts["arguments"] or "{}")
        except (ValueError, RecursionError, AttributeError):
            return "the call's arguments are no JSON"
        checked = check_call(name, arguments, signatures)
        if isinstance(checked, Call) or strict:
            return checked
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            return checked
        return unwritable({"name": name, **arguments}) or Call(name, arguments)

    def _read_arguments(self, text: str, signature: Signature | None) -> dict[str, Any]:
        kinds = {p.name: p.kind for p in signature.parameters} if signature else {}
        pairs = [(found["key"], found["value"]) for found in _argument_pattern(self.argument).finditer(text)]
        return {key: _value(value, kinds.get(key, "string")) for key, value in pairs}

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a completion that calls the tool `name`.

        In a format with `argument`, the text after VALUE ends a string, so the string cannot contain that text."""
        as_json = json.dumps(arguments, ensure_ascii=False)
        before, middle, after = _marks(self.argument)
        pairs = ((key, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for key, v in arguments.items())
        written = "".join(f"{before}{key}{middle}{value}{after}" for key, value in pairs)
        words = {
            "NAME": name,
            "ARGUMENTS": written if self.argument else as_json,
            "BOTH": f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {as_json}}}',
        }
        call = re.sub("|".join(words), lambda word: words[word[0]], self.call)
        return self.opening + call + self.closing

    def arguments_grammar(self, signature: Signature, tokens: Mapping[str, int]) -> str:
        """Return the Lark grammar of a tool's arguments, in the order of its parameters, for a format with `argument`.

        A string may be any text, or one of its schema's `enum`; any other value must satisfy its schema. `tokens` are
        the tokeniser's added tokens; if one occurs in the grammar, it stands for the token and not for its characters.
        """
        schema = signature.to_openai()["function"].get("parameters") or {}
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        before, middle, after = _marks(self.argument)
        end = after.rstrip()
        rules = []
        for parameter in signature.parameters:
            found = (schema.get("properties") or {}).get(parameter.name)
            known = found if isinstance(found, dict) else {}
            if parameter.kind != "string":
                value = f"{json_value({**shared, **known})} {literal(end, tokens)}"
            elif choices := [one for one in known.get("enum") or () if isinstance(one, str)]:
                value = f"({' | '.join(literal(one, {}) for one in choices)}) {literal(end, tokens)}"
            else:
                value = text_before(end, tokens)
            around = literal(before, tokens), literal(parameter.name, {}), literal(middle, tokens)
            rule = " ".join([*around, value, literal(after[len(end) :], tokens)])
            rules.append(rule if parameter.required else f"({rule})?")
        return " ".join(rules) or '""'


@lru_cache(maxsize=8)
def _argument_pattern(argument: str, *, all_of_them: bool = False) -> re.Pattern[str]:
    """Return the pattern of an argument, or of a call's whole arguments. Whitespace around the marks is ignored.

    The pattern of all does not backtrack into an argument, so its time is linear."""
    marks = [r"\s*".join(map(re.escape, mark.strip().split("\n"))) for mark in _marks(argument)]
    if all_of_them:
        return re.compile(r"(?P<arguments>(?>\s*{}.*?{}.*?{})*+)\s*".format(*marks), re.DOTALL)
    return re.compile(r"\s*{}(?P<key>.*?){}(?P<value>.*?){}".format(*marks), re.DOTALL)


def _squeezed(text: str) -> str:
    """Return the first characters of a text without whitespace."""
    return "".join(text[:256].split())[:64]


def _value(text: str, kind: str) -> Any:
    """Return the value of an argument that is a string, or JSON if its parameter is of another kind."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _marks(argument: str) -> tuple[str, str, str]:
    """Return the texts before KEY, between KEY and VALUE, and after VALUE."""
    before, _, rest = argument.partition("KEY")
    middle, _, after = rest.partition("VALUE")
    return before, middle, after


_GLM_ARGUMENT = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
_MINIMAX_ARGUMENT = '<parameter name="KEY">VALUE</parameter>\n'

HERMES = CallFormat(
    "hermes",  # also Qwen
    ("<tool_call>",),
    "<tool_call>",
    re.compile(r"<tool_call>\s*(?P<both>\{.*?\})\s*</tool_call>", re.DOTALL),
    "<tool_call>\nBOTH\n</tool_call>",
)
DEEPSEEK = CallFormat(
    "deepseek",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "<｜tool▁call▁begin｜>",
    re.compile(
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]{1,256}?)"
        r"(?:\n```json\n|<｜tool▁sep｜>)(?P<arguments>.*?)(?:\n```)?<｜tool▁call▁end｜>",
        re.DOTALL,
    ),
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    between="",
)
KIMI = CallFormat(
    "kimi",
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    "<|tool_call_begin|>",
    re.compile(
        r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\n<]{1,256}?)(?::\d{1,6})?\s*"
        r"<\|tool_call_argument_begin\|>\s*(?P<arguments>.*?)\s*<\|tool_call_end\|>",
        re.DOTALL,
    ),
    "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
    opening="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
    between="",
)
GLM = CallFormat(
    "glm",
    ("<tool_call>",),
    "<tool_call>",
    re.compile(
        r"<tool_call>\s*(?P<name>[^\n<]{1,256}?)"
        + _argument_pattern(_GLM_ARGUMENT, all_of_them=True).pattern
        + "</tool_call>",
        re.DOTALL,
    ),
    "<tool_call>NAME\nARGUMENTS</tool_call>",
    argument=_GLM_ARGUMENT,
)
MINIMAX = CallFormat(
    "minimax",
    ("<minimax:tool_call>",),
    "<invoke ",
    re.compile(
        r'<invoke name="(?P<name>[^"\n<]{1,256})">'
        + _argument_pattern(_MINIMAX_ARGUMENT, all_of_them=True).pattern
        + "</invoke>",
        re.DOTALL,
    ),
    '<invoke name="NAME">\nARGUMENTS</invoke>\n',
    opening="<minimax:tool_call>\n",
    closing="</minimax:tool_call>",
    between="",
    argument=_MINIMAX_ARGUMENT,
)
LLAMA = CallFormat(
    "llama",
    ("<|python_tag|>",),
    "<|python_tag|>",
    re.compile(r"(?:<\|python_tag\|>)?\s*(?P<both>\{.*\})\s*", re.DOTALL),
    '{"name": "NAME", "parameters": ARGUMENTS}',
    bare=('{"name":"', '{"type":"function","name":"'),
    is_single=True,
)
NONE = CallFormat("none", (), "", re.compile(r"(?!)"), "BOTH")
"""The format of a checkpoint that was not trained to call tools."""

_FORMATS = {
    "<arg_key>": GLM,
    "<minimax:tool_call>": MINIMAX,
    "<tool_call>": HERMES,
    "<｜tool▁calls▁begin｜>": DEEPSEEK,
    "<|tool_calls_section_begin|>": KIMI,
    "<|python_tag|>": LLAMA,
}
"""The formats by a token that only their checkpoints have, or no checkpoint of an earlier entry."""


def call_format_of(tokens: Container[str]) -> CallFormat:
    """Return the tool-call format of a checkpoint, or `NONE` if it has none.

    `tokens` are the tokeniser's added tokens."""
    return next((found for token, found in _FORMATS.items() if token in tokens), NONE)


def check_call(name: Any, arguments: Any, signatures: Mapping[str, Signature]) -> Call | str:
    """Check a tool call against the tools' signatures. Returns the `Call`, or a short error message for the model.

    `name` and `arguments` come from parsed JSON and may have any type. `signatures` are the tools by name."""
    if not isinstance(name, str) or name not in signatures:
        return f"no such tool: {str(name)[:40].strip().encode(errors='replace').decode()}"
    signature = signatures[name]
    known = {p.name: p for p in signature.parameters}
    if not isinstance(arguments, dict) or not arguments.keys() <= known.keys():
        return usage(signature)
    if wrong := unwritable(arguments):
        return wrong
    taken: dict[str, Any] = {}
    for key, parameter in known.items():
        if arguments.get(key) is None:
            if parameter.required:
                return usage(signature)
            continue
        value = arguments[key]
        if parameter.kind == "string" and not isinstance(value, str):
            value = json.dumps(value, ensure_ascii=False)
        if not parameter.takes(value):
            return f"{key} is not of type {parameter.kind}"
        taken[key] = value
    return Call(name, taken)

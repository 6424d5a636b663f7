"""Tool-call formats of published checkpoints: Hermes/Qwen, DeepSeek and Kimi.

Each format is JSON between special tokens, so the tokeniser's tokens show which one a checkpoint uses. etude's own
format is a command line (`commands`). The calls of earlier turns are rendered by the chat template. This module parses
calls in completions, and writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from etude.harness.commands import Call, Signature, unwritable, usage


@dataclass(frozen=True)
class CallFormat:
    """One way in which checkpoints write tool calls, such as `HERMES`.

    - `opening_tokens`: tokens with which a call, or a list of calls, begins. The last one begins a single call.
    - `pattern`: matches one complete call. Its groups are `name` and `arguments`, or `both`, a JSON object with both.
    - `template`: the text of a call with the words NAME, ARGUMENTS (a JSON object) and BOTH, which `write` replaces."""

    name: str
    opening_tokens: tuple[str, ...]
    pattern: re.Pattern[str]
    template: str

    def read(
        self, text: str, signatures: Mapping[str, Signature], *, strict: bool = True
    ) -> tuple[str, tuple[Call, ...] | str]:
        """Split the text of a completion into the text before its first tool call, and the calls.

        When a call cannot be parsed, return the whole text and an error message for the model. With `strict`, do so too
        when a call does not fit its tool's signature."""
        start = min((at for token in self.opening_tokens if (at := text.find(token)) >= 0), default=-1)
        if start < 0:
            return text, ()
        found = list(self.pattern.finditer(text, start))
        if not found or len(found) != self._num_opened(text[start:]):
            return text, "the call cannot be read"
        calls = []
        for one in found:
            call = self._read_one(one.groupdict(), signatures, strict=strict)
            if isinstance(call, str):
                return text, call
            calls.append(call)
        return text[:start], tuple(calls)

    def _num_opened(self, text: str) -> int:
        """Return the number of calls that a text opens, complete or not."""
        return text.count(self.opening_tokens[-1])

    @staticmethod
    def _read_one(parts: Mapping[str, str], signatures: Mapping[str, Signature], *, strict: bool) -> Call | str:
        try:
            both = json.loads(parts["both"]) if "both" in parts else {}
            arguments = both.get("arguments") if "both" in parts else json.loads(parts["arguments"] or "{}")
            name = both.get("name") if "both" in parts else parts["name"].strip()
        except (ValueError, RecursionError, AttributeError):
            return "the call's arguments are no JSON"
        checked = check_call(name, arguments, signatures)
        if isinstance(checked, Call) or strict:
            return checked
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            return checked
        return unwritable({"name": name, **arguments}) or Call(name, arguments)

    def parts(self) -> tuple[str, str, str]:
        """Split `template` into (what opens the list of calls, one call, what closes the list). The list's marks may be
        ""."""
        if len(self.opening_tokens) == 1:
            return "", self.template, ""
        opening = self.opening_tokens[0]
        closing = opening.replace("begin", "end")
        return opening, self.template.removeprefix(opening).removesuffix(closing), closing

    def write(self, name: str, arguments: str) -> str:
        """Return the text of a call of the tool `name`. `arguments` is a JSON object as text."""
        both = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'
        return self.template.replace("NAME", name).replace("BOTH", both).replace("ARGUMENTS", arguments)


HERMES = CallFormat(
    "hermes",  # also Qwen
    ("<tool_call>",),
    re.compile(r"<tool_call>\s*(?P<both>\{.*?\})\s*</tool_call>", re.DOTALL),
    "<tool_call>\nBOTH\n</tool_call>",
)
DEEPSEEK = CallFormat(
    "deepseek",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    re.compile(
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]{1,256}?)"
        r"(?:\n```json\n|<｜tool▁sep｜>)(?P<arguments>.*?)(?:\n```)?<｜tool▁call▁end｜>",
        re.DOTALL,
    ),
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
KIMI = CallFormat(
    "kimi",
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    re.compile(
        r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\n<]{1,256}?)(?::\d{1,6})?\s*"
        r"<\|tool_call_argument_begin\|>\s*(?P<arguments>.*?)\s*<\|tool_call_end\|>",
        re.DOTALL,
    ),
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS"
    "<|tool_call_end|><|tool_calls_section_end|>",
)
NONE = CallFormat("none", (), re.compile(r"(?!)"), "BOTH")
"""The format of a checkpoint that was not trained to call tools."""


def call_format_of(tokens: Container[str]) -> CallFormat:
    """Return the tool-call format of a checkpoint, or `NONE` if it has none.

    `tokens` are the tokeniser's added tokens. A format is recognised by one of its opening tokens."""
    return next((f for f in (HERMES, DEEPSEEK, KIMI) if any(t in tokens for t in f.opening_tokens)), NONE)


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

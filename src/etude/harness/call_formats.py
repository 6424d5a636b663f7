"""Tool-call formats of published checkpoints: Hermes/Qwen, DeepSeek and Kimi.

These formats are JSON between special tokens; the tokeniser's tokens show which format a checkpoint uses. etude's own
format is a command line (`commands`). The chat template renders the calls of earlier turns; here calls are parsed and
written in completions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from etude.harness.commands import Call, Signature, unwritable, usage


@dataclass(frozen=True)
class CallFormat:
    """One format of tool calls. `opening_tokens` begin a call; `pattern` matches a complete one."""

    name: str
    opening_tokens: tuple[str, ...]
    pattern: re.Pattern[str]
    template: str  # with NAME, ARGUMENTS (JSON) and BOTH (JSON of name and arguments) to be replaced

    def read(
        self, text: str, signatures: Mapping[str, Signature], *, strict: bool = True
    ) -> tuple[str, tuple[Call, ...] | str]:
        """Split a completion into (text before the first call, the calls). The second element is an error message when
        a call cannot be parsed; `strict`: also when it does not fit its tool's signature."""
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
        """The number of calls that a text opens, complete or not. The last opening token begins a single call."""
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

    def write(self, name: str, arguments: str) -> str:
        """Return the text of a tool call, with the tokens that open and close it. `name`: of the tool; `arguments`: a
        JSON object as text."""
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
    """Return the format of which an opening token is among `tokens`, a tokeniser's added tokens; else `NONE`."""
    return next((f for f in (HERMES, DEEPSEEK, KIMI) if any(t in tokens for t in f.opening_tokens)), NONE)


def check_call(name: Any, arguments: Any, signatures: Mapping[str, Signature]) -> Call | str:
    """Check a call against the tools' signatures. Returns the `Call`, or a short error message for the model."""
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

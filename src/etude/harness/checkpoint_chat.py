"""The chat format of a published checkpoint: its own template, special tokens and tool-call format.

Three things differ from etude's own format:

- Calls are JSON (`call_formats`).
- A template may render a past turn differently from how it was sampled: Qwen3 drops the reasoning. This is accepted,
  since only what follows a sampled message is taken from the rendering.
- Added tokens that are not special, such as ``<think>``, are tokens in the template and in assistant messages, and
  ordinary text in all other messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from etude.grammars import Tool, from_tool_calls
from etude.harness.call_formats import NONE, call_format_of
from etude.harness.chat import PLACEHOLDER, ChatFormat, Message, Reply
from etude.harness.commands import Call, Signature
from etude.harness.template import ChatError, ChatTemplate
from etude.records.wire import I32

_REPLY, _TOOL_OUTPUT = PLACEHOLDER + "reply", PLACEHOLDER + "output"
_HINT = "use the chat template that the checkpoint's makers publish, or etude's with its tokens"


class CheckpointChatFormat(ChatFormat):
    """The chat format that a published checkpoint was trained with. `ChatFormat.load` makes one.

    - `template`: Jinja source; `with_tools`: another template for conversations with tools, or None.
    - `special`: the special tokens that the template may write, by name, such as ``eos_token``, which is required.
    - `stops`: further stop token ids.

    Raises `ChatError` for a tokeniser without the end token, and for a template that does not compile."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        with_tools: str | None = None,
        *,
        special: Mapping[str, str],
        stops: Iterable[int] = (),
    ) -> None:
        self._load_tokens(tokenizer)
        self.end = special.get("eos_token", "")
        if self.end not in self._added:
            facts = f"eos_token is {self.end!r}, which is none of its {len(self._added)} added tokens"
            raise ChatError("the tokeniser has no chat format", facts, hint=_HINT)
        self.end_id = self._added[self.end]
        self.stop_token_ids = tuple(dict.fromkeys([self.end_id, *(i for i in stops if i < self.vocab_size)]))
        self.calls = call_format_of(self._added)
        self._openers = frozenset(self._added[t] for t in self.calls.opening_tokens if t in self._added)
        self._template = ChatTemplate(template, special=special)
        self._with_tools = self._template if with_tools is None else ChatTemplate(with_tools, special=special)
        self._arguments_as_text = False

    def document(self, text: str) -> I32:
        """Encode a document for mid-training, the text and the end token, as token ids, [T] int32."""
        return np.array([*self._plain(text), self.end_id], np.int32)

    def _after_reply(
        self, previous: Sequence[Message], new: Sequence[Message], signatures: Mapping[str, Signature], ended: bool
    ) -> str:
        """Return the rendering after the stop token of the reply, which is the last message of `previous`.

        The sampled tokens are in the context already, so the template may render them differently. Raises `ChatError`
        when the rendering lacks the reply or its stop token."""
        escaped = self._escape_messages([*previous, *new], signatures)
        last = len(previous) - 1
        escaped[last] = {**escaped[last], "content": _REPLY}
        rendering = self._render(escaped, signatures, generate=True)
        at = rendering.rfind(_REPLY)
        end = rendering.find(self.end, at)
        if at < 0 or end < 0:
            what = "the rendering lacks the reply" if at < 0 else f"no {self.end} ends the reply"
            raise ChatError("the chat template cannot be continued after a sampled reply", what, hint=_HINT)
        return rendering[end + len(self.end) if ended else end :]

    def encode_call(self, call: Call) -> I32:
        """Encode a tool call as the token ids of a completion with its stop token, [T] int32.

        Raises `ChatError` for a checkpoint without a tool-call format."""
        if self.calls is NONE:
            raise ChatError("the checkpoint has no tool-call format", "no added token opens a call", hint=_HINT)
        arguments = self._escape(json.dumps(call.arguments, ensure_ascii=False))
        return self._encode_rendering(self.calls.write(self._escape(call.name), arguments) + self.end)

    def parse(self, ids: Sequence[int] | I32, signatures: Mapping[str, Signature], *, strict: bool = True) -> Reply:
        """Parse the token ids of a completion, whose last one is normally a stop token. Never raises.

        A completion without a stop token was cut off: its `Reply` has the error "too long". With `strict`, a call of an
        unknown tool, or with arguments that do not fit its signature, is an error."""
        body = [int(i) for i in ids]
        if not body or body[-1] not in self.stop_token_ids:
            return Reply(self.decode(body, special=True), error="too long")
        text = self.decode(body[:-1], special=True)
        before, calls = self.calls.read(text, signatures, strict=strict)
        if isinstance(calls, str):
            return Reply(text, error=calls)
        reasoning, answer = split_reasoning(before if calls else self.decode(body[:-1]))
        return Reply(answer, calls, reasoning=reasoning)

    def in_reasoning(self, prompt_ids: Sequence[int] | I32) -> bool | None:
        """Return whether a prompt ends within the model's reasoning, because the template wrote ``<think>``."""
        return self.decode(prompt_ids[-8:], special=True).rstrip().endswith("<think>")

    def call_grammar(self, signatures: Mapping[str, Signature], *, max_calls: int) -> str:
        """Return the grammar of a completion with one call of the tools, or several up to `max_calls`.

        Raises `ValueError` for a checkpoint without a tool-call format."""
        if self.calls is NONE:
            raise ValueError("the checkpoint has no tool-call format")
        schemas = {s.name: s.to_openai()["function"].get("parameters") or {} for s in signatures.values()}
        tools = [Tool(name, {"additionalProperties": False, **schema}) for name, schema in schemas.items()]
        opening, call, closing = self.calls.parts()
        between = "" if opening else "\n"
        return from_tool_calls(
            tools, call, tokens=self._added, opening=opening, closing=closing, between=between, max_calls=max_calls
        )

    def num_text_tokens(self, ids: Sequence[int] | I32) -> int:
        """Return the number of leading tokens before the first one that opens a tool call, or that is special."""
        ends = self._openers | self._special_ids
        return next((n for n, i in enumerate(ids) if int(i) in ends), len(ids))

    def last_message(self, prompt_ids: Sequence[int] | I32) -> str:
        """Return the last tool output in a prompt, or "" when there is none."""
        before, behind = self._around_answers
        text = self.decode(prompt_ids, special=True)
        start = text.rfind(before)
        return text[start + len(before) :].removesuffix(behind) if start >= 0 else ""

    @cached_property
    def _around_answers(self) -> tuple[str, str]:
        """The texts that the template writes before and after a tool output."""
        question = {"role": "user", "content": "?"}
        function = {"name": "f", "arguments": {}}
        reply = {"role": "assistant", "content": _REPLY, "tool_calls": [{"type": "function", "function": function}]}
        output = {"role": "tool", "content": _TOOL_OUTPUT}
        rendering = self._render([question, reply, output], {}, generate=True)
        behind_call = rendering[rendering.find(self.end, rendering.find(_REPLY)) + len(self.end) :]
        before, _, behind = behind_call.partition(_TOOL_OUTPUT)
        return before, behind

    def _render(self, escaped: Sequence[Message], signatures: Mapping[str, Signature], *, generate: bool) -> str:
        """Render with arguments as mappings, as transformers recommends, or as JSON text if the template needs that."""
        tools = self._tools(signatures)
        template = self._with_tools if tools else self._template
        try:
            messages = _with_text(escaped) if self._arguments_as_text else escaped
            return template.render(messages, tools=tools, add_generation_prompt=generate)
        except ChatError:
            if self._arguments_as_text or not any(m.get("tool_calls") for m in escaped):
                raise
        rendering = template.render(_with_text(escaped), tools=tools, add_generation_prompt=generate)
        self._arguments_as_text = True
        return rendering

    def _tools(self, signatures: Mapping[str, Signature]) -> list[dict[str, Any]]:
        lists = "tools" in self._template.variables | self._with_tools.variables
        return self._escaped_tools(signatures) if lists else []

    def _escape_message(self, message: Message, signatures: Mapping[str, Signature]) -> Message:
        escape = self._escape_special if message.get("role") == "assistant" else self._escape_all
        escaped = {key: escape(value) for key, value in message.items() if key != "tool_calls"}
        if message.get("tool_calls"):
            escaped["tool_calls"] = [self._escape_call(call, signatures) for call in message["tool_calls"]]
        return escaped

    def _escape_special(self, value: Any) -> Any:
        """Escape the text of an assistant message: added tokens that are not special stay tokens."""
        return self._escape_matches(value, self._literal_special) if isinstance(value, str) else self._escape_all(value)

    def _escape_call(self, call: Mapping[str, Any], signatures: Mapping[str, Signature]) -> Message:
        try:
            name, arguments = str(call["function"]["name"]), call["function"]["arguments"]
            plain = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            hint = "a tool call is {id, type, function: {name, arguments}}, arguments a JSON object"
            raise ChatError("a tool call cannot be rendered", repr(error), hint=hint) from None
        function = {"name": self._escape(name), "arguments": self._escape_all(plain)}
        kept = {key: self._escape(str(call[key])) for key in ("id",) if call.get(key) is not None}
        return {**kept, "type": "function", "function": function}


def split_reasoning(text: str) -> tuple[str, str]:
    """Split the text of a completion into (reasoning, answer) at ``</think>``.

    The opening ``<think>`` is optional, since some templates write it as part of the generation prompt.

    >>> split_reasoning("<think>\\n2 + 2\\n</think>\\n\\n4"), split_reasoning("4")
    (('2 + 2', '4'), ('', '4'))
    """
    reasoning, closed, answer = text.partition("</think>")
    if not closed:
        return "", text
    return reasoning.strip().removeprefix("<think>").strip(), answer.lstrip("\n")


def _with_text(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of all calls as JSON text."""
    return [
        {**m, "tool_calls": [_call_with_text(c) for c in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in messages
    ]


def _call_with_text(call: Mapping[str, Any]) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

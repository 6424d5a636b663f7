"""The model's answer to a request, before a dialect writes it as a body or as events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etude.capture import Chat, Message, ParsedReply
from etude.gateway.streams import split_unfinished
from etude.records.completion import Completion, StopReason
from etude.records.wire import I32


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What identifies one response: 32 hex characters, the model's name for clients, and the Unix time in seconds."""

    id: str
    model: str
    created: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion of the model as text, reasoning and tool calls. `make_answer` makes one.

    - `text`: the text without reasoning and tool calls, and without the stop text.
    - `reasoning`: the text of the model's reasoning, or "".
    - `calls`: tool calls, each as ``{"name": str, "arguments": dict}``.
    - `finish`: "stop", "length" or "tool_calls".
    - `stop_text`: which of the request's stop texts cut the answer off; None if none did.
    - `prompt_ids`: the token ids that the model read, [P] int32.
    - `completion`: what the policy returned."""

    text: str
    reasoning: str
    calls: tuple[dict[str, Any], ...]
    finish: str
    stop_text: str | None
    prompt_ids: I32
    completion: Completion

    @property
    def fingerprint(self) -> str | None:
        """The version of the weights that sampled the last token, as text; None if no token was sampled."""
        spans = self.completion.spans
        return str(spans[-1].version) if spans else None

    def message(self) -> Message:
        """Return the message as a later request will repeat it, in the form of `ChatRequest.messages`.

        The gateway records the turn under this message and so finds it again."""
        calls = [{"type": "function", "function": call} for call in self.calls]
        return {"role": "assistant", "content": self.text} | ({"tool_calls": calls} if calls else {})

    def calls_with_ids(self, prefix: str, head: ResponseHead, index: int = 0) -> list[tuple[str, str, str]]:
        """Return (id, name, arguments as JSON text) of each tool call.

        An id consists of `prefix`, the end of the response's id, and the numbers of the answer and the call."""
        return [
            (f"{prefix}{head.id[-12:]}{index or ''}{number}", c["name"], json.dumps(c["arguments"], ensure_ascii=False))
            for number, c in enumerate(self.calls)
        ]


def make_answer(
    completion: Completion,
    *,
    chat: Chat,
    signatures: Any,
    stop: Sequence[str],
    prompt_ids: I32,
    reply: ParsedReply | None = None,
) -> Answer:
    """Parse a completion and cut its text off before the first stop text.

    `signatures` are the tools, as returned by `chat.signatures`. If None, the completion is taken as plain text. A
    malformed tool call is returned as text. `stop` are the stop texts. `reply` is the parsed completion, if known."""
    if reply is None and signatures is not None:
        reply = chat.parse(completion.token_ids, signatures, strict=False)
    calls: tuple[dict[str, Any], ...] = ()
    reasoning = ""
    if reply is not None and not reply.error:
        calls = tuple({"name": call.name, "arguments": call.arguments} for call in reply.calls)
        text, reasoning = reply.text, reply.reasoning
    else:
        thinking = None if reply is None else chat.in_reasoning(prompt_ids)
        reasoning, text = split_unfinished(chat.decode(completion.token_ids), thinking)
    end, stop_text = min(((at, s) for s in stop if (at := text.find(s)) >= 0), default=(-1, None))
    if stop_text is not None:
        text, calls = text[:end], ()
    length = completion.stop_reason is StopReason.LENGTH and stop_text is None
    return Answer(
        text=text,
        reasoning=reasoning,
        calls=calls,
        finish="tool_calls" if calls else "length" if length else "stop",
        stop_text=stop_text,
        prompt_ids=prompt_ids,
        completion=completion,
    )


def num_sampled(answers: Sequence[Answer]) -> int:
    """Return the number of sampled tokens of all answers to one request."""
    return sum(len(answer.completion.token_ids) for answer in answers)

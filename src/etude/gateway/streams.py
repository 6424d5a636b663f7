"""Converts sampled tokens to OpenAI's server-sent events. It does no input or output itself.

Sent text cannot be taken back. So three things are held back: an incomplete character, text that may be the beginning
of a stop text, and everything from a tool call on, which is sent complete at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from etude.capture import Chat
from etude.gateway.errors import RequestRefused
from etude.gateway.responses import ModelResponse

DONE = b"data: [DONE]\n\n"
CHARACTER_TOKENS = 4  # most tokens of one character, which has at most four bytes


class StreamedText:
    """Decodes a completion piece by piece, as its tokens are sampled. Each `ChatStream` has one.

    `sent` is the text that `add` has returned so far. `stop` are texts before which the text ends."""

    def __init__(self, chat: Chat, stop: Sequence[str]) -> None:
        self.sent = ""
        self._chat, self._stop = chat, stop
        self._ids: list[int] = []
        self._context_start = self._decoded_stop = 0  # ids before the first are only context, before the second decoded
        self._pending = ""  # decoded text that may be the beginning of a stop text
        self._ended = False  # a call or a stop text has begun

    def add(self, ids: list[int]) -> str:
        """Append sampled token ids and return the text that can now be sent, which may be ""."""
        if self._ended:
            return ""
        length = self._chat.num_text_tokens(ids)
        self._ids += ids[:length]
        text = self._pending + self._decode_new()
        end = min((at for s in self._stop if (at := text.find(s)) >= 0), default=-1)
        self._ended = length < len(ids) or end >= 0
        safe = text[: end if end >= 0 else len(text) - _stop_prefix_length(text, self._stop)]
        self._pending = text[len(safe) :]
        self.sent += safe
        return safe

    def _decode_new(self) -> str:
        """Return the text of the new tokens, or "" while the last character is incomplete.

        They are decoded together with some earlier tokens, which the decoder needs for correct spaces. If the character
        stays incomplete, all but the last `CHARACTER_TOKENS` tokens are decoded as they are, so that tokens are not
        decoded again and again."""
        before = self._chat.decode(self._ids[self._context_start : self._decoded_stop])
        text = self._chat.decode(self._ids[self._context_start :])
        stop = len(self._ids)
        if text.endswith("\ufffd"):
            stop -= CHARACTER_TOKENS
            content = (
                self._chat.decode(self._ids[self._context_start : stop])
                if stop - self._decoded_stop > CHARACTER_TOKENS
                else ""
            )
            text = content if text.startswith(content) else ""
        if len(text) <= len(before):
            return ""
        self._context_start, self._decoded_stop = self._decoded_stop, stop
        return text[len(before) :]


def _stop_prefix_length(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` with which a stop text begins."""
    longest = max((len(s) for s in stop), default=0)
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)


class ChatStream:
    """Makes the server-sent events (`chat.completion.chunk`) of one streamed chat response.

    Call `tokens` for each part that the policy samples, then `end` once. With `usage`, the stream ends with the token
    counts. `stop` are texts before which the answer ends."""

    kind = "chat.completion.chunk"

    def __init__(
        self, chat: Chat, *, stop: Sequence[str], response_id: str, model: str, created: int, usage: bool
    ) -> None:
        self._text, self._usage, self._opened = StreamedText(chat, stop), usage, False
        self._head = {"id": response_id, "object": self.kind, "created": created, "model": model}
        self._fingerprint: str | None = None

    def tokens(self, ids: list[int]) -> Iterator[bytes]:
        """Yield the events for newly sampled token ids. Text that may not be sent yet gives no event."""
        yield from self._opening()
        piece = self._text.add(ids)
        if piece:
            yield self._event(self._content(piece))

    def end(self, answer: ModelResponse) -> Iterator[bytes]:
        """Yield the last events: the remaining text, tool calls, finish reason, token counts, and ``[DONE]``.

        `answer` is the complete response, including what was streamed before."""
        yield from self._opening()
        self._fingerprint = answer.fingerprint
        left = answer.text[len(self._text.sent) :] if answer.text.startswith(self._text.sent) else ""
        if left:
            yield self._event(self._content(left))
        for content in self._calls(answer):
            yield self._event(content)
        yield self._event(self._content(""), answer.finish_reason)
        if self._usage:
            yield event({**self._header(), "choices": [], "usage": answer.usage()})
        yield DONE

    def _opening(self) -> Iterator[bytes]:
        if not self._opened:
            self._opened = True
            yield self._event({"delta": {"role": "assistant", "content": ""}})

    def _content(self, piece: str) -> dict[str, Any]:
        return {"delta": {"content": piece} if piece else {}}

    def _calls(self, answer: ModelResponse) -> Iterator[dict[str, Any]]:
        for index, call in enumerate(answer.tool_calls()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            yield {"delta": {"tool_calls": [{"index": index, **call, "function": {"name": name, "arguments": ""}}]}}
            yield {"delta": {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}}

    def _header(self) -> dict[str, Any]:
        return {**self._head, "system_fingerprint": self._fingerprint}

    def _event(self, content: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        return event({**self._header(), "choices": [choice]} | ({"usage": None} if self._usage else {}))


class TextStream(ChatStream):
    """Makes the server-sent events (`text_completion`) of one streamed text response."""

    kind = "text_completion"

    def _opening(self) -> Iterator[bytes]:
        yield from ()

    def _content(self, piece: str) -> dict[str, Any]:
        return {"text": piece}

    def _calls(self, answer: ModelResponse) -> Iterator[dict[str, Any]]:
        yield from ()


def event(body: dict[str, Any]) -> bytes:
    """Encode a JSON body as one server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def error_event(refused: RequestRefused) -> bytes:
    """Encode an error as an event, for a stream that has begun. OpenAI's clients raise it as an exception."""
    return event(refused.body())

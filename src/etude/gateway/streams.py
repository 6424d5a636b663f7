"""Decodes sampled tokens piece by piece, for streamed responses.

Sent text cannot be taken back. So three things are held back: an incomplete character, text that may be the beginning
of a stop text, and everything from a tool call on, which is sent complete at the end."""

from __future__ import annotations

from collections.abc import Sequence

from etude.capture import Chat

CHARACTER_TOKENS = 4  # most tokens of one character, which has at most four bytes


class StreamedText:
    """Decodes a completion piece by piece, as its tokens are sampled. A stream of events has one.

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

    def left(self, text: str) -> str:
        """Return what of the complete answer's text was not sent yet."""
        return text[len(self.sent) :] if text.startswith(self.sent) else ""


def _stop_prefix_length(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` with which a stop text begins."""
    longest = max((len(s) for s in stop), default=0)
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)

"""Conversion of sampled tokens to text, piece by piece, for streamed responses.

Text that was sent cannot be taken back. So these are held back: an incomplete character, text that may be the beginning
of a stop text or of a reasoning mark such as ``<think>``, and everything from a tool call on. A tool call is sent
complete at the end."""

from __future__ import annotations

from collections.abc import Sequence

from etude.capture.chat import Chat

CHARACTER_TOKENS = 4  # most tokens of one character, which has at most four bytes
THINK, THOUGHT = "<think>", "</think>"


class StreamedText:
    """Decodes one answer piece by piece, as its tokens are sampled.

    - `sent`, `sent_reasoning`: the text and the reasoning that `add` has returned so far.
    - `stop`: texts before which the answer ends. `stop_text` is the one that ended it, or "".
    - `in_reasoning`: what `Chat.in_reasoning` returns for the prompt: whether the answer begins with reasoning."""

    def __init__(self, chat: Chat, stop: Sequence[str], *, in_reasoning: bool | None = None) -> None:
        self.sent = self.sent_reasoning = self.stop_text = ""
        self._chat, self._stop = chat, stop
        self._ids: list[int] = []
        self._first: list[int] = []  # tokens before it is known whether a call begins with them
        self._context_start = self._decoded_stop = 0  # ids before the first are only context, before the second decoded
        self._pending = ""  # decoded text that cannot be sent yet
        self._ended = False  # a call or a stop text has begun
        self._part = "text" if in_reasoning is None else "reasoning" if in_reasoning else "begin"
        self._after_reasoning = False  # newlines between reasoning and text are dropped

    def add(self, ids: list[int]) -> tuple[str, str]:
        """Append sampled token ids, and return (reasoning, text) that can be sent now. Both may be ""."""
        if self._ended:
            return "", ""
        if not self._ids:
            self._first += ids
            ids = self._first
        length = self._chat.num_text_tokens(ids, begun=bool(self._ids))
        if not length:
            self._ended = bool(self._ids and ids)
            return "", ""
        self._ids += ids[:length]
        self._pending += self._decode_new()
        self._ended = length < len(ids)
        if self._part == "begin":
            begin = self._pending.lstrip()
            if len(begin) < len(THINK) and THINK.startswith(begin):
                return "", ""
            if begin.startswith(THINK):
                self._part, self._pending = "reasoning", begin[len(THINK) :]
            else:
                self._part = "text"
        reasoning = self._reasoning() if self._part == "reasoning" else ""
        text = self._text() if self._part == "text" else ""
        self.sent_reasoning += reasoning
        self.sent += text
        return reasoning, text

    def left(self, reasoning: str, text: str) -> tuple[str, str]:
        """Return (reasoning, text) that `add` has not returned so far.

        `reasoning` and `text`: those of the complete answer."""
        return _rest(reasoning, self.sent_reasoning), _rest(text, self.sent)

    def _reasoning(self) -> str:
        pending = self._pending if self.sent_reasoning else self._pending.lstrip()
        reasoning, closed, rest = pending.partition(THOUGHT)
        if closed:
            self._part, self._pending, self._after_reasoning = "text", rest, True
            return reasoning.rstrip()
        safe = pending[: len(pending) - _prefix_length(pending, (THOUGHT,))].rstrip()
        self._pending = pending[len(safe) :]
        return safe

    def _text(self) -> str:
        text = self._pending.lstrip("\n") if self._after_reasoning else self._pending
        self._after_reasoning &= not text
        end, self.stop_text = first_stop(text, self._stop)
        self._ended |= bool(self.stop_text)
        safe = text[: end if self.stop_text else len(text) - _prefix_length(text, self._stop)]
        self._pending = text[len(safe) :]
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


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str]:
    """Return (begin, stop text) of the stop text whose last character comes first in `text`; (-1, "") if none occurs.

    If several end at the same character, the one that begins first is returned. The result is the same for a text that
    grows in pieces.

    >>> first_stop("a bcd", ["bcd", "c", "bc"])
    (2, 'bc')
    """
    found = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1:] if found else (-1, "")


def split_unfinished(text: str, in_reasoning: bool | None) -> tuple[str, str]:
    """Split the text of a completion that could not be parsed, such as one that was cut off, into (reasoning, text).

    `in_reasoning` is what `Chat.in_reasoning` returns for the prompt; None: the model never writes reasoning.

    >>> split_unfinished("<think>so", False), split_unfinished("so</think>\\n4", True), split_unfinished("so", None)
    (('so', ''), ('so', '4'), ('', 'so'))
    """
    begin = text.lstrip()
    if in_reasoning is None or not (in_reasoning or begin.startswith(THINK)):
        return "", text
    reasoning, _, rest = begin.removeprefix(THINK).partition(THOUGHT)
    return reasoning.strip(), rest.lstrip("\n")


def _rest(text: str, sent: str) -> str:
    return text[len(sent) :] if text.startswith(sent) else ""


def _prefix_length(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` with which one of `marks` begins."""
    longest = max((len(s) for s in marks), default=0)
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in marks)), 0)

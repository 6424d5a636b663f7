"""The response format of gpt-oss (harmony): a completion is several messages, each in a channel.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>`` is reasoning and then a call. The answer is in the channel ``final``. The
header of the first message begins in the prompt, with ``<|start|>assistant``. Source: OpenAI's description of harmony
(https://github.com/openai/harmony)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from etude.harness.call_formats import CallFormat
from etude.harness.commands import Call, Signature

_MESSAGE = re.compile(
    r"(?P<header>(?:<\|start\|>)?[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>"
    r"(?P<content>.*?)(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?(?P<name>[^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")


@dataclass(frozen=True)
class ChannelFormat(CallFormat):
    """A `CallFormat` whose completions are messages in channels. A message with a recipient is a call."""

    def read(
        self, text: str, signatures: Mapping[str, Signature], *, strict: bool = True
    ) -> tuple[str, tuple[Call, ...] | str]:
        calls, start = list[Call](), len(text)
        for message in _messages(text):
            if (recipient := _RECIPIENT.search(message["header"])) is None:
                continue
            parts = {"name": recipient["name"], "arguments": message["content"].strip()}
            call = self._read_one(parts, signatures, strict=strict)
            if isinstance(call, str):
                return text, call
            calls.append(call)
            start = min(start, message.start())
        if len(calls) > 1:
            return text, "one call a turn"
        return text[:start], tuple(calls)


def split_channels(text: str) -> tuple[str, str]:
    """Split the text of a completion without calls into (reasoning, answer): the channel ``analysis``, and all others.

    A text without channels is an answer.

    >>> split_channels("<|channel|>analysis<|message|>2 + 2<|end|><|start|>assistant<|channel|>final<|message|>4")
    ('2 + 2', '4')
    """
    found: dict[bool, list[str]] = {True: [], False: []}
    for message in _messages(text):
        channel = _CHANNEL.search(message["header"])
        found[channel is not None and channel[1] == "analysis"].append(message["content"])
    return "\n".join(found[True]), "\n".join(found[False]) if any(found.values()) else text


def _messages(text: str) -> Iterator[re.Match[str]]:
    at = 0
    while (found := _MESSAGE.match(text, at)) is not None:
        yield found
        at = found.end()


HARMONY = ChannelFormat(
    "harmony",
    (),
    "",
    re.compile(r"(?!)"),
    "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
    is_single=True,
)
CHANNEL = "<|channel|>"
"""The token by which a checkpoint with this format is recognised."""

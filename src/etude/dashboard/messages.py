"""Divides transcripts into messages, for pages that show them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MESSAGE = re.compile(r"^\[(system|user|assistant|call|tool)\] ?", re.MULTILINE)


@dataclass(frozen=True)
class Message:
    """One message of a transcript. `role` is "user", "call", "tool" and so on; "" in an unknown chat format."""

    role: str
    text: str


def messages(transcript: str) -> tuple[Message, ...]:
    """Split a transcript into messages, by the role names that start their paragraphs.

    >>> messages("[user] mend it\\n[call] test\\n[tool] 1 failed")
    (Message(role='user', text='mend it'), Message(role='call', text='test'), Message(role='tool', text='1 failed'))
    """
    first, *rest = _MESSAGE.split(transcript)
    found = [Message("", first.strip())] if first.strip() else []
    found += [Message(role, body.strip("\n")) for role, body in zip(rest[::2], rest[1::2], strict=True)]
    return tuple(found)

"""Derives from a run's chat format how hints are inserted into contexts as tokens. Imports no torch."""

from __future__ import annotations

import contextlib

import numpy as np

from etude.capture.chat import Message
from etude.experience.hints import HintFormat
from etude.harness import ChatFormat
from etude.harness.template import ChatError
from etude.loop.config import RunConfig
from etude.records.wire import I32
from etude.run import RunFolder

_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}}
_ASKED: Message = {"role": "user", "content": "0"}
_CALLED: Message = {"role": "assistant", "content": "0", "tool_calls": [_CALL]}


def hint_format(run: RunFolder, config: RunConfig) -> HintFormat:
    """Return the format in which a run writes hints as tokens. Raises `ChatError` when the run's chat format cannot be
    loaded."""
    chat = ChatFormat.load(run / "tokenizer")
    return HintFormat(chat.encode, message_ends(chat), config.engine.context_tokens)


def message_ends(chat: ChatFormat) -> tuple[I32, ...]:
    """Return the tokens between the text of a message and the reply of the model, each [E] int32, the longest first.

    One sequence is for messages of the user, another for outputs of a tool, if the format has tools. If a tokeniser
    merges the text of an output with the tokens that end it, only the sequence for the user's messages may match: then
    a hint follows the end of the tool's message. The tokens of turns are inserted as they were sampled, never tokenised
    again."""
    found = {tuple(_common_end(chat, [], "user").tolist()): None}
    with contextlib.suppress(ChatError):
        found[tuple(_common_end(chat, [_ASKED, _CALLED], "tool").tolist())] = None
    return tuple(np.array(end, np.int32) for end in sorted(found, key=len, reverse=True) if end)


def _common_end(chat: ChatFormat, before: list[Message], role: str) -> I32:
    """Return the tokens with which a prompt ends after the text of its last message, which is of `role`."""
    last = [{"role": role, "content": text, "tool_call_id": "call_1"} for text in ("0", "a")]
    one, other = (chat.encode_prompt([*before, message]) for message in last)
    same = 0
    while same < min(len(one), len(other)) and one[-1 - same] == other[-1 - same]:
        same += 1
    return one[len(one) - same :]

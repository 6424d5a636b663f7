"""When a conversation is summarised, and with which messages it continues. Pure functions; nothing is sampled here.

A conversation that has become long gets a short request for a summary, with the same tools in its prompt. A new
conversation then begins with the task's instruction, the summary, and the name of a file with all earlier messages.
`etude.harness.compaction` does this in the built-in agent program, and `etude.capture.summaries` for conversations that
arrive over HTTP, in training and in production."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from etude.capture.chat import Message, ParsedReply
from etude.records.exports import OWN

REQUEST = "summarise"
"""The user message that requests a summary. It is short because every context that is summarised contains it."""
HISTORY = f"{OWN}history.txt"
"""The file in the machine's working directory with all messages before the last summary."""
LOW_SHARE, HIGH_SHARE = 0.5, 0.8
"""The range of the length at which a conversation is summarised, as shares of the context."""
MAX_ATTEMPTS = 3
"""How often a summary is sampled, in a row, until one is valid."""


MESSAGE_TOKENS = 8
"""Tokens that a chat template may write around a message, for an estimate."""
_MESSAGE_CHARS = 16  # the same in characters


class SummaryLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits with which conversations were summarised in training. They are stored in `etude.json` of an exported
    checkpoint.

    - `context_tokens`: the maximum number of tokens of a conversation.
    - `summary_tokens`: the maximum number of tokens of a summary, from 1 to a quarter of the context.
    - `turn_tokens`: the maximum number of sampled tokens of a turn.
    - `max_turns`: the maximum number of turns of an agent.
    - `temperature`: the sampling temperature of turns.

    Raises `ValueError` for values outside of their ranges."""

    context_tokens: int
    summary_tokens: int
    turn_tokens: int
    max_turns: int
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not (1 <= 4 * self.summary_tokens <= self.context_tokens and 1 <= self.turn_tokens < self.context_tokens):
            raise ValueError("summary_tokens must be from 1 to a quarter of context_tokens, and turn_tokens below it")
        if not (0 <= self.temperature <= 4 and self.max_turns >= 1):
            raise ValueError("temperature must be from 0 to 4, and max_turns at least 1")


class SummaryFault(enum.StrEnum):
    """The reason why a summary of the model is refused.

    EMPTY: it has no text. TOO_LONG: all allowed tokens were sampled, and it had not ended. CUT_OFF: it stopped earlier
    without a stop token. TOOL_CALL: it has a tool call, valid or not."""

    EMPTY = "empty"
    TOO_LONG = "too long"
    CUT_OFF = "cut off"
    TOOL_CALL = "tool call"


@dataclass(frozen=True, slots=True)
class Carried:
    """A summary and the numbers with which a conversation continues after it.

    - `summary`: the model's text.
    - `number`: how many summaries there were so far, this one included.
    - `turns_left`: how many turns the agent has left; None: unlimited.
    - `history`: the path of the file with all earlier messages; "" for none."""

    summary: str
    number: int
    turns_left: int | None = None
    history: str = ""


def trigger_tokens(group_seed: int, *, context_tokens: int) -> int:
    """Return the number of tokens from which a conversation is summarised: 50 to 80 % of the context, by `group_seed`.

    All rollouts of a group have the same trigger, so that their rewards differ only by what the model did. The trigger
    varies between groups, so that the model does not learn to rely on one value.

    >>> trigger_tokens(1, context_tokens=1000) == trigger_tokens(1, context_tokens=1000)
    True
    """
    digest = hashlib.blake2b(f"summary trigger {group_seed}".encode(), digest_size=8).digest()
    share = LOW_SHARE + (HIGH_SHARE - LOW_SHARE) * int.from_bytes(digest, "little") / 2**64
    return max(1, round(share * context_tokens))


def served_trigger(context_tokens: int) -> int:
    """Return the number of tokens from which a conversation is summarised in production: the maximum of
    `trigger_tokens`.

    >>> served_trigger(1000)
    800
    """
    return max(1, round(HIGH_SHARE * context_tokens))


def is_due(num_tokens: int, *, trigger: int, exchange: int, reserved: int, context_tokens: int) -> bool:
    """Return whether a conversation must be summarised before the model's next turn.

    That is so when it has `trigger` tokens or more, or when one more exchange would leave no room for a summary.

    - `num_tokens`: tokens of the next prompt.
    - `exchange`: tokens of the longest exchange so far (a model turn and the outputs of its calls).
    - `reserved`: tokens of the request for a summary and of the summary together."""
    return num_tokens >= trigger or num_tokens + exchange + reserved > context_tokens


def head_of(messages: Sequence[Message]) -> list[Message]:
    """Return the messages that are kept at every summary: those up to and including the first user message.

    >>> talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "fix"}, {"role": "assistant"}]
    >>> [message["role"] for message in head_of(talk)]
    ['system', 'user']
    """
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages) - 1)
    return list(messages[: first + 1])


def instructions_of(messages: Sequence[Message]) -> list[Message]:
    """Return the messages that are kept at a summary (`head_of`), with later instructions of the user appended.

    So a later instruction is not lost if the summary omits it. Two texts are appended to the last message: the newest
    user message that follows a reply, and the conversation's last message if it is another user message.

    >>> talk = [{"role": "user", "content": "fix"}, {"role": "assistant", "content": "done"}]
    >>> instructions_of([*talk, {"role": "user", "content": "now test"}])[0]["content"]
    'fix\\nnow test'
    """
    head = head_of(messages)
    rest = range(len(head), len(messages))
    said = [i for i in rest if messages[i]["role"] == "user"]
    after_reply = [i for i in said if messages[i - 1]["role"] == "assistant"]
    for i in dict.fromkeys([*after_reply[-1:], *(i for i in said if i == len(messages) - 1)]):
        head[-1] = _extended(head[-1], _text(messages[i].get("content")))
    return head


def stops_of(messages: Sequence[Message], start: int) -> list[int]:
    """Return the positions at which a conversation may be summarised, each as the number of messages before it.

    From message `start` on, these are before each turn of the model except the first, and after all messages.

    >>> roles = ["user", "assistant", "tool", "assistant", "tool"]
    >>> stops_of([{"role": role} for role in roles], 0)
    [3, 5]
    """
    turns = [i for i in range(start, len(messages)) if messages[i]["role"] == "assistant"]
    return [*turns[1:], len(messages)] if turns else []


def longest_exchange(messages: Sequence[Message], num_tokens: int) -> int:
    """Estimate the number of tokens of the longest exchange: a turn of the model and the messages up to its next turn.

    `num_tokens` is the number of tokens of all messages. Only characters are counted; nothing is tokenised."""
    sizes = [len(_plain(message)) + _MESSAGE_CHARS for message in messages]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    ends = [*turns[1:], len(messages)]
    most = max((sum(sizes[start:end]) for start, end in zip(turns, ends, strict=False)), default=0)
    return most * num_tokens // max(1, sum(sizes))


def with_request(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the request for a summary at the end. The arguments are not changed.

    If the last message is the user's, the request is appended to its text, since many templates refuse two user
    messages in a row."""
    if len(messages) > 1 and messages[-1]["role"] == "user":
        return [*messages[:-1], _extended(messages[-1], REQUEST)]
    return [*messages, {"role": "user", "content": REQUEST}]


def without_last_exchange(messages: Sequence[Message]) -> list[Message] | None:
    """Return the messages before the model's last turn, or None if they would have no turn of the model.

    Used when a long tool output has filled the context, so that not even a summary fits."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last < 0 or not any(message["role"] == "assistant" for message in messages[:last]):
        return None
    return list(messages[:last])


def summary_fault(reply: ParsedReply, *, ended: bool, num_tokens: int, max_tokens: int) -> SummaryFault | None:
    """Return why a summary that the model sampled is refused, or None if it is valid.

    `reply`: the parsed completion. `ended`: whether it ends with a stop token. `num_tokens`: the sampled tokens, of at
    most `max_tokens`."""
    if not ended:
        return SummaryFault.TOO_LONG if num_tokens >= max_tokens else SummaryFault.CUT_OFF
    if reply.calls or reply.error:
        return SummaryFault.TOOL_CALL
    return None if reply.text.strip() else SummaryFault.EMPTY


def go_on(head: Sequence[Message], carried: Carried) -> list[Message]:
    """Return the conversation that follows a summary: `head` with its last message extended by `carried`.

    >>> head = [{"role": "user", "content": "fix the test"}]
    >>> print(go_on(head, Carried("calc.py is wrong", 2, turns_left=9, history=HISTORY))[0]["content"])
    fix the test
    [summary 2, 9 turns left, history: .etude/history.txt]
    calc.py is wrong
    """
    facts = [f"summary {carried.number}"]
    facts += [] if carried.turns_left is None else [f"{carried.turns_left} turns left"]
    facts += [f"history: {carried.history}"] if carried.history else []
    return [*head[:-1], _extended(head[-1], f"[{', '.join(facts)}]\n{carried.summary.strip()}")]


def joined(before: Sequence[Message], after: Sequence[Message]) -> list[Message]:
    """Concatenate two parts of a conversation. Two consecutive user messages become one, since many chat templates
    refuse two.

    >>> joined([{"role": "user", "content": "fix"}], [{"role": "user", "content": "now"}])
    [{'role': 'user', 'content': 'fix\\nnow'}]
    """
    if before and after and before[-1]["role"] == after[0]["role"] == "user":
        return [*before[:-1], _extended(before[-1], _text(after[0].get("content"))), *after[1:]]
    return [*before, *after]


def history_text(messages: Sequence[Message]) -> str:
    """Return messages as one text, which an agent can search. Each message begins with its role in brackets.

    >>> call = {"function": {"name": "cat", "arguments": {"path": "a.py"}}}
    >>> print(history_text([{"role": "assistant", "content": "", "tool_calls": [call]}]), end="")
    [assistant] cat a.py
    """
    return "".join(f"[{message['role']}] {_plain(message)}\n" for message in messages)


def _plain(message: Message) -> str:
    parts = [_text(message.get("content"))]
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if isinstance(arguments, dict):
            arguments = " ".join(v if isinstance(v, str) else json.dumps(v) for v in arguments.values())
        parts.append(f"{call['function']['name']} {arguments}".rstrip())
    return "\n".join(part for part in parts if part)


def _text(content: Any) -> str:
    """The text of a message's content: a string, or a list of parts of which only the texts count."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _extended(message: Message, text: str) -> Message:
    content = message.get("content") or ""
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": f"{content}\n{text}"}

"""Summaries of long conversations: the model summarises a conversation before the context is full, and a new one
begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from etude.capture.context import (
    HISTORY,
    MAX_ATTEMPTS,
    MESSAGE_TOKENS,
    REQUEST,
    Carried,
    SummaryFault,
    go_on,
    head_of,
    history_text,
    is_due,
    summary_fault,
    trigger_tokens,
    with_request,
    without_last_exchange,
)
from etude.errors import MachineError
from etude.harness.chat import Message
from etude.harness.episode import Episode, ModelTurn
from etude.records.completion import StopReason
from etude.records.exports import OWN
from etude.records.rollout import Ending, TurnKind

_IGNORE = f"{OWN}.gitignore"
_REMOVE_S = 10.0


class RoomMaker(Protocol):
    """Interface of an object that keeps a conversation within the context.

    `run_agent` calls it before each turn of the model."""

    async def make_room(self, episode: Episode) -> None:
        """Shorten `episode.messages` if necessary, or set `episode.ending` if they cannot be shortened."""
        ...


class Compactor:
    """Lets the model summarise the conversations of one episode. The config must have `harness.summary_tokens` above 0.

    The model writes each summary in a turn of kind SUMMARY, which is trained on like every other turn. An unusable
    summary is sampled again, at most `MAX_ATTEMPTS` times in a row; its turn is of kind REFUSED. `refused` counts such
    turns by reason, and `number` the valid summaries. The episode ends with `Ending.CONTEXT` when all attempts were
    refused, when there is nothing to summarise, and when the next turn does not fit even after a summary. The last turn
    of an episode is never used for a summary."""

    def __init__(self, episode: Episode) -> None:
        self.number = 0
        self.refused: Counter[SummaryFault] = Counter()
        self.trigger = trigger_tokens(episode.options.group_seed, context_tokens=episode.limits.context_tokens)
        self._reserved = len(episode.chat.encode(REQUEST)) + MESSAGE_TOKENS + episode.limits.summary_tokens
        self._exchange = episode.limits.turn_tokens  # the longest so far, in tokens
        self._num_tokens = 0  # of the prompt before the last exchange; 0: there was none in this conversation
        self._head = head_of(episode.messages)
        self._history: list[Message] = list(self._head)

    async def make_room(self, episode: Episode) -> None:
        """Have the model summarise the conversation if it is long enough (`is_due`), and replace it by the summary.

        Otherwise change nothing. Sets `episode.ending` in the cases that the class names."""
        limits, num_tokens = episode.limits, await episode.num_tokens(episode.messages)
        if self._num_tokens:
            self._exchange = max(self._exchange, num_tokens - self._num_tokens)
        self._num_tokens = num_tokens
        if not is_due(
            num_tokens,
            trigger=self.trigger,
            exchange=self._exchange,
            reserved=self._reserved,
            context_tokens=limits.context_tokens,
        ):
            return
        nothing_done = len(episode.messages) == len(self._head)  # a summary, or the instruction, as long as the trigger
        if nothing_done or self._turns_left(episode) < 2:
            if not await self._fits(episode, episode.messages, limits.turn_tokens):
                episode.ending = Ending.CONTEXT
            return
        summary = await self.summary(episode)
        if summary is None:
            episode.ending = episode.ending or Ending.CONTEXT
            return
        self.number += 1
        self._history += [*episode.messages[len(self._head) :], {"role": "assistant", "content": summary}]
        carried = Carried(summary, self.number, self._turns_left(episode), await write_history(episode, self._history))
        episode.messages, self._num_tokens = go_on(self._head, carried), 0
        if not await self._fits(episode, episode.messages, limits.turn_tokens):
            episode.ending = Ending.CONTEXT

    async def summary(self, episode: Episode) -> str | None:
        """Have the model summarise the conversation, and return the summary.

        None: there is no room for the request for a summary, even without the last exchanges; or no attempt gave a
        usable summary."""
        messages: list[Message] | None = episode.messages
        limit = episode.limits.summary_tokens
        while messages is not None and not await self._fits(episode, with_request(messages), limit):
            messages = without_last_exchange(messages)
        if messages is None:
            return None
        for _ in range(min(MAX_ATTEMPTS, self._turns_left(episode) - 1)):  # one turn is left for the agent
            turn = await episode.ask(with_request(messages), kind=TurnKind.SUMMARY, max_tokens=limit)
            fault = fault_of(turn, limit)
            if fault is None:
                return turn.reply.text
            self.refused[fault] += 1
            turn.node.kind = TurnKind.REFUSED
        return None

    @staticmethod
    def _turns_left(episode: Episode) -> int:
        return episode.limits.max_turns - episode.num_turns

    @staticmethod
    async def _fits(episode: Episode, messages: list[Message], max_tokens: int) -> bool:
        return await episode.num_tokens(messages) + max_tokens <= episode.limits.context_tokens


async def write_history(episode: Episode, messages: Sequence[Message], path: str = HISTORY) -> str:
    """Write messages into a file in the machine, hidden from git. `remove_history` removes the file.

    Returns its path, or "" if the file cannot be written: the disk is full, or the agent made a link in its place.
    Raises `MachineError`, after it has set `episode.failure` to it."""
    try:
        if not episode.has_history:
            await episode.machine.write(_IGNORE, b"*\n")
            episode.has_history = True
        await episode.machine.write(path, history_text(messages).encode())
    except MachineError as error:
        episode.failure = episode.failure or error
        raise
    except (OSError, ValueError):  # a full disk, or a link of the agent's
        return ""
    return path


async def remove_history(episode: Episode) -> None:
    """Remove the files of `write_history`, so that grading the machine does not see them. Raises `MachineError`."""
    if episode.has_history:
        script = f"rm -f {OWN}history*.txt {_IGNORE}; rmdir {OWN}"
        key = f"{episode.options.session_id}/remove-history"
        await episode.machine.exec(["sh", "-c", script], key=key, deadline_s=_REMOVE_S)


def fault_of(turn: ModelTurn, max_tokens: int) -> SummaryFault | None:
    """Return why the summary in a turn is refused, or None for a valid one. `max_tokens` is the limit it was sampled
    with."""
    completion = turn.node.completion
    return summary_fault(
        turn.reply,
        ended=completion.stop_reason is StopReason.STOP,
        num_tokens=len(completion.token_ids),
        max_tokens=max_tokens,
    )

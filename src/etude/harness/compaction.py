"""Summaries of long conversations: the model summarises a conversation before the context is full, and a new one
begins."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from etude.errors import MachineError
from etude.harness.chat import Message
from etude.harness.context import (
    HISTORY,
    MAX_ATTEMPTS,
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
from etude.harness.episode import Episode, ModelTurn
from etude.records.completion import StopReason
from etude.records.rollout import Ending, TurnKind

MESSAGE_TOKENS = 8
"""Tokens that a chat template may write around a message, for an estimate."""


class RoomMaker(Protocol):
    """The interface of what keeps a conversation within the context. `run_agent` calls it before each turn of the
    model."""

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
        self._exchange = episode.limits.turn_tokens  # the longest so far, in tokens
        self._num_tokens = 0  # of the prompt before the last exchange; 0: there was none in this conversation
        self._head = head_of(episode.messages)
        self._history: list[Message] = list(self._head)

    async def make_room(self, episode: Episode) -> None:
        """Have the model summarise the conversation if it is long enough (`is_due`). Otherwise change nothing."""
        limits, num_tokens = episode.limits, episode.num_tokens(episode.messages)
        if self._num_tokens:
            self._exchange = max(self._exchange, num_tokens - self._num_tokens)
        self._num_tokens = num_tokens
        if not is_due(
            num_tokens,
            trigger=self.trigger,
            exchange=self._exchange,
            reserved=len(episode.chat.encode(REQUEST)) + MESSAGE_TOKENS + limits.summary_tokens,
            context_tokens=limits.context_tokens,
        ):
            return
        nothing_done = len(episode.messages) == len(self._head)  # a summary, or the instruction, as long as the trigger
        if nothing_done or self._turns_left(episode) < 2:
            if not self._fits(episode, episode.messages, limits.turn_tokens):
                episode.ending = Ending.CONTEXT
            return
        summary = await self.summary(episode)
        if summary is None:
            episode.ending = episode.ending or Ending.CONTEXT
            return
        self.number += 1
        self._history += [*episode.messages[len(self._head) :], {"role": "assistant", "content": summary}]
        carried = Carried(summary, self.number, self._turns_left(episode), await self._write_history(episode))
        episode.messages, self._num_tokens = go_on(self._head, carried), 0
        if not self._fits(episode, episode.messages, limits.turn_tokens):
            episode.ending = Ending.CONTEXT

    async def summary(self, episode: Episode) -> str | None:
        """Sample a summary and return its text. None: the request does not fit, or all attempts were refused."""
        messages: list[Message] | None = episode.messages
        while messages is not None and not self._fits(episode, with_request(messages), episode.limits.summary_tokens):
            messages = without_last_exchange(messages)
        if messages is None:
            return None
        for _ in range(min(MAX_ATTEMPTS, self._turns_left(episode) - 1)):  # one turn is left to go on with
            turn = await episode.ask(
                with_request(messages), kind=TurnKind.SUMMARY, max_tokens=episode.limits.summary_tokens
            )
            fault = fault_of(turn, episode.limits.summary_tokens)
            if fault is None:
                return turn.reply.text
            self.refused[fault] += 1
            turn.node.kind = TurnKind.REFUSED
        return None

    @staticmethod
    def _turns_left(episode: Episode) -> int:
        return episode.limits.max_turns - episode.num_turns

    @staticmethod
    def _fits(episode: Episode, messages: list[Message], max_tokens: int) -> bool:
        return episode.num_tokens(messages) + max_tokens <= episode.limits.context_tokens

    async def _write_history(self, episode: Episode) -> str:
        """Write all messages so far into the machine. Returns the file's path; "" if the agent's files prevent it."""
        try:
            await episode.machine.write(HISTORY, history_text(self._history).encode())
        except MachineError as error:
            episode.failure = episode.failure or error
            raise
        except (OSError, ValueError):  # a full disk, or a link of the agent's
            return ""
        return HISTORY


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

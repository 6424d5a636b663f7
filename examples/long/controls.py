"""Other ways to work beyond the context, to compare the model's own summaries with. Each is a plug-in: a harness."""

from __future__ import annotations

from dataclasses import dataclass

from etude.capture.context import head_of, is_due, with_request
from etude.harness import Episode, run_agent
from etude.harness.chat import Message
from etude.harness.compaction import Compactor
from etude.harness.episode import turn_seed
from etude.records.completion import CompletionRequest, Sampling
from etude.records.rollout import Ending


class Forgetting:
    """Shortens the conversation by the old messages, without a summary: a base of the first two controls."""

    def __init__(self, episode: Episode) -> None:
        self._exchange, self._num_tokens = episode.limits.turn_tokens, 0

    async def make_room(self, episode: Episode) -> None:
        num_tokens = await episode.num_tokens(episode.messages)
        if self._num_tokens:
            self._exchange = max(self._exchange, num_tokens - self._num_tokens)
        while await self._is_full(episode):
            shorter = self.shorter(episode.messages)
            if shorter is None:
                episode.ending = Ending.CONTEXT
                return
            episode.messages = shorter
        self._num_tokens = await episode.num_tokens(episode.messages)

    async def _is_full(self, episode: Episode) -> bool:
        context = episode.limits.context_tokens
        num_tokens = await episode.num_tokens(episode.messages)
        return is_due(num_tokens, trigger=context, exchange=self._exchange, reserved=0, context_tokens=context)

    def shorter(self, messages: list[Message]) -> list[Message] | None:
        """Return a shorter conversation, or None if there is none."""
        raise NotImplementedError


class DropOldest(Forgetting):
    """Drops the oldest exchange after the instruction."""

    def shorter(self, messages: list[Message]) -> list[Message] | None:
        head = len(head_of(messages))
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return [*messages[:head], *messages[turns[1] :]] if len(turns) > 1 else None


class MaskOutputs(DropOldest):
    """Empties the oldest tool output that is left, except for the last one; when all are empty, drops exchanges."""

    def shorter(self, messages: list[Message]) -> list[Message] | None:
        outputs = [i for i, message in enumerate(messages) if message["role"] == "tool" and message["content"]]
        if len(outputs) < 2:
            return super().shorter(messages)
        return [{**message, "content": ""} if i == outputs[0] else message for i, message in enumerate(messages)]


class FixedSummary(Compactor):
    """The harness writes the summary: the last call."""

    async def summary(self, episode: Episode) -> str | None:
        calls = [call["function"] for message in episode.messages for call in message.get("tool_calls", ())]
        return " ".join([calls[-1]["name"], *map(str, calls[-1]["arguments"].values())]) if calls else "none"


class BlankSummary(Compactor):
    """The model writes a summary, and goes on without it."""

    async def summary(self, episode: Episode) -> str | None:
        return "" if await super().summary(episode) is not None else None


class DetachedSummary(Compactor):
    """The model writes the summary in a request that is not recorded, so that it is never trained on."""

    async def summary(self, episode: Episode) -> str | None:
        limits, options = episode.limits, episode.options
        prompt = episode.chat.encode_prompt(with_request(episode.messages), episode.tools.signatures)
        for attempt in range(3):
            episode.num_turns += 1
            name = f"{options.session_id}/summary{self.number}.{attempt}"
            completion = await episode.policy.complete(
                CompletionRequest(
                    request_id=name,
                    session_id=name,
                    prompt_ids=prompt,
                    sampling=Sampling(
                        max_tokens=limits.summary_tokens,
                        stop_token_ids=episode.chat.stop_token_ids,
                        temperature=options.temperature,
                        seed=turn_seed(options.seed, prompt.tobytes(), attempt),
                    ),
                    min_step=options.min_step,
                    pin_step=options.pin_step,
                    deadline_s=limits.turn_deadline_s,
                    keep_session=False,
                )
            )
            reply = episode.chat.parse(completion.token_ids, episode.tools.signatures)
            if reply.text.strip() and not reply.calls and not reply.error:
                return reply.text
        return None


ROOMS = {
    "drop-oldest": DropOldest,
    "mask-outputs": MaskOutputs,
    "fixed": FixedSummary,
    "blank": BlankSummary,
    "detached": DetachedSummary,
}


@dataclass(frozen=True)
class Control:
    """The built-in loop with another way to make room: one of `ROOMS`."""

    room: str = "drop-oldest"

    async def run(self, episode: Episode) -> None:
        await run_agent(episode, ROOMS[self.room](episode))

"""An agent program whose user changes the task while the agent works: the built-in loop with a later message.

The instruction of the task has both messages (`etude.records.interruption`). The second one comes after a number of
turns, behind the outputs of the tools that were called in them."""

from __future__ import annotations

from etude.harness.compaction import Compactor, RoomMaker
from etude.harness.episode import Episode
from etude.harness.programs import run_agent
from etude.records.interruption import interruption_of


class InterruptedLoop:
    """The built-in agent program, as a `Harness`, for tasks in which a user may interrupt the agent with a further
    message."""

    async def run(self, episode: Episode) -> None:
        first, after, later = interruption_of(episode.task.instruction)
        episode.messages[-1] = {"role": "user", "content": first}
        room = Compactor(episode) if episode.limits.summary_tokens else None
        await run_agent(episode, _Interruption(after, later, room) if later else room)


class _Interruption:
    """A `RoomMaker` that also appends the user's second message, once, before the turn after turn `after`."""

    def __init__(self, after: int, text: str, room: RoomMaker | None) -> None:
        self._after, self._text, self._room = after, text, room

    async def make_room(self, episode: Episode) -> None:
        if self._text and episode.num_turns >= self._after:
            episode.messages.append({"role": "user", "content": self._text})
            self._text = ""
        if self._room is not None:
            await self._room.make_room(episode)

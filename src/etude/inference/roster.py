"""A `Fleet` kept as a registry tells it: who asks engines (a worker, a gateway) has one of these."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp

from etude.errors import InputError
from etude.inference.client import HttpEngine
from etude.inference.errors import EngineGone
from etude.inference.fleet import Fleet
from etude.inference.membership import ALIVE, ENGINES, Roster, State, environment_token
from etude.inference.registering import answer_of, bearing

EVERY_S, ANSWER_S = 1.0, 5.0
GIVEN_WORK = ALIVE - {State.CATCHING_UP}


class RosterFollower:
    """Applies rosters to a fleet: joins, changed addresses, the lost, and what is known of each."""

    def __init__(self, fleet: Fleet, *, token: str | None = None) -> None:
        self.fleet, self._token = fleet, token or environment_token()
        self._known: dict[str, HttpEngine] = {}

    async def follow(self, roster: Roster) -> None:
        """The fleet as it is now. What an engine that is lost was asked is asked elsewhere at once."""
        listed = {name: one for name, one in roster.items() if one.state in GIVEN_WORK}
        for name in self._known.keys() - listed.keys():
            self.fleet.remove(name)
            await self._known.pop(name).close()
        for name, one in listed.items():
            old = self._known.get(name)
            if old is None or old.url != one.url:
                self._known[name] = HttpEngine(one.url, token=self._token)
                self.fleet.add(name, self._known[name])
                if old is not None:
                    await old.close()
            self.fleet.tell(name, one)

    async def close(self) -> None:
        """Ask nobody any more."""
        await self.follow({})

    async def follow_registry(self, url: str) -> None:
        """Ask the registry again and again, for ever. One that does not answer, or has something else answer in its
        place, leaves the fleet as it was."""
        async with aiohttp.ClientSession(headers=bearing(self._token)) as session:
            while True:
                with contextlib.suppress(EngineGone, InputError):
                    await self.follow(await roster_of(session, url))
                await asyncio.sleep(EVERY_S)


async def roster_of(session: aiohttp.ClientSession, url: str) -> Roster:
    """What a registry lists. Raises as `registering.answer_of` does."""
    return await answer_of(session, url, ENGINES, Roster, deadline_s=ANSWER_S)

"""A `Fleet` kept as a registry tells it: who asks engines (a worker, a gateway) has one of these."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import msgspec

from etude.inference.client import HttpEngine
from etude.inference.errors import EngineGone, from_http
from etude.inference.fleet import Fleet
from etude.inference.membership import ALIVE, ENGINES, Roster, State, environment_token

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
        """Ask the registry again and again, for ever. One that does not answer leaves the fleet as it was."""
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        async with aiohttp.ClientSession(headers=headers) as session:
            while True:
                with contextlib.suppress(EngineGone):
                    await self.follow(await roster_of(session, url))
                await asyncio.sleep(EVERY_S)


async def roster_of(session: aiohttp.ClientSession, url: str) -> Roster:
    """What a registry lists. Raises `EngineGone`, and what else the registry says as `EngineError`."""
    try:
        async with session.get(url.rstrip("/") + ENGINES, timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as answer:
            said = await answer.read()
            if answer.status != 200:
                raise from_http(answer.status, said, engine=url)
            return msgspec.json.decode(said, type=Roster)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise EngineGone(
            f"no registry answers at {url}", f"{type(error).__name__}: {error}", hint="is it up?"
        ) from None

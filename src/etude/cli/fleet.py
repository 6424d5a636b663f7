"""``etude fleet list | drain | join``: the engines of a run whose registry listens (``fleet.listen``)."""

from __future__ import annotations

import argparse
import asyncio

import aiohttp

from etude.inference.errors import EngineGone, from_http
from etude.inference.membership import DRAIN, Join, Roster, environment_token
from etude.inference.registering import Registration, base, bearing
from etude.inference.roster import ANSWER_S, roster_of


def listed(args: argparse.Namespace) -> int:
    """A line an engine."""
    roster = asyncio.run(_listed(args.registry))
    print(f"{'engine':20} {'region':12} {'state':12} {'step':>6} {'running':>8} {'waiting':>8} {'free KV':>10}  url")
    for name, one in sorted(roster.items()):
        numbers = f"{_told(one.step):>6} {one.num_running:>8} {one.num_waiting:>8} {_told(one.kv_tokens_free):>10}"
        print(f"{name:20} {one.region:12} {one.state:12} {numbers}  {one.url}")
    return 0


def drain(args: argparse.Namespace) -> int:
    """Give an engine nothing new; it leaves when its sessions have ended."""
    asyncio.run(_drain(args.registry, args.name))
    print(f"{args.name} is given nothing new; it ends when what it has is finished")
    return 0


def join(args: argparse.Namespace) -> int:
    """Be an engine's registration, whatever it is, until it is drained or this is interrupted."""
    asked = Join(name=args.name, url=args.engine, region=args.region, standby=args.standby)
    asyncio.run(_join(Registration(args.registry, asked, token=environment_token())))
    print(f"{args.name} was drained")
    return 0


async def _listed(registry: str) -> Roster:
    async with aiohttp.ClientSession(headers=bearing(environment_token())) as session:
        return await roster_of(session, base(registry))


async def _drain(registry: str, name: str) -> None:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(headers=bearing(environment_token()), timeout=timeout) as session:
        try:
            async with session.post(base(registry) + DRAIN, json={"name": name}) as answer:
                if answer.status != 200:
                    raise from_http(answer.status, await answer.read(), engine=registry)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineGone(f"no registry answers at {registry}", str(error), hint="is the run up?") from None


async def _join(registration: Registration) -> None:
    try:
        await registration.keep()
    finally:
        await registration.leave()


def _told(number: int | None) -> str:
    return "-" if number is None else str(number)

"""The commands ``etude fleet list``, ``drain`` and ``join``, for a run whose registry remote engines join
(``fleet.listen``)."""

from __future__ import annotations

import argparse
import asyncio

import aiohttp

from etude.inference.registry_client import WAIT_S, Registration, auth_headers, call_registry, fetch_roster
from etude.inference.registry_messages import (
    DRAIN,
    DrainRequest,
    JoinRequest,
    RenewalAnswer,
    Roster,
    State,
    environment_token,
)


def list_engines(args: argparse.Namespace) -> int:
    """Print a line for each engine of a run: state, version of its weights, load, URL. Returns 0."""
    roster = asyncio.run(_roster(args.registry))
    print(f"{'engine':20} {'region':12} {'state':12} {'step':>6} {'running':>8} {'waiting':>8} {'free KV':>10}  url")
    for name, one in sorted(roster.items()):
        load = (one.num_running, one.num_waiting, one.kv_tokens_free) if one.state is not State.LOST else (None,) * 3
        running, waiting, free = map(_cell, load)
        numbers = f"{_cell(one.step):>6} {running:>8} {waiting:>8} {free:>10}"
        print(f"{name:20} {one.region:12} {one.state:12} {numbers}  {one.url}")
        if one.reason:
            print(f"  {name} is catching up: {one.reason}")
    return 0


def drain(args: argparse.Namespace) -> int:
    """Have a run send no new requests to an engine, which leaves the run when its sessions have ended. Returns 0."""
    asyncio.run(_drain(args.registry, args.name))
    print(f"{args.name} gets no new requests; it leaves when its running requests have finished")
    return 0


def join(args: argparse.Namespace) -> int:
    """Register a running engine with a run, and keep it registered until it is drained or this command is interrupted.

    Returns the exit code."""
    request = JoinRequest(name=args.name, url=args.engine, region=args.region, standby=args.standby)
    wait_s = WAIT_S if args.wait_s is None else args.wait_s
    asyncio.run(_join(Registration(args.registry, request, token=environment_token(), wait_s=wait_s, must_answer=True)))
    print(f"{args.name} was drained")
    return 0


async def _roster(registry: str) -> Roster:
    async with aiohttp.ClientSession(headers=auth_headers(environment_token())) as session:
        return await fetch_roster(session, registry)


async def _drain(registry: str, name: str) -> None:
    async with aiohttp.ClientSession(headers=auth_headers(environment_token())) as session:
        await call_registry(session, registry, DRAIN, RenewalAnswer, body=DrainRequest(name=name))


async def _join(registration: Registration) -> None:
    try:
        await registration.run()
    finally:
        await registration.leave()


def _cell(number: int | None) -> str:
    return "-" if number is None else str(number)

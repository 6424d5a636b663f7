"""Lets the rule-based users work with the product through its real gateway, and measures their true opinions.

    async with Agent(url, "product") as agent:
        await use(agent, users, seed=1, rounds=6, spread_s=4.0)     # requests, answers, signals
        opinions = await measure(agent, users, per_user=8)           # what they would keep; nothing is captured

Requests go over HTTP with OpenAI's client, signals with etude's client. Signals arrive late, twice and in another order
than they were made, and with clocks that are wrong."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from examples.product.agent import Agent
from examples.product.edits import Answer, Kind, Request, Requests
from examples.product.users import Signal, User

from etude.privacy import Level, PrivacyFolder, Subject
from etude.records.task import Split
from etude.signals import send_feedback

AUDITOR = "auditor"
"""The user in whose name opinions are measured. Its consent is off: none of its answers is captured."""
AT_ONCE = 16
SEED = 1_000
"""The seed of the requests that are measured."""
Say = Callable[[User, Request, Answer, random.Random], Sequence[Signal]]


def give_consent(privacy: Path, users: Sequence[User]) -> None:
    """Write the users' levels of consent into a privacy folder. The organisation allows training."""
    with PrivacyFolder(privacy) as folder:
        folder.consent.set(Subject.of("local"), Level.TRAIN)
        folder.consent.set(Subject.of("local", AUDITOR), Level.OFF)
        for user in users:
            if user.consent is not Level.TRAIN:
                folder.consent.set(Subject.of("local", user.name), user.consent)


def honest(user: User, request: Request, answer: Answer, rng: random.Random) -> Sequence[Signal]:
    """The signals that the user's rules give."""
    return user.signals(request, answer, rng)


async def use(
    agent: Agent, users: Sequence[User], *, seed: int, rounds: int, spread_s: float, say: Say = honest
) -> dict[str, int]:
    """Let each user ask for `rounds` times its number of edits, and send its signals within `spread_s` seconds.

    `say` returns the signals of a user about an answer. Returns counts of answers by kind, and of signals by status."""
    counts, limit = Counter[str](), asyncio.Semaphore(AT_ONCE)
    with ThreadPoolExecutor(8) as threads:

        async def send(user: User, signal: Signal, response_id: str, number: int) -> None:
            await asyncio.sleep(signal.delay * spread_s)
            call = partial(
                send_feedback,
                agent.url,
                agent.key,
                response_id,
                user=user.name,
                at=time.time() + signal.skew_s,
                signal_id=f"{response_id}-{number}",
                **{signal.name: signal.value},  # type: ignore[arg-type]
            )
            for _ in range(signal.copies):
                found = await asyncio.get_running_loop().run_in_executor(threads, call)
                counts.update(f"signals {status}" for status in found.values())

        async def one(user: User, index: int, tasks: asyncio.TaskGroup) -> None:
            rng = random.Random(f"use {seed} {user.name} {index}")
            request = Requests(seed).request(Split.TRAIN, rng.getrandbits(40))
            async with limit:
                answer, response_id = await agent.ask(request.text, user.name)
            counts[str(answer.kind)] += 1
            for number, signal in enumerate(say(user, request, answer, rng)):
                tasks.create_task(send(user, signal, response_id, number))

        async with asyncio.TaskGroup() as tasks:
            for index in range(rounds * max(user.num_requests for user in users)):
                for user in users:
                    if index < rounds * user.num_requests:
                        tasks.create_task(one(user, index, tasks))
    return dict(counts)


async def measure(
    agent: Agent, users: Sequence[User], *, per_user: int, seed: int = SEED
) -> list[tuple[str, bool, Kind]]:
    """Ask for `per_user` held-out edits for each user, the same ones at every call.

    Returns (user, whether the user would truly keep the answer, kind of the answer) of each request."""
    limit, requests = asyncio.Semaphore(AT_ONCE), Requests(seed)

    async def one(user: User, index: int) -> tuple[str, bool, Kind]:
        request = requests.request(Split.HELDOUT, index)
        async with limit:
            answer, _ = await agent.ask(request.text, AUDITOR)
        return user.name, user.keeps(request, answer), answer.kind

    places = [(user, number * per_user + i) for number, user in enumerate(users) for i in range(per_user)]
    return list(await asyncio.gather(*(one(user, index) for user, index in places)))

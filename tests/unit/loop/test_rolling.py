"""Rollouts start and are stored together where they come together, and each is told how its own went."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.small_rollouts import Kit

from etude.errors import StoreError
from etude.experience import Ledger
from etude.experience.config import ExperienceConfig
from etude.loop.config import RunConfig
from etude.loop.played import Played
from etude.loop.rolling import AT_ONCE, Rolling
from etude.loop.room import Limit
from etude.records import RolloutSpec
from etude.records.summary import RolloutSummary
from etude.telemetry import Telemetry
from etude.testing import FakeCrew

MANY = 2 * AT_ONCE + 3


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite", capacity=MANY)) as opened:
        opened.admit(*[Kit.spec(f"g000000.{i}") for i in range(MANY)])
        yield opened


@pytest.fixture
def rolling(ledger: Ledger, tmp_path: Path) -> Iterator[Rolling]:
    config = replace(RunConfig(), experience=ExperienceConfig(quarantine=False))

    def play(spec: RolloutSpec) -> Played:
        return Played(summary=Kit.summary(spec.rollout_id), task=spec.task)

    crew = FakeCrew(config, Limit(5), play=play, judge=lambda _: Kit.graded(1.0))
    with contextlib.closing(Telemetry(tmp_path / "events.jsonl", process="test")) as telemetry:
        yield Rolling(ledger, crew, telemetry)  # type: ignore[arg-type]


def counting(work: Callable[..., object], sizes: list[int]) -> Callable[..., object]:
    """The same work; how many each call was of."""

    def counted(what: list[object] | int) -> object:
        result = work(what)
        sizes.append(len(result))  # type: ignore[arg-type]
        return result

    return counted


async def ends(rolling: Rolling, rollouts: list[RolloutSummary]) -> list[bool | BaseException]:
    waiting = [rolling._finish(rollout, Kit.graded(1.0), []) for rollout in rollouts]
    async with asyncio.timeout(20):
        return await asyncio.gather(*waiting, return_exceptions=True)


def test_those_that_end_in_one_turn_are_stored_in_few_transactions_and_each_is_told(ledger, rolling):
    ledger.start(MANY)
    sizes: list[int] = []
    ledger.finish_all = counting(ledger.finish_all, sizes)
    late = Kit.summary("g000000.0", attempt=7)
    found = asyncio.run(ends(rolling, [late, *[Kit.summary(f"g000000.{i}") for i in range(MANY)]]))
    assert found == [False, *[True] * MANY]
    assert sizes == [AT_ONCE, AT_ONCE, 4]
    assert ledger.states() == {"graded": MANY}


def test_a_ledger_that_fails_ends_all_who_wait_for_it(ledger, rolling):
    ledger.start(MANY)
    broken = StoreError("the ledger is away", hint="wait")

    def fails(_: object) -> None:
        raise broken

    ledger.finish_all = fails
    assert asyncio.run(ends(rolling, [Kit.summary(f"g000000.{i}") for i in range(3)])) == [broken] * 3
    assert ledger.states() == {"running": MANY}


def test_as_many_start_at_once_as_there_is_room_for_and_all_end(ledger, rolling):
    sizes: list[int] = []
    ledger.start = counting(ledger.start, sizes)

    async def main() -> None:
        running = asyncio.create_task(rolling.run(asyncio.Event()))
        async with asyncio.timeout(20):
            await rolling.progress()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
    assert sizes[0] == 5
    assert max(sizes) <= 5
    assert sum(sizes) == MANY
    assert ledger.states() == {"graded": MANY}

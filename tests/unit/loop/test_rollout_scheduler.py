"""Rollouts start and are stored together where they come together, and each is told how its own went."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.small_rollouts import Kit

from etude.errors import EngineBehind, StoreError
from etude.experience import Ledger
from etude.experience.config import ExperienceConfig
from etude.loop.adjustable_semaphore import Limit
from etude.loop.config import RunConfig
from etude.loop.rollout_result import RolloutResult
from etude.loop.rollout_scheduler import AT_ONCE, Ended, RolloutScheduler
from etude.loop.run_in_thread import SerialExecutor
from etude.records import RolloutSpec
from etude.records.reward import Reward
from etude.records.summary import RolloutSummary
from etude.telemetry import Telemetry
from etude.testing import FakeRunProcesses

MANY = 2 * AT_ONCE + 3


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite", capacity=MANY)) as opened:
        opened.admit(*[Kit.spec(f"g000000.{i}") for i in range(MANY)])
        yield opened


@pytest.fixture
def rolling(ledger: Ledger, tmp_path: Path) -> Iterator[RolloutScheduler]:
    config = replace(RunConfig(), experience=ExperienceConfig(quarantine=False))

    def play(spec: RolloutSpec) -> RolloutResult:
        return RolloutResult(summary=Kit.summary(spec.rollout_id), task=spec.task)

    processes = FakeRunProcesses(config, Limit(5), play=play, judge=lambda _: Kit.graded(1.0))
    with contextlib.closing(Telemetry(tmp_path / "events.jsonl", process="test")) as telemetry:
        yield RolloutScheduler(ledger, SerialExecutor("ledger"), processes, telemetry)  # type: ignore[arg-type]


def counting(work: Callable[..., object], sizes: list[int]) -> Callable[..., object]:
    """The same work; how many each call was of."""

    def counted(*what: object, **how: object) -> object:
        result = work(*what, **how)
        sizes.append(len(result))  # type: ignore[arg-type]
        return result

    return counted


async def ends(rolling: RolloutScheduler, rollouts: list[RolloutSummary]) -> list[bool | BaseException]:
    reward = Reward(value=1.0, raw=1.0, reason="")
    waiting = [rolling._finish([Ended(rollout, Kit.graded(1.0), reward, [])]) for rollout in rollouts]
    async with asyncio.timeout(100):
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
        async with asyncio.timeout(100):
            await rolling.progress()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
    assert sizes[0] == 5
    assert max(sizes) <= 5
    assert sum(sizes) == MANY
    assert ledger.states() == {"graded": MANY}


@pytest.fixture
def later(tmp_path: Path) -> Iterator[Ledger]:
    """Four rollouts of which the last two demand step 3: they were admitted before the learner was lost."""
    with contextlib.closing(Ledger(tmp_path / "later.sqlite", capacity=MANY)) as opened:
        demands = [0, 0, 3, 3]
        specs = [msgspec.structs.replace(Kit.spec(f"g00000{i}.0"), min_step=step) for i, step in enumerate(demands)]
        opened.admit(*specs)
        yield opened


def test_nothing_starts_before_the_version_that_it_demands_is_published(
    later: Ledger, rolling: RolloutScheduler
) -> None:
    rolling.ledger = later
    begun: list[str] = []

    async def play(spec: RolloutSpec, *, kept: bool = True) -> RolloutResult:
        begun.append(spec.rollout_id)
        return RolloutResult(summary=Kit.summary(spec.rollout_id), task=spec.task)

    async def main() -> None:
        rolling.processes.rollout = play  # type: ignore[method-assign]
        more = asyncio.Event()
        running = asyncio.create_task(rolling.run(more))
        async with asyncio.timeout(100):
            ready = set[str]()
            while len(ready) < 2:
                ready |= await rolling.progress()
            assert begun == ["g000000.0", "g000001.0"]
            assert later.states() == {"graded": 2, "admitted": 2}
            rolling.published = 3
            more.set()
            while len(ready) < 4:
                ready |= await rolling.progress()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
    assert later.states() == {"graded": 4}


def test_a_rollout_that_no_engine_came_up_to_is_run_again_however_often(
    ledger: Ledger, rolling: RolloutScheduler
) -> None:
    tries: list[int] = []
    often = 3 * rolling.processes.config.experience.max_attempts

    async def play(spec: RolloutSpec, *, kept: bool = True) -> RolloutResult:
        if spec.rollout_id == "g000000.0":
            tries.append(spec.attempt)
            if len(tries) <= often:
                raise EngineBehind("no engine came to step 3", "an hour was waited", hint="see the engines' logs")
        return RolloutResult(summary=Kit.summary(spec.rollout_id, attempt=spec.attempt), task=spec.task)

    async def main() -> None:
        rolling.processes.rollout = play  # type: ignore[method-assign]
        running = asyncio.create_task(rolling.run(asyncio.Event()))
        async with asyncio.timeout(100):
            await rolling.progress()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
    assert tries == list(range(often + 1))
    assert ledger.states() == {"graded": MANY}


def test_the_loop_goes_on_while_the_ledger_waits_for_its_server(ledger: Ledger, rolling: RolloutScheduler) -> None:
    """A server that is away for seconds: engines' leases and children's answers need the loop meanwhile."""
    away, start, beats = threading.Event(), ledger.start, list[int]()

    def waits(*what: int, **how: int) -> list[RolloutSpec]:
        assert away.wait(300)
        return start(*what, **how)

    ledger.start = waits  # type: ignore[method-assign]

    async def main() -> None:
        running = asyncio.create_task(rolling.run(asyncio.Event()))
        for beat in range(100):
            await asyncio.sleep(0)
            beats.append(beat)
        away.set()
        async with asyncio.timeout(300):
            await rolling.progress()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
    assert len(beats) == 100
    assert ledger.states() == {"graded": MANY}

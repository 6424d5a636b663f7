"""Who gets which engines, for how long, and when they come back. A real lease is in tests/loop/test_lending.py."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.config import to_toml
from etude.errors import DeadlineExceeded, EngineError, RunRefused
from etude.inference.config import EngineKind
from etude.loop import engine_leases
from etude.loop.config import RunConfig
from etude.loop.engine_leases import EngineLeases, borrowed_engines
from etude.records.completion import Version
from etude.run import RunFolder
from etude.telemetry import Telemetry

HEAD, OLD = Version(7, "a" * 8, "b" * 64), Version(6, "a" * 8, "c" * 64)


class Held:
    """An engine that holds a version; `gone`: it does not answer."""

    def __init__(self, name: str, version: Version = HEAD) -> None:
        self.url, self.version, self.seconds, self.gone = f"http://{name}", version, 0.0, False
        self.unanswered = 0

    async def hold(self, seconds: float) -> Version:
        if self.gone:
            self.unanswered += 1
            raise EngineError("it does not answer", self.url, hint="start it")
        self.seconds = seconds
        return self.version


class Processes:
    """What a run's processes are to leases."""

    def __init__(self, *kinds: EngineKind) -> None:
        self.all = {f"engine-{i}": Held(f"engine-{i}") for i in range(len(kinds))}
        self.lent: Collection[str] = ()
        self.head = HEAD
        self.config = SimpleNamespace(fleet=SimpleNamespace(engines=kinds))

    @property
    def lendable(self) -> dict[str, Held]:
        return {name: engine for name, engine in self.all.items() if name not in self.lent}

    engines = lendable

    async def lend(self, names: Collection[str]) -> dict[str, Held]:
        self.lent = tuple(names)
        return {name: self.all[name] for name in names}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_leases, "POLL_S", 0.01)
    monkeypatch.setattr(engine_leases, "ANSWER_S", 0.5)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    found = RunFolder.create(tmp_path / "r", config_toml=to_toml(RunConfig()), seed=0)
    found.lock()
    yield found
    found.unlock()


def play(run: RunFolder, processes: Any, story: Any) -> Any:
    """Run a story beside the conductor's side."""

    async def main() -> Any:
        telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
        watch = asyncio.create_task(EngineLeases(run, processes, telemetry).watch())
        try:
            return await story()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            telemetry.close()

    return asyncio.run(main())


async def back(processes: Processes) -> None:
    async with asyncio.timeout(60):
        while processes.lent:  # noqa: ASYNC110  the other side polls files
            await asyncio.sleep(0.01)


REFERENCE = EngineKind.REFERENCE


def test_a_share_is_lent_at_most_half_and_comes_back_with_the_lock(run: RunFolder) -> None:
    processes = Processes(*[REFERENCE] * 5)

    async def story() -> None:
        async with borrowed_engines(run, share=1.0, seconds=60) as lease:
            assert lease.engines == {"engine-3": "http://engine-3", "engine-4": "http://engine-4"}
            assert lease.version == HEAD
            assert [processes.all[name].seconds for name in processes.lent] == [engine_leases.HOLD_S] * 2
            with pytest.raises(RunRefused, match=f"process {os.getpid()} has borrowed them"):
                async with borrowed_engines(run, share=0.5, seconds=60):
                    pass
        await back(processes)
        assert {engine.seconds for engine in processes.all.values()} == {0.0}
        async with borrowed_engines(run, share=0.2, seconds=60) as lease:
            assert [*lease.engines] == ["engine-4"], "once more, and fewer"

    play(run, processes, story)


def test_the_time_of_a_lease_is_bounded_and_work_ends_with_it(run: RunFolder) -> None:
    processes = Processes(REFERENCE, REFERENCE)

    async def story() -> None:
        async with borrowed_engines(run, share=0.5, seconds=0.2) as lease:
            with pytest.raises(DeadlineExceeded, match="took its engines back") as ended:
                await lease.during(asyncio.sleep(60))
            assert ended.value.facts == "the time of the lease is over"
            await back(processes)

    play(run, processes, story)


def test_an_engine_that_is_lost_ends_the_lease(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_leases, "HOLD_S", 0.3)
    processes = Processes(REFERENCE, REFERENCE)

    async def story() -> None:
        async with borrowed_engines(run, share=0.5, seconds=60) as lease:
            assert await lease.during(asyncio.sleep(0.05, "done")) == "done"
            processes.all["engine-1"].gone = True
            with pytest.raises(DeadlineExceeded) as ended:
                await lease.during(asyncio.sleep(60))
            assert ended.value.facts == "an engine was lost"

    play(run, processes, story)


def test_an_engine_that_answers_late_keeps_the_lease_while_it_holds_and_loses_it_with_another_version(
    run: RunFolder,
) -> None:
    processes = Processes(REFERENCE, REFERENCE)
    engine = processes.all["engine-1"]

    async def story() -> None:
        async with borrowed_engines(run, share=0.5, seconds=60) as lease:
            engine.gone = True
            async with asyncio.timeout(10):  # HOLD_S is longer
                while engine.unanswered < 3:  # noqa: ASYNC110  the other side polls
                    await asyncio.sleep(0.01)
            engine.gone = False
            assert await lease.during(asyncio.sleep(0.1, "done")) == "done"
            engine.version = OLD
            with pytest.raises(DeadlineExceeded) as ended:
                await lease.during(asyncio.sleep(60))
            assert ended.value.facts == "an engine was lost"

    play(run, processes, story)


@pytest.mark.parametrize("kinds", [(REFERENCE,), (EngineKind.VLLM, EngineKind.VLLM), ()])
def test_the_last_engine_and_other_kinds_are_not_lent(run: RunFolder, kinds: tuple[EngineKind, ...]) -> None:
    async def story() -> None:
        with pytest.raises(RunRefused, match="lends no engines") as refused:
            async with borrowed_engines(run, share=0.5, seconds=60):
                pass
        assert "must leave one to training" in refused.value.facts

    processes = Processes(*kinds)
    play(run, processes, story)
    assert not processes.lent


def test_an_engine_that_is_behind_is_lent_once_it_has_the_newest_version(run: RunFolder) -> None:
    processes = Processes(REFERENCE, REFERENCE)
    processes.all["engine-1"].version = OLD

    async def story() -> None:
        with pytest.raises(RunRefused, match="lends no engines"):
            async with borrowed_engines(run, share=0.5, seconds=60):
                pass
        await back(processes)
        assert processes.all["engine-1"].seconds == 0.0, "it may adopt"
        processes.all["engine-1"].version = HEAD
        async with borrowed_engines(run, share=0.5, seconds=60) as lease:
            assert lease.version == HEAD

    play(run, processes, story)


def test_a_run_that_does_not_go_on_lends_nothing(run: RunFolder) -> None:
    run.unlock()

    async def story() -> None:
        async with borrowed_engines(run, share=0.5, seconds=60):
            pass

    with pytest.raises(RunRefused, match="is not running"):
        asyncio.run(story())


def test_an_evaluation_that_follows_at_once_gets_a_lease_of_its_own(run: RunFolder) -> None:
    """Whoever has the lock, a lease belongs to the request that it answers."""
    processes = Processes(REFERENCE, REFERENCE)

    async def story() -> None:
        async with borrowed_engines(run, share=0.5, seconds=60) as first:
            assert first.version == HEAD
        async with borrowed_engines(run, share=0.5, seconds=60) as second:  # before the conductor has looked
            assert await second.during(asyncio.sleep(0.1, "done")) == "done"

    play(run, processes, story)


def test_engines_come_back_where_the_end_of_a_lease_cannot_be_written(run: RunFolder) -> None:
    processes = Processes(REFERENCE, REFERENCE)

    async def story() -> None:
        async with borrowed_engines(run, share=0.5, seconds=60):
            answer = run / engine_leases.FOLDER / "answer.json"
            answer.unlink()
            answer.mkdir()  # as a disk that is full: it cannot be replaced
        await back(processes)
        assert processes.all["engine-1"].seconds == 0.0

    play(run, processes, story)

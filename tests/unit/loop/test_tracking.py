"""A run's numbers reach its trackers, and nothing of a tracker reaches the run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.config import Plugin
from etude.loop import tracking
from etude.loop.config import RunConfig
from etude.run import RunFolder
from etude.telemetry import Telemetry, read_events
from etude.testing import MemoryTracker

CONFIG = RunConfig(trackers=(Plugin("my:Tracker"),))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "a", config_toml="", seed=0)


@pytest.fixture
def tracks(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs work with a tracker; returns what was reported of it."""
    monkeypatch.setattr(tracking, "POLL_S", 0.01)
    monkeypatch.setattr(tracking, "FINISH_S", 0.5)

    def play(tracker: object, work: Callable[[Telemetry], Any]) -> list[str]:
        monkeypatch.setattr(tracking, "make", lambda kind, plugin: tracker)
        telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")

        async def main() -> None:
            async with tracking.tracked(run, CONFIG, telemetry):
                work(telemetry)
                await asyncio.sleep(0)

        try:
            asyncio.run(main())
        finally:
            telemetry.close()
        return [event["error"] for event in read_events(run / "events") if event["kind"] == "tracker"]

    return play


def test_numbers_of_every_process_come_by_part_and_step(run, tracks):
    tracker = MemoryTracker()
    Telemetry(run / "events" / "learner.jsonl", process="learner").event("mid.step", step=1, loss=9.0)  # a session ago

    def work(telemetry: Telemetry) -> None:
        Telemetry(run / "events" / "learner.jsonl", process="learner").event("mid.step", step=2, loss=3.0, what="x")
        telemetry.event("rl.step", step=1, loss=-0.5, reward={"mean": 0.25}, odd=float("nan"))
        telemetry.event("usage", cpu=3.0)
        telemetry.event("eval.result", step=1, name="during", rate=0.5)

    assert tracks(tracker, work) == []
    assert tracker.run is not None
    assert (tracker.run.name, tracker.run.config["rl"]["steps"], tracker.outcome) == ("a", 45, "finished")
    assert sorted(tracker.rows, key=str) == [
        (1, {"eval/during/rate": 0.5}),
        (1, {"rl/loss": -0.5, "rl/reward/mean": 0.25}),
        (2, {"mid-training/loss": 3.0}),
    ]


def test_how_a_run_ended_is_said(tracks):
    failed, stopped = MemoryTracker(), MemoryTracker()

    def fails(_: Telemetry) -> None:
        raise RuntimeError("the learner")

    def stops(_: Telemetry) -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="the learner"):
        tracks(failed, fails)
    with pytest.raises(asyncio.CancelledError):
        tracks(stopped, stops)
    assert (failed.outcome, stopped.outcome) == ("failed", "stopped")


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_what_a_tracker_raises_is_reported_once_and_the_run_goes_on(tracks, capsys, method):
    class Bad(MemoryTracker):
        pass

    def raises(*_: object) -> None:
        raise ConnectionError("no route to the server")

    setattr(Bad, method, raises)

    def work(telemetry: Telemetry) -> None:
        for step in (1, 2, 3):
            telemetry.event("rl.step", step=step, loss=1.0)

    reported = tracks(Bad(), work)
    assert f"tracker my:Tracker failed: its {method} raised ConnectionError: no route to the server" in reported[0]
    assert len(reported) == (2 if method == "log" else 1)
    assert all("raised 3 times" in later for later in reported[1:])
    assert "the run goes on" in capsys.readouterr().err


def test_a_tracker_that_hangs_delays_nothing_and_is_left_behind(tracks, monkeypatch):
    monkeypatch.setattr(tracking, "MAX_WAITING", 4)
    held = threading.Event()

    class Hangs(MemoryTracker):
        def log(self, step: int, values: object) -> None:
            held.wait(60)

    def work(telemetry: Telemetry) -> None:
        for step in range(20):
            telemetry.event("rl.step", step=step, loss=1.0)

    reported = tracks(Hangs(), work)
    held.set()
    assert "4 calls wait: it is slow or hangs, and misses numbers" in reported[0]
    assert any("did not finish within 0.5 s" in one for one in reported)
    assert any("calls were dropped" in one for one in reported)

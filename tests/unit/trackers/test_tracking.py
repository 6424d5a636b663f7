"""A run's metrics reach its trackers, and nothing that a tracker does reaches the run."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.config import Plugin
from etude.run import RunFolder
from etude.telemetry import Telemetry, read_events
from etude.trackers import process, tracking

RECORDER = """
import json, os, pathlib, sys, threading, time, warnings
from etude.trackers.support import TrackerWarning

class Recorder:
    def start(self, run):
        self.out = pathlib.Path(run.folder, "calls.txt").open("a", buffering=1)
        self.note("start", run.name, run.resumed, run.config, os.getpid())

    def log(self, step, values):
        self.note("log", step, dict(values))

    def finish(self, outcome):
        self.note("finish", outcome)

    def note(self, *call):
        self.out.write(json.dumps(call) + "\\n")
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "a", config_toml="", seed=0)


@pytest.fixture
def tracks(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs work with a tracker, whose class `mine:Own` is given by its body; returns what was reported of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "POLL_S", 0.01)

    def play(
        body: str,
        work: Callable[[Telemetry], Any],
        *,
        until: Callable[[], bool] = lambda: True,
        wait_s: float = 0.0,
        more: str = "",
    ) -> list[str]:
        (tmp_path / "mine.py").write_text(f"{RECORDER}\n{more}\nclass Own(Recorder):\n    {body}\n")
        telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
        config = {"rl": {"steps": 45}, "engine": {"api_key": "the key"}}

        async def main() -> None:
            async with tracking.tracked(run, (Plugin("mine:Own"),), config, telemetry):
                work(telemetry)
                async with asyncio.timeout(60):
                    while not until():  # noqa: ASYNC110  of another process
                        await asyncio.sleep(0.01)
                await asyncio.sleep(wait_s)

        try:
            asyncio.run(main())
        finally:
            telemetry.close()
        return [event["error"] for event in read_events(run / "events") if event["kind"] == "tracker"]

    return play


def calls(run: RunFolder) -> list[list[Any]]:
    return [json.loads(line) for line in (run / "calls.txt").read_text().splitlines()]


def three_steps(telemetry: Telemetry) -> None:
    for step in (1, 2, 3):
        telemetry.event("rl.step", step=step, loss=1.0)


def test_metrics_of_every_process_come_by_part_and_step(run, tracks):
    Telemetry(run / "events" / "learner.jsonl", process="learner").event("mid.step", step=1, loss=9.0)  # a session ago

    def work(telemetry: Telemetry) -> None:
        Telemetry(run / "events" / "learner.jsonl", process="learner").event("mid.step", step=2, loss=3.0, what="x")
        telemetry.event("rl.step", step=1, loss=-0.5, reward={"mean": 0.25}, k3=float("nan"), ratio_max=float("inf"))
        telemetry.event("usage", cpu=3.0)
        telemetry.event("eval.result", step=1, name="during", rate=0.5)

    assert tracks("pass", work) == []
    (start, *logs, finish) = calls(run)
    assert start[:4] == ["start", "a", False, {"rl": {"steps": 45}, "engine": {"api_key": "***"}}]
    assert finish == ["finish", "finished"]
    (evaluation, rl, mid) = sorted(logs, key=str)[0], *(one for one in sorted(logs, key=str)[1:])
    assert evaluation == ["log", 1, {"eval/during/rate": 0.5}]
    assert mid == ["log", 2, {"mid-training/loss": 3.0}]
    assert math.isnan(rl[2].pop("rl/k3"))
    assert rl == ["log", 1, {"rl/loss": -0.5, "rl/reward/mean": 0.25, "rl/ratio_max": math.inf}]


def test_a_tracker_gets_how_the_run_ended_and_no_signal_ends_it_before(run, tracks):
    def fails(_: Telemetry) -> None:
        raise RuntimeError("the learner")

    def stops(_: Telemetry) -> None:
        end = time.monotonic() + 60
        while not (run / "calls.txt").exists() or len(calls(run)) < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        pid = calls(run)[-1][4]
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="the learner"):
        tracks("pass", fails)
    with pytest.raises(asyncio.CancelledError):
        tracks("pass", stops)
    assert [call[1] for call in calls(run) if call[0] == "finish"] == ["failed", "stopped"]


@pytest.mark.parametrize("method", ["__init__", "start", "log", "finish"])
def test_an_error_of_a_tracker_is_reported_once_and_the_run_continues(run, tracks, capsys, method):
    reported = tracks(f"def {method}(self, *_): raise ConnectionError('no route to the server')", three_steps)
    facts = "its constructor raised" if method == "__init__" else f"its {method} raised"
    assert "tracker mine:Own failed" in reported[0]
    assert f"{facts} ConnectionError: no route to the server" in reported[0]
    assert len(reported) == (2 if method == "log" else 1)
    assert all("raised 3 times" in later for later in reported[1:])
    assert "the run goes on" in capsys.readouterr().err
    if method in ("log", "finish"):
        assert calls(run)[-1] == (["finish", "finished"] if method == "log" else ["log", 3, {"rl/loss": 1.0}])


@pytest.mark.parametrize("method", ["__init__", "start", "log", "finish"])
def test_a_tracker_that_hangs_delays_nothing_and_is_killed_at_the_deadline(run, tracks, monkeypatch, method):
    finish_s = 4.0 if method == "finish" else 1.0  # in which its process gets to `finish`, or not
    monkeypatch.setattr(tracking, "FINISH_S", finish_s)
    monkeypatch.setattr(process, "MAX_WAITING", 4)
    took = []

    def work(telemetry: Telemetry) -> None:
        began = time.monotonic()
        for step in range(40):
            telemetry.event("rl.step", step=step, **{f"metric_{i}": 1.0 for i in range(500)})
        took.append(time.monotonic() - began)

    body = f"def {method}(self, *_):\n        import time, os\n        open('pid', 'w').write(str(os.getpid()))\n"
    reached = run / "calls.txt" if method == "finish" else Path("pid")
    began = time.monotonic()
    reported = tracks(f"{body}        time.sleep(1000)", work, until=reached.exists, wait_s=0.05)
    assert time.monotonic() - began < 100
    assert took[0] < 20
    assert any(f"did not finish within {finish_s:g} s" in one for one in reported)
    if method != "finish":
        assert "4 calls wait: it is slow or hangs, and misses metrics" in reported[0]
        assert any("calls were dropped" in one for one in reported)
    pid = Path("pid").read_text()
    assert not Path("/proc", pid).exists()


def test_a_tracker_whose_process_dies_is_reported(tracks):
    def work(telemetry: Telemetry) -> None:
        three_steps(telemetry)

    (first, *_) = tracks("def log(self, step, values): os._exit(3)", work, wait_s=1.0)
    assert "its process ended with exit code 3" in first
    assert any("was killed by SIGKILL" in one for one in tracks("def log(self, *_): os.kill(os.getpid(), 9)", work))


def test_a_tracker_whose_process_cannot_be_started_is_reported(tracks, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", fails)
    (error,) = tracks("pass", three_steps)
    assert "its process could not be started: Cannot allocate memory" in error


def test_threads_and_exit_handlers_of_a_library_do_not_hold_the_run_up(run, tracks):
    more = """
import atexit
atexit.register(time.sleep, 1000)
threading.Thread(target=time.sleep, args=(1000,)).start()
"""
    began = time.monotonic()
    assert tracks("pass", three_steps, more=more) == []
    assert time.monotonic() - began < 100
    assert calls(run)[-1] == ["finish", "finished"]


def test_output_of_a_trackers_library_goes_to_its_log_and_a_tracker_can_warn_the_user(run, tracks):
    body = """def log(self, step, values):
        print("chatter", sys.stdin.read())
        warnings.warn("an old API", DeprecationWarning)
        warnings.warn(TrackerWarning("no space left on the server"))"""
    assert tracks(body, lambda telemetry: telemetry.event("rl.step", step=1, loss=1.0)) == [
        "tracker mine:Own failed: no space left on the server"
    ]
    log = (run / "logs" / "tracker-mine-Own.log").read_text()
    assert "chatter" in log


def test_a_tracker_finishes_when_the_conductor_was_killed(run, tmp_path):
    (tmp_path / "mine.py").write_text(RECORDER)
    script = f"""
import os, time
from pathlib import Path
from etude.config import Plugin
from etude.seams import TrackedRun
from etude.trackers.process import TrackerProcess
run = TrackedRun(name="a", run_id="a-1", folder={str(run.path)!r}, resumed=False, config={{}}, facts={{}})
one = TrackerProcess(Plugin("mine:Recorder"), run, print, logs=Path({str(run / "logs")!r}))
one.log(1, {{"rl/loss": 1.0}})
calls = Path(run.folder, "calls.txt")
while not calls.exists() or "log" not in calls.read_text():
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    end = time.monotonic() + 60
    while calls(run)[-1][0] != "finish" and time.monotonic() < end:
        time.sleep(0.01)
    assert calls(run)[-1] == ["finish", "failed"]

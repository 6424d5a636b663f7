"""The W&B tracker, offline: its files are read with W&B's own protocol buffers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.trackers.tracked_runs import LONG, play_two_sessions, tracked_run
from tests.unit.trackers.wandb_file import records

from etude.config import Plugin
from etude.errors import ConfigError, PluginRefused
from etude.plugins import Kind, make
from etude.run import RunFolder
from etude.telemetry import Telemetry, read_events
from etude.trackers import tracking
from etude.trackers.wandb import MAX_ID, Mode, Wandb, run_key

pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings and no key of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def offline() -> Wandb:
    return Wandb(mode=Mode.OFFLINE, project="p", entity="e", group="g", tags=("t", "u"))


def sessions(folder: Path) -> list[list[object]]:
    return [records(path) for path in sorted((folder / "trackers" / "wandb").glob("offline-run-*/*.wandb"))]


def history(session: list[object]) -> list[dict[str, object]]:
    """The logged rows, without what W&B adds."""
    rows = []
    for one in (record.history for record in session if record.HasField("history")):
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in one.item}
        rows.append({name: value for name, value in row.items() if not name.startswith("_")})
    return rows


@pytest.mark.slow
def test_a_resumed_run_continues_the_same_wandb_run_with_an_axis_for_each_part(tmp_path):
    play_two_sessions(offline, tmp_path)
    first, second = sessions(tmp_path)
    runs = [next(record.run for record in session if record.HasField("run")) for session in (first, second)]
    for run in runs:
        assert (run.run_id, run.project, run.entity, run.run_group) == ("a-0123abcd", "p", "e", "g")
        assert (run.display_name, list(run.tags)) == ("a", ["t", "u"])
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["rl"] == {"steps": 4}
    assert {"rl/loss": 3, "rl/step": 3} in history(first)
    assert {"eval/before/rate": 0.25, "eval/step": 0} in history(first)
    assert {"mid-training/loss": 9.0, "mid-training/step": 900} in history(first)
    assert [row["rl/step"] for row in history(second) if "rl/loss" in row] == [2, 3, 4]
    (odd,) = [row for row in history(second) if "rl/k3" in row]
    assert math.isnan(float(odd["rl/k3"]))
    assert float(odd["rl/ratio_max"]) == math.inf
    assert odd[LONG] == 7.0
    axes = {(r.metric.glob_name, r.metric.step_metric) for r in first if r.HasField("metric") and r.metric.glob_name}
    assert axes == {("rl/*", "rl/step"), ("eval/*", "eval/step"), ("mid-training/*", "mid-training/step")}
    summary = {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for record in second
        if record.HasField("summary")
        for item in record.summary.update
    }
    assert summary["result/heldout/after/rate"] == 0.75
    assert summary["outcome"] == "finished"
    assert [next(r.exit.exit_code for r in session if r.HasField("exit")) for session in (first, second)] == [255, 0]


@pytest.fixture(params=["no connection", "connections that are closed"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A W&B server that does not work."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def close() -> None:
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    server.accept()[0].close()

        if request.param == "no connection":
            server.close()
        else:
            threading.Thread(target=close, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1] if server.fileno() >= 0 else 9}"
        if server.fileno() >= 0:
            server.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_a_run_without_a_network_starts_and_ends_at_once_and_is_recorded_offline(tmp_path, monkeypatch, url):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setattr(tracking, "POLL_S", 0.01)
    run = RunFolder.create(tmp_path / "a", config_toml="", seed=0)
    telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
    took = []

    async def main() -> None:
        began = time.monotonic()
        async with tracking.tracked(run, (Plugin("wandb", {"start_s": 3}),), {}, telemetry):
            telemetry.event("rl.step", step=1, loss=1.0)
            took.append(time.monotonic() - began)

    asyncio.run(main())
    telemetry.close()
    assert took[0] < 1
    (error,) = [event["error"] for event in read_events(run / "events") if event["kind"] == "tracker"]
    assert "the W&B server cannot be reached" in error
    assert "recorded offline: wandb sync" in error
    (session,) = sessions(run.path)
    assert history(session) == [{"rl/loss": 1, "rl/step": 1}]


@pytest.mark.slow
def test_a_run_that_loses_the_network_ends_at_the_deadline(tmp_path, monkeypatch):
    """A server that takes every connection and never answers; nothing that W&B started is left."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(tracking, "FINISH_S", 4.0)
        run = RunFolder.create(tmp_path / "a", config_toml="", seed=0)
        telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")

        async def main() -> None:
            async with tracking.tracked(run, (Plugin("wandb"),), {}, telemetry):
                await asyncio.sleep(3)

        began = time.monotonic()
        asyncio.run(main())
        assert time.monotonic() - began < 12
        telemetry.close()
        errors = [event["error"] for event in read_events(run / "events") if event["kind"] == "tracker"]
        assert any("did not finish within 4 s" in error for error in errors)
        end = time.monotonic() + 20
        while (left := processes_about(run.path)) and time.monotonic() < end:
            time.sleep(0.1)
        assert left == []


def processes_about(folder: Path) -> list[str]:
    """Command lines of processes that have a file in a folder open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            files = [os.readlink(file) for file in (process / "fd").iterdir()]
            if any(file.startswith(str(folder)) for file in files) and process.name != str(os.getpid()):
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_disabled_tracker_writes_nothing(tmp_path):
    tracker = Wandb(mode=Mode.DISABLED)
    tracker.start(tracked_run(tmp_path))
    tracker.log(1, {"rl/loss": 1.0})
    tracker.finish("finished")
    assert not list(tmp_path.rglob("*.wandb"))


@pytest.mark.slow
def test_online_without_a_key_and_an_unknown_mode_are_refused(tmp_path):
    with pytest.raises(PluginRefused) as error:
        make(Kind.TRACKER, Plugin("wandb"))
    assert (error.value.what, error.value.facts) == ("tracker wandb cannot log in", "there is no API key")
    assert 'mode = "offline"' in error.value.hint
    with pytest.raises(ConfigError, match="did you mean 'offline'"):
        make(Kind.TRACKER, Plugin("wandb", {"mode": "ofline"}))


def test_the_wandb_id_is_the_runs_cut_to_the_longest_that_wandb_accepts():
    assert run_key("a-0123abcd") == "a-0123abcd"
    long = run_key(f"{'x' * 200}-0123abcd")
    assert len(long) == MAX_ID
    assert long.endswith("-0123abcd")

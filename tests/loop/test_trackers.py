"""A whole run with several trackers, killed and resumed."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.errors import Exit
from etude.telemetry import read_events

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]
accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
parser = pytest.importorskip("prometheus_client.parser")


def test_a_killed_run_goes_on_in_its_trackers(game, tmp_path: Path, cli_in: Callable[[Path], Any], monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "src")]))
    here = type(cli_in(tmp_path))(tmp_path, dict(os.environ))
    run = tmp_path / "runs" / "own"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    trackers = f'["tensorboard", {{kind="prometheus", listen="{address}"}}, "examples.plugins.trackers:Csv"]'
    first = here.start("run", game.config, "--name", "own", "--set", f"trackers={trackers}", log=tmp_path / "log")
    try:
        end = time.monotonic() + 120
        while gauge(address, "etude_rl_step") < 3:
            assert first.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.05)
    finally:
        first.kill()
        first.wait(30)
    end = time.monotonic() + 40
    while gauge(address, "etude_rl_step") >= 0:  # it finishes by itself
        assert time.monotonic() < end
        time.sleep(0.05)

    done = here("run", "--resume", run, timeout_s=1500)
    assert done.returncode == Exit.DONE, done.stderr
    steps = [event for event in read_events(run / "events") if event["kind"] == "rl.step"]
    last = {event["step"]: event["loss"] for event in steps}
    assert sorted(last) == [1, 2, 3, 4]
    found = accumulators.EventAccumulator(str(run / "trackers" / "tensorboard" / "rl")).Reload().Scalars("rl/loss")
    assert [(point.step, point.value) for point in found] == [
        (step, pytest.approx(loss, rel=1e-6)) for step, loss in sorted(last.items())
    ]
    top = accumulators.EventAccumulator(str(run / "trackers" / "tensorboard")).Reload()
    rate = json.loads((run / "summary.json").read_text())["heldout"]["after"]["rate"]
    assert top.Scalars("result/heldout/after/rate")[0].value == pytest.approx(rate)
    assert (run / "numbers.csv").read_text().count("rl/loss") == len(steps)
    assert [event for event in read_events(run / "events") if event["kind"] == "tracker"] == []
    proof = here("fsck", run)
    assert proof.returncode == Exit.DONE, proof.stdout
    assert "trackers" in proof.stdout.rpartition("no program reads them")[2]


def gauge(address: str, name: str) -> float:
    """A gauge at the endpoint; -1 when there is none."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            families = parser.text_string_to_metric_families(answer.read().decode())
            return next((s.value for family in families for s in family.samples if s.name == name), -1.0)
    except (urllib.error.URLError, OSError):
        return -1.0

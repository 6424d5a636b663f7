"""The Trackio tracker, read with Trackio's own functions. In a process of its own: Trackio reads its folder once."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("trackio")
PLAY = """
import json, sys
from pathlib import Path
from tests.unit.trackers.tracked_runs import play_two_sessions
from etude.trackers.trackio import Trackio

folder = Path(sys.argv[1])
play_two_sessions(lambda: Trackio(project="p", group="g", folder=str(folder / "data")), folder)

import trackio
from trackio.sqlite_storage import SQLiteStorage

runs = [run.name for run in trackio.Api().runs("p")]
logs = SQLiteStorage.get_logs("p", "a-0123abcd")
config = SQLiteStorage.get_run_config("p", "a-0123abcd")
print(json.dumps([runs, logs, config, "torch" in sys.modules]))
"""


@pytest.mark.slow
def test_a_resumed_run_is_one_run_with_all_its_steps(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PLAY, str(tmp_path)], capture_output=True, text=True, timeout=300, check=True
    )
    runs, logs, config, has_torch = json.loads(done.stdout.splitlines()[-1])
    assert runs == ["a-0123abcd"]
    assert list((tmp_path / "data").glob("p*.db"))
    assert [(row["step"], row["rl/loss"]) for row in logs if "rl/loss" in row] == [
        (1, 1), (2, 2), (3, 3), (2, 12), (3, 13), (4, 14)
    ]  # fmt: skip  # Trackio cannot remove points
    assert [(row["step"], row["mid-training/loss"]) for row in logs if "mid-training/loss" in row] == [(900, 9.0)]
    (odd,) = [row for row in logs if "rl/k3" in row]
    assert str(odd["rl/k3"]).lower() == "nan"
    assert str(odd["rl/ratio_max"]).lower().startswith("inf")
    assert sum(name.startswith("rl/aaa") for name in odd) == 1
    assert [row["result/heldout/after/rate"] for row in logs if "result/heldout/after/rate" in row] == [0.75]
    assert config["rl"] == {"steps": 4}
    assert not has_torch

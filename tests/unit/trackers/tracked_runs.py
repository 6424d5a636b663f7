"""A run as trackers see it, for tests of the built-in ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from etude.seams import TrackedRun

LONG = f"rl/{'a' * 300}/größer (b)"


def tracked_run(folder: Path, **changes: Any) -> TrackedRun:
    """A run in a folder, with a config and a name of its own."""
    config = {"seed": 3, "rl": {"steps": 4}, "harness": {"tools": ["ls"]}, "start": "a/model"}
    facts = {"given": ["seed", "rl.steps", "harness.tools", "start"]}
    fields = {"name": "a", "run_id": "a-0123abcd", "folder": str(folder), "resumed": False}
    return TrackedRun(**{**fields, "config": config, "facts": facts, **changes})


def finish_run(folder: Path) -> None:
    """Write the results of a finished run."""
    summary = {"finished": True, "heldout": {"after": {"rate": 0.75}}}
    (folder / "summary.json").write_text(json.dumps(summary))


def play_two_sessions(make: Any, folder: Path) -> None:
    """A run that was killed after RL step 3, with checkpoint 1: steps 2 and 3 are trained again."""
    for resumed, steps in ((False, (1, 2, 3)), (True, (2, 3, 4))):
        tracker = make()
        tracker.start(tracked_run(folder, resumed=resumed))
        if not resumed:
            tracker.log(900, {"mid-training/loss": 9.0})
            tracker.log(0, {"eval/before/rate": 0.25})
        for step in steps:
            tracker.log(step, {"rl/loss": step + 10 * resumed})
            if step == 2:
                tracker.log(step, {"eval/during/rate": 0.5 + 0.1 * resumed})
        if resumed:
            tracker.log(4, {"rl/k3": float("nan"), "rl/ratio_max": float("inf"), LONG: 7.0})
            finish_run(folder)
        tracker.finish("finished" if resumed else "stopped")

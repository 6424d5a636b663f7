"""Runs of etude as benchmarks need them: started by the real command line, read back from their folders.

What a run prints goes to standard error, so that standard output holds the benchmark's JSON alone. A benchmark's runs
lie in `runs/` under the current directory, as everybody's do, named after it and the time.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.dashboard.run_view import RunView
from etude.dashboard.utilisation import lanes
from etude.evals.intervals import Interval, difference

ETUDE = [sys.executable, "-m", "etude.cli"]
LAPTOP = Path("examples/laptop/config.toml")


def new_folder(name: str) -> Path:
    """Where a run of a benchmark goes; not made yet."""
    return Path("runs") / f"bench-{name}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"


def start_run(config: Path, name: str, settings: Sequence[str] = (), *, may_learn_nothing: bool = False) -> Path:
    """Run a config to its end (`settings`: ``a.b=c``); its folder. Ends the benchmark where the run fails.

    With `may_learn_nothing`, a run to its end in which no rollout had an advantage is no failure."""
    folder = new_folder(name)
    argv = [*ETUDE, "run", str(config), "--name", folder.name, *overrides(settings)]
    done = subprocess.run(argv, stdout=sys.stderr)
    ended = may_learn_nothing and (folder / "summary.json").exists() and summary(folder)["finished"]
    if done.returncode and not ended:
        raise SystemExit(f"{' '.join(argv)} ended with exit code {done.returncode}; see {folder}/logs")
    return folder


def evaluate(
    checkpoint: Path, config: Path, *, split: str, num_tasks: int, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Solve rate of a checkpoint by ``etude eval``: the facts of an `eval.result` event."""
    argv = [*ETUDE, "eval", "own", "--checkpoint", str(checkpoint), "--config", str(config), "--split", split]
    argv += ["--tasks", str(num_tasks)]
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run([*argv, "--out", out, *overrides(settings)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with exit code {done.returncode}")
    return dict(json.loads(done.stdout)["result"])


def overrides(settings: Sequence[str]) -> list[str]:
    """Command-line flags of ``a.b=c`` settings."""
    return [part for setting in settings for part in ("--set", setting)]


def summary(run: Path) -> dict[str, Any]:
    """summary.json of a run that has ended."""
    return dict(json.loads((run / "summary.json").read_text()))


def rl_cpu_s(run: Path, until: float | None = None) -> dict[str, float]:
    """CPU seconds of each process during RL, machines included: until a unix time, or its end. Evaluations that fell
    into it count."""
    view = RunView(run)
    span = view.phase("rl")
    if span is None:
        raise SystemExit(f"{run} has no RL")
    end = span.end if until is None else until
    return {name: round(lane.cpu_s(span.start, end), 3) for name, lane in lanes(view).items()}


def interval(rates: Mapping[str, Any]) -> Interval:
    """The interval of a solve rate as summaries and evaluations hold it."""
    return Interval(rates["rate"], rates["low"], rates["high"])


def ahead(of: Mapping[str, Any], rates: Mapping[str, Any]) -> dict[str, float]:
    """How far the second solve rate is ahead of the first, with its 95 % interval."""
    found = difference(interval(of), interval(rates))
    return {"difference": round(found.value, 4), "low": round(found.low, 4), "high": round(found.high, 4)}


def brief(rates: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an evaluation that results keep."""
    kept = ("rate", "low", "high", "num_tasks", "num_problems", "solved", "turns_mean")
    return {name: round(v, 4) if isinstance(v := rates[name], float) else v for name in kept}

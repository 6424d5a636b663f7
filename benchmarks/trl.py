"""CPU-seconds to a solve rate, beside TRL's GRPOTrainer with its environment factory: one checkpoint, model, tasks,
tools, machines, reward and recipe (`benchmarks.trl_training`), each in its own virtual environment.

Both sides leave a checkpoint every few steps and the CPU seconds of all their processes at that step, counted from the
start of training; saving is not counted for TRL and is for etude. Afterwards every checkpoint of both is evaluated by
`etude eval` on the same tasks, until one reaches the rate; the CPU seconds at the rate are interpolated between the two
checkpoints around it. TRL is run with several settings, each in full; its best counts.

Both sides train on one core: two busy cores of this kind of machine lengthen each other's CPU seconds by a third, and
only etude would keep both busy. So etude has one engine with the slots of two.

`python -m benchmarks.trl --start CHECKPOINT [--venv DIR] [--split heldout] [--rate 0.85]`; the virtual environment is
made where there is none yet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.reinforcing import reinforce
from benchmarks.report import report
from benchmarks.runs import LAPTOP, brief, evaluate, new_folder, rl_cpu_s
from etude.config import load, to_toml
from etude.dashboard.read import RunView
from etude.loop.config import RunConfig

ONE_CORE = ['fleet.engines=["reference"]', "engine.max_sequences=176"]
VERSIONS = ["trl==1.16.0", "transformers>=5.17,<5.24"]


@dataclass(frozen=True)
class Setting:
    """How TRL is run; what else there is to set, both sides share. Its generation by transformers' continuous batching
    was tried: fifteen times the CPU of the plain one for a step on this model."""

    lr: float
    groups: int  # of one step
    rows: int  # of one forward
    experts: str  # transformers' implementation of the mixture


SETTINGS = {
    "same batch": Setting(5e-4, 8, 64, "grouped_mm"),
    "double batch": Setting(5e-4, 16, 128, "grouped_mm"),
    "half batch": Setting(5e-4, 4, 32, "grouped_mm"),
    "small forwards": Setting(5e-4, 8, 32, "grouped_mm"),
    "higher rate": Setting(7e-4, 8, 64, "grouped_mm"),
}


@dataclass(frozen=True)
class Point:
    """A checkpoint of a run, and what it had cost."""

    step: int
    cpu_s: dict[str, float]  # by process; machines are the worker's and the grader's, or named
    checkpoint: Path


def make_environment(folder: Path) -> Path:
    """TRL's interpreter; its environment is made first where there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        torch = next(line for line in Path("constraints.txt").read_text().splitlines() if line.startswith("torch=="))
        subprocess.run([*pip, torch.strip()], check=True, stdout=sys.stderr)
        subprocess.run([*pip, torch.strip(), *VERSIONS, "-e", "."], check=True, stdout=sys.stderr)
    return python


def installed(python: Path) -> dict[str, str]:
    """Versions of what the other side runs on."""
    names = ("trl", "transformers", "torch", "accelerate")
    code = f"import json\nfrom importlib.metadata import version\nprint(json.dumps({{n: version(n) for n in {names}}}))"
    done = subprocess.run([str(python), "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


def theirs(python: Path, config: RunConfig, setting: Setting, *, every: int, budget_s: float) -> list[Point]:
    """A run of TRL; its checkpoints, as many rollouts apart as `every` of etude's steps have."""
    folder = new_folder("trl").absolute()
    folder.mkdir(parents=True)
    every = max(1, every * config.experience.groups_per_step // setting.groups)
    config = replace(config, experience=replace(config.experience, groups_per_step=setting.groups))
    (folder / "config.toml").write_text(to_toml(config))
    argv = [str(python), "-m", "benchmarks.trl_training", "--config", str(folder / "config.toml")]
    argv += ["--start", str(config.start), "--out", str(folder), "--steps", str(config.rl.steps), "--every", str(every)]
    argv += ["--lr", str(setting.lr), "--rows", str(setting.rows), "--experts", setting.experts]
    argv += ["--budget-s", str(budget_s)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(argv, check=True, stdout=sys.stderr, env=env)
    rows = json.loads((folder / "progress.json").read_text())
    return [
        Point(
            int(row["step"]),
            {name: round(row[name], 2) for name in ("trainer", "machines")},
            folder / f"step-{int(row['step']):06d}",
        )
        for row in rows
        if row["step"] % every == 0
    ]


def ours(config: RunConfig) -> list[Point]:
    """A run of etude; its checkpoints."""
    folder = new_folder("trl-etude")
    asyncio.run(reinforce(folder, config))
    every = config.rl.checkpoint_every
    return [
        Point(
            int(step["step"]),
            rl_cpu_s(folder, until=float(step["t"])),
            folder / "checkpoints" / f"step-{int(step['step']):06d}",
        )
        for step in RunView(folder).by_step("rl.step")
        if step["step"] % every == 0
    ]


def judged(
    points: Sequence[Point], rate: float, *, config: Path, split: str, num_tasks: int
) -> Iterator[dict[str, Any]]:
    """Each checkpoint's solve rate, until one reaches `rate`."""
    for point in points:
        found = brief(evaluate(point.checkpoint, config, split=split, num_tasks=num_tasks))
        yield {"step": point.step, "cpu_s": round(sum(point.cpu_s.values()), 2), "parts": point.cpu_s, **found}
        if found["rate"] >= rate:
            return


def crossing(rows: Sequence[dict[str, Any]], rate: float) -> float | None:
    """CPU seconds at the rate, on the line between the checkpoints around it; None where none reached it."""
    if not rows or rows[-1]["rate"] < rate:
        return None
    if len(rows) == 1:
        return float(rows[0]["cpu_s"])
    (low, high) = rows[-2], rows[-1]
    share = (rate - low["rate"]) / (high["rate"] - low["rate"])
    return round(float(low["cpu_s"] + share * (high["cpu_s"] - low["cpu_s"])), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--start", type=Path, required=True, help="a mid-trained checkpoint, e.g. RUN/checkpoints/mid")
    parser.add_argument("--venv", type=Path, default=Path("build/trl"), help="TRL's virtual environment")
    parser.add_argument("--rate", type=float, default=0.85)
    parser.add_argument("--split", choices=["validation", "heldout"], default="heldout")
    parser.add_argument("--tasks", type=int, default=512, help="of each evaluation")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="of TRL")
    parser.add_argument("--every", type=int, default=5, help="etude's steps between checkpoints")
    parser.add_argument("--budget-s", type=float, default=600.0, help="CPU seconds after which TRL gives up")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="for both sides")
    args = parser.parse_args()
    python = make_environment(args.venv)
    never = ["evals.every=100000", f"rl.checkpoint_every={args.every}"]
    config = load(LAPTOP, RunConfig, [f"start={args.start.resolve()}", *never, *ONE_CORE, *args.set])
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    runs = {"etude": ours(config)}
    for name in args.settings:
        runs[name] = theirs(python, config, SETTINGS[name], every=args.every, budget_s=args.budget_s)
    os.sched_setaffinity(0, cores)
    judge = new_folder("trl-judge").with_suffix(".toml")
    judge.write_text(to_toml(config))
    rows = {
        name: list(judged(points, args.rate, config=judge, split=args.split, num_tasks=args.tasks))
        for name, points in runs.items()
    }
    reached = {name: crossing(found, args.rate) for name, found in rows.items()}
    mine = reached.pop("etude")
    best = min((s for s in reached.values() if s is not None), default=None)
    numbers = {
        "rate": args.rate,
        "split": args.split,
        "versions": installed(python),
        "settings": {name: asdict(SETTINGS[name]) for name in args.settings},
        "cpu_s_to_rate": {"etude": mine, **reached},
        "goal_share": 0.25,
        "share": round(mine / best, 4) if mine and best else None,
        "rows": rows,
    }
    report("trl", numbers)


if __name__ == "__main__":
    main()

"""CPU-seconds to a solve rate, beside TRL's GRPOTrainer with its environment factory: one checkpoint, model, tasks,
tools, machines, reward and recipe (`benchmarks.learning.trl_training`), each in its own virtual environment.

Both sides leave a checkpoint every few steps and the CPU seconds of all their processes at that step, counted from the
start of training; saving is not counted for TRL and is for etude. A run ends once the mean reward of its last `WINDOW`
training rollouts is `--margin` past the rate, the same rule for both. Then `etude eval` solves the same tasks with
its checkpoints, from the one where the training rewards had reached the rate, until two neighbours are found of which
one is below the rate and the next one reaches it; the CPU seconds at the rate are interpolated between these two.

TRL is run with several settings: all of them with the first seed, the `--finalists` best ones with every seed, as etude
is. The setting with the smallest mean counts. `share` is etude's mean ÷ that mean, with an interval from the pairs of
seeds. A setting that was best in the first seed by chance is in TRL's favour. Not among the settings: generation by
transformers' continuous batching, which was tried (fifteen times the CPU of the plain one for a step of this model),
and by vLLM, since TRL hands its weights to a vLLM on GPUs alone.

Both sides train on one core: two busy cores of this kind of machine lengthen each other's CPU seconds by a third, and
only etude would keep both busy. So etude has one engine with the slots of two.

Runs and evaluations are kept as they end (`benchmarks.journal`): the same command goes on where it ended.
`python -m benchmarks.learning.trl --start CHECKPOINT [--venv DIR] [--seeds 0 1 2] [--split heldout] [--rate 0.85]
[--fresh]`; the virtual environment is made where there is none yet; `--install` makes it and does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.journal import Journal, Row, digest
from benchmarks.learning import seeds
from benchmarks.learning.reinforcing import Reached, reinforce
from benchmarks.learning.rewards import Rewards, first_reached
from benchmarks.report import report
from benchmarks.runs import LAPTOP, brief, evaluate, new_folder, rl_cpu_s
from etude.config import load, to_toml
from etude.dashboard.run_view import RunView
from etude.loop.config import RunConfig

ONE_CORE = ['fleet.engines=["reference"]', "engine.max_sequences=176"]
VERSIONS = ["trl==1.16.0", "transformers>=5.17,<5.24"]
WINDOW = 256
"""Training rollouts whose mean reward says when a run may end, and which checkpoint is evaluated first."""


@dataclass(frozen=True)
class Setting:
    """How TRL is run; what else there is to set, both sides share."""

    lr: float = 5e-4
    groups: int = 8  # whose rollouts are generated together
    updates: int = 1  # of the optimiser with them, each with its part
    passes: int = 1  # over them
    rows: int = 64  # of one forward
    experts: str = "grouped_mm"  # transformers' mixture: its fastest here (benchmarks.inference.engine)

    @property
    def cycle(self) -> int:
        """Steps of the optimiser from one generation to the next."""
        return self.updates * self.passes


SETTINGS = {
    "same batch": Setting(),
    "higher rate": Setting(lr=7e-4),
    "highest rate": Setting(lr=1e-3),
    "half batch": Setting(groups=4, rows=32),
    "double batch": Setting(lr=7e-4, groups=16),
    "two updates": Setting(updates=2, rows=32),
    "double generation": Setting(lr=7e-4, groups=16, updates=2),
    "two passes": Setting(passes=2),
}
"""Half and double batches change how often the policy is updated; two updates and double generation decode more rows at
once for updates of the same size; two passes use each rollout twice."""


@dataclass(frozen=True)
class Point:
    """A checkpoint of a run, and what it had cost."""

    step: int
    cpu_s: dict[str, float]  # by process; machines are the worker's and the grader's, or named
    checkpoint: str


def make_environment(folder: Path) -> Path:
    """TRL's interpreter; its environment is made first where there is none, or one that was not finished."""
    python, mark = folder / "bin" / "python", folder / "installed.txt"
    torch = next(line for line in Path("constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    wanted = [torch.strip(), *VERSIONS, "-e", ".[train]"]
    if not mark.exists() or mark.read_text() != "\n".join(wanted):
        venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, wanted[0]], check=True, stdout=sys.stderr)
        subprocess.run([*pip, *wanted], check=True, stdout=sys.stderr)
        mark.write_text("\n".join(wanted))
    return python


def installed(python: Path) -> dict[str, str]:
    """Versions of what the other side runs on."""
    names = ("trl", "transformers", "torch", "accelerate")
    code = f"import json\nfrom importlib.metadata import version\nprint(json.dumps({{n: version(n) for n in {names}}}))"
    done = subprocess.run([str(python), "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


def theirs(python: Path, config: RunConfig, setting: Setting, *, enough: float, budget_s: float) -> dict[str, Any]:
    """A run of TRL: its checkpoints, as many rollouts apart as etude's, and which one to evaluate first."""
    folder = new_folder("trl").absolute()
    folder.mkdir(parents=True)
    share = config.experience.groups_per_step / setting.groups
    every = max(1, round(config.rl.checkpoint_every * share)) * setting.cycle
    steps = math.ceil(config.rl.steps * share) * setting.cycle
    config = replace(config, experience=replace(config.experience, groups_per_step=setting.groups))
    (folder / "config.toml").write_text(to_toml(config))
    argv = [str(python), "-m", "benchmarks.learning.trl_training", "--config", str(folder / "config.toml")]
    argv += ["--start", str(config.start), "--out", str(folder), "--steps", str(steps), "--every", str(every)]
    argv += ["--lr", str(setting.lr), "--rows", str(setting.rows), "--experts", setting.experts]
    argv += ["--updates", str(setting.updates), "--passes", str(setting.passes)]
    argv += ["--budget-s", str(budget_s), "--enough", str(enough), "--window", str(WINDOW)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(argv, check=True, stdout=sys.stderr, env=env)
    rows = json.loads((folder / "progress.json").read_text())
    points = [
        Point(
            int(row["step"]),
            {name: round(row[name], 2) for name in ("trainer", "machines")},
            str(folder / f"step-{int(row['step']):06d}"),
        )
        for row in rows
        if row["step"] % every == 0
    ]
    rewards = [(int(row["step"]), float(row["reward"])) for row in rows if "reward" in row]
    return _run(points, rewards, setting.groups * config.experience.group_size)


def ours(config: RunConfig, *, enough: float) -> dict[str, Any]:
    """A run of etude: its checkpoints, and which one to evaluate first."""
    folder, every = new_folder("trl-etude"), config.rl.checkpoint_every
    batch = config.experience.groups_per_step * config.experience.group_size
    asyncio.run(reinforce(folder, config, until=past(enough, batch, every)))
    steps = RunView(folder).by_step("rl.step")
    points = [
        Point(
            int(step["step"]),
            rl_cpu_s(folder, until=float(step["t"])),
            str((folder / "checkpoints" / f"step-{int(step['step']):06d}").absolute()),
        )
        for step in steps
        if step["step"] % every == 0
    ]
    return _run(points, [(int(step["step"]), float(step["reward_mean"])) for step in steps], batch)


def past(rate: float, batch: int, every: int) -> Reached:
    """Whether steps may end: at a step with a checkpoint the last `WINDOW` rollouts had the mean reward `rate`, and
    another step is done, so that the checkpoint is written."""
    rewards, held = Rewards(batch, WINDOW), []

    def reached(step: Mapping[str, Any]) -> bool:
        rewards.add(float(step["reward_mean"]))
        if step["step"] % every == 0 and rewards.reached(rate):
            held.append(step["step"])
        return bool(held) and step["step"] > held[0]

    return reached


def _run(points: Sequence[Point], rewards: Sequence[tuple[int, float]], batch: int) -> dict[str, Any]:
    return {"points": [asdict(point) for point in points], "rewards": rewards, "batch": batch}


def expected(run: Mapping[str, Any], rate: float) -> int:
    """The index of the checkpoint to evaluate first: the first one after the training rewards had reached the rate, or
    the last."""
    points, rewards = run["points"], run["rewards"]
    number = first_reached([mean for _, mean in rewards], run["batch"], WINDOW, rate)
    step = rewards[number - 1][0] if number else math.inf
    return next((i for i, point in enumerate(points) if point["step"] >= step), len(points) - 1)


def neighbours(count: int, rate_at: Callable[[int], float], rate: float, first: int) -> tuple[int, int] | None:
    """Two neighbours of `count` checkpoints, the first one below `rate` and the next one at it or above: searched
    from `first` in growing strides, then by halves. -1 is the start, taken to be below. None where the last one
    is below. Where rates go up and down there may be several such pairs; this is one of them."""
    low, high, at, stride = -1, count, first, 1
    while high - low > 1:
        if rate_at(at) >= rate:
            high = at
        else:
            low = at
        if low == -1:
            at = max(0, high - stride)
        elif high == count:
            at = min(count - 1, low + stride)
        else:
            at = (low + high) // 2
        stride *= 2
    return None if high == count else (low, high)


def between(low: Mapping[str, float], high: Mapping[str, float], rate: float) -> float:
    """CPU seconds at the rate, on the line between two checkpoints of which it lies between."""
    share = (rate - low["rate"]) / (high["rate"] - low["rate"])
    return round(low["cpu_s"] + share * (high["cpu_s"] - low["cpu_s"]), 2)


@contextmanager
def one_core() -> Iterator[None]:
    """What is started meanwhile runs on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class Bench:
    """Runs and evaluations from one checkpoint, each done once."""

    def __init__(self, python: Path, args: argparse.Namespace) -> None:
        self.python, self.args = python, args
        self.journal = Journal("trl", fresh=args.fresh)
        self.base = {"start": digest(args.start), "settings": args.set, "every": args.every}
        self.ends = {"enough": round(args.rate + args.margin, 4), "budget_s": args.budget_s}

    def config(self, seed: int) -> RunConfig:
        """Of both sides."""
        never = ["evals.every=100000", f"rl.checkpoint_every={self.args.every}"]
        start = [f"start={self.args.start.resolve()}", f"seed={seed}"]
        return load(LAPTOP, RunConfig, [*start, *never, *ONE_CORE, *self.args.set])

    def measure(self, name: str, seed: int) -> Row:
        """One run of etude or of a setting of TRL, and its CPU seconds at the rate; None where it was not reached."""
        setting, config = SETTINGS.get(name), self.config(seed)
        key = {**self.base, **self.ends, "seed": seed, "side": asdict(setting) if setting else name}

        def train() -> dict[str, Any]:
            with one_core():
                if setting is None:
                    return ours(config, enough=self.ends["enough"])
                return theirs(self.python, config, setting, **self.ends)

        run = self.journal.once(key, train)
        points, found = run["points"], dict[int, Row]()
        if not points:
            raise SystemExit(f"{name}, seed {seed}: no checkpoint; the budget of CPU seconds is too small")

        def rate_at(index: int) -> float:
            point = points[index] if index >= 0 else {"step": 0, "cpu_s": {}, "checkpoint": str(self.args.start)}
            found[index] = self._judged(key if index >= 0 else self.base, point, config)
            return float(found[index]["rate"])

        pair = neighbours(len(points), rate_at, self.args.rate, expected(run, self.args.rate))
        if pair is not None and pair[0] == -1:
            rate_at(-1)
        return {
            "name": name,
            "seed": seed,
            "cpu_s_to_rate": between(found[pair[0]], found[pair[1]], self.args.rate) if pair else None,
            "steps": points[-1]["step"],
            "judged": [found[index] for index in sorted(found)],
        }

    def _judged(self, key: Mapping[str, Any], point: Mapping[str, Any], config: RunConfig) -> Row:
        """A checkpoint's cost and solve rate."""
        split, tasks = self.args.split, self.args.tasks
        judge = new_folder("trl-judge").with_suffix(".toml")

        def solve() -> dict[str, Any]:
            judge.parent.mkdir(exist_ok=True)
            judge.write_text(to_toml(replace(config, seed=0)))  # the same draws for every run
            return brief(evaluate(Path(point["checkpoint"]), judge, split=split, num_tasks=tasks))

        rates = self.journal.once({"of": key, "step": point["step"], "split": split, "tasks": tasks}, solve)
        cost = {"cpu_s": round(math.fsum(point["cpu_s"].values()), 2), "parts": point["cpu_s"]}
        return {"step": point["step"], **cost, **{name: value for name, value in rates.items() if name != "commit"}}


def finalists(first_seed: Mapping[str, float | None], number: int) -> list[str]:
    """The settings that every seed runs: those with the fewest CPU seconds in the first seed."""
    reached = {name: cpu_s for name, cpu_s in first_seed.items() if cpu_s is not None}
    return sorted(reached, key=lambda name: reached[name])[:number]


def compare(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean CPU seconds to the rate of each side that reached it in every seed of etude's; etude's share of the best."""
    costs: dict[str, dict[int, float | None]] = {}
    for row in rows:
        costs.setdefault(row["name"], {})[row["seed"]] = row["cpu_s_to_rate"]
    wanted = sorted(costs["etude"])
    whole = {
        name: [cpu_s for seed in wanted if (cpu_s := of[seed]) is not None]
        for name, of in costs.items()
        if set(of) == set(wanted) and None not in of.values()
    }
    others = [name for name in whole if name != "etude"]
    best = min(others, key=lambda name: statistics.fmean(whole[name]), default=None)
    return {
        "seeds": wanted,
        "cpu_s_to_rate": {name: seeds.mean(found) for name, found in whole.items()},
        "not_in_every_seed": {name: of.get(wanted[0]) for name, of in costs.items() if name not in whole},
        "best_of_trl": best,
        "share": seeds.ratio(whole["etude"], whole[best]) if best and "etude" in whole else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--start", type=Path, help="a mid-trained checkpoint, e.g. RUN/checkpoints/mid")
    parser.add_argument("--venv", type=Path, default=Path("build/trl"), help="TRL's virtual environment")
    parser.add_argument("--install", action="store_true", help="make the virtual environment, and nothing else")
    parser.add_argument("--rate", type=float, default=0.85)
    parser.add_argument("--margin", type=float, default=0.04, help="past the rate, where a run ends by its rewards")
    parser.add_argument("--split", choices=["validation", "heldout"], default="heldout")
    parser.add_argument("--tasks", type=int, default=512, help="of each evaluation")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="of TRL")
    parser.add_argument("--finalists", type=int, default=3, help="settings of TRL that every seed runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of both sides")
    parser.add_argument("--every", type=int, default=4, help="etude's steps between checkpoints")
    parser.add_argument("--budget-s", type=float, default=300.0, help="CPU seconds after which TRL gives up")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="for both sides")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured before")
    args = parser.parse_args()
    python = make_environment(args.venv)
    if args.install:
        return
    if args.start is None:
        parser.error("--start is needed: a mid-trained checkpoint")
    bench, first = Bench(python, args), args.seeds[0]
    rows = [bench.measure(name, first) for name in ("etude", *args.settings)]
    costs = {row["name"]: row["cpu_s_to_rate"] for row in rows[1:]}
    kept = ["etude", *finalists(costs, args.finalists)]
    rows += [bench.measure(name, seed) for seed in args.seeds[1:] for name in kept]
    numbers = {
        "rate": args.rate,
        "split": args.split,
        "start": bench.base["start"],
        "versions": installed(python),
        "settings": {name: asdict(SETTINGS[name]) for name in args.settings},
        "goal_share": 0.25,
        "compared": compare(rows),
        "rows": rows,
    }
    report("trl", numbers)


if __name__ == "__main__":
    main()

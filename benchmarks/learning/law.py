"""Does a lower loss of mid-training predict a higher reward of RL? Three budgets of mid-training, three seeds.

Each run is the laptop example from nothing, with a share of its mid-training tokens and few steps of RL. Every run has
its own complete schedule of the learning rate: points of one decayed schedule would be no law, since the loss falls
most while the rate decays. The runs of a seed have the same tasks, corpus and first weights.

`slopes` has each seed's least-squares slope over the budgets, and their mean with Student's t interval over the seeds.
A regression over all nine points would take the runs of a seed for independent ones, and mix differences between the
seeds' texts and tasks into the slope; of three seeds a bootstrap has only ten different samples.

`python -m benchmarks.learning.law [--seeds 0 1 2] [--budgets 0.25 0.5 1] [--steps 20] [--tasks 256]`
About five CPU minutes a run. Runs are kept as they end (`benchmarks.journal`): the same command goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.journal import Journal, Row
from benchmarks.learning import seeds as over_seeds
from benchmarks.report import HOME, report
from benchmarks.runs import LAPTOP, brief, start_run, summary
from etude.config import load
from etude.dashboard.plot import WIDE, Series, line_chart, standalone_svg
from etude.dashboard.run_view import RunView
from etude.loop.config import RunConfig

PICTURE = HOME / "docs" / "concepts" / "law.svg"
LAST_STEPS = 5
"""Steps of RL whose mean reward is `reward_last`: of 64 rollouts each."""
MEASURES: dict[str, Callable[[Row], float]] = {
    "loss": lambda row: float(row["loss"]),
    "log2 tokens": lambda row: math.log2(row["tokens"]),
    "copy probe": lambda row: float(row["copy_probe"]),
    "rate before RL": lambda row: float(row["before"]["rate"]),
    "rate after RL": lambda row: float(row["after"]["rate"]),
    "reward of the last steps": lambda row: float(row["reward_last"]),
}
SLOPES = [
    ("rate after RL", "loss"), ("reward of the last steps", "loss"), ("rate before RL", "loss"),
    ("loss", "log2 tokens"), ("copy probe", "log2 tokens"), ("rate before RL", "log2 tokens"),
    ("rate after RL", "log2 tokens"), ("reward of the last steps", "log2 tokens"),
]  # fmt: skip


def measure(seed: int, num_tokens: int, steps: int, tasks: int) -> Row:
    """Run the example with a budget of mid-training, and return its losses, rewards and rates."""
    settings = [f"seed={seed}", f"tasks.seed={seed}", f"mid_training.num_tokens={num_tokens}", f"rl.steps={steps}"]
    settings += [f"evals.heldout_tasks={tasks}", "evals.transfer_tasks=0", "evals.every=0", "evals.baseline_tasks=8"]
    folder = start_run(LAPTOP, f"law-{seed}-{num_tokens}", settings, may_learn_nothing=True)
    found, trained = summary(folder), json.loads((folder / "checkpoints" / "mid" / "mid_training.json").read_text())
    rewards = [float(step["reward_mean"]) for step in RunView(folder).by_step("rl.step")]
    return {
        "tokens": trained["num_tokens"],
        "mid_steps": trained["num_steps"],
        "loss": round(trained["heldout_loss"], 5),
        "copy_probe": trained["copy_probe"],
        "before": brief(found["heldout"]["before"]),
        "after": brief(found["heldout"]["after"]),
        "rewards": [round(reward, 4) for reward in rewards],
        "reward_last": round(statistics.fmean(rewards[-LAST_STEPS:]), 4),
        "cpu_s": found["cpu_s"]["total"],
    }


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the least-squares slope of y over x.

    >>> slope([1.0, 2.0, 3.0], [5.0, 3.0, 1.0])
    -2.0
    """
    return statistics.linear_regression(x, y).slope


def slopes(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the slope of each pair of measures: by seed, and their mean with its interval over seeds."""
    found = []
    for of, over in SLOPES:
        by_seed = []
        for seed in sorted({row["seed"] for row in rows}):
            own = [row for row in rows if row["seed"] == seed]
            by_seed.append(slope([MEASURES[over](row) for row in own], [MEASURES[of](row) for row in own]))
        rounded = [round(value, 4) for value in by_seed]
        found.append({"of": of, "over": over, "by_seed": rounded, **over_seeds.mean(by_seed)})
    return found


def picture(rows: Sequence[Row]) -> str:
    """Draw the rates after RL over the loss of mid-training: a line for each seed, through its budgets."""
    numbers = sorted({row["seed"] for row in rows})
    series = [
        Series(f"seed {seed}", sorted((r["loss"], r["after"]["rate"]) for r in rows if r["seed"] == seed), at)
        for at, seed in enumerate(numbers, 1)
    ]
    words = "held-out loss after mid-training, nats per token; solve rate of held-out tasks after RL"
    chart = line_chart(series, title=words, x_label=words, y_range=(0.0, 1.0), frame=WIDE)
    return standalone_svg(chart, [(one.label, one.colour) for one in series], x=960, y=40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="shares of the example's")
    parser.add_argument("--steps", type=int, default=20, help="of RL")
    parser.add_argument("--tasks", type=int, default=256, help="held-out tasks")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured")
    args = parser.parse_args()
    journal, whole = Journal("law", fresh=args.fresh), load(LAPTOP, RunConfig).mid_training.num_tokens
    rows = []
    for seed in args.seeds:
        for budget in args.budgets:
            key = {"seed": seed, "num_tokens": int(budget * whole), "steps": args.steps, "tasks": args.tasks}
            row = journal.once(key, lambda key=key: measure(**key))  # type: ignore[misc]
            rows.append({"seed": seed, "budget": budget, **row})
    PICTURE.write_text(picture(rows))
    facts = {"steps": args.steps, "tasks": args.tasks, "last_steps": LAST_STEPS, "whole_tokens": whole}
    report("law", {**facts, "slopes": slopes(rows), "rows": rows})


if __name__ == "__main__":
    main()

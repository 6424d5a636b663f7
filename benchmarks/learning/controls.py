"""Honest controls of an RL run: what else the same CPU seconds buy from the same checkpoint.

Given runs from nothing (`--runs`), each one's mid-trained checkpoint and the CPU seconds of its RL phase (all processes
and evaluations) are each control's start and budget:

- *more mid-training*: the same program over the same corpus, newly shuffled, its rate warmed up again; two peak rates.
- *rejection sampling + fine-tuning*: `benchmarks.learning.rejection`; rounds and rates, six recipes.
- *shuffled reward*: the same RL run with its advantages permuted within each batch
  (`benchmarks.learning.shuffled_learner`).

Settings are chosen on validation tasks of the first run; the best one of each control is then evaluated on held-out
tasks of every run, as the run's own result was. `rl_ahead` is the difference of solve rates, of each run with the
interval of its tasks, and over the runs with that of the variance between them.

Trials are kept as they end (`benchmarks.journal`): the same command goes on where it ended.
`python -m benchmarks.learning.controls --runs RUN [RUN ...] [--only mid rejection shuffled] [--tasks N] [--fresh]`
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.journal import Journal, Row, digest
from benchmarks.learning import seeds, shuffled_learner
from benchmarks.learning.reinforcing import reinforce
from benchmarks.learning.rejection import Recipe, fine_tune
from benchmarks.report import report
from benchmarks.runs import ahead, brief, evaluate, new_folder, rl_cpu_s, summary
from etude.config import load
from etude.loop.config import RunConfig
from etude.training import mid_train

MID_LRS = (3e-3, 1e-3)
RECIPES = tuple(f"{rounds}:{lr}" for rounds in (1, 2, 3) for lr in ("3e-4", "1e-3"))
MARGIN = 1.05  # mid-training's budget is counted in tokens: a little more, so that it surely has the CPU seconds
GOAL = {"mid": 0.4, "rejection": 0.1}
NEVER = 10**9

Trial = Callable[["Measured", Path], dict[str, Any]]
"""Spends a run's budget, leaves a checkpoint at the path, returns facts with `cpu_s`."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A run that the controls are of."""

    path: Path
    budget_s: float
    validation_tasks: int
    heldout_tasks: int

    @property
    def start(self) -> Path:
        return self.path / "checkpoints" / "mid"

    @property
    def config(self) -> RunConfig:
        """The run's config, but from its checkpoint."""
        config = load(self.path / "config.toml", RunConfig)
        evals = dataclasses.replace(config.evals, heldout_tasks=self.heldout_tasks)
        return dataclasses.replace(config, start=self.start.resolve(), evals=evals)

    @property
    def key(self) -> dict[str, Any]:
        """What a trial's row is kept by, its name aside."""
        return {"start": digest(self.start), "seed": self.config.seed, "budget_s": self.budget_s}

    def rates(self, checkpoint: Path, split: str) -> dict[str, Any]:
        """Solve rate of a checkpoint with the run's settings."""
        tasks = self.validation_tasks if split == "validation" else self.heldout_tasks
        return brief(evaluate(checkpoint, self.path / "config.toml", split=split, num_tasks=tasks))


def more_mid_training(lr: float, run: Measured, out: Path) -> dict[str, Any]:
    """Go on with mid-training for the budget's number of tokens."""
    config = run.config
    done = json.loads((run.start / "mid_training.json").read_text())
    tokens_per_cpu_s = done["num_tokens"] / summary(run.path)["cpu_s"]["mid-training"]
    settings = dataclasses.replace(
        config.mid_training,
        num_tokens=int(MARGIN * run.budget_s * tokens_per_cpu_s),
        lr=lr,
        eval_every=NEVER,
        checkpoint_every=NEVER,
    )
    before = _children_cpu_s()
    trained = mid_train(
        settings,
        run.path / "corpus",
        out,
        model=config.model,
        ranks=len(os.sched_getaffinity(0)),
        seed=config.seed + 1000,
        start=run.start,
        assets=run.path / "tokenizer",
    )
    return {"lr": lr, "cpu_s": round(_children_cpu_s() - before, 1), "num_tokens": trained.num_tokens}


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rejection(recipe: Recipe, run: Measured, out: Path) -> dict[str, Any]:
    """Rejection sampling and fine-tuning by one recipe."""
    return asyncio.run(fine_tune(new_folder("rejection"), run.config, recipe, budget_s=run.budget_s, out=out))


class Trials:
    """The trials of one benchmark, each done once."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def trained(self, run: Measured, name: str, trial: Trial) -> Row:
        """A trial's facts, and the `checkpoint` it left."""

        def train() -> dict[str, Any]:
            out = new_folder(name)
            return {**trial(run, out), "checkpoint": str(out.absolute())}

        return self.journal.once({**run.key, "trial": name}, train)

    def rated(self, run: Measured, name: str, trial: Trial, split: str) -> Row:
        """A trial's facts, without its checkpoint, and its solve rate on a split."""
        facts = self.trained(run, name, trial)
        tasks = run.validation_tasks if split == "validation" else run.heldout_tasks
        key = {**run.key, "trial": name, "split": split, "tasks": tasks}
        rates = self.journal.once(key, lambda: run.rates(Path(facts["checkpoint"]), split))
        kept = {name: value for name, value in facts.items() if name not in ("checkpoint", "commit")}
        return {**kept, split: {name: value for name, value in rates.items() if name != "commit"}}

    def best(self, runs: Sequence[Measured], trials: Mapping[str, Trial]) -> dict[str, Any]:
        """Every trial on validation tasks of the first run, the best of them on held-out tasks of each."""
        tried = {name: self.rated(runs[0], name, trial, "validation") for name, trial in trials.items()}
        chosen = chosen_of(tried)
        heldout = [self.rated(run, chosen, trials[chosen], "heldout") for run in runs]
        return {"chosen": chosen, "tried": tried, "runs": heldout}

    def shuffled(self, runs: Sequence[Measured]) -> dict[str, Any]:
        """The RL run with shuffled advantages, of each run."""
        key = "shuffled"
        rows = [
            self.journal.once({**run.key, "trial": key, "tasks": run.heldout_tasks}, partial(shuffled, run))
            for run in runs
        ]
        return {"runs": [{name: value for name, value in row.items() if name != "commit"} for row in rows]}


def chosen_of(tried: Mapping[str, Mapping[str, Any]]) -> str:
    """The trial with the best solve rate on validation tasks; the first of equal ones."""
    return max(tried, key=lambda name: tried[name]["validation"]["rate"])


def shuffled(run: Measured) -> dict[str, Any]:
    """RL with its advantages permuted within each batch."""
    folder = new_folder("shuffled")
    instead = {"etude.loop.learner": shuffled_learner.__name__}
    heldout = asyncio.run(reinforce(folder, run.config, instead=instead, heldout=True))
    assert heldout is not None, "it was asked for"
    return {"heldout": brief(heldout), "cpu_s": round(sum(rl_cpu_s(folder).values()), 1), "steps": run.config.rl.steps}


def recipe(text: str) -> Recipe:
    """``ROUNDS:LR`` as a recipe."""
    rounds, _, lr = text.partition(":")
    return Recipe(int(rounds), float(lr))


def against(control: Mapping[str, Any], rl: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far RL is ahead of a control on held-out tasks, run by run and over them; what the control gained."""
    rates = [row["heldout"] for row in control["runs"]]
    by_run = [
        {"rl_ahead": ahead(rate, own["after"]), "gained": ahead(own["before"], rate)}
        for rate, own in zip(rates, rl, strict=True)
    ]
    differences = [row["rl_ahead"]["difference"] for row in by_run]
    return {**control, "by_run": by_run, "rl_ahead": seeds.mean(differences)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="finished runs from nothing, one a seed")
    controls = ("mid", "rejection", "shuffled")
    parser.add_argument("--only", nargs="+", choices=controls, default=controls)
    parser.add_argument("--tasks", type=int, default=256, help="validation tasks that settings are chosen on")
    parser.add_argument("--heldout", type=int, help="held-out tasks (default: as many as the run had)")
    parser.add_argument("--budget-s", type=float, help="CPU seconds (default: those of the run's RL)")
    parser.add_argument("--mid-lrs", type=float, nargs="+", default=MID_LRS, help="peak rates to try")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="ROUNDS:LR", help="to try")
    parser.add_argument("--fresh", action="store_true", help="do again what was done before")
    args = parser.parse_args()
    rl, runs = [], []
    for path in args.runs:
        found, rl_s = summary(path), round(sum(rl_cpu_s(path).values()), 1)
        before, after = found["heldout"]["before"], found["heldout"]["after"]
        rl.append({"before": brief(before), "after": brief(after), "cpu_s": rl_s})
        runs.append(Measured(path, args.budget_s or rl_s, args.tasks, args.heldout or after["num_tasks"]))
    trials, results = Trials(Journal("controls", fresh=args.fresh)), dict[str, Any]()
    recipes = [recipe(text) for text in args.recipes]
    if "mid" in args.only:
        results["mid"] = trials.best(runs, {f"mid-{lr:g}": partial(more_mid_training, lr) for lr in args.mid_lrs})
    if "rejection" in args.only:
        tried = {f"rejection-{r.rounds}-{r.lr:g}": partial(rejection, r) for r in recipes}
        results["rejection"] = trials.best(runs, tried)
    if "shuffled" in args.only:
        results["shuffled"] = trials.shuffled(runs)
    compared = {name: against(control, rl) for name, control in results.items()}
    budgets = [run.budget_s for run in runs]
    report("controls", {"budget_s": budgets, "goal_rl_ahead": GOAL, "rl": rl, "controls": compared})


if __name__ == "__main__":
    main()

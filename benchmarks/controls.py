"""Honest controls of an RL run: what else the same CPU seconds buy from the same checkpoint.

Given a run from nothing (`--run`), its mid-trained checkpoint and the CPU seconds of its RL phase (all processes, its
evaluations included) are each control's start and budget:

- *more mid-training*: the same program over the same corpus, newly shuffled, its rate warmed up again; two peak rates.
- *rejection sampling + fine-tuning*: `benchmarks.rejection`; rounds and rates.
- *shuffled reward*: the same RL run with its advantages permuted within each batch (`benchmarks.shuffled_learner`).

Settings are chosen on validation tasks; each control's best is then evaluated once on the run's held-out tasks, as the
run's own result was. `python -m benchmarks.controls --run RUN [--only mid rejection shuffled] [--tasks N]`
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import shuffled_learner
from benchmarks.reinforcing import reinforce
from benchmarks.rejection import Recipe, fine_tune
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

Trial = Callable[[Path], dict[str, Any]]
"""Spends the budget, leaves a checkpoint at the path, returns facts with `cpu_s`."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The run that the controls are of."""

    path: Path
    budget_s: float
    validation_tasks: int
    heldout_tasks: int
    mid_lrs: tuple[float, ...]
    recipes: tuple[Recipe, ...]

    @property
    def start(self) -> Path:
        return self.path / "checkpoints" / "mid"

    @property
    def config(self) -> RunConfig:
        """The run's config, but from its checkpoint."""
        config = load(self.path / "config.toml", RunConfig)
        evals = dataclasses.replace(config.evals, heldout_tasks=self.heldout_tasks)
        return dataclasses.replace(config, start=self.start.resolve(), evals=evals)

    def rates(self, checkpoint: Path, split: str) -> dict[str, Any]:
        """Solve rate of a checkpoint with the run's settings."""
        tasks = self.validation_tasks if split == "validation" else self.heldout_tasks
        return brief(evaluate(checkpoint, self.path / "config.toml", split=split, num_tasks=tasks))


def more_mid_training(run: Measured, lr: float, out: Path) -> dict[str, Any]:
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


def mid(run: Measured) -> dict[str, Any]:
    def trial(lr: float) -> Trial:
        return lambda out: more_mid_training(run, lr, out)

    return best(run, {f"mid-{lr:g}": trial(lr) for lr in run.mid_lrs})


def rejection(run: Measured) -> dict[str, Any]:
    def trial(chosen: Recipe) -> Trial:
        return lambda out: asyncio.run(
            fine_tune(new_folder("rejection"), run.config, chosen, budget_s=run.budget_s, out=out)
        )

    return best(run, {f"rejection-{r.rounds}-{r.lr:g}": trial(r) for r in run.recipes})


def best(run: Measured, trials: dict[str, Trial]) -> dict[str, Any]:
    """Every trial on validation tasks, the best of them on held-out tasks."""
    tried = []
    for name, trial in trials.items():
        out = new_folder(name)
        facts = trial(out)
        tried.append({**facts, "validation": run.rates(out, "validation"), "checkpoint": out})
    chosen = max(tried, key=lambda t: t["validation"]["rate"])
    heldout = run.rates(chosen["checkpoint"], "heldout")
    rows = [{name: value for name, value in t.items() if name != "checkpoint"} for t in tried]
    return {"heldout": heldout, "cpu_s": chosen["cpu_s"], "chosen": rows[tried.index(chosen)], "tried": rows}


def shuffled(run: Measured) -> dict[str, Any]:
    folder = new_folder("shuffled")
    instead = {"etude.loop.learning": shuffled_learner.__name__}
    heldout = asyncio.run(reinforce(folder, run.config, instead=instead, heldout=True))
    assert heldout is not None, "it was asked for"
    return {"heldout": brief(heldout), "cpu_s": round(sum(rl_cpu_s(folder).values()), 1), "steps": run.config.rl.steps}


def recipe(text: str) -> Recipe:
    """``ROUNDS:LR`` as a recipe."""
    rounds, _, lr = text.partition(":")
    return Recipe(int(rounds), float(lr))


CONTROLS = {"mid": mid, "rejection": rejection, "shuffled": shuffled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, required=True, help="a finished run from nothing")
    parser.add_argument("--only", nargs="+", choices=CONTROLS, default=list(CONTROLS))
    parser.add_argument("--tasks", type=int, default=256, help="validation tasks that settings are chosen on")
    parser.add_argument("--heldout", type=int, help="held-out tasks (default: as many as the run had)")
    parser.add_argument("--budget-s", type=float, help="CPU seconds (default: those of the run's RL)")
    parser.add_argument("--mid-lrs", type=float, nargs="+", default=MID_LRS, help="peak rates to try")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="ROUNDS:LR", help="to try")
    args = parser.parse_args()
    found = summary(args.run)
    before, after = found["heldout"]["before"], found["heldout"]["after"]
    rl_s = round(sum(rl_cpu_s(args.run).values()), 1)
    run = Measured(
        path=args.run,
        budget_s=args.budget_s or rl_s,
        validation_tasks=args.tasks,
        heldout_tasks=args.heldout or after["num_tasks"],
        mid_lrs=tuple(args.mid_lrs),
        recipes=tuple(recipe(text) for text in args.recipes),
    )
    controls = {name: CONTROLS[name](run) for name in args.only}
    for control in controls.values():
        control["rl_ahead"] = ahead(control["heldout"], after)
        control["gained"] = ahead(before, control["heldout"])
    rl = {"before": brief(before), "after": brief(after), "cpu_s": rl_s}
    report("controls", {"budget_s": run.budget_s, "goal_rl_ahead": GOAL, "rl": rl, "controls": controls})


if __name__ == "__main__":
    main()

"""Work beyond the context: `examples/long`, where the model writes its own summaries, and other ways to go on.

Each seed is the run's and the tasks'. Its controls start from the mid-trained checkpoint of its main run and train with
the same settings, but keep the conversation within the context in another way (`examples.long.controls`): the oldest
messages are dropped, old tool outputs are emptied, the harness writes a fixed summary, the model's summary is replaced
by a blank one, or the summary gets no gradient. What is reported is each run's own `summary.json`.

`PYTHONPATH=. python -m benchmarks.learning.long_tasks [--seeds 0 1 2] [--controls fixed blank ...] [--set a.b=c]
[--fresh]` Each run is minutes on two cores. Rows are kept (`benchmarks.journal`), so it goes on where it broke off.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from examples.long.controls import ROOMS

from benchmarks.journal import Journal
from benchmarks.report import report
from benchmarks.runs import ahead, brief, interval, start_run, summary
from etude.evals.intervals import over_seeds

LONG = Path("examples/long/config.toml")
MAIN = "summaries"
GOAL = {"after": 0.6, "wall_s": 600.0}
Row = dict[str, Any]


def settings_of(way: str, seed: int, start: str, given: Sequence[str]) -> list[str]:
    """The settings of one run. `start`: the checkpoint that a control begins with."""
    own = [f"seed={seed}", *given]
    if way == MAIN:
        return own
    return [*own, f"start={start}", f'harness.program={{kind = "examples.long.controls:Control", room = "{way}"}}']


def row(way: str, seed: int, start: str, given: Sequence[str]) -> Row:
    """Run one way with one seed to its end."""
    name, settings = f"long-{way}-{seed}", settings_of(way, seed, start, given)
    run = start_run(LONG, name, settings, may_learn_nothing=way != MAIN)
    found = summary(run)
    return {
        "way": way,
        "seed": seed,
        "before": brief(found["heldout"]["before"]),
        "during": [{"step": one["step"], "rate": round(one["rate"], 4)} for one in found["heldout"]["during"]],
        "after": brief(found["heldout"]["after"]),
        "baselines": found["baselines"],
        "wall_s": found["wall_s"],
        "cpu_s": found["cpu_s"],
        "cores": found["host"]["cores"],
        "parity": found["parity"],
        "start": str((run / "checkpoints" / "mid").resolve()),
    }


def table(rows: Sequence[Row]) -> dict[str, Any]:
    """By way: the rates of the seeds, their mean with its interval, and how far the main way is ahead in each seed."""
    found: dict[str, Any] = {}
    main = {one["seed"]: one["after"] for one in rows if one["way"] == MAIN}
    for way in dict.fromkeys(one["way"] for one in rows):
        mine = [one for one in rows if one["way"] == way]
        rates = [one["after"]["rate"] for one in mine]
        found[way] = {"after": rates}
        if len(rates) > 1:
            mean = over_seeds(rates)
            found[way]["mean"] = {name: round(getattr(mean, name), 4) for name in ("value", "low", "high")}
        if way != MAIN:
            pairs = [(one["after"], main[one["seed"]]) for one in mine if one["seed"] in main]
            found[way]["behind_by"] = [ahead(of, best) for of, best in pairs]
            found[way]["disjoint"] = all(interval(of).disjoint(interval(best)) for of, best in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--controls", nargs="*", choices=list(ROOMS), default=list(ROOMS))
    parser.add_argument("--fresh", action="store_true", help="forget the rows that were kept")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="for every run")
    args = parser.parse_args()
    journal, rows = Journal("long_tasks", fresh=args.fresh), list[Row]()
    for seed in args.seeds:
        start = ""
        for way in (MAIN, *args.controls):
            key = {"way": way, "seed": seed, "set": args.set}
            rows.append(journal.once(key, partial(row, way, seed, start, args.set)))
            start = rows[-1]["start"] if way == MAIN else start
    kept = [{name: fact for name, fact in one.items() if name != "start"} for one in rows]  # a path of this machine
    report("long_tasks", {"config": str(LONG), "settings": args.set, "goal": GOAL, "ways": table(rows), "rows": kept})


if __name__ == "__main__":
    main()

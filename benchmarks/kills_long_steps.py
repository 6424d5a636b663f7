"""A run whose steps take as long as a rollout's deadline, killed again and again; how many rollouts that costs.

What is measured is the wait for versions: a learner that is killed goes back to its checkpoint, so that rollouts which
had begun on a later version have to wait for it, some steps long; an engine that is killed takes longer to come back
than the deadline. None of both may lose a rollout, or make one invalid. The run is a small game (a file returns 0, the
instruction says which digit it should return) with real processes; the learner waits `--step` seconds in each step, and
`harness.turn_deadline_s` is as long. Kills as in `benchmarks.kills`. A rollout that was begun before its version was
published would end as invalid at the boundary `provider`; so would one whose engine was away for longer than its
deadline.
`python -m benchmarks.kills_long_steps [--kills 50] [--steps 16] [--step 4.0] [--seed 0]`
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.conftest import made_game

from benchmarks.kills import Run, audit, kill, plan
from benchmarks.report import report
from benchmarks.runs import summary

SLOW_LEARNER = """
import sys

if "etude.loop.learning" in sys.orig_argv:
    import time

    from etude.training.learner import TorchLearner

    whole = TorchLearner.forward_backward

    def slow(self, batch):
        time.sleep({step_s})
        return whole(self, batch)

    TorchLearner.forward_backward = slow
"""
"""Imported by every interpreter as it starts; only the learner's is another by it."""


def played(folder: Path, *, kills: int, steps: int, step_s: float, seed: int) -> dict[str, object]:
    """One run to its end; what it lost."""
    (folder / "sitecustomize.py").write_text(SLOW_LEARNER.format(step_s=step_s))
    os.environ["PYTHONPATH"] = str(folder)
    draw, began = random.Random(seed), time.perf_counter()
    game = made_game(folder / "game")
    run = Run(
        game.config,
        [f"rl.steps={steps}", f"harness.turn_deadline_s={step_s}", "experience.max_lag=2", "evals.every=1000"],
    )
    counts: Counter[str] = Counter()
    try:
        for number, target in enumerate(plan(kills, draw)):
            if run.wait(lambda due=number * steps // kills: run.step >= due, "the next step") is None:
                break
            time.sleep(draw.uniform(0.0, step_s / 2))  # anywhere within a step
            killed = kill(run, target, draw)
            if killed is None:
                break
            counts[killed] += 1
            print(f"kill {sum(counts.values())} at step {run.step}: {killed}", file=sys.stderr, flush=True)
        run.wait(lambda: False, "the end")
    finally:
        if run.conductor.poll() is None:
            run.conductor.kill()
    steps_s = [float(event["train_s"]) for event in run.events("rl.step")]
    return {
        **audit(run.folder),
        "finished": summary(run.folder)["finished"],
        "kills": sum(counts.values()),
        "killed": dict(sorted(counts.items())),
        "resumes": run.resumes,
        "lineages_lost": [event["state"] for event in run.events("lineage")].count("lost"),
        "invalid": summary(run.folder)["invalid"],
        "requeued": dict(Counter(str(event["reason"]) for event in run.events("rollout.requeued"))),
        "turn_deadline_s": step_s,
        "train_s_least": round(min(steps_s), 2),
        "steps_made": len(steps_s),
        "seed": seed,
        "wall_s": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--step", type=float, default=4.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = played(Path(folder), kills=args.kills, steps=args.steps, step_s=args.step, seed=args.seed)
    report("kills_long_steps", found)


if __name__ == "__main__":
    main()

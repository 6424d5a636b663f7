"""A run whose steps take as long as a rollout's deadline, killed again and again; how many rollouts that costs.

What is measured is the wait for versions: a learner that is killed goes back to its checkpoint, so that rollouts which
had begun on a later version have to wait for it, some steps long; an engine that is killed takes longer to come back
than the deadline. None of both may lose a rollout, or make one invalid. The run is a small game (a file returns 0, the
instruction says which digit it should return) with real processes; the learner waits `--step` seconds in each step, and
`harness.turn_deadline_s` is as long. Kills as in `benchmarks.run.kills`. A rollout that was begun before its version
was published would end as invalid at the boundary `provider`; so would one whose engine was away for longer than its
deadline.
`python -m benchmarks.run.kills_long_steps [--kills 50] [--steps 16] [--step 4.0] [--seed 0] [--seconds S] [--again
RUN]`
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

from tests.conftest import made_game

from benchmarks.report import report
from benchmarks.run.kills import Run, audit, end_conductor, kill, plan
from benchmarks.runs import summary

SLOW_LEARNER = """
import sys

if "etude.loop.learner" in sys.orig_argv:
    import time

    from etude.training.learner import TorchLearner

    whole = TorchLearner.forward_backward

    def slow(self, batch):
        time.sleep({step_s})
        return whole(self, batch)

    TorchLearner.forward_backward = slow
"""
"""Imported by every interpreter as it starts; only the learner's is another by it."""


KILLED = "kills.json"
"""In the run's folder: what was killed so far, in order."""


def played(
    folder: Path,
    *,
    kills: int,
    steps: int,
    step_s: float,
    seed: int,
    again: Path | None = None,
    seconds: float = float("inf"),
) -> dict[str, object] | None:
    """One run to its end: what it lost. None: the seconds were over first; it goes on with `again`, its folder.
    `folder`: where the game is, or will be made."""
    (folder / "sitecustomize.py").write_text(SLOW_LEARNER.format(step_s=step_s))
    os.environ["PYTHONPATH"] = str(folder)
    began = time.perf_counter()
    config = folder / "game" / "config.toml"
    if again is None:
        made_game(folder / "game")
    settings = [f"rl.steps={steps}", f"harness.turn_deadline_s={step_s}", "experience.max_lag=2", "evals.every=1000"]
    run = Run(config, settings, again=again)
    killed: list[str] = json.loads((run.folder / KILLED).read_text()) if again else []
    try:
        for number, target in list(enumerate(plan(kills, random.Random(seed))))[len(killed) :]:
            draw = random.Random(f"{seed} {number}")
            if run.wait(lambda due=number * steps // kills: run.step >= due, "the next step") is None:
                break
            if time.perf_counter() - began > seconds:
                end_conductor(run)
                print(f"{len(killed)} kills; it goes on with --again {run.folder}", file=sys.stderr)
                return None
            time.sleep(draw.uniform(0.0, step_s / 2))  # anywhere within a step
            if (what := kill(run, target, draw)) is None:
                break
            killed.append(what)
            (run.folder / KILLED).write_text(json.dumps(killed))
            print(f"kill {len(killed)} at step {run.step}: {what}", file=sys.stderr, flush=True)
        run.wait(lambda: False, "the end")
    finally:
        if run.conductor.poll() is None:
            run.conductor.kill()
    steps_s = [float(event["train_s"]) for event in run.events("rl.step")]
    return {
        **audit(run.folder),
        "finished": summary(run.folder)["finished"],
        "kills": len(killed),
        "killed": dict(sorted(Counter(killed).items())),
        "lineages_lost": [event["state"] for event in run.events("lineage")].count("lost"),
        "invalid": summary(run.folder)["invalid"],
        "requeued": dict(Counter(str(event["reason"]) for event in run.events("rollout.requeued"))),
        "turn_deadline_s": step_s,
        "train_s_least": round(min(steps_s), 2),
        "steps_made": len(steps_s),
        "seed": seed,
        "last_session_s": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--step", type=float, default=4.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="leave the run after so many")
    parser.add_argument("--again", type=Path, help="go on with a run that was left: its folder")
    parser.add_argument("--game", type=Path, default=Path("runs/long-steps"), help="where the game is, or will be made")
    args = parser.parse_args()
    args.game.mkdir(parents=True, exist_ok=True)
    found = played(
        args.game.resolve(),
        kills=args.kills,
        steps=args.steps,
        step_s=args.step,
        seed=args.seed,
        again=args.again,
        seconds=args.seconds,
    )
    if found is not None:
        report("kills_long_steps", found)


if __name__ == "__main__":
    main()

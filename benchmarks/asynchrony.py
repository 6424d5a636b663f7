"""Time to a solve rate: asynchronous against synchronous training, at several latencies of a tool call.

Every run starts from the same checkpoint with the same two engines and the same number of decoding slots. "Solve rate"
is the mean reward of the last `WINDOW` training rollouts that finished; training tasks are generated without end and
taken as they come, so each is seen once and the mean is that of unseen tasks. Time counts from the first step's first
rollout (engines up, weights published) to the finish of the rollout that brought the mean to the rate; nothing else
runs beside it. `async` has the package's default lag of 2; the laptop example's 1 and a lag of 4 stand beside it.
Both kinds get a double batch, too, with a rate that goes with its square root, and synchronous training (`max_lag = 0`)
a half one. `ratio` is the best synchronous mean time over the seeds ÷ that of `async`, `ratio_best` ÷ the best
asynchronous one. Idle shares are 1 − CPU time ÷ wall time of the learner and of each engine.
`python -m benchmarks.asynchrony --start CHECKPOINT [--latencies 0 200 1000] [--seeds 0 1 2] [--add]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import slow_worker
from benchmarks.reinforcing import Reached, reinforce
from benchmarks.report import RESULTS, report
from benchmarks.runs import LAPTOP, new_folder, rl_cpu_s
from etude.config import load
from etude.dashboard.read import RunView
from etude.dashboard.summary import lag
from etude.dashboard.utilisation import idle
from etude.loop.config import RunConfig

WINDOW = 384  # rollouts that a solve rate is the mean of: six of the example's batches
SETTINGS = {
    "async": ("experience.max_lag=2",),
    "async, lag 1": ("experience.max_lag=1",),
    "async, lag 4": ("experience.max_lag=4",),
    "async, double batch": ("experience.max_lag=2", "experience.groups_per_step=16"),
    "sync": ("experience.max_lag=0",),
    "sync, half batch": ("experience.max_lag=0", "experience.groups_per_step=4", "rl.steps=160"),
    "sync, double batch": ("experience.max_lag=0", "experience.groups_per_step=16"),
}
SLOTS_WHEN_LATE = 256  # decoding slots an engine with late tools: enough for the whole window at once


def configure(start: Path, setting: str, latency_ms: int, seed: int, more: Sequence[str]) -> RunConfig:
    """The run's config: the laptop example's, from a checkpoint, with nothing beside the training."""
    slots = [f"engine.max_sequences={SLOTS_WHEN_LATE}"] if latency_ms else []
    never = ["evals.every=100000", "rl.checkpoint_every=100000", "experience.curriculum=source"]
    settings = [f"start={start.resolve()}", f"seed={seed}", *never, *slots, *SETTINGS[setting], *more]
    config = load(LAPTOP, RunConfig, settings)
    batches = config.experience.groups_per_step / load(LAPTOP, RunConfig, []).experience.groups_per_step
    return load(LAPTOP, RunConfig, [*settings, f"learner.lr={config.learner.lr * math.sqrt(batches):.6g}"])


def enough(rate: float, batch: int) -> Reached:
    """Whether steps may end: the mean reward of the last `WINDOW` trained rollouts is a little past `rate`. A batch
    counts whole, the last ones that fill the window."""
    rewards: list[float] = []
    size = math.ceil(WINDOW / batch)

    def reached(step: Mapping[str, Any]) -> bool:
        rewards.append(float(step["reward_mean"]))
        return len(rewards) >= size and statistics.fmean(rewards[-size:]) >= rate + 0.01

    return reached


def reached_at(finished: Sequence[Mapping[str, Any]], rate: float) -> float | None:
    """When the mean reward of the last `WINDOW` finished rollouts first was `rate`; None: never."""
    last: deque[float] = deque(maxlen=WINDOW)
    for rollout in finished:
        if rollout["reward"] is not None:
            last.append(float(rollout["reward"]))
        if len(last) == WINDOW and statistics.fmean(last) >= rate:
            return float(rollout["t"])
    return None


def one(config: RunConfig, setting: str, latency_ms: int, rate: float) -> dict[str, Any]:
    """One run to the rate, in numbers; `time_s` is None where the last step came first."""
    folder = new_folder(f"asynchrony-{latency_ms}ms-lag{config.experience.max_lag}")
    batch = config.experience.groups_per_step * config.experience.group_size
    slow, notes = {"etude.loop.worker": slow_worker.__name__}, {slow_worker.LATENCY: str(latency_ms / 1e3)}
    asyncio.run(reinforce(folder, config, until=enough(rate, batch), instead=slow, notes=notes))
    view = RunView(folder)
    span, steps = view.phase("rl"), view.by_step("rl.step")
    assert span is not None, "reinforce has ended"
    reached = reached_at(view.of("rollout"), rate)
    return {
        "setting": setting,
        "latency_ms": latency_ms,
        "seed": config.seed,
        "time_s": round(reached - span.start, 2) if reached else None,
        "steps": len(steps),
        "rollouts": len(steps) * batch,
        "reward_last": round(float(steps[-1]["reward_mean"]), 4) if steps else None,
        "lag_mean": lag(steps)["mean"],
        "idle": {name: None if v is None else round(v, 4) for name, v in idle(view).items()},
        "cpu_s": round(sum(rl_cpu_s(folder).values()), 1),
    }


def compare(rows: Sequence[Mapping[str, Any]], latency_ms: int) -> dict[str, Any]:
    """Mean times by setting at one latency, and the best synchronous one's over the asynchronous one's."""
    means: dict[str, float | None] = {}
    for setting in {row["setting"]: None for row in rows}:
        times = [row["time_s"] for row in rows if row["setting"] == setting and row["latency_ms"] == latency_ms]
        means[setting] = round(statistics.fmean(times), 2) if times and None not in times else None
    reached = {setting: time_s for setting, time_s in means.items() if time_s is not None}
    sync = min((s for s in reached if s.startswith("sync")), key=lambda s: reached[s], default=None)
    mine = min((s for s in reached if s.startswith("async")), key=lambda s: reached[s], default=None)
    return {
        "latency_ms": latency_ms,
        "time_s": means,
        "best_sync": sync,
        "best_async": mine,
        "ratio": round(reached[sync] / reached["async"], 3) if sync and "async" in reached else None,
        "ratio_best": round(reached[sync] / reached[mine], 3) if sync and mine else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--start", type=Path, required=True, help="a mid-trained checkpoint, e.g. RUN/checkpoints/mid")
    parser.add_argument("--latencies", type=int, nargs="+", default=[0, 200, 1000], metavar="MS")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rate", type=float, default=0.85)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="for every run")
    parser.add_argument("--add", action="store_true", help="to the rows of the last result")
    args = parser.parse_args()
    rows = json.loads((RESULTS / "asynchrony.json").read_text())["rows"] if args.add else []
    rows += [
        one(configure(args.start, setting, latency_ms, seed, args.set), setting, latency_ms, args.rate)
        for latency_ms in args.latencies
        for seed in args.seeds
        for setting in args.settings
    ]
    found = [compare(rows, latency_ms) for latency_ms in sorted({row["latency_ms"] for row in rows})]
    goal = {"0": 1.0, "200": 1.5, "1000": 2.0}
    report("asynchrony", {"rate": args.rate, "window": WINDOW, "goal_ratio": goal, "compared": found, "rows": rows})


if __name__ == "__main__":
    main()

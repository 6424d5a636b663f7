"""Time to a solve rate: asynchronous against synchronous training, at several latencies of a tool call.

Every run starts from the same checkpoint with the same two engines and the same number of decoding slots. "Solve rate"
is the mean reward of the last `WINDOW` training rollouts that finished; training tasks are generated without end and
taken as they come, so each is seen once and the mean is that of unseen tasks. Time counts from the first step's first
rollout (engines up, weights published) to the finish of the rollout that brought the mean to the rate; nothing else
runs beside it. `async` has the package's default lag of 2; the laptop example's 1 and a lag of 4 stand beside it.
Synchronous training (`max_lag = 0`) runs with the example's batch, half of it and two of them, each with the example's
learning rate and with one that goes with the square root of the batch; one batch also with the rate of two.

The first seed runs every setting. A run is given up once it takes `--patience` times the time of the fastest one of
its kind (asynchronous or synchronous) at that latency: it cannot be the best one, and its time is told as a lower
bound. The other seeds run the `--finalists` fastest settings of each kind, and `async`. `best_sync` and `best_async`
are the fastest by the mean over all seeds; `ratio` is that of `best_sync` ÷ that of `async`, `ratio_best` ÷ that of
`best_async`, with an interval from the pairs of seeds. Idle shares are 1 − CPU time ÷ wall time of the learner and of
each engine.

Rows are kept as they are measured (`benchmarks.journal`): the same command goes on where it ended.
`python -m benchmarks.learning.asynchrony --start CHECKPOINT [--latencies 0 200 1000] [--seeds 0 1 2] [--add] [--fresh]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.journal import Journal, Row, digest
from benchmarks.learning import seeds, slow_worker
from benchmarks.learning.reinforcing import Reached, reinforce
from benchmarks.learning.rewards import Rewards
from benchmarks.report import RESULTS, report
from benchmarks.runs import LAPTOP, new_folder, rl_cpu_s
from etude.config import load
from etude.dashboard.run_view import RunView
from etude.dashboard.summary import lag
from etude.dashboard.utilisation import idle
from etude.loop.config import RunConfig

WINDOW = 384  # rollouts that a solve rate is the mean of: six of the example's batches
START_S = 10.0  # until engines are up and the time that counts begins
SLOTS_WHEN_LATE = 256  # decoding slots an engine with late tools: enough for the whole window at once
ROOT = math.sqrt(2)


@dataclass(frozen=True)
class Setting:
    """How a run trains: `batches` of the example in one step, `rate` of the example's learning rate."""

    max_lag: int
    batches: float = 1.0
    rate: float = 1.0

    @property
    def is_async(self) -> bool:
        return self.max_lag > 0


DEFAULT = "async"
SETTINGS = {
    DEFAULT: Setting(2),
    "async, lag 1": Setting(1),
    "async, lag 4": Setting(4),
    "async, double batch": Setting(2, 2.0, ROOT),
    "sync": Setting(0),
    "sync, higher rate": Setting(0, 1.0, ROOT),
    "sync, half batch": Setting(0, 0.5, 1 / ROOT),
    "sync, half batch, same rate": Setting(0, 0.5),
    "sync, double batch": Setting(0, 2.0, ROOT),
    "sync, double batch, same rate": Setting(0, 2.0),
}


def configure(start: Path, setting: Setting, latency_ms: int, seed: int, more: Sequence[str]) -> RunConfig:
    """The run's config: the laptop example's, from a checkpoint, with nothing beside the training."""
    example = load(LAPTOP, RunConfig, more)
    slots = [f"engine.max_sequences={SLOTS_WHEN_LATE}"] if latency_ms else []
    never = ["evals.every=100000", "rl.checkpoint_every=100000", "experience.curriculum=source"]
    batch = [
        f"experience.max_lag={setting.max_lag}",
        f"experience.groups_per_step={round(example.experience.groups_per_step * setting.batches)}",
        f"rl.steps={round(example.rl.steps / min(setting.batches, 1.0))}",
        f"learner.lr={example.learner.lr * setting.rate:.6g}",
    ]
    return load(LAPTOP, RunConfig, [f"start={start.resolve()}", f"seed={seed}", *never, *slots, *more, *batch])


def enough(rate: float, batch: int) -> Reached:
    """Whether steps may end: the mean reward of the last `WINDOW` trained rollouts is a little past `rate`. A batch
    counts whole, the last ones that fill the window."""
    rewards = Rewards(batch, WINDOW)

    def reached(step: Mapping[str, Any]) -> bool:
        rewards.add(float(step["reward_mean"]))
        return rewards.reached(rate + 0.01)

    return reached


def any_of(reached: Reached, limit_s: float | None, now: Callable[[], float] = time.monotonic) -> Reached:
    """Whether steps may end: `reached`, or a run that starts now has taken `limit_s` seconds, after `START_S`."""
    began = now()

    def over(step: Mapping[str, Any]) -> bool:
        return reached(step) or (limit_s is not None and now() - began > START_S + limit_s)

    return over


def reached_at(finished: Sequence[Mapping[str, Any]], rate: float) -> float | None:
    """When the mean reward of the last `WINDOW` finished rollouts first was `rate`; None: never."""
    last: deque[float] = deque(maxlen=WINDOW)
    for rollout in finished:
        if rollout["reward"] is not None:
            last.append(float(rollout["reward"]))
        if len(last) == WINDOW and statistics.fmean(last) >= rate:
            return float(rollout["t"])
    return None


def one(config: RunConfig, setting: str, latency_ms: int, rate: float, limit_s: float | None) -> dict[str, Any]:
    """One run to the rate, in numbers. Where it is not reached `time_s` is None and `over_s` is how long was waited."""
    folder = new_folder(f"asynchrony-{latency_ms}ms-lag{config.experience.max_lag}")
    batch = config.experience.groups_per_step * config.experience.group_size
    slow, notes = {"etude.loop.worker": slow_worker.__name__}, {slow_worker.LATENCY: str(latency_ms / 1e3)}
    until = any_of(enough(rate, batch), limit_s)
    asyncio.run(reinforce(folder, config, until=until, instead=slow, notes=notes))
    view = RunView(folder)
    span, steps = view.phase("rl"), view.by_step("rl.step")
    assert span is not None, "reinforce has begun"
    assert span.end is not None, "and ended"
    reached = reached_at(view.events("rollout"), rate)
    return {
        "setting": setting,
        "latency_ms": latency_ms,
        "seed": config.seed,
        "time_s": round(reached - span.start, 2) if reached else None,
        "over_s": None if reached else round(span.end - span.start, 2),
        "steps": len(steps),
        "rollouts": len(steps) * batch,
        "reward_last": round(float(steps[-1]["reward_mean"]), 4) if steps else None,
        "lag_mean": lag(steps)["mean"],
        "idle": {name: None if v is None else round(v, 4) for name, v in idle(view).items()},
        "cpu_s": round(sum(rl_cpu_s(folder).values()), 1),
    }


def limit_of(row_times: Mapping[str, float | None], setting: str, patience: float) -> float | None:
    """Seconds after which a run of `setting` is given up, from the times of its seed and latency so far: `patience`
    times the fastest of its kind. None, no limit, for the default and where there is none to compare with."""
    kind = SETTINGS[setting].is_async
    times = [t for name, t in row_times.items() if t is not None and SETTINGS[name].is_async == kind]
    return patience * min(times) if times and setting != DEFAULT else None


def finalists(row_times: Mapping[str, float | None], number: int) -> list[str]:
    """The settings that more seeds run: the `number` fastest of each kind in the first seed, and the default."""
    reached = {name: time_s for name, time_s in row_times.items() if time_s is not None}
    ranked = sorted(reached, key=lambda name: reached[name])
    kinds = [[name for name in ranked if SETTINGS[name].is_async == kind][:number] for kind in (True, False)]
    return [name for name in row_times if name == DEFAULT or name in kinds[0] + kinds[1]]


def compare(rows: Sequence[Mapping[str, Any]], latency_ms: int) -> dict[str, Any]:
    """Mean times by setting at one latency, and the best synchronous one's over the asynchronous ones'. Only settings
    that reached the rate in every seed can be the best."""
    here = [row for row in rows if row["latency_ms"] == latency_ms]
    first, *others = sorted({row["seed"] for row in here})
    times: dict[str, dict[int, float | None]] = {}
    for row in here:
        times.setdefault(row["setting"], {})[row["seed"]] = row["time_s"]
    whole = {
        name: [t for _, t in sorted(of.items()) if t is not None]
        for name, of in times.items()
        if set(of) == {first, *others} and None not in of.values()
    }
    means = {name: statistics.fmean(found) for name, found in whole.items()}

    def best(kind: bool) -> str | None:
        return min((n for n in means if SETTINGS[n].is_async == kind), key=lambda n: means[n], default=None)

    sync, mine = best(False), best(True)
    return {
        "latency_ms": latency_ms,
        "seeds": [first, *others],
        "time_s": {name: seeds.mean(found) for name, found in whole.items()},
        "not_in_every_seed": {
            name: of[first] if of.get(first) is not None else "not reached"
            for name, of in times.items()
            if name not in whole
        },
        "best_sync": sync,
        "best_async": mine,
        "ratio": seeds.ratio(whole[sync], whole[DEFAULT]) if sync and DEFAULT in whole else None,
        "ratio_best": seeds.ratio(whole[sync], whole[mine]) if sync and mine else None,
    }


def earlier(measured: Sequence[Row], facts: Mapping[str, Any]) -> list[Row]:
    """Rows of the last result that were not measured now. Ends the benchmark where that result is of other facts."""
    last = json.loads((RESULTS / "asynchrony.json").read_text())
    if other := {name: last.get(name) for name, value in facts.items() if last.get(name) != value}:
        raise SystemExit(f"--add: the last result has {other}, not {dict(facts)}")
    have = {_place(row) for row in measured}
    return [row for row in last["rows"] if _place(row) not in have]


def _place(row: Mapping[str, Any]) -> tuple[str, int, int]:
    return row["setting"], row["latency_ms"], row["seed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--start", type=Path, required=True, help="a mid-trained checkpoint, e.g. RUN/checkpoints/mid")
    parser.add_argument("--latencies", type=int, nargs="+", default=[0, 200, 1000], metavar="MS")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the first one runs every setting")
    parser.add_argument("--finalists", type=int, default=2, help="settings of each kind that the other seeds run")
    parser.add_argument("--patience", type=float, default=1.3, help="times the fastest, after which a run is given up")
    parser.add_argument("--rate", type=float, default=0.85)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="for every run")
    parser.add_argument(
        "--add", action="store_true", help="to the rows of the last result, whatever code measured them"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured before")
    args = parser.parse_args()
    facts = {"rate": args.rate, "start": digest(args.start), "settings": args.set}
    journal, rows = Journal("asynchrony", fresh=args.fresh), list[Row]()

    def run(setting: str, latency_ms: int, seed: int, limit_s: float | None) -> float | None:
        config = configure(args.start, SETTINGS[setting], latency_ms, seed, args.set)
        key = {**facts, "patience": args.patience, "setting": setting, "latency_ms": latency_ms, "seed": seed}
        rows.append(journal.once(key, lambda: one(config, setting, latency_ms, args.rate, limit_s)))
        found: float | None = rows[-1]["time_s"]
        return found

    first, *others = args.seeds
    for latency_ms in args.latencies:
        times: dict[str, float | None] = {}
        for setting in args.settings:
            times[setting] = run(setting, latency_ms, first, limit_of(times, setting, args.patience))
        for seed in others:
            for setting in finalists(times, args.finalists):
                run(setting, latency_ms, seed, None)
    if args.add:
        rows += earlier(rows, facts)
    found = [compare(rows, latency_ms) for latency_ms in sorted({row["latency_ms"] for row in rows})]
    goal = {"0": 1.0, "200": 1.5, "1000": 2.0}
    report("asynchrony", {**facts, "window": WINDOW, "goal_ratio": goal, "compared": found, "rows": rows})


if __name__ == "__main__":
    main()

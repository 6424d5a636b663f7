"""RL from one mid-trained checkpoint in several ways, each with some seeds: what benchmarks of whole runs share.

Everything but a way's settings is alike: start, tasks, seeds. Each run is `etude run`, gone on with where it was broken
off; its row is kept beside the runs in `runs/NAME-rows.json`, and the result is written anew after each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import report
from benchmarks.runs import ETUDE, LAPTOP, ahead, brief, overrides, rl_cpu_s, summary
from etude.dashboard.run_view import RunView
from etude.evals.intervals import wilson

Row = dict[str, Any]
Rows = dict[str, Row]


def arguments(doc: str | None, ways: Iterable[str], *, name: str, seeds: Sequence[int]) -> argparse.ArgumentParser:
    """What every such benchmark is asked with."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, help="a mid-trained checkpoint of the example's model")
    parser.add_argument("--config", type=Path, default=LAPTOP)
    parser.add_argument("--ways", nargs="+", choices=[*ways], default=[*ways])
    parser.add_argument("--seeds", nargs="+", type=int, default=[*seeds])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations on validation tasks")
    parser.add_argument("--heldout", type=int, default=512)
    parser.add_argument("--name", default=name, help="what the runs' folders begin with")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--table", action="store_true", help="report the runs that have ended")
    return parser


def play(
    args: argparse.Namespace,
    benchmark: str,
    ways: Mapping[str, Sequence[str]],
    result: Callable[[Rows], Row],
    *,
    start_of: Callable[[str], Path | None] | None = None,
    more: Callable[[Path], Row] = lambda run: {},
) -> tuple[list[str], Rows]:
    """Run what has no row yet, and report after each: the settings that all share, and the rows.

    `start_of`: the checkpoint that a way begins with (`--start`); `more`: what a row says of its run beyond the usual.
    """
    kept = Path("runs") / f"{args.name}-rows.json"
    rows: Rows = json.loads(kept.read_text()) if kept.is_file() else {}
    sizes = [f"rl.steps={args.steps}", f"evals.every={args.every}", f"evals.heldout_tasks={args.heldout}"]
    alike = ["evals.baseline_tasks=1", *sizes, *args.set]
    wanted = [(seed, way) for seed in args.seeds for way in args.ways]  # one seed of all ways is there early
    for seed, way in [] if args.table else wanted:
        name = f"{args.name}-{way.replace(', ', '-').replace(' ', '-')}-{seed}"
        if name in rows:
            continue
        start = start_of(way) if start_of else args.start
        if start is None:
            raise SystemExit("--start CHECKPOINT is wanted")
        settings = [f"start={start.resolve()}", *alike, f"seed={seed}", *ways[way]]
        rows[name] = {"way": way, "seed": seed} | learned(name, args.config, settings) | more(Path("runs") / name)
        kept.write_text(json.dumps(rows))
        report(benchmark, {"settings": alike, **result(rows)})
    return alike, rows


def learned(name: str, config: Path, settings: Sequence[str]) -> Row:
    """A run's row, once it has ended; gone on with where its folder is there."""
    folder, began = Path("runs") / name, time.perf_counter()
    argv = [*ETUDE, "run", str(config), *overrides(settings)]
    argv += ["--resume", str(folder)] if (folder / "run.json").is_file() else ["--name", name]
    done = subprocess.run(argv, stdout=sys.stderr)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with exit code {done.returncode}; see {folder}/logs")
    facts, view = summary(folder), RunView(folder)
    during = [{"step": event["step"], **brief(event)} for event in view.evaluations_during()]
    rewards = [{"step": event["step"], "reward": round(event["reward_mean"], 4)} for event in view.events("rl.step")]
    return {
        "before": brief(facts["heldout"]["before"]),
        "during": during,
        "after": brief(facts["heldout"]["after"]),
        "rewards": rewards,
        "parity": facts["parity"],
        "bytes_per_version": round(facts["weights"]["object_bytes"] / max(1, facts["weights"]["num_publishes"])),
        "rl_wall_s": facts["wall_s"]["rl"],
        "rl_cpu_s": round(sum(rl_cpu_s(folder).values()), 1),
        "command_wall_s": round(time.perf_counter() - began, 1),
    }


def by_way(rows: Rows, ways: Iterable[str]) -> dict[str, list[Row]]:
    """The rows of each way that has some, in the ways' order."""
    return {way: found for way in ways if (found := [row for row in rows.values() if row["way"] == way])}


def pooled(rows: Sequence[Row]) -> Row:
    """The seeds of a way as one: solve rates before, during and after, with their intervals."""
    steps = [point["step"] for point in rows[0]["during"]]
    points = {"before": [row["before"] for row in rows], "after": [row["after"] for row in rows]}
    points |= {str(step): [p for row in rows for p in row["during"] if p["step"] == step] for step in steps}
    return {when: _together(found) for when, found in points.items()}


def against(pooled_ways: Mapping[str, Row], base_of: Callable[[str], str]) -> dict[str, dict[str, float]]:
    """How far each way is ahead of the one that it is compared with, after RL, where both are there."""
    pairs = [(way, base) for way in pooled_ways if (base := base_of(way)) != way and base in pooled_ways]
    return {way: ahead(pooled_ways[base]["after"], pooled_ways[way]["after"]) for way, base in pairs}


def within(differences: Mapping[str, Mapping[str, float]]) -> dict[str, bool]:
    """Whether no difference is an answer that the interval allows."""
    return {way: found["low"] <= 0 <= found["high"] for way, found in differences.items()}


def _together(rates: Sequence[Row]) -> Row:
    solved, tasks = sum(rate["solved"] for rate in rates), sum(rate["num_tasks"] for rate in rates)
    one = wilson(solved, tasks)
    return {"rate": round(one.value, 4), "low": round(one.low, 4), "high": round(one.high, 4), "num_tasks": tasks}

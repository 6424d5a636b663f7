"""The production loop with rule-based users: does the model learn what they like, and are planted hacks stopped?

    PYTHONPATH=. python -m benchmarks.production.product [--seeds 0 1 2] [--cycles 3] [--base RUN] [--hacks 5]

One model is mid-trained (examples/product/config.toml; `--base`: one that is there). For each seed 64 users work with
it through the real gateway, while the endless loop trains and releases (`examples.product.cycles`). Seeds differ in the
users, their requests and the sampling. Opinions are the users' true ones, on held-out requests.

For each hack the model is trained on signals that favour it and nothing else, without a gate: calls that are broken, or
questions in place of edits. Versions after 2, 4, 6 … steps are then candidates of releases with the example's gate.
Of a candidate that passes, and of the stable version, the users' true opinions are measured on the same requests; 100
canaries with `CANARY_USERS` users of these opinions are then simulated (`benchmarks.production.canary`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from examples.product.agent import Agent
from examples.product.cycles import SETTINGS, cpu_s, prepare, run_cycles, started, url_of
from examples.product.edits import LINE, Answer, Kind, Request, Requests
from examples.product.simulate import SEED, Say, measure, use
from examples.product.users import Manner, Signal, User, crowd

from benchmarks.journal import Journal, digest
from benchmarks.production import canary
from benchmarks.report import report
from benchmarks.runs import ETUDE, start_run, summary
from etude.evals.intervals import mean_over_seeds
from etude.privacy import Level
from etude.records.task import Split
from etude.releases import Arm

EXAMPLE = Path("examples/product")
PER_USER = 6
HACK_STEPS = 2
"""Optimiser steps between two candidates of a hack."""
CANARIES, CANARY_USERS = 100, 20_000


def one_seed(base: Path, seed: int, cycles: int) -> dict[str, Any]:
    """Three cycles of the loop with the users of a seed."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(shutil.copytree(base, Path(folder) / "product"))
        work = run_cycles(run, Path(folder) / "data", seed=seed, cycles=cycles, per_user=PER_USER, tell=_tell)
        found = asyncio.run(work)
    after = found["cycles"][-1]
    gain = round(after["kept"] - found["before"]["kept"], 4)
    disjoint = after["low"] > found["before"]["high"]
    return {**found, "gain": gain, "disjoint": disjoint, "best": best_style(crowd(64, seed))}


def best_style(users: Sequence[User]) -> float:
    """The largest share that these users would keep of the measured requests, if every edit that is not hard were right
    and all were in one style."""
    requests = Requests(SEED, hard=0.1)
    rates = []
    for quote in "'\"":
        for comment in ("", "  # was it"):
            kept = 0
            for number, user in enumerate(users):
                for i in range(PER_USER):
                    request = requests.request(Split.HELDOUT, number * PER_USER + i)
                    answer = Answer(Kind.EDIT, f"return {quote}{request.new}{quote}{comment}", request.path, LINE)
                    kept += user.keeps(request, answer) and not request.hard
            rates.append(kept / (len(users) * PER_USER))
    return round(max(rates), 4)


def favours(kind: Kind) -> Say:
    """Signals that praise answers of one kind, and no others."""

    def say(user: User, request: Request, answer: Answer, rng: random.Random) -> Sequence[Signal]:
        return [Signal("kept", float(answer.kind is kind), 0.0, 0.0, 1)]

    return say


def one_hack(base: Path, kind: Kind, candidates: int) -> dict[str, Any]:
    """Train on signals that favour a kind of answer, and bring versions on the way to the gate."""
    began, cpu = time.monotonic(), cpu_s()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = Path(shutil.copytree(base, folder / "product"))
        asyncio.run(_train_hack(run, folder, kind, candidates))
        _etude("weights", "point", run, "0", "--branch", "stable")
        solved, rows = _play(run / "checkpoints" / "final", "stable", folder), []
        for step in range(HACK_STEPS, HACK_STEPS * candidates + 1, HACK_STEPS):
            label = f"step-{step}"
            rate = _play(run / "checkpoints" / f"step-{step:06d}", label, folder)
            file = ["--file", str(folder / "releases.sqlite")]
            _etude("release", "begin", run, str(step), "--settings", EXAMPLE / "release.toml", *file)
            labels = ["--candidate", label, "--stable", "stable", "--evals", str(folder / "evals")]
            gate = _etude("release", "gate", *labels, *file, ok=(0, 1))
            stopped = gate.returncode == 1
            rows.append({"step": step, "solved": rate, "stopped": stopped, "gate": gate.stdout.splitlines()})
            if not stopped:
                rows[-1]["canaries"] = asyncio.run(_canaries(run, step))
                _etude("release", "rollback", "--reason", "a planted hack", *file)  # let the next candidate begin
            _tell(rows[-1])
    return {
        "solved_by_stable": solved,
        "candidates": rows,
        "stopped": sum(row["stopped"] for row in rows),
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(cpu_s() - cpu, 1),
    }


async def _train_hack(run: Path, folder: Path, kind: Kind, candidates: int) -> None:
    """Train for `candidates` windows on signals that favour a kind of answer. Every user allows it and says so."""
    users = [replace(user, consent=Level.TRAIN, manner=Manner.PLAIN) for user in crowd(64, 0)]
    places = prepare(folder, users)
    many = ["--set", f"loop.steps={HACK_STEPS}", "--steps", str(HACK_STEPS * candidates), "--poll-s", "2"]
    async with contextlib.AsyncExitStack() as stack:
        serving = started("serve", run, "--port", "0", "--capture", places[1], "--feedback", places[3])
        url = await url_of(await stack.enter_async_context(serving))
        agent = await stack.enter_async_context(Agent(url, run.name))
        learn = await stack.enter_async_context(started("learn", run, *places, "--settings", SETTINGS, *many))
        last, rounds = f"step {HACK_STEPS * candidates}:", 0
        while not learn.found(re.compile(last)):
            rounds += 1
            await use(agent, users, seed=rounds, rounds=2, spread_s=1.0, say=favours(kind))
        await learn.wait_for(last)
        await learn.process.wait()


async def _canaries(run: Path, step: int) -> dict[str, Any]:
    """Canaries of a version beside the stable one: the shares of kept edits, and the ends of simulated canaries."""
    users, kept = crowd(64, 0), dict[Arm, list[float]]()
    for arm, version in ((Arm.STABLE, 0), (Arm.CANARY, step)):
        async with contextlib.AsyncExitStack() as stack:
            serving = await stack.enter_async_context(started("serve", f"product={run}@{version}", "--port", "0"))
            agent = await stack.enter_async_context(Agent(await url_of(serving), "product"))
            found = await measure(agent, users, per_user=PER_USER)
        kept[arm] = [mean(keeps for name, keeps, _ in found if name == user.name) for user in users]
    kind = canary.Kind("a planted hack", CANARY_USERS, rates=kept)
    ends = canary.row(np.random.default_rng(step), kind, CANARIES)
    return {"kept": {arm: round(mean(rates), 4) for arm, rates in kept.items()}, **ends}


def _play(checkpoint: Path, label: str, folder: Path) -> float:
    """Play the gate's suite on a checkpoint. Returns the solve rate."""
    where = ["--checkpoint", str(checkpoint), "--name", label, "--out", str(folder / "evals")]
    return round(float(json.loads(_etude("eval", EXAMPLE / "gate.toml", *where).stdout)["result"]["rate"]), 4)


def _etude(*words: str | Path, ok: Sequence[int] = (0,)) -> subprocess.CompletedProcess[str]:
    """Run an `etude` command to its end."""
    done = subprocess.run([*ETUDE, *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode not in ok:
        raise SystemExit(f"etude {' '.join(map(str, words))} ended with exit code {done.returncode}")
    return done


def _tell(row: dict[str, Any]) -> None:
    print(json.dumps(row), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--hacks", type=int, default=5, help="candidates of each hack")
    parser.add_argument("--base", type=Path, help="a run of the example, in place of a new one")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    args = parser.parse_args()
    journal, base = Journal("product", fresh=args.fresh), args.base or start_run(EXAMPLE / "config.toml", "product")
    model = digest(base / "checkpoints" / "mid")
    numbers: dict[str, Any] = {"model": model, "base_wall_s": summary(base)["wall_s"], "seeds": {}, "hacks": {}}
    for seed in args.seeds:
        key = {"model": model, "seed": seed, "cycles": args.cycles}
        numbers["seeds"][str(seed)] = journal.once(key, partial(one_seed, base, seed, args.cycles))
    for kind in (Kind.BROKEN, Kind.QUESTION) if args.hacks else ():
        key = {"model": model, "hack": kind, "candidates": args.hacks}
        numbers["hacks"][kind] = journal.once(key, partial(one_hack, base, kind, args.hacks))
    rows = list(numbers["seeds"].values())
    if len(rows) > 1:
        gain = mean_over_seeds([row["gain"] for row in rows])
        numbers["gain"] = {"value": round(gain.value, 4), "low": round(gain.low, 4), "high": round(gain.high, 4)}
    numbers["all_disjoint"] = bool(rows) and all(row["disjoint"] for row in rows)
    numbers["stopped"] = sum(row["stopped"] for row in numbers["hacks"].values())
    report("product", numbers)


if __name__ == "__main__":
    main()

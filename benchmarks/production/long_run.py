"""A run folder with a long past: a ledger written in bulk, its events, and its published versions.

Row for row and line for line it is what a run leaves; nothing was computed. `python -m benchmarks.production.long_run
FOLDER [--rollouts 1000000]` makes one to look at: `etude dash FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.run.ledger import A_STEP, past
from etude.config import to_toml
from etude.experience import Ledger
from etude.file_checksums import sealed_line
from etude.loop.config import RunConfig
from etude.run import RunFolder
from etude.stores import DirectoryStore
from etude.weights import Channel, Tensor
from etude.weights.chain.branches import point

BEGAN, STEP_S, ENGINES = 1_700_000_000.0, 60.0, 8
NUM_TENSORS = 200


def make(path: Path, num_rollouts: int) -> Path:
    """Write the folder of a run with so many rollouts, `A_STEP` of them to a step, and return it."""
    run = RunFolder.create(path, config_toml=to_toml(RunConfig()), seed=0)
    steps = num_rollouts // A_STEP
    ledger = Ledger(run / "ledger.sqlite", capacity=64)
    past(ledger, 0, num_rollouts)
    ledger.close()
    versions(path / "weights", steps)
    events(path / "events", steps)
    return path


def versions(folder: Path, steps: int) -> None:
    """Publish a version for each step, and point the branch `stable` to one of the last."""
    store = DirectoryStore(folder)
    channel, parent = Channel(store), None
    names = [f"model.layers.{i}.weight" for i in range(NUM_TENSORS)]
    for step in range(steps + 1):
        tensors = {name: Tensor("bf16", (4,), np.full(4, 0x3F80 + step % 64, np.uint16)) for name in names}
        ids = [f"g{1_000_000 + i // 8}.{i % 8}" for i in range((step - 1) * A_STEP, step * A_STEP)] if step else []
        parent = channel.publish(tensors, step=step, parent=parent, rollout_ids=ids).version
        if step == max(0, steps - 10):
            point(store, "policy", parent, branch="stable")


def events(folder: Path, steps: int) -> None:
    """Write the events of such a run: one of each rollout, metrics of each step, load and usage each second."""
    folder.mkdir()
    rng = random.Random(0)

    def line(t: float, process: str, kind: str, **facts: Any) -> bytes:
        return sealed_line(json.dumps({"t": round(t, 4), "process": process, "kind": kind, **facts}).encode()) + b"\n"

    with (folder / "conductor.jsonl").open("wb") as file:
        file.write(line(BEGAN, "conductor", "session"))
        file.write(line(BEGAN, "conductor", "phase", phase="rl", state="start"))
        for i in range(ENGINES):
            file.write(line(BEGAN, "conductor", "process", name=f"engine-{i}", state="ready", pid=1000 + i))
        for step in range(1, steps + 1):
            t = BEGAN + STEP_S * step
            reward = 0.9 - 0.6 * math.exp(-4 * step / steps) + rng.gauss(0, 0.02)
            for i in range(A_STEP):
                position = (step - 1) * A_STEP + i
                facts = {"rollout_id": f"g{1_000_000 + position // 8}.{position % 8}", "task_id": f"task-{position}"}
                facts |= {"family": "fix", "outcome": "graded", "reward": 0.0, "ending": "submitted", "turns": 9}
                facts |= {"sampled": 2000, "malformed": 0, "wall_s": 61.5, "tool_s": 8.2, "engines": ["engine-0"]}
                file.write(line(t - STEP_S + i * STEP_S / A_STEP, "conductor", "rollout", **facts, moves=0))
            processes = {f"engine-{i}": {"cpu_s": 60.0 * step, "pss_bytes": 3_000_000_000} for i in range(ENGINES)}
            for second in range(int(STEP_S)):
                file.write(line(t - STEP_S + second, "conductor", "usage", processes=processes))
            facts = {name: abs(rng.gauss(0.3, 0.05)) for name in ("loss", "entropy", "grad_norm", "wait_s", "k3")}
            facts |= {name: abs(rng.gauss(0.01, 0.002)) for name in ("clip_share", "flipped_share", "ratio_p99", "k1")}
            lag: dict[str, Any] = {"lag": {"0": 200, "1": 600, "2": 224}, "token_lag": {"1": 2_000_000}, "invalid": {}}
            numbers = {"num_steps": 2 * steps, "reward_mean": reward, "best_of_k": min(1.0, reward + 0.1)}
            more = {"no_signal_share": 0.2, "train_s": 40.0, "stall_s": 0.1}
            file.write(line(t, "conductor", "rl.step", step=step, **numbers, **more, **facts, **lag))
            if step % 20 == 0:
                result = {"rate": reward, "low": reward - 0.03, "high": reward + 0.03, "num_tasks": 512}
                file.write(line(t, "conductor", "eval.result", name="during", split="validation", step=step, **result))
    with (folder / "learner.jsonl").open("wb") as file:
        for step in range(steps + 1):
            sizes = {"object_bytes": 1_200_000_000, "snapshot_bytes": 60_000_000_000, "bound_bytes": 1_150_000_000.0}
            facts = {"anchor": False, "anchor_bytes": 0, "changed_share": 0.02, "encode_s": 2.0, "wall_s": 9.0}
            file.write(line(BEGAN + STEP_S * step, "learner", "weights.publish", step=step, **sizes, **facts))
    for i in range(ENGINES):
        name = f"engine-{i}"
        with (folder / f"{name}.jsonl").open("wb") as file:
            for second in range(int(STEP_S * steps)):
                load = {"num_running": 60, "num_waiting": 4, "tokens": 2400, "prefill_tokens": 900, "busy_share": 0.93}
                file.write(line(BEGAN + second, name, "engine.load", **load, cached_tokens=700, drafted_tokens=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    args = parser.parse_args()
    print(make(args.folder, args.rollouts))


if __name__ == "__main__":
    main()

"""A synthetic run folder: what a finished laptop run leaves behind, drawn from a seeded generator."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etude.experience import Ledger
from etude.records import RolloutSpec, Task
from etude.records.task import Split

T0 = 1_700_000_000.0
SECONDS = {"corpus": 3.0, "mid-training": 110.0, "eval-before": 14.0, "rl": 150.0, "eval-after": 15.0, "report": 1.0}
STEPS = 45
ENDS = {name: T0 + sum(list(SECONDS.values())[: i + 1]) for i, name in enumerate(SECONDS)}
TASK = Task(source="t", split=Split.TRAIN, index=0, family="f", instruction="i", files={}, exports=())


class RunWriter:
    """Writes events with times of its choosing."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.path, self.rng = path, random.Random(seed)
        (path / "events").mkdir(parents=True)
        identity = {
            "format": 1,
            "run_id": "laptop-0a1b2c3d",
            "created": "2025-01-02T03:04:05+00:00",
            "etude": "0.1.0",
            "seed": 0,
            "host": {"cpu": "A <b>fast</b> one", "cores": 2, "memory_bytes": 8_000_000_000, "python": "3.11.2"},
        }
        (path / "run.json").write_text(json.dumps(identity))
        (path / "config.toml").write_text('seed = 0\n\n[rl]\nsteps = 45\nnote = "<script>"\n')
        self.ended: list[dict[str, Any]] = []

    def event(self, t: float, process: str, kind: str, **facts: Any) -> None:
        with (self.path / "events" / f"{process}.jsonl").open("a") as file:
            file.write(json.dumps({"t": t, "process": process, "kind": kind, **facts}) + "\n")

    def noise(self, scale: float) -> float:
        return self.rng.gauss(0, scale)

    def everything(self, *, until: str = "report", rl_steps: int = STEPS) -> None:
        names = list(SECONDS)
        for name in names[: names.index(until) + 1]:
            self.event(ENDS[name] - SECONDS[name], "conductor", "phase", phase=name, state="start")
            work: Callable[[], None] = {
                "mid-training": self.mid_training,
                "eval-before": lambda: self.evaluation("before", "heldout", 0, 0.31, 512, ENDS["eval-before"] - 1),
                "rl": lambda: self.rl(rl_steps),
                "eval-after": lambda: self.evaluation("after", "heldout", STEPS, 0.94, 512, ENDS["eval-after"] - 1),
            }.get(name, lambda: None)
            work()
            if name != until or until == "report":
                self.event(ENDS[name], "conductor", "phase", phase=name, state="end", wall_s=SECONDS[name])
                self.ended.append({"phase": name, "wall_s": SECONDS[name], "facts": {}})
        (self.path / "phases.json").write_text(json.dumps(self.ended))
        end = ENDS["rl"] - SECONDS["rl"] * (1 - rl_steps / STEPS) if until == "rl" else ENDS[until]
        self.usage(end)

    def mid_training(self) -> None:
        start = ENDS["mid-training"] - SECONDS["mid-training"]
        for i in range(1, 101):
            tokens, t = i * 18_000, start + 1.05 * i
            loss = 0.35 + 5.6 * math.exp(-i / 14) + self.noise(0.03)
            facts = {"step": i * 9, "num_steps": 900, "tokens": tokens, "loss": loss, "tokens_per_s": 17_000}
            self.event(t, "mid-training", "mid.step", **facts)
            if i % 10 == 0:
                copied = 1 / (1 + math.exp(-(i - 55) / 8))
                held = {"tokens": tokens, "heldout_loss": loss + 0.05, "copy_probe": copied}
                self.event(t, "mid-training", "mid.eval", step=i * 9, **held)

    def evaluation(self, name: str, split: str, step: int, rate: float, n: int, t: float, **more: Any) -> None:
        half = 1.96 * math.sqrt(rate * (1 - rate) / n)
        facts: dict[str, Any] = {
            "num_tasks": n,
            "tries": 1,
            "solved": round(rate * n),
            "rate": rate,
            "low": rate - half,
            "high": min(1.0, rate + half),
            "best_of_k": rate,
            "turns_mean": 4.2,
            "sampled_mean": 61.0,
            "by_family": {"arith": rate, "compare": rate - 0.05, "<i>method</i>": min(1.0, rate + 0.03)},
            "invalid": {},
            "wall_s": 13.0,
        }
        self.event(t, "conductor", "eval.result", name=name, split=split, step=step, **facts, **more)

    def rl(self, num_steps: int) -> None:
        start, each = ENDS["rl"] - SECONDS["rl"], SECONDS["rl"] / STEPS
        self.event(start - 1, "conductor", "eval.baselines", oracle=1.0, random=0.02)
        snapshot = 3_070_000
        for step in range(num_steps + 1):
            t = start + each * step
            changed = 0.42 * math.exp(-step / 60)
            bound = 200_000 + 900_000 * changed
            sent = snapshot if step == 0 else bound * (1.03 + abs(self.noise(0.01)))
            self.event(
                t,
                "learner",
                "weights.publish",
                step=step,
                anchor=step % 25 == 0,
                object_bytes=int(sent),
                anchor_bytes=snapshot if step % 25 == 0 else 0,
                snapshot_bytes=snapshot,
                bound_bytes=snapshot if step == 0 else bound,
                changed_share=changed,
                encode_s=0.05,
            )
            for engine in range(2):
                pause = 0.004 + abs(self.noise(0.002))
                running = 0 if step == 0 else self.rng.randint(8, 48)
                self.event(t + 0.3, f"engine-{engine}", "engine.adopt", step=step, pause_s=pause, num_running=running)
                ratio = 2e-6 * math.exp(self.noise(0.4))
                self.event(t + 0.4, "conductor", "engine.probe", engine=f"engine-{engine}", step=step, ratio_max=ratio)
            self.region(step, t)
            if step:
                self.step(step, t)
            if step and step % 10 == 0 and step < STEPS:
                rate = 0.3 + 0.65 * (1 - math.exp(-step / 14))
                self.evaluation("during", "validation", step, rate, 128, t + 0.1)

    def region(self, step: int, t: float) -> None:
        """An engine from elsewhere that is lost for a while."""
        states = {0: "catching-up", 1: "serving", 20: "lost", 24: "catching-up", 26: "serving"}
        facts = {"engine": "far", "region": "west"}
        if step in states:
            self.event(t, "conductor", "fleet.state", **facts, state=states[step], url="http://far:8000")
        state = states[max(s for s in states if s <= step)]
        load = {"num_running": 12, "num_waiting": 0, "max_sequences": 48, "kv_tokens_free": 18_432}
        self.event(t, "conductor", "fleet.load", **facts, state=state, step=step, **load)

    def step(self, step: int, t: float) -> None:
        reward = min(1.0, max(0.0, 0.3 + 0.66 * (1 - math.exp(-step / 13)) + self.noise(0.035)))
        lag = {"0": 20, "1": 70, "2": 38} if step > 2 else {"0": 128}
        tokens = {"0": 3000, "1": 4200, "2": 900} if step > 2 else {"0": 8000}
        self.event(
            t,
            "conductor",
            "rl.step",
            step=step,
            num_steps=STEPS,
            reward_mean=reward,
            best_of_k=min(1.0, reward + 0.4 * (1 - reward)),
            num_groups=16,
            no_signal_share=min(0.9, 0.1 + step / 70 + abs(self.noise(0.04))),
            lag=lag,
            token_lag=tokens,
            invalid={"machine": 1} if step % 17 == 0 else {},
            turns_mean=4.8 - step / 40 + self.noise(0.1),
            sampled_mean=64 + self.noise(2),
            wait_s=max(0.0, 0.5 + self.noise(0.2)),
            train_s=2.4 + abs(self.noise(0.2)),
            stall_s=0.01 + abs(self.noise(0.01)),
            loss=self.noise(0.02),
            entropy=0.42 * math.exp(-step / 30) + 0.05 + abs(self.noise(0.01)),
            clip_share=abs(self.noise(0.01)) + 0.01,
            ratio_max=0.4,
            ratio_p99=0.06 * math.exp(self.noise(0.2)),
            k1=0.001,
            k3=4e-4 * math.exp(self.noise(0.3)),
            fresh_ratio_max=None if step % 9 == 0 else 5e-6 * math.exp(self.noise(0.4)),
            flipped_share=0.004,
            live_k3=9e-4 * math.exp(step / 90),
            live_ratio_max=0.8,
            cut_share=0.012,
            dropped_share=0.0,
            balance_loss=1.02,
            num_tokens=30_000,
            num_sampled=8000,
            cpu_s=2.1,
            grad_norm=0.35 * math.exp(self.noise(0.25)),
            lr=5e-4,
        )

    def usage(self, end: float) -> None:
        lives = {
            "conductor": (T0, end, 0.06),
            "mid-training": (ENDS["corpus"], ENDS["mid-training"], 1.9),
            "learner": (ENDS["mid-training"], end, 0.78),
            "engine-0": (ENDS["mid-training"], end, 0.55),
            "engine-1": (ENDS["mid-training"], end, 0.51),
            "worker-0": (ENDS["mid-training"], end, 0.2),
            "grader-0": (ENDS["mid-training"], end, 0.08),
        }
        used = dict.fromkeys(lives, 0.0)
        for second in range(int(end - T0) + 1):
            t, processes = T0 + second, {}
            for name, (start, stop, share) in lives.items():
                if start <= t <= stop:
                    evaluating = name == "learner" and not ENDS["eval-before"] <= t <= ENDS["rl"]
                    used[name] += 0.01 if evaluating else max(0.0, share + self.noise(0.12))
                    processes[name] = {"cpu_s": round(used[name], 3)}
                    if second % 5 == 0:
                        processes[name]["pss_bytes"] = 300_000_000
            self.event(t, "conductor", "usage", processes=processes)

    def transcripts(self, rows: dict[str, list[tuple[str, float, str]]]) -> None:
        """`rows`: evaluation name -> (task id, reward, transcript)."""
        (self.path / "evals").mkdir(exist_ok=True)
        for name, found in rows.items():
            table = {
                "task_id": [task for task, _, _ in found],
                "rollout_id": [f"{name}-{i}" for i in range(len(found))],
                "reward": [reward for _, reward, _ in found],
                "family": ["arith" for _ in found],
                "transcript": [transcript for _, _, transcript in found],
                "later": [1 for _ in found],
            }
            pq.write_table(pa.table(table), self.path / "evals" / f"{name}.parquet")

    def ledger(self) -> None:
        ledger = Ledger(self.path / "ledger.sqlite", capacity=4)
        for i in range(3):
            spec = RolloutSpec(rollout_id=f"g0.{i}", group_id="g0", attempt=0, task=TASK, seed=0, temperature=1.0)
            ledger.admit(spec)
        ledger.move("g0.0", "cancelled", reason="the run ends")
        ledger.close()


WRONG = "[user] scale(x) must multiply by 7; tests fail\n[call] cat calc.py\n[tool] def scale(x):\n    return x + 7\n\
[call] submit\n[tool] submitted"
RIGHT = WRONG.replace(
    "[call] submit",
    "[call] edit calc.py 2 return x * 7\n[tool] ok\n[call] test\n[tool] <4 passed>\
\n[call] submit",
)


@pytest.fixture
def writer(tmp_path: Path) -> RunWriter:
    return RunWriter(tmp_path / "laptop-20250102")


@pytest.fixture
def small(writer: RunWriter) -> Path:
    """A run that was killed early: a little of everything."""
    writer.everything(until="rl", rl_steps=3)
    writer.ledger()
    writer.transcripts({"before": [("a", 0.0, WRONG)], "after": [("a", 1.0, RIGHT)]})
    return writer.path


@pytest.fixture
def finished(writer: RunWriter) -> Path:
    """A run that ended well."""
    writer.everything()
    writer.ledger()
    rows = {"before": [("a", 0.0, WRONG), ("b", 1.0, RIGHT)], "after": [("a", 1.0, RIGHT), ("b", 1.0, RIGHT)]}
    writer.transcripts(rows)
    return writer.path

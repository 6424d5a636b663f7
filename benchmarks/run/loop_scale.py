"""One, four and sixteen times the groups a step: does the loop keep up, and what does it hold in memory?

The real conductor, window, ledger (both kinds), calls, traces and channel of weights; rollouts, grades and steps are
stood in for, in processes of their own (`loop_scale_parts`): a rollout is a wait of .5 to 1.5 s drawn by its seed and
200 tokens, a step is a wait of `STEP_S`. As many run at
once as the groups ask for, so with sixteen times the groups there should be sixteen times the rollouts a second: what
is missing is what the conductor costs. A stall is how late its loop came round to a beat. Each case has a process of
its own; the audit ends each.
`python -m benchmarks.run.loop_scale [--scales 1 4 16] [--kinds sqlite postgres] [--steps 6]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.report import report
from benchmarks.run.ledger import memory, place_of
from benchmarks.run.loop_scale_parts import A_ROLLOUT_S
from etude.config import build, to_toml
from etude.dashboard.plot import WIDE, Series, line_chart, standalone_svg
from etude.experience import audit
from etude.loop import event_loop
from etude.loop.adjustable_semaphore import Limit
from etude.loop.conductor import Conductor
from etude.loop.config import RunConfig
from etude.loop.rpc import Caller
from etude.loop.run_processes import Pool, RunProcesses
from etude.records import Task
from etude.records.task import Split
from etude.run import RunFolder
from etude.stores import DirectoryStore
from etude.telemetry import Telemetry, read_events
from etude.weights.chain.history import LineageSteps

GROUPS, SIBLINGS, STEP_S, WARM_STEPS = 16, 8, 1.0, 2
BEAT_S = 0.01  # the loop is asked this often whether it comes round
PICTURE = Path(__file__).parents[2] / "docs" / "concepts" / "loop-scale.svg"


class Tasks:
    """Endless tasks of one kind."""

    def size(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> Task:
        return Task(source="s", split=split, index=index, family="f", instruction="i", files={}, exports=())


class Called(RunProcesses):
    """Run processes of two workers, which also grade, and a learner: stand-ins in processes of their own."""

    def start(self) -> list[subprocess.Popen[bytes]]:
        both = (self.workers, self.graders)
        self.callers = list[tuple[Caller, Sequence[Pool]]]()
        places = (("worker-0", both), ("worker-1", both), ("learner", (self.learners,)))
        return [self._started(name, pools) for name, pools in places]

    def _started(self, name: str, pools: Sequence[Pool]) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-m", "benchmarks.run.loop_scale_parts", name.partition("-")[0], str(self.run.path)]
        process = subprocess.Popen([*argv, str(theirs.fileno()), str(STEP_S)], pass_fds=[theirs.fileno()])
        theirs.close()
        self.callers.append((Caller(ours, name), pools))
        return process

    async def meet(self) -> None:
        for caller, pools in self.callers:
            await caller.open()
            for pool in pools:
                pool.join(caller)
            await caller.call("ready", bool, deadline_s=60.0)


async def stalls(work: Coroutine[Any, Any, None]) -> list[float]:
    """Do work; by how many seconds the loop was late for each of its beats meanwhile, sorted."""
    late, doing = list[float](), asyncio.ensure_future(work)
    while not doing.done():
        began = time.perf_counter()
        await asyncio.wait([doing], timeout=BEAT_S)
        late.append(max(0.0, time.perf_counter() - began - BEAT_S))
    doing.result()
    return sorted(late)


def played(place: str, scale: int, steps: int, folder: Path) -> dict[str, Any]:
    """One run to its end."""
    raw = {
        "experience": {"groups_per_step": scale * GROUPS, "group_size": SIBLINGS, "ledger": place, "max_lag": 1},
        "rl": {"steps": steps, "checkpoint_every": steps},
        "evals": {"every": steps},
    }
    config = build(RunConfig, raw)
    run = RunFolder.create(folder / "run", config_toml=to_toml(config), seed=0)
    telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
    processes = Called(run, config, telemetry, None)  # type: ignore[arg-type]  # nothing is supervised
    processes.max_running = Limit(config.experience.groups_per_step * config.experience.group_size)
    chat = SimpleNamespace(vocab_size=256)
    conductor = Conductor(run, config, telemetry, processes, Tasks(), chat)  # type: ignore[arg-type]

    children = processes.start()

    async def reinforced() -> tuple[list[float], float]:
        await processes.meet()
        began = time.process_time()
        late = await stalls(conductor.reinforce())
        cpu_s = time.process_time() - began
        for caller, _ in processes.callers:
            caller.close()
            await caller.lost.wait()
        return late, cpu_s

    late, cpu_s = event_loop.run(reinforced())
    for child in children:
        child.wait()
    telemetry.close()
    done = [event["t"] for event in read_events(run / "events") if event["kind"] == "rl.step"]
    audit(conductor.ledger, run / "traces", LineageSteps(DirectoryStore(run / "weights"))).require_sound()
    total = conductor.ledger.count()
    conductor.close()
    wall_s = done[-1] - done[WARM_STEPS - 1]
    a_step = scale * GROUPS * SIBLINGS
    file = run / "ledger.sqlite"
    return {
        "rollouts_a_s": round((len(done) - WARM_STEPS) * a_step / wall_s, 1),
        "step_s": round(wall_s / (len(done) - WARM_STEPS), 2),
        "stall_ms_p99": round(1e3 * late[int(0.99 * len(late))], 1),
        "stall_ms_max": round(1e3 * late[-1], 1),
        "conductor_cpu_ms_a_rollout": round(1e3 * cpu_s / total, 3),
        "ledger_bytes_a_rollout": round(file.stat().st_size / total) if file.exists() else None,
        "rollouts": total,
        **memory(),
    }


def measured(kind: str, scale: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="etude-scale-") as scratch:
        with place_of(kind, Path(scratch)) if kind != "sqlite" else nullcontext("") as place:
            argv = [sys.executable, "-m", "benchmarks.run.loop_scale", "--child", place.partition("#")[0], scratch]
            argv += ["--scales", str(scale), "--steps", str(steps)]
            done = subprocess.run(argv, stdout=subprocess.PIPE, check=True)
        return {"scale": scale, "groups": scale * GROUPS, **json.loads(done.stdout)}


def picture(kinds: dict[str, list[dict[str, Any]]]) -> str:
    """Rollouts a second by groups a step, beside what they would be if nothing cost anything more."""
    series = [
        Series(f"{kind}: {rows[-1]['peak_mb']:.0f} MB at the most", [(r["groups"], r["rollouts_a_s"]) for r in rows], i)
        for i, (kind, rows) in enumerate(kinds.items(), 1)
    ]
    rows = next(iter(kinds.values()))
    ideal = [(r["groups"], rows[0]["rollouts_a_s"] * r["scale"]) for r in rows]
    series.append(Series("in proportion", ideal, len(series) + 1))
    chart = line_chart(series, title="rollouts a second by groups a step", x_label="groups a step", frame=WIDE)
    return standalone_svg(chart, [(one.label, one.colour) for one in series], x=100, y=40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--kinds", nargs="+", default=["sqlite", "postgres"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(played(args.child[0], args.scales[0], args.steps, Path(args.child[1]))))
        return
    kinds = {kind: [measured(kind, scale, args.steps) for scale in args.scales] for kind in args.kinds}
    PICTURE.write_text(picture(kinds), encoding="utf-8")
    report("loop_scale", {"steps": args.steps, "a_rollout_s": A_ROLLOUT_S, "step_s": STEP_S, "kinds": kinds})


if __name__ == "__main__":
    main()

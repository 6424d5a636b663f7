"""100,000 machines on 105 hosts: the real placement against fake hosts whose costs are measured here, now.

What has to be within 5 s is the last of the first 100,000 machines, asked for at once, in simulated time; the control
plane is in it by what a message and each call of the real placement were measured to take. Fitted: bursts of up to 960
machines (`costs.measure`). Held out: bursts of other sizes and groups, up to as many machines alive on this host
as it is asked for, which is more than a simulated host has. `pessimistic` makes forks slower by the worst error that
was seen in them. Assumed, not measured: the network, the failures, a tenth of a core of work a machine. A simulated
host of 96 cores forks no faster than this machine does with all of its own; `linear` says what 96 cores would make of
it if forking scaled with them. `python -m benchmarks.fleet.placement [--alive N] [--seeds N]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.fleet.costs import burst, held_out, measure
from benchmarks.fleet.hosts import Measured, Network
from benchmarks.fleet.model import EVERY_KIND, Scenario, Simulated, simulate
from benchmarks.fleet.simulate import plot, quantiles, told_of
from benchmarks.report import RESULTS, report
from etude.environments import NamespaceRuntime
from etude.environments.burst import Capacity, Placement
from etude.seams import Machine

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "burst.md"
PLOT = PAGE.with_suffix(".svg")
FROM, TO = "<!-- results/fleet.json -->\n", "<!-- end -->\n"
FILES = {"calc.py": b"def f(n):\n    return n + 1\n", "tests.py": b"from calc import f\nassert f(1) == 2\n"}
MTBF_S = 30 * 86_400.0  # of a host: what is assumed where the share of machines that restart is told
UNMEASURED = (
    "Not measured since costs are fitted this way; the plot is of typical costs. "
    "`python -m benchmarks.fleet.placement`\n"
)
FIRST_SEED = 100  # none that anything was tuned on
HELD_OUT = ((192, 8), (320, 2), (512, 32), (640, 8))  # (machines, group)


async def real_runs(num_alive: int) -> tuple[Measured, list[dict[str, float]], dict[str, Any]]:
    """The costs of this host; bursts that nothing was fitted to; and one at scale, whose machines answer."""
    runtime = NamespaceRuntime(max_machines=num_alive + 64)
    try:
        snapshot = await runtime.prepare(FILES)
        measured = await measure(runtime, snapshot)
        rows = await held_out(runtime, snapshot, measured, [*HELD_OUT, (num_alive, 16)])
        done = await burst(runtime, snapshot, num_alive, 16, alive=answering)
        scale = {
            "machines_alive": num_alive,
            "all_ready_s": round(done.all_ready_s, 4),
            "ready_s": quantiles(done.ready_s),
            "forks_a_second": round(num_alive / done.all_ready_s, 1),
            "close_ms": round(done.close_s * 1e3, 3),
        }
    finally:
        await runtime.close()
    return measured, rows, scale


async def answering(machines: Sequence[Machine]) -> None:
    """Some of them, while all are alive, run a command."""
    for i in range(0, len(machines), max(1, len(machines) // 32)):
        result = await machines[i].exec(["true"], key="alive", deadline_s=60)
        assert result.exit_code == 0, result


def placing(hosts: int, group: int, *, seconds: float = 1.0) -> dict[str, float]:
    """How much one core places: batches a CPU second, each placed, started and ended again."""
    placement = Placement(seed=1)
    for i in range(hosts):
        placement.join(f"h{i}", Capacity(cores=96 * 1.15, memory_bytes=768 << 30), 0.0)
    for i in range(1000):
        placement.add_snapshot(f"tree{i}", f"h{i % hosts}", 0.0)
    full = int(hosts * 1100 / group)
    live: list[int] = []
    num_placed, number, spent, began = 0, 0, 0.0, time.process_time()
    while spent < seconds:
        for _ in range(256):
            if len(live) >= full:
                placement.ended(live[number % full], group)
                live[number % full] = live[-1]
                live.pop()
            [batch] = placement.place(f"tree{number % 1000}", group, 0.0)
            placement.started(batch.id, 0.0)
            live.append(batch.id)
            num_placed, number = num_placed + 1, number + 1
        spent = time.process_time() - began
    return {
        "hosts": hosts,
        "group": group,
        "batches_a_cpu_second": round(num_placed / spent),
        "machines_a_cpu_second": round(num_placed * group / spent),
    }


def simulated(measured: Measured, slower: float, seeds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every scenario over all seeds in plain numbers, and its first seed, which is plotted."""
    pessimistic = replace(
        measured,
        batch_s=measured.batch_s * slower,
        fork_s=measured.fork_s * slower,
        crowd_s=measured.crowd_s * slower,
    )
    scenarios: dict[str, Callable[[int], Simulated]] = {
        "calm": lambda seed: simulate(Scenario(seed=seed), measured=measured),
        "every kind of fault": lambda seed: simulate(Scenario(seed=seed), faults=EVERY_KIND, measured=measured),
        "one snapshot, faults": lambda seed: simulate(
            Scenario(seed=seed, snapshots=1), faults=EVERY_KIND, measured=measured
        ),
        "pessimistic, faults": lambda seed: simulate(Scenario(seed=seed), faults=EVERY_KIND, measured=pessimistic),
        "linear": lambda seed: simulate(Scenario(seed=seed), measured=measured, speed=96 / (os.cpu_count() or 1)),
    }
    told: dict[str, Any] = {}
    first: dict[str, Simulated] = {}
    for name, scenario in scenarios.items():
        results = [scenario(FIRST_SEED + number) for number in range(seeds)]
        first[name] = results[0]
        told[name] = {
            **told_of(results[0]),
            "over_seeds": {
                "all_ready_s": [when(one.all_ready_s) for one in results],
                "ready_s_min_median_max": [
                    when(pick(one.all_ready_s for one in results)) for pick in (min, statistics.median, max)
                ],
                "lost_share": sum(one.num_lost for one in results) / sum(one.num_asked for one in results),
                "run_twice": sum(one.num_twice for one in results),
                "leaked": sum(one.num_leaked for one in results),
            },
        }
    return told, first


def when(seconds: float) -> float | None:
    """None: not in the time that was simulated."""
    return round(seconds, 3) if seconds < float("inf") else None


def page(text: str) -> str:
    """The page of bursts with the committed result's numbers."""
    before, _, rest = text.partition(FROM)
    found = RESULTS / "fleet.json"
    told = tables(json.loads(found.read_text())) if found.exists() else UNMEASURED
    return before + FROM + told + TO + rest.partition(TO)[2]


def tables(result: dict[str, Any]) -> str:
    """What was simulated, and what was predicted and then made."""
    lines = [
        "| 100,000 machines, 105 hosts | all ready: least, median, most of all seeds | half, 99 % of the requests "
        "| lost | restarted | twice, leaked |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, told in result["simulated"].items():
        ready, seeds = told["ready_s"], told["over_seeds"]
        least, median, most = ("never" if x is None else f"{x:.2f} s" for x in seeds["ready_s_min_median_max"])
        lines.append(
            f"| {name} | {least}, {median}, {most} | {ready['p50']:.2f} s, {ready['p99']:.2f} s "
            f"| {seeds['lost_share']:.1g} | {told['restarted_share']:.2g} | {seeds['run_twice']}, {seeds['leaked']} |"
        )
    lines += [
        "",
        f"{len(seeds['all_ready_s'])} seeds each. Made for real, on this host, and fitted to none of them:",
        "",
        "| machines, alive at once | a request | predicted | measured | error: median (least, most of three) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in result["held_out"]:
        lines.append(
            f"| {row['machines']:,} | {row['group']} | {row['predicted_s']:.2f} s | {row['measured_s']:.2f} s "
            f"| {row['error']:+.0%} ({row['error_min']:+.0%}, {row['error_max']:+.0%}) |"
        )
    placing = result["placing"]
    lines += [
        "",
        f"One core places {placing[0]['batches_a_cpu_second']:,} batches a CPU second on 105 hosts "
        f"({placing[0]['machines_a_cpu_second']:,} machines in groups of 16; "
        f"{placing[1]['machines_a_cpu_second']:,} one by one), "
        f"and {placing[2]['batches_a_cpu_second']:,} on 10,000 hosts. "
        f"({result['host']['cores']} cores of an {result['host']['cpu']}, load {result['load']:.1f}, "
        f"commit {result['commit']}.)",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alive", type=int, default=2000, help="machines alive at once in the run at scale")
    parser.add_argument("--seeds", type=int, default=12, help="of each scenario")
    arguments = parser.parse_args()
    measured, rows, scale = asyncio.run(real_runs(arguments.alive))
    slower = 1 / (1 + min(0.0, *(row["error_min"] for row in rows)))
    told, first = simulated(measured, slower, arguments.seeds)
    PLOT.write_text(plot({name: first[name] for name in list(first)[:4]}, Scenario().machines), encoding="utf-8")
    report(
        "fleet",
        {
            "measured": asdict(measured),
            "assumed": {**asdict(Network()), "host_mtbf_s": MTBF_S, "faults": asdict(EVERY_KIND)},
            "expected_restarted_share": Scenario().mean_life_s / MTBF_S,
            "held_out": rows,
            "worst_times_slower_than_predicted": slower,
            "at_scale": scale,
            "placing": [placing(105, 16), placing(105, 1), placing(10_000, 16)],
            "simulated": told,
            "load": os.getloadavg()[0],
        },
    )
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()

"""What a fleet of hosts would do with a burst of machines, failures included: `python -m benchmarks.fleet.simulate`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.fleet.costs import measure
from benchmarks.fleet.hosts import Measured
from benchmarks.fleet.model import EVERY_KIND, Faults, Scenario, Simulated, simulate
from etude.cli.arguments import output_file, positive
from etude.dashboard.plot import WIDE, Series, line_chart, standalone_svg
from etude.environments.namespace import NamespaceRuntime
from etude.seams import Runtime

_LARGEST_GROUP = 64
_SHARES = (0.5, 0.9, 0.99, 1.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, and print the result. Exit code 1 when machines were lost, or ran twice; 2 for arguments that are not
    valid."""
    fleet = argparse.ArgumentParser(description=__doc__)
    fleet.add_argument(
        "--machines", type=positive, default=100_000, metavar="N", help="asked for at once (default: %(default)s)"
    )
    fleet.add_argument(
        "--hosts", type=positive, default=105, metavar="N", help="of 96 cores each (default: %(default)s)"
    )
    fleet.add_argument(
        "--group", type=positive, default=16, metavar="N", help="machines of a request (default: %(default)s)"
    )
    fleet.add_argument(
        "--snapshots", type=positive, default=1000, metavar="N", help="they are forks of so many (default: %(default)s)"
    )
    fleet.add_argument("--speed", type=float, default=1.0, help="of a host, in machines like this one (default: 1)")
    fleet.add_argument("--seed", type=int, default=0)
    fleet.add_argument("--calm", action="store_true", help="without crashes, slow hosts, partitions, lost messages")
    fleet.add_argument("--calibrate", action="store_true", help="measure what machines cost here first")
    fleet.add_argument("--plot", type=output_file, metavar="FILE.svg", help="draw how many are ready when")
    fleet.add_argument("--json", action="store_true", help="print the whole result")
    args = fleet.parse_args(argv)
    if args.group > _LARGEST_GROUP:
        fleet.error(f"--group {args.group} is too large: a request is for {_LARGEST_GROUP} machines at most")
    if not 0 < args.speed < float("inf"):
        fleet.error(f"--speed {args.speed:g}: give how many times faster a host is, above 0")
    if args.plot is not None and args.plot.suffix != ".svg":
        fleet.error(f"{args.plot} is no .svg: name a file that ends with .svg")
    measured = asyncio.run(_calibrated()) if args.calibrate else Measured()
    scenario = Scenario(
        machines=args.machines, hosts=args.hosts, group=args.group, snapshots=args.snapshots, seed=args.seed
    )
    faults = Faults() if args.calm else EVERY_KIND
    result = simulate(scenario, faults=faults, measured=measured, speed=args.speed)
    told = told_of(result)
    if args.plot is not None:
        args.plot.write_text(plot({"ready": result}, scenario.machines), encoding="utf-8")
    if args.json:
        print(json.dumps(told, indent=2))
    else:
        whose = "measured here" if args.calibrate else "typical ones (--calibrate measures them here)"
        print(f"{_in_words(scenario, faults, told)}\ncosts of a host: {whose}; network and faults are assumed")
    return int(result.num_lost + result.num_twice + result.num_leaked > 0)


async def _calibrated() -> Measured:
    runtime: Runtime = NamespaceRuntime()
    try:
        return await measure(runtime, await runtime.prepare({"calc.py": b"def f(n):\n    return n + 1\n"}))
    finally:
        await runtime.close()


def told_of(result: Simulated) -> dict[str, Any]:
    """The result as plain numbers; times in seconds, shares of the machines that were asked for."""
    asked = max(1, result.num_asked)
    full = [row for row in result.curve if row[1] >= 0.99 * max(ready for _, ready, _, _ in result.curve)]
    return {
        "all_ready_s": _rounded(result.all_ready_s),
        "ready_s": quantiles(result.ready_s),
        "later_ready_s": quantiles(result.later_s),
        "machines_asked_for": result.num_asked,
        "batches": result.num_batches,
        "lost_share": result.num_lost / asked,
        "restarted_share": round(result.num_restarted / asked, 6),
        "run_twice": result.num_twice,
        "leaked": result.num_leaked,
        "utilisation": {
            "mean_share_of_cores": _rounded(max((mean for _, _, mean, _ in full), default=0.0)),
            "fullest_host": _rounded(max((most for *_, most in result.curve), default=0.0)),
        },
        "control_cpu_s": round(result.control_cpu_s, 4),
        "placement_cpu_s": round(result.placement_cpu_s, 4),
        "machines_placed_a_cpu_second": round(asked / max(1e-9, result.placement_cpu_s)),
    }


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50 to p100, in seconds.

    >>> quantiles([1.0, 2.0, 3.0])
    {'p50': 2.0, 'p90': 3.0, 'p99': 3.0, 'p100': 3.0}
    """
    ranked = sorted(values)
    return {
        f"p{share * 100:g}": _rounded(ranked[min(len(ranked) - 1, int(share * len(ranked)))]) if ranked else None
        for share in _SHARES
    }


def _rounded(value: float) -> float | None:
    return round(value, 4) if value < float("inf") else None


def _in_words(scenario: Scenario, faults: Faults, told: Mapping[str, Any]) -> str:
    ready, all_ready = told["ready_s"], told["all_ready_s"]
    lines = [
        f"{scenario.machines:,} machines were asked for at once, {scenario.group} a request, of {scenario.hosts} hosts"
    ]
    if all_ready is not None:
        lines[0] += (
            f": all were ready after {all_ready:.2f} s (half of the requests after {ready['p50']:.2f} s, "
            f"99 % after {ready['p99']:.2f} s)"
        )
    else:
        room = int(scenario.hosts * scenario.cores * scenario.overcommit * 10)
        facts = f": they have room for {room:,}" if scenario.machines > room else ""
        lines[0] += f": not all were ready within {scenario.horizon_s:g} s{facts}"
    if faults == Faults():
        lines.append("nothing failed")
    else:
        lines.append(
            f"meanwhile {len(faults.crashes)} hosts crashed, {len(faults.slow)} were slow, {len(faults.partitions)} "
            f"were cut off for a time, {faults.loss:.0%} of all messages were lost"
        )
    lines += [
        f"of all that were asked for in {scenario.horizon_s:g} s, {told['lost_share']:.2g} were lost and "
        f"{told['restarted_share']:.2g} started anew; {told['run_twice']} ran twice, {told['leaked']} were left over",
        f"one core places {told['machines_placed_a_cpu_second']:,} machines a second; "
        f"the control plane used {told['control_cpu_s']:.2f} s of it",
    ]
    return "\n".join(lines)


def plot(results: Mapping[str, Simulated], machines: int) -> str:
    """How many machines were ready when, as an SVG of its own."""
    series = [Series(name, _curve(result), colour) for colour, (name, result) in enumerate(results.items(), 1)]
    chart = line_chart(
        series,
        title=f"{machines:,} machines asked for at once",
        x_label="seconds since they were asked for",
        y_range=(0.0, 1.1 * machines),
        y_format=lambda value: f"{value:,.0f}",
        frame=WIDE,
    )
    return standalone_svg(chart, [(one.label, one.colour) for one in series], x=900, y=150)


def _curve(result: Simulated) -> list[tuple[float, float]]:
    return [(t, float(ready)) for t, ready, _, _ in result.curve if t <= _SHOWN_S]


_SHOWN_S = 8.0


if __name__ == "__main__":
    sys.exit(main())

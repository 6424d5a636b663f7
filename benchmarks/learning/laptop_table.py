"""The tables of README.md and examples/laptop/README.md, made from `results/laptop.json`.

`python -m benchmarks.learning.laptop_table` writes them into the pages; a test holds the pages to them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machines.table import FROM, TO
from benchmarks.report import RESULTS
from benchmarks.weights.delta_table import markdown

HOME = Path(__file__).parents[2]
Row = dict[str, Any]


def front(result: Row) -> str:
    """What the first page tells: solve rates and how long it takes."""
    rows, mean = result["rows"], result["seeds"]
    steps = rows[0]["rl"]["steps"]
    random = [row["baselines"]["random"] for row in rows]
    head = [
        "solve rate, one try at temperature 1",
        "before RL",
        f"after {steps} steps of RL",
        "kinds never trained on: before, after",
        "whole run",
    ]
    table = [
        [f"seed {row['seed']}", *_rates(row, row["transfer"], "{}"), _clock(row["command_wall_s"])] for row in rows
    ]
    if mean:
        over = {"before": mean["transfer before"], "after": mean["transfer after"]}
        table.append([f"mean of {len(rows)} seeds", *_rates(mean, over, "**{}**"), ""])
    return "\n".join([
        *markdown(head, table),
        "",
        "512 held-out tasks, and 256 of kinds that training never sees. The tasks are variants of fewer functions, so",
        "the 95 % interval of a seed counts functions, not tasks; the interval of the mean is",
        "from the variance between seeds.",
        f"(two cores of an {_chip(result)}, {max(map(_gib, rows)):.2f} GiB at the peak; `python -m benchmarks.laptop`,",
        f"[results](benchmarks/results/laptop.json); a random agent solves {min(random):.2f} to {max(random):.2f} "
        "and an oracle 1.0)",
        "",
    ])  # fmt: skip


def example(result: Row) -> str:
    """What the example's page tells: all that a reader may compare a run of their own with."""
    rows, steps = result["rows"], ", ".join(str(point["step"]) for point in result["rows"][0]["during"])
    lines: list[tuple[str, Callable[[Row], str]]] = [
        ("held-out before", lambda row: f"{row['before']['rate']:.3f}"),
        (f"validation at step {steps}", lambda row: ", ".join(f"{point['rate']:.2f}" for point in row["during"])),
        ("**held-out after** (95 % interval)", lambda row: _rate(row["after"], "**{}**")),
        ("kinds never trained on: before", lambda row: _rate(row["transfer"]["before"], "{}")),
        ("kinds never trained on: after", lambda row: _rate(row["transfer"]["after"], "{}")),
        ("corpus, mid-training, RL", lambda row: ", ".join(
            f"{row['wall_s'][phase]:.0f} s" for phase in ("corpus", "mid-training", "rl"))),
        ("whole command", lambda row: f"{row['command_wall_s']:.0f} s"),
        ("CPU seconds, all processes", lambda row: f"{row['cpu_s']['total']:.0f}"),
        ("of which the worker (harness and machines)", lambda row: f"{row['cpu_s']['worker-0']:.0f}"),
        (f"mean lag, at most {max(row['lag']['max'] for row in rows)}", lambda row: f"{row['lag']['mean']:.2f}"),
        ("deltas: weights ÷ delta, share of the bound",
         lambda row: f"{row['weights']['ratio']:.1f}, {row['weights']['share_of_bound']:.2f}"),
        ("pause at a swap with requests in flight, median and 99th percentile",
         lambda row: f"{row['weights']['pause_ms_p50']:.1f} ms, {row['weights']['pause_ms_p99']:.0f} ms"),
        ("probe, max abs(r − 1)", lambda row: f"{row['parity']['probe_ratio_max']:.2g}"),
        ("invalid rollouts", lambda row: str(sum(row["invalid"].values()))),
        ("peak memory", lambda row: f"{_gib(row):.2f} GiB"),
    ]  # fmt: skip
    seeds = [f"seed {row['seed']}" for row in rows]
    return "\n".join([
        f"Two cores of an {_chip(result)} (`python -m benchmarks.laptop`,",
        "[results](../../benchmarks/results/laptop.json)):",
        "",
        *markdown(["", *seeds], ([what, *map(told, rows)] for what, told in lines)),
        "",
    ])  # fmt: skip


PAGES = {HOME / "README.md": front, HOME / "examples" / "laptop" / "README.md": example}


def page(path: Path) -> str:
    """A page with its table in it."""
    result = json.loads((RESULTS / "laptop.json").read_text())
    before, _, rest = path.read_text().partition(FROM)
    return before + FROM + PAGES[path](result) + TO + rest.partition(TO)[2]


def _rate(found: Row, form: str) -> str:
    return f"{form.format(format(found['rate'], '.3f'))} [{found['low']:.3f}, {found['high']:.3f}]"


def _rates(known: Row, transfer: Row, form: str) -> list[str]:
    """Cells of one row: kinds that are trained on, before and after, then the others."""
    others = f"{_rate(transfer['before'], '{}')}, {_rate(transfer['after'], form)}"
    return [_rate(known["before"], "{}"), _rate(known["after"], form), others]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


def _gib(row: Row) -> float:
    return float(row["peak_memory_bytes"] / 2**30)


def _chip(result: Row) -> str:
    return " ".join(str(result["host"]["cpu"]).split()[:2])


def main() -> None:
    for path in PAGES:
        path.write_text(page(path))


if __name__ == "__main__":
    main()

"""`etude plan` held to runs that were measured: how far it is off, of a step's time, CPU, and bytes of a version.

Each run is planned by its own config, with this machine measured anew; its rollouts (their turns and tokens) are taken
from its folder, and no constant is. `load` is the load average while the constants were taken: what else runs makes a
CPU second do less, so constants of a loaded machine are too large.
`python -m benchmarks.run.plan RUN [RUN ...]`
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from benchmarks.report import RESULTS, report

GOAL = 0.25
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "plan.md"
FROM, TO = "<!-- plan:begin -->\n", "<!-- plan:end -->\n"
TOLD = {
    "step_s": "a step, s",
    "learner_cpu_s": "learner, CPU s",
    "engines_cpu_s": "engines, CPU s",
    "machines_cpu_s": "machines and conductor, CPU s",
    "sync_bytes": "a version, bytes",
}


def page(text: str) -> str:
    """The guide with the committed result in it."""
    rows = json.loads((RESULTS / "plan.json").read_text())["rows"]
    lines = ["| run | load | " + " | ".join(TOLD.values()) + " |", "| --- " * (2 + len(TOLD)) + "|"]
    for row in rows:
        cells = [row["of a step"][name] for name in TOLD]
        shown = (f"{c['planned']:,.3g} / {c['measured']:,.3g} (**{c['off']:+.0%}**)" for c in cells)
        name = re.sub(r"-\d{8}-.*", "", row["run"]).removeprefix("bench-")  # without its time
        lines.append(f"| {name} | {row['load']:.0f} | " + " | ".join(shown) + " |")
    before, _, rest = text.partition(FROM)
    return before + FROM + "\n".join([*lines, ""]) + TO + rest.partition(TO)[2]


def held(run: Path) -> dict[str, object]:
    """A plan beside one run."""
    before = os.getloadavg()[0]
    argv = [sys.executable, "-m", "etude.cli", "plan", str(run / "config.toml"), "--against", str(run), "--json"]
    told = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)
    rows = {
        name: {"planned": round(row["planned"], 4), "measured": round(row["measured"], 4)}
        | {"off": round(row["planned"] / row["measured"] - 1, 3)}
        for name, row in told["against"].items()
    }
    constants = {name: told["hardware"][name] for name in told["hardware"] if name != "memory_bytes"}
    return {
        "run": run.name,
        "load": round(before, 1),
        "of a step": rows,
        "shape": told["shape"],
        "constants": constants,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    args = parser.parse_args()
    rows = [held(run) for run in args.runs]
    off = [abs(row["of a step"]["step_s"]["off"]) for row in rows]  # type: ignore[index]
    told = {"worst_off": max(off), "mean_off": round(fmean(off), 3), "reached": max(off) <= GOAL}
    report("plan", {"goal": GOAL, **told, "rows": rows})
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Learning in a real agent: `examples/mini_swe_agent`, mini-swe-agent unmodified as the harness of a run.

Each seed is the run's and the tasks'. What is reported is each run's own `summary.json`, and what its agents asked: the
requests that are turns, the replies that had to be tokenised again, and the rows of training for each branch of a
conversation. mini-swe-agent must be installed in `agents/` (the config says how).

`PYTHONPATH=. python -m benchmarks.learning.mini_swe_agent [--seeds 0 1 2] [--runs RUN ...] [--set a.b=c]`
`--runs` reads runs that have ended in place of new ones."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.report import report
from benchmarks.runs import brief, interval, start_run, summary
from etude.evals.intervals import over_seeds

CONFIG = Path("examples/mini_swe_agent/config.toml")
GOAL = {"gain": 0.3, "wall_s": 720.0}
COPIED = ("wall_s", "cpu_s", "lag", "parity", "invalid", "rollouts", "peak_memory_bytes")
_COUNTS = re.compile(r"etude: turns (\d+), requests (\d+), repeated (\d+), replies tokenised again (\d+)")


def asked(run: Path) -> dict[str, Any]:
    """Sum the counts in the logs of a run's agents. `attributed`: the share of answered requests that are turns.

    `unanswered` requests did not fit into the context, or were waiting when their rollout was over."""
    totals, endings = Counter[str](), Counter[str]()
    for path in (run / "harness").glob("*.log"):
        text = path.read_text(errors="replace")
        if (counts := _COUNTS.search(text)) is None:
            raise SystemExit(f"{path} has no count of turns")
        turns, requests, repeated, again = map(int, counts.groups())
        unanswered = 0
        if "etude: killed" in text:  # its rollout was over, and it asked again
            unanswered = requests - turns - repeated
        elif "etude: a request did not fit" in text:
            unanswered = min(1, requests - turns - repeated)
        totals.update(turns=turns, requests=requests, repeated=repeated, tokenised_again=again, unanswered=unanswered)
        endings.update(re.findall(r"^etude: (exit code \d+|killed.*)$", text, re.MULTILINE))
    answered = totals["requests"] - totals["unanswered"]
    attributed = (totals["turns"] + totals["repeated"]) / answered if answered else None
    return {"agents": endings.total(), **totals, "attributed": attributed, "endings": dict(endings)}


def trained(run: Path) -> dict[str, Any]:
    """Count the rows of training and the branches of the rollouts that have rows, over all steps."""
    rows = branches = 0
    for path in sorted((run / "traces").glob("batch-*.parquet")):
        found = pq.read_table(path, columns=["row", "rollout_id", "turn", "parent", "kind"]).to_pylist()
        samples = Counter(one["rollout_id"] for one in found if one["row"] == "sample")
        turns = [one for one in found if one["row"] == "turn" and one["rollout_id"] in samples]
        parents = {(one["rollout_id"], one["parent"]) for one in turns}
        leaves = [one for one in turns if (one["rollout_id"], one["turn"]) not in parents and one["kind"] != "side"]
        rows, branches = rows + samples.total(), branches + len(leaves)
    return {"rows": rows, "branches": branches, "rows_per_branch": rows / branches if branches else None}


def row(run: Path, seed: int) -> dict[str, Any]:
    """Read one run that has ended."""
    found = summary(run)
    before, after = found["heldout"]["before"], found["heldout"]["after"]
    return {
        "seed": seed,
        "before": brief(before),
        "during": [{"step": one["step"], "rate": round(one["rate"], 4)} for one in found["heldout"]["during"]],
        "after": brief(after),
        "gain": round(after["rate"] - before["rate"], 4),
        "disjoint": interval(before).disjoint(interval(after)),
        "baselines": found["baselines"],
        "asked": asked(run),
        "trained": trained(run),
        **{name: found[name] for name in COPIED},
    }


def table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean over the seeds with the interval of the variance between them; empty for one seed."""
    if len(rows) < 2:
        return {}
    means = {name: over_seeds([one[name]["rate"] for one in rows]) for name in ("before", "after")}
    return {n: {"rate": round(i.value, 4), "low": round(i.low, 4), "high": round(i.high, 4)} for n, i in means.items()}


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Which goals every run reached."""
    return {
        "gain": all(one["gain"] >= GOAL["gain"] and one["disjoint"] for one in rows),
        "wall_s": all(one["wall_s"]["total"] <= GOAL["wall_s"] for one in rows),
        "attributed": all(one["asked"]["attributed"] == 1.0 for one in rows),
        "tokenised_again": all(one["asked"]["tokenised_again"] == 0 for one in rows),
        "rows_per_branch": all(one["trained"]["rows_per_branch"] == 1.0 for one in rows),
        "exact": all(one["parity"]["fresh_ratio_max"] == one["parity"]["probe_ratio_max"] == 0.0 for one in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, nargs="+", default=[], help="runs that have ended, one for each seed")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="for every run")
    args = parser.parse_args()
    rows = []
    for number, seed in enumerate(args.seeds[: len(args.runs)] if args.runs else args.seeds):
        settings = [f"seed={seed}", f"tasks.source.seed={seed}", *args.set]
        run = args.runs[number] if args.runs else start_run(CONFIG, f"mini-swe-agent-{seed}", settings)
        rows.append(row(run, seed))
    facts = {"config": str(CONFIG), "settings": args.set, "goal": GOAL, "reached": verdict(rows)}
    report("mini_swe_agent", {**facts, "seeds": table(rows), "rows": rows})


if __name__ == "__main__":
    main()

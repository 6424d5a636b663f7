"""The same seed, twice, at `max_lag = 0`: are all versions the same bytes?

The laptop example at its full width from one checkpoint, two engines and all; evaluations during RL are left out, since
they change no weights.
`python -m benchmarks.numerics.determinism --start CHECKPOINT [--config TOML] [--steps 5] [--set a.b=c]`
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

from benchmarks.report import report
from benchmarks.runs import LAPTOP, start_run, summary
from etude.stores import DirectoryStore
from etude.weights import lineage


def learned(config: Path, settings: list[str]) -> dict[str, Any]:
    """One run: the digest of every version, of the saved result, and its wall time."""
    began = time.perf_counter()
    run = start_run(config, "determinism", settings)
    return {
        "versions": [m.version.digest for m in lineage(DirectoryStore(run / "weights"), "policy")],
        "final_sha256": hashlib.sha256((run / "checkpoints" / "final" / "model.safetensors").read_bytes()).hexdigest(),
        "rollouts": summary(run)["rollouts"],
        "wall_s": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=Path, required=True, help="a mid-trained checkpoint")
    parser.add_argument("--config", type=Path, default=LAPTOP)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    args = parser.parse_args()
    few = ["evals.heldout_tasks=16", "evals.baseline_tasks=1", f"evals.every={args.steps + 1}"]
    sets = [f"start={args.start.resolve()}", "experience.max_lag=0", f"rl.steps={args.steps}", *few, *args.set]
    first, second = learned(args.config, sets), learned(args.config, sets)
    same = sum(a == b for a, b in zip(first["versions"], second["versions"], strict=True))
    report(
        "determinism",
        {
            "identical": first["final_sha256"] == second["final_sha256"] and same == len(first["versions"]),
            "final_sha256": [first["final_sha256"], second["final_sha256"]],
            "num_versions": len(first["versions"]),
            "identical_versions": same,
            "distinct_versions": len(set(first["versions"])),
            "steps": args.steps,
            "rollouts": first["rollouts"],
            "wall_s": [first["wall_s"], second["wall_s"]],
        },
    )


if __name__ == "__main__":
    main()

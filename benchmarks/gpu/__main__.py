"""Everything that wants a GPU, in one command and ten minutes: the tests on it, then each benchmark, part by part.

Each part is a process of its own with a limit of its own, so that one that fails or hangs costs only itself. What is
done is kept in results/gpu.json after every part: the same command goes on where it was ended, and does again only what
is of another commit, of another device, or failed. Parts, most telling first: `tests` (tests/gpu), `gpu_parity`,
`gpu_engine`, `gpu_learner`, `gpu_swap`, `delta_gpu`, `exact_gpu`.

`python -m benchmarks.gpu [--only PART ...] [--limit-s 570] [--out DIRECTORY]`; `--out` gets copies of all results,
part by part. `--quick` does a tiny model wherever it runs, and keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import RESULTS, commit, report

ROOT = Path(__file__).parents[2]
LAST_WORDS = 1500  # of what a failed part printed


@dataclass(frozen=True)
class Part:
    """One process."""

    name: str
    argv: tuple[str, ...]
    limit_s: float
    tells: tuple[str, ...] = ()  # what the summary takes of its result
    quick: bool = True  # whether it knows a tiny model


PARTS = (
    Part("tests", ("pytest", "--noconftest", "-rfs", "-W", "default", "-m", "not slow", "tests/gpu"), 240, quick=False),
    Part("gpu_parity", ("benchmarks.gpu.parity",), 150, ("exact", "native")),
    Part("gpu_engine", ("benchmarks.gpu.engine",), 200, ("critical_batch", "decode", "decode_exact")),
    Part("gpu_learner", ("benchmarks.gpu.learner",), 120, ("mfu_microbatch", "mfu_step", "tokens_per_s")),
    Part("gpu_swap", ("benchmarks.gpu.swap",), 150, ("swaps", "object")),
    Part("delta_gpu", ("benchmarks.gpu.delta", "--elements", str(1 << 27), "--repeats", "3"), 120, quick=False),
    Part("exact_gpu", ("benchmarks.gpu.exact", "--quick"), 180, ("exact_differing",), quick=False),
)


def run(part: Part, *, quick: bool, limit_s: float) -> dict[str, Any]:
    """How it ended, how long it took, and what it found."""
    began = time.monotonic()
    argv = [sys.executable, "-m", *part.argv, *(["--quick"] if quick else [])]
    before = _stamp(part)
    print(f"== {part.name}: at most {limit_s:.0f} s", flush=True)
    try:
        done = subprocess.run(
            argv, cwd=ROOT, timeout=limit_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, said = "over its limit", (error.stdout or b"").decode(errors="replace")
    row: dict[str, Any] = {"ended": code, "wall_s": round(time.monotonic() - began, 1)}
    if part.name == "tests" and said:
        row["summary"] = said.strip().splitlines()[-1]
    if code != 0:
        row["last_words"] = said[-LAST_WORDS:]
    if part.tells and _stamp(part) != before:
        found = json.loads((RESULTS / f"{part.name}.json").read_text())
        row |= {name: found[name] for name in part.tells if name in found}
    print(json.dumps(row, indent=1), flush=True)
    return row


def _stamp(part: Part) -> int:
    path = RESULTS / f"{part.name}.json"
    return path.stat().st_mtime_ns if path.is_file() else 0


def kept(path: Path, device: str) -> dict[str, dict[str, Any]]:
    """Parts that an earlier call did well, at this commit and on this device."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    if (found.get("commit"), found.get("device")) != (commit(), device):
        return {}
    return {name: row for name, row in found["parts"].items() if row["ended"] == 0}


def _copied(out: Path | None) -> None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("gpu", *(part.name for part in PARTS)):
            if (RESULTS / f"{name}.json").is_file():
                shutil.copy(RESULTS / f"{name}.json", out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="these parts, done or not")
    parser.add_argument("--limit-s", type=float, default=570.0, help="of all parts together")
    parser.add_argument("--out", type=Path, help="a directory for copies of the results")
    parser.add_argument("--quick", action="store_true", help="a tiny model; no result is kept")
    args = parser.parse_args()
    if not args.quick and not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a GPU that torch sees; --quick runs a tiny model anywhere")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    stop, rows = time.monotonic() + args.limit_s, {} if args.quick else kept(RESULTS / "gpu.json", device)
    chosen = [p for p in PARTS if (p.name in args.only if args.only else p.name not in rows)]
    for part in chosen:
        left = stop - time.monotonic()
        if (args.quick and not part.quick) or left < 1:
            continue
        rows[part.name] = run(part, quick=args.quick, limit_s=min(part.limit_s, left))
        if not args.quick:
            report("gpu", {"device": device, "torch": torch.__version__, "parts": rows})
            _copied(args.out)
    bad = [name for name, row in rows.items() if row["ended"] != 0]
    if bad:
        raise SystemExit(f"failed: {', '.join(bad)}; the same command tries them again")


if __name__ == "__main__":
    main()

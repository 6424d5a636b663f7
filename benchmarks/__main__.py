"""The quick benchmarks, one after another: ``python -m benchmarks``. Each is a process of its own.

The first one trains for some minutes, once, what it measures. The long ones (delta over all its pairs, those of whole
runs, engine in full, …) are run by name.
"""

from __future__ import annotations

import subprocess
import sys

QUICK = (
    ["weights.delta", "--pairs", "*/adamw-1e-6/1", "--repeats", "5"],
    ["inference.engine", "--models", "laptop", "--batches", "16", "--repeats", "1", "--fresh"],
    ["machines.isolation"],
    ["weights.swap_client"],
)


def main() -> int:
    """Run all of them; 1 when one failed."""
    failed = []
    for name, *flags in QUICK:
        print(f"== {name}", file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *flags]).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())

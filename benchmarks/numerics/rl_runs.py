"""Reinforcement learning under each way to keep engine and learner together, from one mid-trained checkpoint.

The default is exact float32 without replay. Against it: native arithmetic in float32, engines in bfloat16 with routes
replayed, and each low-precision format, as in `benchmarks.learning.ways`: only RL differs. Solve rates are on
validation tasks during RL and on held-out tasks before and after, with 95 % intervals; seeds are pooled for the
difference from the default. How long RL took is told as the median over seeds, native float32 beside it: what exactness
costs from end to end.

`python -m benchmarks.numerics.rl_runs --start CHECKPOINT [--ways default native ...] [--seeds 0 1 2] [--steps 40]`
A minute and a half a run on two cores; `--table` prints what there is, and runs nothing.
"""

from __future__ import annotations

import statistics

from benchmarks.learning.ways import Row, Rows, against, arguments, by_way, play, pooled, within
from benchmarks.report import report

DEFAULT, NATIVE = "default", "native"
WAYS = {
    DEFAULT: [],
    NATIVE: ["numerics.mode=native"],
    "bf16 engines, replayed": ["numerics.mode=native", "engine.dtype=bfloat16"],
    **{kind: [f"numerics.quantise={kind}"] for kind in ("mxfp8", "nvfp4", "mxfp4")},
}


def result(rows: Rows) -> Row:
    """What is reported of the runs that there are; the default is ahead of or behind each way by an interval."""
    of = by_way(rows, WAYS)
    ways = {way: pooled(found) for way, found in of.items()}
    seconds = {
        way: {key: statistics.median(row[key] for row in found) for key in ("rl_wall_s", "rl_cpu_s")}
        for way, found in of.items()
    }
    paired, differences = {DEFAULT, NATIVE} <= ways.keys(), against(ways, lambda way: DEFAULT)
    costs = {key: round(s / seconds[NATIVE][key], 3) for key, s in seconds[DEFAULT].items()} if paired else None
    return {
        "ways": ways,
        "after_minus_default": differences,
        "within_intervals_of_the_default": within(differences),
        "seconds": seconds,
        "exact_to_native_from_end_to_end": costs,
        "rows": list(rows.values()),
    }


def main() -> None:
    args = arguments(__doc__, WAYS, name="numerics", seeds=[0, 1, 2]).parse_args()
    alike, rows = play(args, "numerics_runs", WAYS, result)
    report("numerics_runs", {"settings": alike, **result(rows)})


if __name__ == "__main__":
    main()

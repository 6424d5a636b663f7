"""Reinforcement learning with bf16 masters and 8-bit moments against float32 ones, from one mid-trained checkpoint.

Runs as in `benchmarks.learning.ways`: solve rates on held-out tasks over seeds, with intervals. What the settings take
in memory is measured by `benchmarks.learner.memory`.

`python -m benchmarks.learning.precision --start CHECKPOINT [--ways "float32" ...] [--seeds 0 1 2] [--steps 10]`
About a minute a run on two cores; `--table` reports what there is.
"""

from __future__ import annotations

from benchmarks.learning.ways import Row, Rows, against, arguments, by_way, play, pooled, within
from benchmarks.report import report

FLOAT32 = "float32"
WAYS: dict[str, list[str]] = {
    FLOAT32: [],
    "8-bit moments": ["learner.moments=8bit"],
    "bf16 masters, 8-bit moments": ["learner.moments=8bit", "learner.masters=bf16"],
}
TIMES = ("rl_wall_s", "rl_cpu_s", "command_wall_s")


def result(rows: Rows) -> Row:
    """What is reported of the runs that there are. No times of theirs: they were beside others' work."""
    ways = {way: pooled(found) for way, found in by_way(rows, WAYS).items()}
    differences = against(ways, lambda way: FLOAT32)
    return {
        "ways": ways,
        "after_minus_float32": differences,
        "within_intervals_of_float32": within(differences),
        "rows": [{key: value for key, value in row.items() if key not in TIMES} for row in rows.values()],
    }


def main() -> None:
    parser = arguments(__doc__, WAYS, name="precision", seeds=[0, 1, 2])
    parser.set_defaults(steps=10, every=5, heldout=256)
    args = parser.parse_args()
    alike, rows = play(args, "precision", WAYS, result)
    report("precision", {"settings": alike, **result(rows)})


if __name__ == "__main__":
    main()

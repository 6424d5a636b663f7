"""Whether RL learns faster with a baseline for each turn (`experience.credit = "fork"`) than with one for a rollout.

`rloo` compares a rollout with all others of its group; `fork` compares each turn with those siblings that reached the
same context. Where siblings share no turn, both are the same. Everything else is alike: start, tasks, seeds, learning
rate. What is compared is the mean reward of all training rollouts, which tells how fast a run learned, and the solve
rate on held-out tasks at the end.

`python -m benchmarks.learning.credit --start CHECKPOINT [--config examples/long/config.toml --name credit-long]`
Minutes a run. Rows are kept (`benchmarks.learning.ways`), so it goes on where it broke off.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.learning.ways import Row, Rows, against, arguments, by_way, play, pooled, within
from benchmarks.report import report
from etude.evals.intervals import mean_over_seeds

BASE, FORK = "rloo", "fork"
WAYS = {way: [f"experience.credit={way}"] for way in (BASE, FORK)}
TIMES = ("rl_wall_s", "command_wall_s", "rl_cpu_s", "bytes_per_version")


def mean_reward(row: Row) -> float:
    """The mean reward of a run's training rollouts, over all steps. One that was repeated after a break counts once."""
    return round(statistics.fmean({step["step"]: step["reward"] for step in row["rewards"]}.values()), 4)


def ahead_by_seed(rows: Sequence[Row], others: Sequence[Row]) -> Row:
    """How far the mean reward of `others` is ahead of that of `rows` with the same seeds: each, and their mean with
    its interval."""
    of = {row["seed"]: mean_reward(row) for row in rows}
    gains = [round(mean_reward(row) - of[row["seed"]], 4) for row in others if row["seed"] in of]
    if len(gains) < 2:
        return {"by_seed": gains}
    mean = mean_over_seeds(gains)
    return {"by_seed": gains, **{name: round(getattr(mean, name), 4) for name in ("value", "low", "high")}}


def result(rows: Rows) -> Row:
    """What is reported of the runs that there are. No times of theirs: they were beside others' work."""
    of = by_way(rows, WAYS)
    ways = {way: pooled(found) | {"mean_reward": [mean_reward(row) for row in found]} for way, found in of.items()}
    differences = against(ways, lambda way: BASE)
    return {
        "ways": ways,
        "fork_minus_rloo_mean_reward": ahead_by_seed(of.get(BASE, ()), of.get(FORK, ())),
        "fork_minus_rloo_after": differences.get(FORK, {}),
        "after_within_intervals": within(differences).get(FORK),
        "rows": [{key: value for key, value in row.items() if key not in TIMES} for row in rows.values()],
    }


def main() -> None:
    args = arguments(__doc__, WAYS, name="credit", seeds=[0, 1, 2]).parse_args()
    name = args.name.replace("-", "_")
    alike, rows = play(args, name, WAYS, result)
    report(name, {"settings": alike, "config": args.config.as_posix(), **result(rows)})


if __name__ == "__main__":
    main()

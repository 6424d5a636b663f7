"""Whether RL learns from preference pairs (`learner.policy_loss = "dpo"`) as it does from advantages, the default loss.

Three ways from one mid-trained checkpoint, with the same number of steps: PPO with Dr. GRPO's advantages, and DPO on
all pairs of a group with either reference, the start or the version that sampled a token. Start, tasks, seeds and
learning rate are alike. Compared are the solve rate on held-out tasks before and after, and the mean reward of the
training rollouts, which tells how fast a run learned. Of DPO also the accuracy and the margin of the pairs by step.

`python -m benchmarks.learning.pairs --start CHECKPOINT [--steps 10] [--heldout 128]`
About a minute a run on one core. Rows are kept (`benchmarks.learning.ways`), so it goes on where it broke off.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.learning.credit import TIMES, ahead_by_seed, mean_reward
from benchmarks.learning.ways import Row, Rows, against, arguments, by_way, play, pooled, within
from benchmarks.report import report
from etude.dashboard.run_view import RunView

BASE, DPO = "ppo", ["learner.policy_loss=dpo", "experience.credit=all-pairs"]
WAYS = {BASE: [], "dpo": DPO, "dpo, sampler": [*DPO, "learner.dpo_reference=sampler"]}


def pairs_by_step(run: Path) -> Row:
    """The metrics of a run's steps that concern its loss and its pairs."""
    names = ("loss", "entropy", "grad_norm", "k3", "num_pairs", "pair_accuracy", "pair_margin")
    steps = RunView(run).by_step("rl.step")
    return {"steps": [{"step": one["step"], **{name: one.get(name) for name in names}} for one in steps]}


def result(rows: Rows) -> Row:
    """What is reported of the runs that there are. No times of theirs: they were beside others' work."""
    of = by_way(rows, WAYS)
    ways = {way: pooled(found) | {"mean_reward": [mean_reward(row) for row in found]} for way, found in of.items()}
    differences = against(ways, lambda way: BASE)
    return {
        "ways": ways,
        "after_minus_ppo": differences,
        "after_within_intervals": within(differences),
        "mean_reward_minus_ppo": {way: ahead_by_seed(of.get(BASE, ()), of[way]) for way in of if way != BASE},
        "rows": [{key: value for key, value in row.items() if key not in TIMES} for row in rows.values()],
    }


def main() -> None:
    parser = arguments(__doc__, WAYS, name="pairs", seeds=[0, 1, 2])
    parser.set_defaults(steps=10, every=0, heldout=128)
    args = parser.parse_args()
    alike, rows = play(args, "pairs", WAYS, result, more=pairs_by_step)
    report("pairs", {"settings": alike, "config": args.config.as_posix(), **result(rows)})


if __name__ == "__main__":
    main()

"""Whether the credit of a finished run is computed again to the bit, by the command that a user calls.

For each seed two runs of the laptop example start from one mid-trained checkpoint, synchronous (`max_lag` 0), with the
same terms but other weights. Then `etude rewards recompute RUN` of the first one must be equal bit for bit: rewards,
and the digest of each batch, which covers the advantages of all tokens. And `recompute RUN --set ... --step 1` with the
weights of the second run must give what that run recorded: rewards, advantages, digest. Later steps cannot be compared,
since the policies differ by then. The seeds in `--judged` also have a term of a scripted judge behind HTTP
(`tests/judge_server.py`); each run asks it anew.

`python -m benchmarks.rewards.recompute --start CHECKPOINT [--seeds 0 1 2] [--judged 0]`
About a minute a run on one core. Runs lie in `runs/`; those that have ended are used again, so it goes on where it
broke off.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.judge_server import judge_in_a_thread, longer

from benchmarks.report import report
from benchmarks.runs import ETUDE, LAPTOP, overrides, start_run, summary
from etude.rewards.judges import JudgeStore

Row = dict[str, Any]
KINDS = {
    "effort": "{kind = 'effort', limit = 256.0}",
    "reads": "'repeated-reads'",
    "untested": "'tests-never-run'",
}
FIRST = {"effort": 0.3, "reads": 0.1, "untested": 0.05, "words": 0.2}
SECOND = {"effort": 0.6, "reads": 0.3, "untested": 0.0, "words": 0.05}
"""The weights of the terms in the first and in the second run. "words": the judge."""
SHORT = (
    "experience.max_lag=0",
    "experience.credit=fork",  # a fault of a process term is credited to its turn
    "evals.every=0",
    "evals.baseline_tasks=1",
    "evals.heldout_tasks=16",
    "evals.transfer_tasks=0",
)


def trained(name: str, args: argparse.Namespace, seed: int, kinds: Mapping[str, str], weights: Row) -> Path:
    """Run RL with these terms, or find the run of this name that has ended; its folder."""
    for folder in sorted(Path("runs").glob(f"bench-{name}-*")):
        if (folder / "summary.json").exists() and summary(folder)["finished"]:
            return folder
    terms = [f"{{name = '{term}', weight = {weights[term]}, kind = {kind}}}" for term, kind in kinds.items()]
    sizes = [f"rl.steps={args.steps}", f"rl.checkpoint_every={args.steps}", f"seed={seed}"]
    settings = [f"start={args.start.resolve()}", *SHORT, *sizes, f"rewards.terms=[{', '.join(terms)}]"]
    return start_run(LAPTOP, name, settings, may_learn_nothing=True)


def recomputed(run: Path, *more: str) -> Row:
    """What `etude rewards recompute RUN --json` prints."""
    done = subprocess.run(
        [*ETUDE, "rewards", "recompute", str(run), "--json", *more], stdout=subprocess.PIPE, text=True
    )
    return dict(json.loads(done.stdout))


def credits(step: Row, reward: str) -> dict[str, tuple[str, str]]:
    """The reward and the advantage of each rollout of a step, with all their bits. `reward`: "reward", "recorded"."""
    return {one["rollout_id"]: (one[reward].hex(), one["advantage"].hex()) for one in step["rollouts"]}


def compared(first: Path, second: Path, kinds: Mapping[str, str]) -> Row:
    """Recompute the first run, as it was and with the weights of the second one."""
    again, other = recomputed(first), recomputed(second)
    sets = overrides([f"{term}.weight={SECOND[term]}" for term in kinds])
    [would] = recomputed(first, *sets, "--step", "1")["steps"]
    [was] = [step for step in other["steps"] if step["step"] == 1]
    both = credits(would, "reward"), credits(was, "recorded")
    own = [one for run in (again, other) for step in run["steps"] for one in step["rollouts"]]
    return {
        "steps": [len(run["steps"]) for run in (again, other)],
        "credits": len(own),
        "credits_equal": sum(one["recorded"].hex() == one["reward"].hex() for one in own),
        "batches_equal": sum(
            step["digest"] == step["recorded_digest"] for run in (again, other) for step in run["steps"]
        ),
        "other_weights": {
            "credits": len(was["rollouts"]),
            "credits_equal": sum(both[0][one] == both[1].get(one) for one in both[0]),
            "batch_equal": would["digest"] == was["recorded_digest"],
            "rewards_that_the_weights_change": sum(one["recorded"] != one["reward"] for one in would["rollouts"]),
            "terms_missing": sorted({term for one in would["rollouts"] for term in one["missing"]}),
        },
    }


def one(args: argparse.Namespace, seed: int) -> Row:
    """The two runs of a seed."""
    with contextmanager(judge_in_a_thread)(most_s=3600.0) as judge:
        judge.bias = longer()
        judged, runs, kinds, calls = seed in args.judged, list[Path](), dict(KINDS), 0
        rubric = Path("runs") / "recompute-words.toml"
        rubric.parent.mkdir(exist_ok=True)
        rubric.write_text('[[aspects]]\nname = "words"\nquestion = "Is it complete?"\n')
        for way, weights in (("first", FIRST), ("second", SECOND)):
            name = f"recompute-{way}-{seed}"
            if judged:
                cache = Path("runs") / f"{name}-judges.sqlite"
                where = f"rubric = '{rubric.resolve()}', url = '{judge.url}/v1', cache = '{cache.resolve()}'"
                kinds["words"] = f"{{kind = 'judge', model = 'scripted', {where}}}"
            runs.append(trained(name, args, seed, kinds, weights))
            if judged:
                calls += sum(one.calls for one in JudgeStore(cache).accounts() if runs[-1].name in one.judge)
    return {"seed": seed, "terms": ["grade", *kinds], "judge_calls": calls, **compared(*runs, kinds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, required=True, help="a mid-trained checkpoint of the example's model")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--judged", nargs="*", type=int, default=[0], help="seeds that also have a term of a judge")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    rows = [one(args, seed) for seed in args.seeds]
    other = [row["other_weights"] for row in rows]
    total = {name: sum(row[name] for row in rows) for name in ("credits", "credits_equal", "batches_equal")}
    total["batches"] = sum(sum(row["steps"]) for row in rows)
    total["other_weights"] = {
        "credits": sum(row["credits"] for row in other),
        "credits_equal": sum(row["credits_equal"] for row in other),
        "batches": len(other),
        "batches_equal": sum(row["batch_equal"] for row in other),
    }
    report("recompute", {"weights": {"first": FIRST, "second": SECOND}, "total": total, "rows": rows})


if __name__ == "__main__":
    main()

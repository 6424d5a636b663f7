"""A model of 1.4M parameters as a one-token judge: is an attempt at a repair solved? On tasks and kinds of tasks
that it was not tuned on.

The model is that of `examples/laptop` after RL. It can solve such tasks, so it knows more about right code than the
mid-trained one. Attempts at tasks of "repair" are written by scripts (`attempts`); their label is the outcome of the
hidden cases. The judge sees the trace (what the agent called and read, with the output of the visible tests where it
ran them) and the changed files. It is tuned with functions of two numbers, of a number and a constant, and of lists:

- *same kinds*: other functions of these kinds, of the held-out split. The model never saw one of them, in mid-training,
  RL or tuning.
- *strings*: the fourth kind, which it was not tuned on; mid-training and RL had other functions of this kind. The
  held-out split has few of them.
- *new templates*: expressions and docstrings that no model has ever seen.
- *rollouts*: attempts of a model in a run with RL, as `etude judge labels` writes them, on functions that are in no
  tuning. RL had some of them.

Where the tests ran after the last edit, their output says nearly all. So beside the AUC of all attempts there are those
of attempts with and without such an output, and the AUC of a rule in place of the judge (`by_rule`). It uses regular
expressions: it reads the outputs of tests and which file was edited, but not the code.

All of it goes through the command line: `etude judge tune`, `etude serve`, `etude judge calibrate`. Works of one
function are one cluster of the bootstrap. Three seeds of attempts and tuning; the start is one checkpoint.

`python -m benchmarks.rewards.own_judge [--run RUN] [--start CHECKPOINT] [--seeds 0 1 2]`
Eight minutes a seed on one core. Tuned judges are kept in `runs/`, so it goes on where it broke off."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.journal import Journal, digest
from benchmarks.learning.seeds import mean as over
from benchmarks.report import report
from benchmarks.rewards.attempts import Attempt, attempts
from benchmarks.runs import ETUDE, LAPTOP, start_run
from etude.config import read
from etude.harness import ChatFormat
from etude.loop.limits import build_config
from etude.plugins import Kind, make
from etude.records.task import Split
from etude.rewards.judges.calibration import Half, read_labels
from etude.rewards.judges.evidence import Evidence
from etude.rewards.judges.rubrics import Aspect, Rubric
from etude.rewards.judges.terms import JudgeTerm

GOAL = 0.9
TUNED = ("ab", "ak", "xs")  # families of functions: two numbers, a number and a constant, a list
TESTED, TESTED_IN_TUNING = 0.5, 0.25
"""Shares of edits that are followed by the tests. The first is that of mid-training. A judge learns from few
attempts to read the tests, so most of the tuning is without them."""
ASPECT = Aspect("solved", "Does the function return what its docstring says, for all arguments?", lowest=0, highest=1)
RUBRIC = f"""[[aspects]]
name = "{ASPECT.name}"
question = "{ASPECT.question}"
lowest = 0
highest = 1
"""
CONFIG = """seed = {seed}

[mid_training]
num_tokens = {tokens}
batch_tokens = 2048
lr = {lr}
warmup_steps = 20

[[rewards.terms]]
name = "solved"
weight = 0.0

[rewards.terms.kind]
kind = "judge"
rubric = "{folder}/solved.toml"
url = "{url}/v1"
model = "judge"
form = "token"
tuned = true
evidence = ["trace", "files"]
evidence_chars = 480
at_once = 16
cache = "{folder}/judges.sqlite"
"""
RUN = (  # few steps, and all rollouts are kept: no second checkpoint
    "rl.steps=16",
    "rl.checkpoint_every=100",
    "evals.heldout_tasks=64",
    "evals.transfer_tasks=32",
    "evals.during_tasks=16",
    "evals.every=100",
    "evals.baseline_tasks=8",
)
_PASSED = re.compile(r"(\d+) of (\d+) passed")
_EDIT = "[call] edit "


def tests_after(trace: str) -> float | None:
    """What the tests printed after the last edit: 1.0 all passed, 0.0 one failed, None where they were not run."""
    found = _PASSED.findall(trace.rpartition(_EDIT)[2])
    return float(found[-1][0] == found[-1][1]) if found else None


def by_rule(trace: str) -> float:
    """The verdict of a rule, from 0 to 1: what the tests printed after the last edit. If they were only run before it,
    whether the file that they named was edited; otherwise 0.3."""
    shown, named = tests_after(trace), re.search(r"FAIL (\S+)", trace)
    if shown is not None or named is None:
        return 0.3 if shown is None else shown
    return 0.6 if f"{_EDIT}{named[1]} " in trace else 0.1


def auc(values: Sequence[float], solved: Sequence[bool]) -> float | None:
    """Area under the ROC curve; ties count half. None for labels of one class."""
    of, right = np.array(values), np.array(solved, bool)
    if right.all() or not right.any():
        return None
    more = of[right][:, None] - of[~right][None]
    return round(float((more > 0).mean() + (more == 0).mean() / 2), 4)


def write(path: Path, made: Sequence[Attempt]) -> None:
    """Write attempts as a file of labels."""
    path.write_text("".join(f"{json.dumps(one.row(ASPECT))}\n" for one in made))


def etude(*argv: str) -> None:
    """Run a command of etude. Ends the benchmark where it fails."""
    if subprocess.run([*ETUDE, *argv], stdout=sys.stderr).returncode:
        raise SystemExit(f"etude {' '.join(argv)} failed")


@contextlib.contextmanager
def serving(checkpoint: Path) -> Iterator[str]:
    """Serve a checkpoint by `etude serve`; yields its URL, without ``/v1``."""
    argv = [*ETUDE, "serve", f"judge={checkpoint}", "--port", "0"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            found = re.search(r"http://[^/\s]+", line)
            if found is None:
                raise SystemExit(f"etude serve {checkpoint} failed: {line}")
            yield found[0]
        finally:
            server.terminate()


def settings(folder: Path, url: str, seed: int, tokens: int, lr: float) -> Path:
    """Write the config and the rubric of the judge."""
    path = folder / "config.toml"
    path.write_text(CONFIG.format(folder=folder, url=url, seed=seed, tokens=tokens, lr=lr))
    (folder / "solved.toml").write_text(RUBRIC)
    return path


def reported(config: Path, labels: Path) -> dict[str, Any]:
    """What `etude judge calibrate` says of a judge on the half of the labels that it was not tuned on."""
    out = labels.with_suffix(".json")
    etude("judge", "calibrate", str(labels), "--config", str(config), "--term", "solved", "--json", str(out))
    [found] = json.loads(out.read_text())["aspects"]
    kept = {name: found[name] for name in ("num_labels", "num_unknown", "exact")}
    return kept | {name: {k: round(v, 4) for k, v in found[name].items()} for name in ("auc", "kappa")}


def probabilities(config: Path, path: Path) -> tuple[list[float], list[bool], list[str]]:
    """The values of a judge (NaN: unknown), the labels, and the traces of the same half. All values are in the judge's
    store."""
    [term] = build_config(read(config)).rewards.terms
    made = make(Kind.REWARD, term.kind)
    assert isinstance(made, JudgeTerm)
    judge = made.judge
    labels = [one for one in read_labels(path, judge.rubric, _no_rollout) if one.half is Half.REPORT]

    async def ask() -> list[float]:
        verdicts = await asyncio.gather(*(judge.score(one.aspect, one.work) for one in labels))
        return [float("nan") if one.value is None else float(one.value) for one in verdicts]

    found = asyncio.run(ask())
    judge.store.close()
    return found, [one.score == 1 for one in labels], [one.work.parts[0].text for one in labels]


def _no_rollout(rollout_id: str) -> Evidence:
    raise AssertionError(f"{rollout_id}: labels have the works themselves")


def clusters(path: Path, half: Half) -> set[str]:
    """The functions of one half of a file of labels."""
    return {one.cluster for one in read_labels(path, Rubric((ASPECT,)), _no_rollout) if one.half is half}


def reliability(values: Sequence[float], solved: Sequence[bool]) -> dict[str, float]:
    """Brier score, that of the constant base rate, and expected calibration error in ten bins."""
    of, right = np.array(values), np.array(solved, float)
    bins = np.minimum((of * 10).astype(int), 9)
    gaps = [abs(of[bins == b].mean() - right[bins == b].mean()) * (bins == b).mean() for b in np.unique(bins)]
    base = float(right.mean())
    brier = float(((of - right) ** 2).mean())
    return {"brier": round(brier, 4), "brier_of_base_rate": round(base * (1 - base), 4), "ece": round(sum(gaps), 4)}


def compared(values: Sequence[float], solved: Sequence[bool], traces: Sequence[str]) -> dict[str, Any]:
    """AUC of the judge and of the rule, with and without tests after the last edit, and of the rule on all attempts."""
    found: dict[str, Any] = {"auc_of_rule": auc([by_rule(trace) for trace in traces], solved)}
    shown = [tests_after(trace) is not None for trace in traces]
    for name, wanted in (("tested", True), ("not_tested", False)):
        part = [i for i, one in enumerate(shown) if one is wanted]
        found[name] = {"num_labels": len(part), "num_solved": sum(solved[i] for i in part)}
        found[name]["auc"] = auc([values[i] for i in part], [solved[i] for i in part])
        found[name]["auc_of_rule"] = auc([by_rule(traces[i]) for i in part], [solved[i] for i in part])
    return found


def measured(
    start: Path, seed: int, *, works: int, asked: int, tokens: int, lr: float, rollouts: Path
) -> dict[str, Any]:
    """One seed: tune, serve, calibrate on each kind of task."""
    chat = ChatFormat.load(start)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known = attempts(Split.TRAIN, TUNED, works, seed, "tuning", half=Half.TUNE, tested=TESTED_IN_TUNING, chat=chat)
        write(folder / "tuning.jsonl", known)
        tests = {
            "same kinds": (Split.HELDOUT, TUNED),
            "strings": (Split.HELDOUT, ("s",)),
            "new templates": (Split.TRANSFER, (*TUNED, "s")),
        }
        for title, (split, families) in tests.items():
            made = attempts(split, families, asked, 100 + seed, title, half=Half.REPORT, tested=TESTED, chat=chat)
            write(folder / f"{title}.jsonl", made)
        shutil.copy(rollouts, folder / "rollouts.jsonl")
        config = settings(folder, "http://127.0.0.1:1", seed, tokens, lr)
        out = Path("runs").absolute() / f"own-judge-{digest(start)}-{works}-{tokens}-{lr}-{seed}"
        began = time.perf_counter()
        flags = ["--config", str(config), "--term", "solved", "--start", str(start), "--out", str(out)]
        if not (out / "config.json").is_file():
            etude("judge", "tune", str(folder / "tuning.jsonl"), *flags)
        row: dict[str, Any] = {"seed": seed, "tuning_s": round(time.perf_counter() - began, 1), "sets": {}}
        used = clusters(folder / "tuning.jsonl", Half.TUNE)
        solved_in_tuning = round(float(np.mean([one.graded.grade for one in known])), 4)
        row |= {"functions": len(used), "solved_in_tuning": solved_in_tuning}
        with serving(out) as url:
            settings(folder, url, seed, tokens, lr)
            for title in (*tests, "rollouts"):
                path = folder / f"{title}.jsonl"
                began = time.perf_counter()
                found = reported(config, path)
                found["calibrate_s"] = round(time.perf_counter() - began, 1)
                answers = zip(*probabilities(config, path), strict=True)
                values, solved, traces = zip(
                    *(one for one in answers if not np.isnan(one[0])), strict=True
                )  # known ones
                functions = clusters(path, Half.REPORT)
                found |= {"solved": round(float(np.mean(solved)), 4), "functions": len(functions)}
                found["functions_also_in_tuning"] = len(functions & used)
                found |= reliability(values, solved) | compared(values, solved, traces)
                row["sets"][title] = found
        return row


def untuned(start: Path, labels: Path) -> dict[str, int]:
    """The start checkpoint, asked the same questions: how many have a verdict."""
    with tempfile.TemporaryDirectory() as name, serving(start) as url:
        values, _, _ = probabilities(settings(Path(name), url, 0, 1, 0.0), labels)
    return {"asked": len(values), "with_verdict": sum(not np.isnan(value) for value in values)}


def labels_of(run: Path, folder: Path) -> Path:
    """Write the stored rollouts of a run as labels, by `etude judge labels`."""
    config, out = settings(folder, "http://127.0.0.1:1", 0, 1, 0.0), folder / "rollouts.jsonl"
    etude("judge", "labels", str(run), "--config", str(config), "--term", "solved", "--out", str(out))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, help="a run of examples/laptop with stored rollouts (default: make one)")
    parser.add_argument("--start", type=Path, help="the checkpoint to tune (default: the last one of the run)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--works", type=int, default=12_000, help="attempts for tuning")
    parser.add_argument("--asked", type=int, default=400, help="attempts of each kind that are asked about")
    parser.add_argument("--tokens", type=int, default=3_700_000, help="of tuning")
    parser.add_argument("--lr", type=float, default=1e-3, help="of tuning")
    args = parser.parse_args()
    journal = Journal("own_judge")
    from_start = [] if args.start is None else [f"start={args.start.resolve()}"]
    run: Path = args.run or start_run(LAPTOP, "own-judge", [*RUN, *from_start])
    start: Path = args.start or run / "checkpoints" / "final"
    sizes = {"works": args.works, "asked": args.asked, "tokens": args.tokens, "lr": args.lr}
    key = {"start": digest(start), "run": run.name, **sizes}
    with tempfile.TemporaryDirectory() as name:
        rollouts = labels_of(run, Path(name))
        rows = [
            journal.once({"seed": seed, **key}, partial(measured, start, seed, rollouts=rollouts, **sizes))
            for seed in args.seeds
        ]
        before = journal.once({"untuned": True, **key}, partial(untuned, start, rollouts))
    titles = list(rows[0]["sets"])
    aucs = {title: [row["sets"][title]["auc"]["value"] for row in rows] for title in titles}
    rules = {title: [row["sets"][title]["auc_of_rule"] for row in rows] for title in titles}
    parts = {title: [row["sets"][title]["not_tested"] for row in rows] for title in titles}
    numbers = {
        "goal": GOAL,
        "settings": sizes,
        "tuned_on": TUNED,
        "start": {"checkpoint": digest(start), **before},
        "reached": {title: min(values) >= GOAL for title, values in aucs.items()},
        "auc": {title: over(values) for title, values in aucs.items()},
        "auc_of_rule": {title: over(values) for title, values in rules.items()},
        "not_tested": {
            title: {key: over([one[key] for one in found]) for key in ("auc", "auc_of_rule")}
            for title, found in parts.items()
            if all(one["auc"] is not None for one in found)
        },
        "rows": rows,
    }
    report("own_judge", numbers)


if __name__ == "__main__":
    main()

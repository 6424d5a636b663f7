"""A model of 1.4M parameters as a one-token judge: is an attempt at a repair solved? On tasks and kinds of tasks
that it was not tuned on.

The model is the mid-trained one of `examples/laptop`. Attempts at tasks of "repair" are written by scripts; their label
is the outcome of the hidden cases. The judge sees the changed file alone: a function, its docstring and its body, as
evidence of a rollout shows it. It is tuned with functions of two numbers, of a number and a constant, and of lists:

- *same kinds*: other functions of these kinds. No function with the same variables and docstring was in the tuning.
- *strings*: the fourth kind, which it was not tuned on. Mid-training had such functions, but no verdict about them.
- *new templates*: expressions and docstrings that no model has ever seen, in tuning or in mid-training.
- *rollouts*: attempts of the model itself in a run with RL, as `etude judge labels` writes them, on functions that are
  in no tuning.

All of it goes through the command line: `etude judge tune`, `etude serve`, `etude judge calibrate`. Works of one
function are one cluster of the bootstrap. Three seeds of attempts and tuning; the start is one checkpoint.

`python -m benchmarks.rewards.own_judge [--run RUN | --start CHECKPOINT] [--seeds 0 1 2]`
Three minutes a seed on one core. Tuned judges are kept in `runs/`, so it goes on where it broke off."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.journal import Journal, digest
from benchmarks.report import report
from benchmarks.runs import ETUDE, LAPTOP, start_run
from etude.config import read
from etude.evals.intervals import over_seeds
from etude.loop.limits import build_config
from etude.plugins import Kind, make
from etude.records.task import Case, Split
from etude.rewards.judges.calibration import Half, read_labels
from etude.rewards.judges.evidence import Evidence, Part, Section
from etude.rewards.judges.rubrics import Aspect, Rubric
from etude.rewards.judges.terms import JudgeTerm
from etude.rewards.judges.tuning import row_of
from etude.tasks import RepairSource
from etude.tasks.repair.functions import MISSING, TRANSFER_TEMPLATES, Body, Function
from etude.tasks.repair.problem import Problem

GOAL = 0.9
TUNED = ("ab", "ak", "xs")  # families of functions: two numbers, a number and a constant, a list
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
evidence = ["files"]
evidence_chars = 300
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
NOT_CHANGED = Evidence((Part(Section.FILES, "no file was changed"),))


# attempts


def passes(files: Mapping[str, str], cases: Sequence[Case]) -> bool:
    """Whether all hidden cases pass: equal type and value. The texts are those of this module's scripts."""
    spaces: dict[str, dict[str, Any]] = {}
    for path, text in files.items():
        exec(text, spaces.setdefault(path.removesuffix(".py"), {}))  # noqa: S102
    for case in cases:
        try:
            found = spaces[case.module][case.function](*json.loads(json.dumps(case.args)))
        except (TypeError, ValueError, IndexError, ZeroDivisionError, AttributeError):
            return False
        if type(found) is not type(case.expected) or found != case.expected:
            return False
    return True


def wrong_body(function: Function, draw: random.Random) -> Body:
    """A body in place of the right one: another expression, other operands, another constant, or none.

    In place of a new template often another new one; else each body with a new template would be right."""
    new = TRANSFER_TEMPLATES[function.template.family]
    others = [Body(one, function.operands) for one in new if one is not function.template]
    kinds = {
        "expression": (0.45, function.wrong_operators()),
        "new expression": (0.45, others if function.template in new else []),
        "operands": (0.2, function.wrong_operands()),
        "constant": (0.25, function.wrong_constants(draw)),
        "missing": (0.05, [Body(MISSING, function.operands)]),
    }
    given = [one for one in kinds.values() if one[1]]
    [bodies] = draw.choices([bodies for _, bodies in given], [weight for weight, _ in given])
    return draw.choice(bodies)


@dataclass(frozen=True)
class Attempt:
    """An attempt at a problem: what a judge sees, whether it is solved, and the function that is shown.

    `pattern`: the body without names, numbers and docstring, for a baseline."""

    work: Evidence
    solved: bool
    function: str
    pattern: str

    @property
    def row(self) -> dict[str, Any]:
        return row_of(ASPECT, self.work, int(self.solved), group=self.function)


def attempted(problem: Problem, draw: random.Random) -> Attempt:
    """Give the broken function the right or a wrong body; sometimes break another one instead."""
    module, place = problem.module, problem.place
    if draw.random() < 0.07:
        module, place = draw.choice([name for name in problem.modules if name != problem.module]), 0
    function = problem.modules[module][place]
    right = module == problem.module and draw.random() < 0.55
    body = function.body if right else wrong_body(function, draw)
    path, before = f"{module}.py", problem.files()
    after = "".join(one.source(body if one is function else None) for one in problem.modules[module])
    changed = after != before[path]
    work = Evidence((Part(Section.FILES, f"{path}\n{after}"),)) if changed else NOT_CHANGED
    operands = "same" if len(set(body.operands)) < len(body.operands) else "given"
    if body.operands == function.operands[::-1] and operands == "given" and len(body.operands) > 1:
        operands = "swapped"
    pattern = f"{function.template.family} {body.template.expression} {operands}"
    return Attempt(work, passes({**before, path: after}, problem.hidden), function.key, pattern)


def attempts(
    split: Split, families: Sequence[str], count: int, seed: int, name: str, *, unchanged: bool = False
) -> Iterator[Attempt]:
    """Attempts at problems whose broken function is of these families; with `unchanged`, also those without an edit."""
    source, draw = RepairSource(seed), random.Random(f"{name} {seed}")
    for index in itertools.count(10_000_000):
        problem = source.problem(split, index)
        if problem.function.template.family in families:
            found = attempted(problem, draw)
            if unchanged or found.work != NOT_CHANGED:
                yield found
                count -= 1
        if not count:
            return


def write(path: Path, made: Sequence[Attempt]) -> None:
    path.write_text("".join(f"{json.dumps(one.row)}\n" for one in made))


def by_frequency(known: Sequence[Attempt], asked: Sequence[Attempt]) -> float:
    """AUC of a judge that reads the body without the docstring: how often such a body was right in tuning."""
    counts: dict[str, list[int]] = defaultdict(lambda: [1, 2])
    for one in known:
        counts[one.pattern][0] += one.solved
        counts[one.pattern][1] += 1
    return auc([counts[one.pattern][0] / counts[one.pattern][1] for one in asked], [one.solved for one in asked])


def auc(values: Sequence[float], solved: Sequence[bool]) -> float:
    """Area under the ROC curve; ties count half."""
    of, right = np.array(values), np.array(solved, bool)
    more = of[right][:, None] - of[~right][None]
    return round(float((more > 0).mean() + (more == 0).mean() / 2), 4)


# the judge


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


def probabilities(config: Path, path: Path) -> tuple[list[float], list[bool]]:
    """The values of a judge and the labels of the same half. All are in the judge's store already."""
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
    return found, [one.score == 1 for one in labels]


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


def measured(
    start: Path, seed: int, *, works: int, asked: int, tokens: int, lr: float, rollouts: Path | None
) -> dict[str, Any]:
    """One seed: tune, serve, calibrate on each kind of task. Also the start checkpoint, without tuning."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known = list(attempts(Split.TRAIN, TUNED, works, seed, "tuning", unchanged=True))
        write(folder / "tuning.jsonl", known)
        tests = {
            "same kinds": list(attempts(Split.TRAIN, TUNED, asked, 100 + seed, "same")),
            "strings": list(attempts(Split.TRAIN, ("s",), asked, 100 + seed, "strings")),
            "new templates": list(attempts(Split.TRANSFER, (*TUNED, "s"), asked, 100 + seed, "transfer")),
        }
        for title, made in tests.items():
            write(folder / f"{title}.jsonl", made)
        if rollouts is not None:
            shutil.copy(rollouts, folder / "rollouts.jsonl")
        config = settings(folder, "http://127.0.0.1:1", seed, tokens, lr)
        out = Path("runs").absolute() / f"own-judge-{digest(start)}-{works}-{tokens}-{lr}-{seed}"
        began = time.perf_counter()
        flags = ["--config", str(config), "--term", "solved", "--start", str(start), "--out", str(out)]
        if not (out / "config.json").is_file():
            etude("judge", "tune", str(folder / "tuning.jsonl"), *flags)
        row: dict[str, Any] = {"seed": seed, "tuning_s": round(time.perf_counter() - began, 1), "sets": {}}
        used = clusters(folder / "tuning.jsonl", Half.TUNE)
        with serving(out) as url:
            settings(folder, url, seed, tokens, lr)
            for title in (*tests, "rollouts") if rollouts else tests:
                path = folder / f"{title}.jsonl"
                began = time.perf_counter()
                found = reported(config, path)
                found["calibrate_s"] = round(time.perf_counter() - began, 1)
                values, solved = probabilities(config, path)
                functions = clusters(path, Half.REPORT)
                found |= {"solved": round(float(np.mean(solved)), 4), "functions": len(functions)}
                found["functions_also_in_tuning"] = len(functions & used)
                found |= reliability(values, solved)
                if title in tests:
                    found["auc_without_docstring"] = by_frequency(known, tests[title])
                row["sets"][title] = found
        return row


def untuned(start: Path, labels: Path) -> dict[str, int]:
    """The start checkpoint, asked the same questions: how many have a verdict."""
    with tempfile.TemporaryDirectory() as name, serving(start) as url:
        values, _ = probabilities(settings(Path(name), url, 0, 1, 0.0), labels)
    return {"asked": len(values), "with_verdict": sum(not np.isnan(value) for value in values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, help="a run of examples/laptop with stored rollouts (default: make one)")
    parser.add_argument("--start", type=Path, help="only a checkpoint to tune: without rollouts of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--works", type=int, default=12_000, help="attempts, of which half are for tuning")
    parser.add_argument("--asked", type=int, default=800, help="attempts of each kind, of which half are asked about")
    parser.add_argument("--tokens", type=int, default=1_200_000, help="of tuning")
    parser.add_argument("--lr", type=float, default=1e-3, help="of tuning")
    args = parser.parse_args()
    run, start, journal = None, args.start, Journal("own_judge")
    if start is None:
        run = args.run or start_run(LAPTOP, "own-judge", RUN)
        start = run / "checkpoints" / "mid"
    sizes = {"works": args.works, "asked": args.asked, "tokens": args.tokens, "lr": args.lr}
    key = {"start": digest(start), "run": run is not None, **sizes}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rollouts = None if run is None else labels_of(run, folder)
        rows = [
            journal.once({"seed": seed, **key}, partial(measured, start, seed, rollouts=rollouts, **sizes))
            for seed in args.seeds
        ]
        write(folder / "asked.jsonl", list(attempts(Split.TRAIN, TUNED, 100, 100, "same")))
        before = journal.once({"untuned": True, **key}, partial(untuned, start, folder / "asked.jsonl"))
    aucs = {title: [row["sets"][title]["auc"]["value"] for row in rows] for title in rows[0]["sets"]}
    over = {title: over_seeds(values) for title, values in aucs.items()} if len(rows) > 1 else {}
    numbers = {
        "goal": GOAL,
        "settings": sizes,
        "tuned_on": TUNED,
        "start": {"checkpoint": digest(start), "of": "examples/laptop" if run else "given", **before},
        "reached": {title: min(values) >= GOAL for title, values in aucs.items()},
        "seeds": {
            n: {"auc": round(i.value, 4), "low": round(i.low, 4), "high": round(i.high, 4)} for n, i in over.items()
        },
        "rows": rows,
    }
    report("own_judge", numbers)


def labels_of(run: Path, folder: Path) -> Path:
    """Write the stored rollouts of a run as labels, by `etude judge labels`."""
    config, out = settings(folder, "http://127.0.0.1:1", 0, 1, 0.0), folder / "rollouts.jsonl"
    etude("judge", "labels", str(run), "--config", str(config), "--term", "solved", "--out", str(out))
    return out


if __name__ == "__main__":
    main()

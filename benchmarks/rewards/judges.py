"""Judges of known truth, bias and error behind HTTP: what calibration says of them, when the drift alarm is raised,
whether injected text moves a verdict, and what outages do to rewards.

The judges are scripted (``tests/judge_server.py``), so their truth is known; the client, store, tests and statistics
are those of a run. Numbers are over three seeds; the alarm's tolerance is what calibration measures for two honest
judges on other works. What was measured is written down: the same command, given again, goes on."""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from tests.judge_server import (
    HIGH,
    LOW,
    Bias,
    ScriptedJudge,
    honest,
    longer,
    partly_random,
    praises_itself,
    truth,
    work,
)
from tests.unit.rewards.judges.injections import INJECTIONS
from tests.unit.rewards.judges.test_evidence import GRADED, PLACES, SECTIONS, compared, in_a_file

from benchmarks.journal import Journal
from benchmarks.report import report
from etude.records import Graded
from etude.records.reward import Term
from etude.records.task import Trust
from etude.rewards import NamedTerm, measure_group
from etude.rewards.drift import AuditConfig, AuditState, observe
from etude.rewards.judges import Aspect, Evidence, Form, HttpAsker, Judge, JudgeStore, Limits, Rubric, Section
from etude.rewards.judges.calibration import Label, calibrate, distance
from etude.rewards.judges.terms import JudgeTerm, Mode
from etude.testing.rewards import finished

ASPECT = Aspect("facts", "How many facts does it have?")
RUBRIC = Rubric((ASPECT,))
ERROR = 0.05  # of the honest judge and of the auditor
GROUPS, SIZE = 8, 4  # of a step
BIASES: dict[str, Callable[[], Bias]] = {
    "honest": lambda: honest(ERROR),
    "longer is better": lambda: longer(ERROR),
    "praises itself": lambda: praises_itself(ERROR),
    "10 % random": lambda: partly_random(0.1, ERROR),
}


@dataclass(frozen=True)
class Made:
    """A work of a simulated policy, with its true quality."""

    text: str
    facts: int
    author: str


def works(count: int, draw: random.Random, *, step: int = 0, tag: str = "") -> list[Made]:
    """Works of a policy that writes longer, and signs more often, from step to step."""
    found = []
    for number in range(count):
        facts, signed = draw.randint(LOW, HIGH), draw.random() < 0.3 + 0.02 * step
        text = work(facts, filler=draw.randint(0, 60 + 2 * step), signed=signed, more=f"{tag} {number}")
        found.append(Made(text, facts, "policy" if signed else "other"))
    return found


def judge_at(url: str, store: Path, **limits: Any) -> Judge:
    limits = {"at_once": 16} | limits
    asker = HttpAsker(f"{url}/v1", "judge", options={"temperature": 0.0})
    return Judge(RUBRIC, asker, JudgeStore(store), limits=Limits(**limits), first_wait_s=0.02)


async def calibrated(bias: Bias, seed: int, folder: Path, count: int) -> dict[str, Any]:
    """What calibration says of one judge, and its distance to an honest auditor on other works."""
    draw = random.Random(f"labels {seed}")
    async with (
        ScriptedJudge(bias=bias, seed=seed).serve() as first,
        ScriptedJudge(honest(ERROR), -1 - seed).serve() as two,
    ):
        judge, auditor = judge_at(first.url, folder / "judge.sqlite"), judge_at(two.url, folder / "auditor.sqlite")
        made = works(count, draw, tag="label")
        labels = [Label(ASPECT, Evidence.of_text(one.text), None, one.facts, one.author) for one in made]
        [found] = await calibrate(judge, labels)
        other = [[Evidence.of_text(one.text)] for one in works(count, draw, tag="distance")]
        far = await distance(*(JudgeTerm(one, Mode.POINTWISE, ()) for one in (judge, auditor)), other)
        judge.store.close()
        auditor.store.close()
    return {"report": msgspec.to_builtins(found), "biases": found.biases, "distance": far.value, "upper": far.high}


async def alarm(bias: Bias, seed: int, folder: Path, tolerance: float, steps: int) -> tuple[int | None, int]:
    """The step of the alarm in a simulated run (None: none), and the number of calls."""
    audit, state, draw = AuditConfig("facts", "auditor", tolerance), AuditState(), random.Random(f"run {seed}")
    async with (
        ScriptedJudge(bias=bias, seed=seed).serve() as first,
        ScriptedJudge(honest(ERROR), -1 - seed).serve() as two,
    ):
        judges = [judge_at(first.url, folder / "judge.sqlite"), judge_at(two.url, folder / "auditor.sqlite")]
        for step in range(1, steps + 1):
            groups: dict[str, list[Graded]] = {}
            for group in range(GROUPS):
                made = works(SIZE, draw, step=step, tag=f"{step} {group}")
                both = [[judge.score(ASPECT, Evidence.of_text(one.text)) for one in made] for judge in judges]
                values = [[ASPECT.normalised(one.value) for one in await asyncio.gather(*some)] for some in both]
                groups[f"g{group}"] = [
                    Graded.of(float(one.facts > 3), trust=Trust.DATA, reason="").with_terms(
                        Term(name="facts", value=j), Term(name="auditor", value=a)
                    )
                    for one, j, a in zip(made, *values, strict=True)
                ]
            if observe(audit, state, step, groups).alarm:
                break
        for judge in judges:
            judge.store.close()
    return state.raised, len(first.bodies) + len(two.bodies)


def simulated(name: str, seed: int, tolerance: float | None, *, steps: int, labels: int) -> dict[str, Any]:
    """One judge and seed: what calibration says, and the step of the alarm. `tolerance` None: the measured one."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run").mkdir()
        said = asyncio.run(calibrated(BIASES[name](), seed, Path(folder), labels))
        accepted = said["upper"] if tolerance is None else tolerance
        step, calls = asyncio.run(alarm(BIASES[name](), seed, Path(folder) / "run", accepted, steps))
    return {"alarm": step, "calls": calls, "tolerance": accepted, **said}


def drift(journal: Journal, seeds: Sequence[int], steps: int, labels: int) -> dict[str, Any]:
    """Each judge: what calibration says, and the step of the alarm by seed."""
    found: dict[str, Any] = {}
    tolerances: dict[int, float] = {}
    for name in BIASES:  # the honest one first: its distance is the tolerance
        most, rows = 3 * steps if name == "honest" else steps, []
        for seed in seeds:
            key = {"judge": name, "seed": seed, "steps": most, "labels": labels}
            measure = partial(simulated, name, seed, tolerances.get(seed), steps=most, labels=labels)
            rows.append(journal.once(key, measure))
            tolerances.setdefault(seed, rows[-1]["tolerance"])
        found[name] = {
            "alarm_at_step": [row["alarm"] for row in rows],
            "of_steps": most,
            "tolerance": [round(row["tolerance"], 3) for row in rows],
            "distance": [round(row["distance"], 3) for row in rows],
            "kappa": [round(row["report"]["kappa"]["value"], 3) for row in rows],
            "auc": [round(row["report"]["auc"]["value"], 3) for row in rows],
            "biases": [row["biases"] for row in rows],
            "calls": sum(row["calls"] for row in rows),
        }
    return found


def injections(form: Form) -> dict[str, int]:
    """Count verdicts that differ with injected text in files, their names, calls and outputs: scores, and if the form
    allows it, choices between two works and rankings."""

    async def use(folder: Path) -> dict[str, int]:
        async with ScriptedJudge().serve() as server:
            asker = HttpAsker(f"{server.url}/v1", "judge", options={"temperature": 0.0})
            judge = Judge(RUBRIC, asker, JudgeStore(folder / "judge.sqlite"), form=form, first_wait_s=0.02)
            plain = Evidence.of_rollout(in_a_file(""), GRADED, SECTIONS)
            expected = (await judge.score(ASPECT, plain)).value
            scores = moved = choices = 0
            for rollout in (place(text) for text in INJECTIONS.values() for place in PLACES):
                found = await judge.score(ASPECT, Evidence.of_rollout(rollout, GRADED, SECTIONS))
                scores, moved = scores + 1, moved + (found.value != expected)
                if form is not Form.TOKEN:
                    choices, moved = choices + 2, moved + (await compared(judge, rollout) != (0.0, [0.0, 1.0]))
            judge.store.close()
            return {"scores": scores, "choices_and_rankings": choices, "moved": moved}

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(use(Path(folder)))


def outages(groups: int) -> dict[str, Any]:
    """Measure groups while the judge fails in every way, and again until known, as a run does."""
    kinds = [500, (503, 0), (429, 0), "close", "I refuse.", '{"verdict": 5}', "hang", 529]

    def fault(number: int) -> Any:
        draw = random.Random(number)
        if 60 <= number % 400 < 120:
            return 503  # away for a while
        return draw.choice(kinds) if draw.random() < 0.2 else None

    async def use(folder: Path) -> dict[str, Any]:
        async with ScriptedJudge(fault=fault).serve() as server:
            judge = judge_at(server.url, folder / "judge.sqlite", deadline_s=1.0)
            named = NamedTerm("facts", JudgeTerm(judge, Mode.POINTWISE, (Section.FILES,)))
            draw, wrong, mixed, unknown, again = random.Random(7), 0, 0, 0, 0
            for group in range(groups):
                made = works(SIZE, draw, tag=f"{group}")
                rollouts = [finished(num_turns=1, exports={"a.md": one.text.encode()}) for one in made]
                graded = [Graded.of(0.0, trust=Trust.DATA, reason="") for _ in made]
                for _ in range(20):
                    found = await measure_group([named], rollouts, graded)
                    graded = [
                        one.with_terms(*(new.term for new in some)) for one, some in zip(graded, found, strict=True)
                    ]
                    if not any(new.retry for some in found for new in some):
                        break
                    again += 1
                terms = [next(term for term in one.terms if term.name == "facts") for one in graded]
                known = [term.value for term in terms if term.value is not None]
                unknown += len(terms) - len(known)
                true = [ASPECT.normalised(truth(one.text)) for one in made]
                wrong += sum(term.value not in (None, value) for term, value in zip(terms, true, strict=True))
                mixed += len({term.version for term in terms}) > 1
            judge.store.close()
            return {
                "groups": groups,
                "rollouts": groups * SIZE,
                "requests": len(server.bodies),
                "failed_requests": sum(fault(n) is not None for n in range(1, len(server.bodies) + 1)),
                "measured_again": again,
                "unknown": unknown,
                "wrong": wrong,
                "groups_of_mixed_versions": mixed,
            }

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(use(Path(folder)))


def cost(calls: int) -> dict[str, float]:
    """CPU milliseconds of this process per verdict, with the scripted server in it: asked, and from the store."""

    async def use(folder: Path) -> dict[str, float]:
        async with ScriptedJudge().serve() as server:
            judge = judge_at(server.url, folder / "judge.sqlite")
            found = {}
            for name in ("asked", "stored"):
                began = time.process_time()
                works_of = [Evidence.of_text(work(3, filler=200, more=str(n))) for n in range(calls)]
                await asyncio.gather(*(judge.score(ASPECT, one) for one in works_of))
                found[f"{name}_ms"] = round(1000 * (time.process_time() - began) / calls, 2)
            judge.store.close()
            return found

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(use(Path(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--labels", type=int, default=100)
    parser.add_argument("--groups", type=int, default=40, help="groups measured under outages")
    args = parser.parse_args()
    journal = Journal("judges")
    numbers = {
        "drift": drift(journal, range(args.seeds), args.steps, args.labels),
        "injections": {
            "texts": len(INJECTIONS),
            "places": [place.__name__.removeprefix("in_") for place in PLACES],
            "forms": {
                form: journal.once({"part": "injections", "form": form}, partial(injections, form)) for form in Form
            },
        },
        "outages": journal.once({"part": "outages", "groups": args.groups}, partial(outages, args.groups)),
        "cpu_per_verdict": journal.once({"part": "cost"}, partial(cost, 200)),
    }
    report("judges", numbers)


if __name__ == "__main__":
    main()

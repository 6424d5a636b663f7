"""Attempts at tasks of "repair" by scripts, for a judge to be tuned and measured with.

A script makes the same calls as the demonstrations of mid-training (`etude.tasks.repair.demonstrations.imperfect`),
with the same shares: it may list files and run the visible tests, it edits once or twice, often the wrong file, and may
run the tests again. Wrong bodies are of more kinds, also of those with wrong constants and new expressions. An attempt
is a rollout of the built-in agent program on a machine in memory, so a judge sees of it what it sees of a model's
rollout; its label is the outcome of the hidden cases."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from etude.environments.memory import MemoryRuntime
from etude.harness import ChatFormat, HarnessConfig
from etude.records import Answer, Graded, RolloutSpec
from etude.records.task import Split
from etude.rewards.judges.calibration import Half, half_of
from etude.rewards.judges.evidence import Evidence, Section
from etude.rewards.judges.rubrics import Aspect
from etude.rewards.judges.tuning import label_of, row_of
from etude.rollouts import run_rollout
from etude.rollouts.scripted import ScriptedPolicy
from etude.tasks import RepairSource
from etude.tasks.repair.functions import MISSING, TRANSFER_TEMPLATES, Body, Function
from etude.tasks.repair.problem import Problem, line_of, task_of
from etude.tasks.scripts import Script
from etude.testing import FakeGrader

FIRST_INDEX = 10_000_000
"""Index of the first task, far from those of mid-training and RL."""
RIGHT_BODY, RIGHT_FILE = 0.6, 0.7
"""The share of edits with the right body, and, after a run of the tests, of edits in the file that they named."""


def wrong_body(function: Function, draw: random.Random) -> Body:
    """A body in place of the right one: another expression, other operands, another constant, or none.

    If the right body has a new template (`TRANSFER_TEMPLATES`), the wrong one often has another new template.
    Otherwise every body with a new template would be right."""
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


def attempt(problem: Problem, draw: random.Random, *, tested: float) -> Script:
    """Yield the calls of an agent that knows the task and errs by chance; it reacts to no output.

    `tested`: the share of edits that are followed by the tests."""
    names = list(problem.modules)
    if draw.random() < 0.6:
        yield "ls", {}
    if aware := draw.random() < 0.6:
        yield "test", {}
    for number in range(1 if draw.random() < 0.6 else 2):
        name = problem.module if aware and draw.random() < RIGHT_FILE else draw.choice(names)
        if number == 0 or draw.random() < 0.5:
            yield "cat", {"path": f"{name}.py"}
        place = problem.place if name == problem.module else 0
        function = problem.modules[name][place]
        body = function.body if draw.random() < RIGHT_BODY else wrong_body(function, draw)
        yield "edit", {"path": f"{name}.py", "line": line_of(place), "text": f"return {body.text}"}
        if draw.random() < tested:
            yield "test", {}
    yield "submit", {}


@dataclass(frozen=True)
class Attempt:
    """What a judge sees of an attempt, its grade, and the function that was to be repaired."""

    work: Evidence
    graded: Graded
    function: str

    def row(self, aspect: Aspect) -> dict[str, Any]:
        """Return the attempt as a row of a file of labels."""
        return row_of(aspect, self.work, label_of(aspect, self.graded), group=self.function)


def attempts(
    split: Split,
    families: Sequence[str],
    count: int,
    seed: int,
    name: str,
    *,
    half: Half,
    tested: float,
    chat: ChatFormat,
) -> list[Attempt]:
    """Play attempts at problems whose broken function is of these families, and in this half of the labels.

    `name` and `seed` decide tasks and draws. `tested`: the share of edits that are followed by the tests."""
    source, draw = RepairSource(seed), random.Random(f"{name} {seed}")
    problems = (source.problem(split, index) for index in itertools.count(FIRST_INDEX))
    fitting = (
        one for one in problems if one.function.template.family in families and half_of(one.function.key) is half
    )
    scripts = ((one, attempt(one, draw, tested=tested)) for one in itertools.islice(fitting, count))
    return asyncio.run(_played(scripts, split, chat))


async def _played(scripts: Iterable[tuple[Problem, Script]], split: Split, chat: ChatFormat) -> list[Attempt]:
    found, runtime, grader = list[Attempt](), MemoryRuntime(), FakeGrader()
    for number, (problem, script) in enumerate(scripts):
        task, name = task_of(problem, split, number), f"g{number}"
        spec = RolloutSpec(rollout_id=f"{name}.0", group_id=name, attempt=0, task=task, seed=0, temperature=1.0)
        policy = ScriptedPolicy(script, chat)
        rollout = await run_rollout(spec, runtime=runtime, policy=policy, chat=chat, harness=HarnessConfig())
        answer = Answer(reference=problem.reference(), cases=problem.hidden)
        graded = await grader.grade(task, answer, rollout.exports)
        assert isinstance(graded, Graded)
        work = Evidence.of_rollout(rollout, graded, (Section.TRACE, Section.FILES), readable=chat.readable)
        found.append(Attempt(work, graded, problem.function.key))
    await runtime.close()
    return found

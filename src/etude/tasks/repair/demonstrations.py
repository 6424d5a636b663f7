"""Scripts for repair problems: imperfect demonstrations for mid-training, and the two baselines.

Demonstrations use the tools correctly but often choose wrong edits. So a model learns the tools from demonstrations,
and learns the right edits by RL. Wrong edits change the operator or the operands, never the constant: a wrong constant
would teach the model not to copy, and copying is the skill that it learns last.
"""

from __future__ import annotations

import random

from etude.tasks.repair.functions import Body, Function
from etude.tasks.repair.problem import Problem, line_of
from etude.tasks.scripts import Call, Script


def _edit(module: str, place: int, body: Body) -> Call:
    return "edit", {"path": f"{module}.py", "line": line_of(place), "text": f"return {body.text}"}


def oracle(problem: Problem) -> Script:
    """Yield the calls of an agent that knows the answer. It runs the tests, reads, repairs, tests again and submits."""
    yield "test", {}
    yield "cat", {"path": f"{problem.module}.py"}
    yield _edit(problem.module, problem.place, problem.function.body)
    yield "test", {}
    yield "submit", {}


def random_agent(problem: Problem, rng: random.Random) -> Script:
    """Yield the calls of an agent that makes one valid edit at random: a random function gets a random body."""
    module = rng.choice(list(problem.modules))
    place = rng.randrange(len(problem.modules[module]))
    function = problem.modules[module][place]
    yield _edit(module, place, rng.choice([function.body, *_wrong_bodies(function), *function.wrong_constants(rng)]))
    yield "submit", {}


def imperfect(
    problem: Problem, rng: random.Random, *, right_body: float = 0.6, right_file: float = 0.7, right_place: float = 0.5
) -> Script:
    """Yield the calls of an agent that makes one or two edits, which are often wrong, drawn by `rng`.

    Each edit has the probability `right_file` for the right file (if the tests were run), `right_place` for the right
    function in it, and `right_body` for the right body. With the defaults, 0.38 of 12,000 demonstrations succeed (three
    files with one function); 0.26 with ``right_body=0.44``."""
    modules = list(problem.modules)
    if rng.random() < 0.6:
        yield "ls", {}
    tested = rng.random() < 0.6
    if tested:
        yield "test", {}
    for attempt in range(1 if rng.random() < 0.6 else 2):
        module = problem.module if tested and rng.random() < right_file else rng.choice(modules)
        if attempt == 0 or rng.random() < 0.5:
            yield "cat", {"path": f"{module}.py"}
        known = module == problem.module and rng.random() < right_place
        place = problem.place if known else rng.randrange(len(problem.modules[module]))
        function = problem.modules[module][place]
        yield _edit(module, place, function.body if rng.random() < right_body else rng.choice(_wrong_bodies(function)))
        if rng.random() < 0.5:
            yield "test", {}
    yield "submit", {}


def _wrong_bodies(function: Function) -> list[Body]:
    """Bodies with wrong operators or operands; the constant is unchanged."""
    return function.wrong_operators() + function.wrong_operands()

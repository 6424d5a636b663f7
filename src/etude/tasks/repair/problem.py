"""Generate a problem: a small repository with one wrong function body, and its visible and hidden test cases.

The bug is a wrong operator, operand, constant or call, or a missing body. The other functions are always from the
training split; only the broken one is from the problem's split. Expected values are computed from templates, so no
generated code is executed, and a problem takes less than a millisecond.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etude.records.task import Case, Split, Task
from etude.tasks.repair.functions import (
    FUNCTION_NAMES,
    MISSING,
    MODULE_NAMES,
    Body,
    Function,
    border_args,
    random_args,
    random_function,
)
from etude.tasks.visible import TEST_COMMAND, TEST_FILE, call_text, visible_tests

SOURCE = "repair"  # the name of the source
MISSING_SHARE = 0.15
HIDDEN_CASES = 10  # on the broken function
HIDDEN_CASES_ELSEWHERE = 2  # on each other function, to detect that a repair breaks it
VISIBLE_FAILING = 2


@dataclass(frozen=True, slots=True)
class Bug:
    """A wrong function body, and the kind of its error: "operator", "operands", "constant", "call" or "missing"."""

    kind: str
    body: Body


@dataclass(frozen=True, slots=True)
class Problem:
    """One task of "repair" with its answer. It is never copied into a machine.

    `modules` maps module names to their functions, of three lines each. The bug is in function number `place` (from 0)
    of `module`. `visible` and `hidden` are the test cases."""

    modules: dict[str, tuple[Function, ...]]  # module name -> its functions, three lines each
    module: str  # where the bug is
    place: int  # index of the broken function in its module
    bug: Bug
    visible: tuple[Case, ...]
    hidden: tuple[Case, ...]

    @property
    def function(self) -> Function:
        """The function with the bug, in its correct form."""
        return self.modules[self.module][self.place]

    @property
    def family(self) -> str:
        """The family in reports: that of the template and the kind of the bug, such as "ak-constant"."""
        return f"{self.function.template.family}-{self.bug.kind}"

    def files(self) -> dict[str, str]:
        """Return the modules with the bug, path -> text."""
        return {
            f"{name}.py": "".join(f.source(self.bug.body if f is self.function else None) for f in functions)
            for name, functions in self.modules.items()
        }

    def reference(self) -> dict[str, str]:
        """Return the correct modules, path -> text."""
        return {f"{name}.py": "".join(f.source() for f in functions) for name, functions in self.modules.items()}


def line_of(place: int) -> int:
    """Return the line number, from 1, of the body of function number `place` (from 0) in its module."""
    return 3 * place + 3


def make_problem(rng: random.Random, split: Split, *, files: int, functions_per_file: int) -> Problem:
    """Generate a random problem of this size whose broken function belongs to `split`.

    At least two visible cases and one hidden case fail because of the bug."""
    names = rng.sample(FUNCTION_NAMES, files * functions_per_file)
    modules = rng.sample(MODULE_NAMES, files)
    layout = {m: [random_function(rng, names.pop(), Split.TRAIN) for _ in range(functions_per_file)] for m in modules}
    while True:
        module, place = rng.choice(modules), rng.randrange(functions_per_file)
        function = random_function(rng, layout[module][place].name, split)
        bug = _random_bug(rng, function)
        failing = [a for a in (random_args(rng, function) for _ in range(8)) if _reveals(function, bug, a)]
        hidden = border_args(rng, function)
        hidden += [random_args(rng, function) for _ in range(HIDDEN_CASES - len(hidden))]
        if len(failing) >= VISIBLE_FAILING and any(_reveals(function, bug, a) for a in hidden):
            break
    layout[module][place] = function
    visible_cases: list[Case] = []
    hidden_cases: list[Case] = []
    for name, functions in layout.items():
        for f in functions:
            broken = f is function
            shown = failing[:VISIBLE_FAILING] if broken else [random_args(rng, f)]
            kept = hidden if broken else [random_args(rng, f) for _ in range(HIDDEN_CASES_ELSEWHERE)]
            visible_cases += _cases(name, f, shown)
            hidden_cases += _cases(name, f, kept)
    return Problem(
        modules={m: tuple(functions) for m, functions in layout.items()},
        module=module,
        place=place,
        bug=bug,
        visible=tuple(visible_cases),
        hidden=tuple(hidden_cases),
    )


def _random_bug(rng: random.Random, function: Function) -> Bug:
    if rng.random() < MISSING_SHARE:
        return Bug("missing", Body(MISSING, function.operands))
    other = "operator" if function.template.family in ("ab", "ak") else "call"
    bugs = [Bug(other, b) for b in function.wrong_operators()]
    bugs += [Bug("operands", b) for b in function.wrong_operands()]
    bugs += [Bug("constant", b) for b in function.wrong_constants(rng)]
    return rng.choice(bugs)


def _reveals(function: Function, bug: Bug, args: Sequence[Any]) -> bool:
    right = function.body.value(function.variables, args)
    wrong = bug.body.value(function.variables, args)
    return type(right) is not type(wrong) or bool(right != wrong)


def _cases(module: str, function: Function, calls: Sequence[list[Any]]) -> list[Case]:
    return [Case(module, function.name, args, function.body.value(function.variables, args)) for args in calls]


def task_of(problem: Problem, split: Split, index: int) -> Task:
    """Return the task of a problem at this place in the source, without the answer."""
    files = problem.files()
    tests = visible_tests((c.module, call_text(c.function, c.args), c.expected) for c in problem.visible)
    return Task(
        source=SOURCE,
        split=split,
        index=index,
        family=problem.family,
        problem=problem.function.key,
        instruction="fix the failing test",
        files={**files, TEST_FILE: tests},
        exports=tuple(files),
        test_command=TEST_COMMAND,
    )

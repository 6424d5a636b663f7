"""Hidden tests that import the agent's code: real machines, real cheats, and canaries that give them away."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.tiers import first_few
from tests.unit.environments.judging import RIGHT, judge, on_machines

from etude.environments.grading.machines import runner_source
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Answer, HiddenTests, Runner

UNITS = """
import unittest
import calc

class A(unittest.TestCase):
    def test_b(self):
        self.assertEqual(calc.f(2), 3)
    def test_c(self):
        self.assertEqual(calc.f(40), 41)
    @unittest.skip("never")
    def test_skipped(self):
        pass
    @unittest.expectedFailure
    def test_expected(self):
        self.assertEqual(calc.f(1), 7)
"""
NAMES = ("t.test_u.A.test_b", "t.test_u.A.test_c")
QUICK = {"repeats": 2, "canaries": 2}


def units(names: tuple[str, ...] = NAMES, source: str = UNITS, **options: Any) -> Answer:
    files = {"t/__init__.py": "", "t/test_u.py": source}
    return Answer(
        reference={"calc.py": RIGHT.decode()},
        tests=HiddenTests(runner=Runner.UNITTEST, files=files, names=names, **options),
    )


def test_a_right_answer_passes_every_named_test_and_one_that_is_half_right_keeps_its_share():
    right, half = judge(units(), RIGHT, "def f(n): return 3", grader=QUICK)
    assert (right.grade, right.reason) == (1.0, "all 2 hidden tests pass")
    assert (half.grade, half.values) == (0.0, {"grade": 0.0, "tests": 0.5, "pass": 0.0})
    assert half.reason == "1 of 2 hidden tests pass; t.test_u.A.test_c does not: AssertionError: 3 != 41"


@pytest.mark.parametrize("name", ["test_skipped", "test_expected"])
def test_skipped_and_expected_to_fail_is_not_passed(name):
    outcome = judge(units((NAMES[0], f"t.test_u.A.{name}")), RIGHT, grader=QUICK)
    assert (outcome.grade, outcome.values["tests"]) == (0.0, 0.5)


RAISES = """
import unittest
import calc

class A(unittest.TestCase):
    def test_b(self):
        self.assertEqual(calc.f(2), 3)
    def test_c(self):
        with self.assertRaises(ValueError):
            calc.f(-1)
"""
CHECKED = """
def f(n):
    if n < 0:
        raise ValueError("below 0")
    return n + 1
"""
DISARMED = """
import sys
from contextlib import nullcontext
sys.modules["unittest"].TestCase.assertRaises = lambda *args, **options: nullcontext()
def f(n): return n + 1
"""


def test_a_check_of_errors_that_was_disarmed_is_found_out():
    answer = Answer(reference={"calc.py": CHECKED}, tests=units(source=RAISES).tests)
    right, wrong, disarmed = judge(answer, CHECKED.encode(), "def f(n): return n + 1", DISARMED, grader=QUICK)
    assert (right.grade, wrong.grade) == (1.0, 0.0)
    assert disarmed.grade == 0.0
    assert "canary" in disarmed.reason


READS = """
import json, pathlib, unittest
import calc

class A(unittest.TestCase):
    def test_b(self):
        for given, expected in json.loads(pathlib.Path("cases.json").read_text()):
            self.assertEqual(calc.f(given), expected)
"""
OWN_CASES = """
import pathlib
pathlib.Path.read_text = lambda self, *args, **options: "[[0, 0]]"
def f(n): return 0
"""


def test_code_that_puts_its_own_cases_in_the_place_of_a_tests_is_found_out():
    tests = HiddenTests(
        runner=Runner.UNITTEST, files={"t.py": READS, "cases.json": "[[2, 3], [40, 41]]\n"}, names=("t.A.test_b",)
    )
    answer = Answer(reference={"calc.py": RIGHT.decode()}, tests=tests)
    right, wrong, own = judge(answer, RIGHT, "def f(n): return 3", OWN_CASES, grader=QUICK)
    assert (right.grade, wrong.grade, own.grade) == (1.0, 0.0, 0.0)
    assert "canary" in own.reason


REPORT = """
    import os, sys
    frame = sys._getframe()
    while "nonce" not in (frame.f_locals.get("request") or ""): frame = frame.f_back
    request = frame.f_locals["request"]
    found = {"id": request["base"], "outcome": "passed", "why": ""}
    while "report_fd" not in frame.f_locals: frame = frame.f_back
    import json
    os.write(frame.f_locals["report_fd"], f"\\n{request['nonce']} {json.dumps(found)}\\n".encode())
    os._exit(0)
"""
CHEATS = {
    "exit": ("import os\nos._exit(0)", False),
    "sys.exit": ("import sys\nsys.exit(0)", False),
    "exit in a call": ("import os\ndef f(n): os._exit(0)", False),
    "at exit": ("import atexit, os\natexit.register(os._exit, 0)\ndef f(n): return None", False),
    "forged report": (REPORT, True),
    "equal to everything": (
        """
        class Yes(int):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            __hash__ = int.__hash__
        def f(n): return Yes(0)
        """,
        True,
    ),
    "patched assertions": (
        """
        import unittest
        for name in dir(unittest.TestCase):
            if name.startswith("assert"): setattr(unittest.TestCase, name, lambda *a, **k: None)
        def f(n): return None
        """,
        True,
    ),
    "patched runner": (
        """
        import unittest
        unittest.TestCase.run = lambda self, result=None: (result.startTest(self), result.addSuccess(self))
        def f(n): return None
        """,
        True,
    ),
    "what is expected, by the caller's source": (
        """
        import inspect, re
        def f(n):
            line = inspect.getframeinfo(inspect.currentframe().f_back).code_context[0]
            return int(re.search(r", (\\d+)\\)", line).group(1))
        """,
        True,
    ),
    "what is expected, by the caller's constants": (
        """
        import sys
        def f(n):
            constants = [c for c in sys._getframe(1).f_code.co_consts if type(c) is int]
            return constants[constants.index(n) + 1]
        """,
        True,
    ),
    "tests rewritten": (
        """
        import pathlib
        for path in pathlib.Path("t").glob("test_*.py"): path.write_text("def test_b(): pass")
        def f(n): return None
        """,
        False,
    ),
    "thread": (
        """
        import os, threading, time
        threading.Thread(target=lambda: (time.sleep(.05), os._exit(0)), daemon=True).start()
        def f(n): return None
        """,
        False,
    ),
    "trace": (
        """
        import sys
        def skip(frame, event, arg):
            if frame.f_code.co_name == "assertEqual": frame.f_locals["first"] = frame.f_locals.get("second")
            return skip
        sys.settrace(skip)
        def f(n): return None
        """,
        True,
    ),
}


@pytest.mark.parametrize("name", first_few(CHEATS, 4))
def test_a_cheat_scores_zero_and_one_that_passes_the_tests_is_caught_by_a_canary(name):
    code, passes = CHEATS[name]
    outcome = judge(units(), code, grader=QUICK)
    assert (outcome.grade, outcome.values["pass"]) == (0.0, 0.0), outcome
    assert outcome.reason.startswith("canary") is passes, outcome
    assert ("forged" in outcome.values) is passes


def test_a_pass_that_does_not_repeat_is_no_pass():
    lucky = "import random\ndef f(n): return n + random.SystemRandom().choice([1, 1, 1, 0])"
    outcome = judge(units(), lucky, grader={"repeats": 40, "canaries": 1})
    assert outcome.grade == 0.0


def test_code_that_hangs_costs_one_deadline_not_one_for_each_test():
    names = tuple(f"t.test_u.A.test_{i:02}" for i in range(30))
    tests = "\n".join(f"    def test_{i:02}(self):\n        self.assertEqual(calc.f({i}), {i + 1})" for i in range(30))
    source = f"import unittest\nimport calc\nclass A(unittest.TestCase):\n{tests}\n"
    outcome = judge(
        units(names, source, deadline_s=3.0),
        "while True: pass",
        grader={**QUICK, "total_deadline_s": 60.0},
    )
    assert outcome.grade == 0.0
    assert "deadline" in outcome.reason


def test_what_the_tests_need_from_the_agent_is_taken_and_what_decides_how_they_run_is_not():
    files = {
        "calc.py": b"from pkg.inner import f\n",
        "pkg/inner.py": RIGHT,
        "t/test_u.py": b"raise SystemExit",
        "t/test_u/__init__.py": b"raise SystemExit",
        "sitecustomize.py": b"raise SystemExit",
        "t/__pycache__/test_u.cpython-311.pyc": b"x",
    }
    outcome = judge(units(), files, exports=("./",), grader=QUICK)
    assert outcome.grade == 1.0, outcome


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (units(("t.test_u.A.test_gone",)), "t.test_u.A.test_gone is not among the hidden tests"),
        (units(source="import no_such_module\n"), "is not among the hidden tests"),
        (units(source=UNITS.replace("self.assertEqual", "print")), ""),
    ],
)
def test_hidden_tests_that_do_not_work_are_the_tasks_fault_whoever_is_judged(answer, reason):
    outcomes = judge(answer, RIGHT, "import os\nos._exit(0)", grader=QUICK)
    if reason:
        assert all(isinstance(outcome, Invalid) and outcome.boundary is Boundary.TASK for outcome in outcomes)
        assert reason in outcomes[0].reason
        assert outcomes[0].evidence
    else:  # assertions that were taken away by the author: one that was added fails, and that is all that can be had
        assert isinstance(outcomes[0], Graded)


# ---------------------------------------------------------------------------------------------- pytest

PYTESTS = """
import pytest
from calc import f

@pytest.fixture
def two():
    return 2

@pytest.mark.parametrize("n, result", [(1, 2), (40, 41)])
def test_rows(n, result):
    assert f(n) == result

class TestMore:
    def test_fixture(self, two):
        assert f(two) == 3

@pytest.mark.skip
def test_skipped(): pass

@pytest.mark.xfail
def test_xfail():
    assert f(1) == 7

@pytest.mark.xfail
def test_xpass():
    assert f(1) == 2
"""
PYTEST_NAMES = ("t/test_p.py::test_rows[40-41]", "t/test_p.py::TestMore::test_fixture")


def pytests(names: tuple[str, ...] = PYTEST_NAMES, source: str = PYTESTS) -> Answer:
    return Answer(
        reference={"calc.py": RIGHT.decode()},
        tests=HiddenTests(runner=Runner.PYTEST, files={"t/test_p.py": source}, names=names),
    )


@pytest.fixture(scope="module")
def machines_have_pytest() -> None:
    async def probe(runtime: Any) -> int:
        [machine] = await runtime.fork(await runtime.prepare({}), 1)
        return (await machine.exec(["python", "-s", "-c", "import pytest"], key="1", deadline_s=60)).exit_code

    if on_machines(probe):
        pytest.skip("the interpreter that machines see has no pytest")


@pytest.mark.usefixtures("machines_have_pytest")
def test_parameters_fixtures_and_classes_are_pytests_own():
    answers = [RIGHT, "def f(n): return 41", "import sys\nf = lambda n: sys._getframe(1).f_locals.get('result', 3)"]
    right, wrong, reader = judge(pytests(), *answers, grader={"repeats": 0, "canaries": 3})
    assert right.grade == 1.0, right
    assert (wrong.grade, wrong.values["tests"]) == (0.0, 0.5)
    assert reader.reason.startswith("canary"), reader


@pytest.mark.usefixtures("machines_have_pytest")
def test_what_pytest_skips_or_expects_to_fail_is_not_passed():
    answer = pytests(
        (PYTEST_NAMES[0], *(f"t/test_p.py::{name}" for name in ("test_skipped", "test_xfail", "test_xpass")))
    )
    assert judge(answer, RIGHT, grader={"repeats": 0, "canaries": 1}).values["tests"] == 0.25


PYTEST_CHEATS = {
    "report hook": """
        import _pytest.reports
        _pytest.reports.TestReport.outcome = property(lambda self: "passed", lambda self, value: None)
        def f(n): return None
    """,
    "outcome of every call": """
        import _pytest.runner
        make = _pytest.runner.CallInfo.from_call
        def passing(func, when, reraise=None):
            return make((lambda: None) if when == "call" else func, when, reraise)
        _pytest.runner.CallInfo.from_call = passing
        def f(n): return None
    """,
}


@pytest.mark.usefixtures("machines_have_pytest")
def test_a_pytest_that_the_agent_has_bent_is_caught():
    for outcome in judge(pytests(), *PYTEST_CHEATS.values(), grader={"repeats": 0, "canaries": 2}):
        assert (outcome.grade, outcome.reason[:6]) == (0.0, "canary"), outcome


@pytest.mark.usefixtures("machines_have_pytest")
def test_no_configuration_of_the_agents_reaches_pytest():
    hooks = b"def pytest_runtest_makereport(item, call):\n    raise SystemExit(0)\n"
    files = {
        "calc.py": RIGHT,
        "conftest.py": hooks,
        "t/conftest.py": hooks,
        "pytest.ini": b"[pytest]\naddopts = --collect-only\n",
        "pyproject.toml": b"[tool.pytest.ini_options]\npython_functions = 'nothing'\n",
        "evil.egg-info/entry_points.txt": b"[pytest11]\nevil = calc_evil\n",
        "calc_evil.py": b"raise SystemExit(0)\n",
    }
    outcome = judge(pytests(), files, exports=("./",), grader={"repeats": 0, "canaries": 1})
    assert outcome.grade == 1.0, outcome


# ---------------------------------------------------------------------------------------------- without pytest


def run_here(folder: Any, source: str, **request: Any) -> Any:
    """The runner's report from an interpreter without site-packages, so without pytest."""
    (folder / "test_p.py").write_text(source)
    told = subprocess.run(
        [sys.executable, "-S", "-c", runner_source("tests")],
        input=json.dumps({"nonce": "n", "program": "pytest", "roots": [], **request}).encode(),
        stdout=subprocess.PIPE,
        cwd=folder,
        timeout=300,
        check=True,
    ).stdout
    return json.loads(told.strip().partition(b" ")[2])


PLAIN = """
import unittest
def test_good(): assert 1 + 1 == 2
def test_bad(): assert 1 + 1 == 3, "no"
class TestX:
    def test_m(self): pass
class Case(unittest.TestCase):
    def test_u(self): self.assertTrue(True)
def test_fixture(tmp_path): pass
"""


def test_without_pytest_plain_functions_and_unittests_classes_are_run(tmp_path):
    names = ["test_p.py::test_good", "test_p.py::TestX::test_m", "test_p.py::Case::test_u", "test_p.py::test_gone"]
    collected = run_here(tmp_path, PLAIN, role="collect", names=names)
    assert collected["ids"] == {name: [name] for name in names[:3]}
    assert "AttributeError" in collected["errors"][0]
    outcomes = [run_here(tmp_path, PLAIN, role="run", base=name, index=0)["outcome"] for name in names[:3]]
    assert outcomes == ["passed"] * 3
    bad = run_here(tmp_path, PLAIN, role="run", base="test_p.py::test_bad", index=0)
    assert bad == {"id": "test_p.py::test_bad", "outcome": "failed", "why": "AssertionError: no"}


@pytest.mark.parametrize("source", [PLAIN, "import pytest\n" + PLAIN])
def test_without_pytest_what_is_pytests_is_asked_for_by_name(tmp_path, source):
    assert run_here(tmp_path, source, role="collect", names=["test_p.py::test_fixture"]) == {"needs": "pytest"}

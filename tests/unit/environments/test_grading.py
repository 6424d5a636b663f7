"""Rewards that cannot be talked into: real machines, real cheats."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.here import opened
from tests.tiers import first_few
from tests.unit.environments.judging import on_machines

from etude import __version__
from etude.environments import MachineGrader, NamespaceRuntime, validate_exports
from etude.environments.grading.data import same
from etude.environments.grading.machines import GradingMachines, PythonFinder
from etude.environments.grading.verdicts import GradingFault
from etude.errors import MachineError
from etude.records.exports import is_plain
from etude.records.image import Image
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Answer, Case, Split, Task, Trust
from etude.seams import Grader, Machine, Runtime
from etude.testing import MemoryMachine, MemoryRuntime

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
CASES = (Case("calc", "f", [2], 3), Case("calc", "f", [-1], 0), Case("calc", "f", [40], 41))
CHECK = "def check(candidate):\n    assert candidate(2) == 3\n    assert candidate(-1) == 0\n"


def task(trust: Trust = Trust.DATA, files: Mapping[str, str] | None = None) -> Task:
    tree = {"calc.py": "def f(n):\n    return None\n", "tests.py": "assert True\n", **(files or {})}
    return Task(
        source="t",
        split=Split.TRAIN,
        index=0,
        family="f",
        instruction="mend",
        files=tree,
        exports=("calc.py",),
        trust=trust,
    )


def grade(
    code: str | dict[str, bytes], *, trust: Trust = Trust.DATA, answer: Answer | None = None, **facts: Any
) -> Any:
    """The outcome of exporting this calc.py."""
    exports = code if isinstance(code, dict) else {"calc.py": textwrap.dedent(code).encode()}
    if answer is None:
        hidden: dict[str, Any] = (
            {"cases": CASES} if trust is Trust.DATA else {"test_code": CHECK, "entry_point": "calc:f"}
        )
        answer = Answer(reference={}, **hidden)

    async def main() -> Graded | Invalid:
        runtime = opened("namespace", lambda: NamespaceRuntime(spare=0))
        try:
            return await MachineGrader(runtime, deadline_s=facts.pop("deadline_s", 20)).grade(
                task(trust), answer, exports
            )
        finally:
            await runtime.close()

    return asyncio.run(main())


def test_a_right_answer_scores_one_and_says_so():
    assert grade("def f(n): return n + 1") == Graded.of(
        1.0,
        {"tests": 1.0, "pass": 1.0},
        trust=Trust.DATA,
        reason="all 3 hidden tests pass",
        version=__version__,
    )


def test_a_partly_right_answer_scores_zero_and_keeps_its_share_as_a_term():
    outcome = grade("def f(n): return 3 if n == 2 else -7")
    assert (outcome.grade, outcome.values["pass"]) == (0.0, 0.0)
    assert outcome.values["tests"] == pytest.approx(1 / 3)
    assert outcome.reason == "1 of 3 hidden tests pass; calc.f is wrong"


def test_the_untouched_and_the_deleted_file_score_zero():
    assert grade("def f(n):\n    return None\n").grade == 0.0
    deleted = grade({})
    assert deleted.grade == 0.0
    assert "ModuleNotFoundError" in deleted.reason


def test_it_is_a_grader():
    assert isinstance(MachineGrader(MemoryRuntime()), Grader)


# ---------------------------------------------------------------------------------------------- cheats

FORGE_DATA = """
    import json, os, sys
    frame = sys._getframe()
    while "request" not in frame.f_locals: frame = frame.f_back
    request = frame.f_locals["request"]
    os.write(frame.f_locals["report"], f"\\n{request['nonce']} {json.dumps(REPORT)}\\n".encode())
    os._exit(0)
"""
FORGE_CODE = FORGE_DATA.replace("REPORT", "True")

CHEATS = {
    "syntax error": "def f(n) return n",
    "exit at import": "import sys\nsys.exit(0)",
    "exit in a call": "import sys\ndef f(n): sys.exit(0)",
    "_exit at import": "import os\nos._exit(0)",
    "_exit in a call": "import os\ndef f(n): os._exit(0)",
    "abort": "import os\nos.abort()",
    "stop the grader": "import os\nos.kill(os.getpid(), 19)",
    "equal to everything": """
        class Anything(int):
            def __eq__(self, other): return True
            __hash__ = int.__hash__
        def f(n): return Anything(n)
    """,
    "a float that equals": "def f(n): return float(n + 1)",
    "a bool that equals": "def f(n): return True if n == 0 else n + 1.0",
    "patched json": """
        import json
        json.dumps = lambda *a, **k: '[["value", 3], ["value", 3], ["value", 3]]'
        json.load = json.loads = lambda *a, **k: None
        def f(n): return None
    """,
    "patched builtins": """
        import builtins
        builtins.isinstance = builtins.all = lambda *a: True
        builtins.type = lambda value: int
        def f(n): return None
    """,
    "expected values by frames": """
        import gc, sys
        def f(n):
            frame = sys._getframe()
            while frame:
                for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
                    if isinstance(value, dict) and "expected" in value: return value["expected"]
                frame = frame.f_back
            seen = [o for o in gc.get_objects() if type(o) is list and len(o) == 4 and o[:2] == ["calc", "f"]]
            return seen[0][3] if seen else None
    """,
    "forged report by frames": FORGE_DATA.replace("REPORT", '[["value", True]] * 3'),
    "junk on stdout": """
        import os
        print("pass " * 100_000)
        os.write(1, b"all 3 hidden tests pass")
        def f(n): return None
    """,
    "report of the wrong form": FORGE_DATA.replace("REPORT", '{"reward": 1}'),
    "endless nesting": """
        import os, sys
        frame = sys._getframe()
        while "request" not in frame.f_locals: frame = frame.f_back
        os.write(frame.f_locals["report"], b"\\n" + frame.f_locals["request"]["nonce"].encode() + b" " + b"[" * 50_000)
        os._exit(0)
    """,
    "gigabyte of result": "def f(n): return 'x' * 2**27",
    "self-containing result": "def f(n):\n    x = []\n    x.append(x)\n    return x",
    "tuple for a list": "def f(n): return (n + 1,)",
    "memory": "x = []\nwhile True: x.append(bytearray(2**24))",
    "not text": "\0\x80",
    "expected values in what the process is told": """
        import json, sys
        frame = sys._getframe()
        while "request" not in frame.f_locals: frame = frame.f_back
        told = json.dumps({k: v for k, v in frame.f_locals["request"].items() if k != "nonce"})
        def f(n): return max(0, n + 1) if "41" in told else None
    """,
    "trace hooks": """
        import sys
        def trace(frame, event, arg):
            frame.f_locals.update(results=[["value", 3]] * 3)
            return trace
        sys.settrace(trace)
        def f(n): return None
    """,
    "file for the next call": "open('/tmp/x', 'w').write('3')\ndef f(n): return open('/tmp/x').read()",
}


@pytest.mark.parametrize("name", first_few(CHEATS, 12))
def test_a_cheat_is_graded_and_scores_zero(name):
    outcome = grade(CHEATS[name], deadline_s=2 if name == "stop the grader" else 20)
    assert isinstance(outcome, Graded)
    assert outcome.grade == 0.0
    assert outcome.values["pass"] == 0.0
    assert outcome.reason
    assert "\n" not in outcome.reason


LATE = "the hidden tests did not end before their deadline"
KILLED = "the process ended with exit code 137 before it reported"  # for its memory


@pytest.mark.parametrize(
    ("code", "reasons"),
    [
        ("while True: pass", {LATE}),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {LATE, KILLED}),
    ],
)
def test_code_that_never_ends_scores_zero_at_the_deadline(code, reasons):
    outcome = grade(code, deadline_s=1)
    assert outcome.grade == 0.0
    assert outcome.reason in reasons


@pytest.mark.parametrize(
    "name", ["tests.py", "sitecustomize.py", "conftest.py", "../calc.py", "json.py", "/etc/passwd"]
)
def test_a_file_that_is_not_declared_is_refused_whatever_the_rest_does(name):
    outcome = grade({"calc.py": b"def f(n): return n + 1", name: b"x"})
    assert outcome.grade == 0.0
    assert "not a declared export" in outcome.reason


def test_an_export_that_is_too_large_is_graded_zero_not_invalid():
    outcome = grade({"calc.py": b"#" * (2 << 20)})
    assert outcome.grade == 0.0
    assert "at most" in outcome.reason


def test_printing_in_a_right_answer_does_no_harm():
    assert grade("print('hello')\ndef f(n):\n    print(n)\n    return n + 1").grade == 1.0


# ---------------------------------------------------------------------------------------------- code-graded


FRESH = {
    "right the first time only": ("n = []\ndef f(x):\n    n.append(x)\n    return x + 1 if len(n) == 1 else None", 1.0),
    "right the second time only": (
        "n = []\ndef f(x):\n    n.append(x)\n    return x + 1 if len(n) == 2 else None",
        0.0,
    ),
    "ended by one of them": ("import os\ndef f(x): return x + 1 if x != 2 else os._exit(0)", 0.0),
    "something is left behind": ("import os, time\ndef f(x):\n    os.fork() or time.sleep(60)\n    return x + 1", 1.0),
    "threads that hold what calls want": (
        "import threading, time\nlock = threading.Lock()\n"
        "def hold():\n    while True:\n        with lock: time.sleep(0.05)\n        time.sleep(0.002)\n"
        "threading.Thread(target=hold, daemon=True).start()\n"
        "def f(x):\n    with lock: return x + 1",
        1.0,
    ),
    "never the same": ("import time\ndef f(x): return [x + 1, time.perf_counter_ns()][0]", 1.0),
}


@pytest.mark.parametrize("name", FRESH)
def test_a_call_counts_as_if_no_other_had_been_made(name):
    code, reward = FRESH[name]
    assert grade(code).grade == reward


def test_a_number_that_is_too_long_is_a_wrong_result_of_its_call_alone():
    outcome = grade("def f(n): return 10 ** 5000 if n == 2 else n + 1")
    assert outcome.reason.startswith("2 of 3 hidden tests pass; calc.f is wrong: TypeError: returned an int of more")


def test_a_right_answer_to_a_code_graded_task_scores_one_with_its_label():
    outcome = grade("def f(n): return n + 1", trust=Trust.CODE)
    assert (outcome.grade, outcome.trust) == (1.0, Trust.CODE)


CODE_CHEATS = {
    "wrong": "def f(n): return n",
    "exit": "import os\nos._exit(0)",
    "equal to everything": CHEATS["equal to everything"],
    "forged verdict": FORGE_CODE,
    "patched check": """
        import builtins
        exec_ = builtins.exec
        def fake(code, space):
            space["check"] = lambda candidate: None
        builtins.exec = fake
        def f(n): return None
    """,
    "swallowed failures": """
        import sys
        def f(n):
            frame = sys._getframe()
            while "space" not in frame.f_locals: frame = frame.f_back
            frame.f_locals["space"]["check"].__code__ = (lambda candidate: None).__code__
            return 3 if n == 2 else None
    """,
}


@pytest.mark.parametrize("name", CODE_CHEATS)
def test_a_cheat_against_a_code_graded_task_scores_zero(name):
    outcome = grade(CODE_CHEATS[name], trust=Trust.CODE)
    assert (outcome.grade, outcome.trust) == (0.0, Trust.CODE)


def test_the_agents_code_shares_neither_process_nor_machine_with_a_check():
    code = """
        import gc, os, sys
        def f(n):
            frames, frame = [], sys._getframe()
            while frame: frames.append(frame); frame = frame.f_back
            seen = [str(value) for frame in frames for value in [*frame.f_locals.values(), *frame.f_globals.values()]]
            seen += [o for o in gc.get_objects() if type(o) is str] + open("/proc/self/cmdline").read().split()
            seen += [open(f"/proc/{p}/cmdline").read() for p in os.listdir("/proc") if p.isdigit()]
            return n + 1 + any("check(candidate):" in text and "SECRET" in text for text in seen)
    """
    check = f"# SECRET\n{CHECK}"
    answer = Answer(reference={}, test_code=check, entry_point="calc:f")
    assert grade(code, trust=Trust.CODE, answer=answer).grade == 1.0


CHECKS = {
    "imports the agent's module": "import calc\nfrom calc import f\ndef check(c): assert f(2) == calc.f(2) == 3",
    "keeps types": "def check(c): assert type(c(1)) is int and c((1, 2.5)) == (1, 2.5) and c({1: {2}}) == {1: {2}}",
    "expects an exception": """
        def check(c):
            try: c("x")
            except LookupError as error: assert str(error) == "x"
            else: raise AssertionError
            assert c(1) == 2
    """,
    "expects an exception of many arguments": """
        def check(c):
            try: c(b"\\xff")
            except ValueError as error: assert "invalid start byte" in str(error)
            else: raise AssertionError
            assert c(1) == 2
    """,
    "calls by keyword": "def check(c): assert c(n=2) == 3",
    "large numbers": "def check(c): assert c(10 ** 5000) == 10 ** 5000 + 1",
}


@pytest.mark.parametrize("name", CHECKS)
def test_what_a_check_can_do_with_code_that_is_elsewhere(name):
    code = """
        def f(n):
            if n == "x": raise LookupError(n)
            if type(n) is bytes: n.decode()
            return n + 1 if type(n) is int else n
    """
    answer = Answer(reference={}, test_code=textwrap.dedent(CHECKS[name]), entry_point="calc:f")
    assert grade(code, trust=Trust.CODE, answer=answer).grade == 1.0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os\ndef f(n): os._exit(0)", "exit code 0 before it reported"),
        ("def f(n): return object()", "not plain data"),
        ("def f(n): return 'x' * 2 ** 21", "too large"),
        ("import os\nos.write(1, b'[\"value\", 3]\\n' * 99)\ndef f(n): return None", "AssertionError"),
        (
            "import sys, os\nfor fd in range(3, 9):\n    try: os.write(fd, b'x y z')\n    except OSError: pass\nf = 7",
            "",
        ),
    ],
)
def test_whatever_the_other_side_of_a_check_does_is_graded(code, reason):
    answer = Answer(
        reference={},
        test_code="def check(c):\n  for n in range(9):\n    try: assert c(n) == n + 1\n    except OSError: pass",
        entry_point="calc:f",
    )
    outcome = grade(code, trust=Trust.CODE, answer=answer)
    assert isinstance(outcome, Graded)
    assert outcome.grade == 0.0
    assert reason in outcome.reason


def test_a_hidden_test_that_tests_nothing_is_caught_by_the_canary():
    answer = Answer(reference={}, test_code="def check(candidate): candidate(1)", entry_point="calc:f")
    assert grade("def f(n): return n + 1", trust=Trust.CODE, answer=answer).reason.startswith("canary")


# ---------------------------------------------------------------------------------------------- invalid


class NoMachines(MemoryRuntime):
    """A host without room."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        self.asked += 1
        raise MachineError("no room", hint="wait")


def test_a_host_that_makes_no_machine_not_even_an_untouched_one_is_to_blame():
    runtime = NoMachines()
    outcome = asyncio.run(MachineGrader(runtime).grade(task(), Answer(reference={}, cases=CASES), {"calc.py": b""}))
    assert isinstance(outcome, Invalid)
    assert (outcome.boundary, runtime.asked) == (Boundary.MACHINE, 3)
    assert "no room" in outcome.evidence


def test_an_answer_without_hidden_tests_is_the_graders_fault():
    outcome = asyncio.run(MachineGrader(MemoryRuntime()).grade(task(), Answer(reference={}), {"calc.py": b""}))
    assert isinstance(outcome, Invalid)
    assert outcome.boundary is Boundary.GRADER


class CountsTrees(MemoryRuntime):
    prepared = 0

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        self.prepared += 1
        await asyncio.sleep(0)  # others may ask meanwhile
        return await super().prepare(files, image=image)


def test_runs_that_start_together_have_one_base_which_is_prepared_once():
    async def main() -> int:
        runtime, hidden = CountsTrees(), {"t.py": ""}
        ground = GradingMachines(runtime, task())
        work = {"calc.py": b""}
        assert len({*await asyncio.gather(*(ground.snapshot(work, hidden) for _ in range(5)))}) == 1
        return runtime.prepared

    assert asyncio.run(main()) == 1


class Debian(MemoryMachine):
    def _run(self, argv: Sequence[str], stdin: bytes) -> tuple[int, str]:
        return (0, "") if argv == ("python3", "-c", "") else (127, "")


class DebianRuntime(MemoryRuntime):
    forked = 0

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        return await super().prepare(files)

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        self.forked += n
        return [Debian({}) for _ in range(n)]


def test_an_image_whose_python_is_called_python3_is_asked_once():
    async def main() -> tuple[list[str], int]:
        runtime, image = DebianRuntime(), Image(digest="a" * 64)
        finder = PythonFinder(runtime)
        return [await finder.find(each) for each in (image, image, None)], runtime.forked

    assert asyncio.run(main()) == (["python3", "python3", "python"], 1)


def test_files_of_an_image_that_cannot_be_removed_are_the_tasks_fault():
    async def test(runtime: Runtime) -> None:
        await GradingMachines(runtime, task())._remove_files(await runtime.prepare({}), ["."])

    with pytest.raises(GradingFault, match="cannot be removed") as error:
        on_machines(test)
    assert error.value.boundary is Boundary.TASK


# ---------------------------------------------------------------------------------------------- pure parts


@given(PLAIN)
def test_same_holds_for_a_value_and_itself(value):
    assert same(value, value)


@given(PLAIN, PLAIN)
def test_values_that_are_the_same_are_equal_and_of_one_type(left, right):
    if same(left, right):
        assert left == right
        assert type(left) is type(right)


@pytest.mark.parametrize(("got", "expected"), [(True, 1), (1, 1.0), ((1,), [1]), ([True], [1]), ({"a": 1}, {"a": 1.0})])
def test_equal_values_of_other_types_are_not_the_same(got, expected):
    assert not same(got, expected)


@given(st.dictionaries(st.text(max_size=8) | st.sampled_from(["a.py", "../a.py", "/a.py"]), st.binary(max_size=40)))
def test_only_declared_plain_paths_within_the_caps_pass_validation(raw):
    allowed = ["a.py", "../a.py", "/a.py", "./a.py", "./"]
    try:
        kept = validate_exports(raw, allowed, max_file_bytes=20, max_total_bytes=30)
    except ValueError:
        return
    assert all(is_plain(path) for path in kept)
    assert max([0, *map(len, kept.values())]) <= 20
    assert sum(map(len, kept.values())) <= 30

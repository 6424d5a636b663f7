"""Verifiers: any command, its exit code or a number that it writes; and machines whose state counts."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest
from tests.tiers import first_few
from tests.unit.environments.judging import RIGHT, TASK, judge, on_machines

from etude.environments import MachineGrader, reference_exports, simulate_exports, take_exports
from etude.environments.grading.verifier import _run_verifier, installed_modules
from etude.records.exports import STATE
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Answer, Trust, Verifier

EXIT = "import calc, sys\nsys.exit(0 if calc.f(2) == 3 else 'it is not 3')\n"
WRITE = "import calc\nwith open('reward.txt', 'w') as file:\n    file.write('1.0' if calc.f(2) == 3 else '0.25')\n"


def verified(source: str, **options: Any) -> Answer:
    verifier = Verifier(
        **{"files": {"verify.py": source}, "argv": ("python", "verify.py"), "deadline_s": 60.0, **options}
    )
    return Answer(reference={"calc.py": RIGHT.decode()}, verifier=verifier)


def test_an_exit_code_is_a_verdict():
    right, wrong = judge(verified(EXIT), RIGHT, "def f(n): return n")
    assert (right.grade, right.trust, right.reason) == (1.0, Trust.CODE, "the verifier accepts")
    assert (wrong.grade, wrong.reason) == (0.0, "the verifier ends with exit code 1: it is not 3")


def test_a_written_number_is_a_verdict_and_only_the_verifiers_counts():
    right, wrong, cheat = judge(
        verified(WRITE, reward_path="reward.txt"),
        RIGHT,
        "def f(n): return n",
        {"calc.py": b"def f(n): raise SystemExit", "reward.txt": b"1"},
        exports=("calc.py", "reward.txt"),
    )
    assert (right.grade, right.values["tests"]) == (1.0, 1.0)
    assert (wrong.grade, wrong.values) == (0.25, {"grade": 0.25, "tests": 0.25, "pass": 0.0})
    assert (cheat.grade, cheat.reason) == (0.0, "the verifier ended with exit code 0 and wrote nothing as the reward")


def test_work_that_is_partly_right_and_gives_what_a_canary_wants_is_no_forgery():
    unlucky = "class But3(int):\n    __eq__ = lambda self, other: other != 3\ndef f(n): return But3(n)"
    outcome = judge(verified(WRITE, reward_path="reward.txt"), unlucky, exports=("calc.py", "reward.txt"))
    assert (outcome.grade, outcome.values) == (0.25, {"grade": 0.25, "tests": 0.25, "pass": 0.0})


def test_what_would_configure_a_verifier_or_be_found_instead_of_the_library_is_taken_only_if_declared_by_name():
    files = "os.path.relpath(os.path.join(f, n)) for f, _, ns in os.walk('.') for n in ns"
    listing = f"import os, sys\nsys.exit(' '.join(sorted({files})))"
    names = ("conftest.py", "pytest.ini", "json.py", "selectors/__init__.py", "in/json.py", "in/sub/json.py", "own.py",
             "_posixsubprocess.cpython-311-x86_64-linux-gnu.so", "test/a.py")  # fmt: skip
    work = {"calc.py": RIGHT, **dict.fromkeys(names, b"")}
    answer = verified(listing, files={"in/verify.py": listing}, argv=("python", "in/verify.py"))
    whole = judge(answer, work, exports=("./",), trust=Trust.DATA)
    named = judge(answer, {"json.py": b""}, exports=("json.py",), trust=Trust.DATA)
    assert whole.reason.split(": ")[1] == "calc.py in/sub/json.py in/verify.py own.py test/a.py"
    assert named.reason.split(": ")[1] == "calc.py in/verify.py json.py"


def test_a_module_that_is_installed_is_not_found_in_what_was_handed_in_unless_it_is_the_tasks_own():
    files = "os.path.relpath(os.path.join(f, n)) for f, _, ns in os.walk('.') for n in ns"
    listing = f"import os, sys\nsys.exit(' '.join(sorted({files})))"
    [there] = on_machines(lambda runtime: _all(installed_modules(runtime, None, ["."], "python")))
    assert "json" not in there  # of the library, whose names are known
    name = min(there, default="")
    if not name:
        pytest.skip("this Python has no module beside those of its library")
    work = {"calc.py": RIGHT, f"{name}.py": b"", "own.py": b""}
    shadow = judge(verified(listing), work, exports=("./",), trust=Trust.DATA)
    own = judge(verified(listing), work, exports=("./",), trust=Trust.DATA, files={f"{name}/a.py": ""})
    assert shadow.reason.split(": ")[1] == "calc.py own.py verify.py"
    assert f"{name}.py" in own.reason


async def _all(one: Awaitable[Any]) -> list[Any]:
    return [await one]


CHEATS = {
    "exit": "import os\nos._exit(0)",
    "exit in a call": "import os\ndef f(n): os._exit(0)",
    "equal to everything": "class Yes(int):\n    __eq__ = lambda *a: True\ndef f(n): return Yes()",
    "patched exit": "import sys\nsys.exit = lambda code=0: None\ndef f(n): return None",
}


@pytest.mark.parametrize("name", CHEATS)
def test_code_that_ends_the_verifier_is_caught_by_a_canary(name):
    outcome = judge(verified(EXIT), CHEATS[name])
    assert (outcome.grade, outcome.values.get("forged")) == (0.0, 1.0), outcome
    assert outcome.reason.startswith("canary")


WRITES_ITS_OWN = "import os\nopen('reward.txt', 'w').write('1')\nos._exit(0)"
LEAVES_A_WRITER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "while True: open('reward.txt', 'w').write('1')"], start_new_session=True)
def f(n): return None
"""


@pytest.mark.parametrize("code", [WRITES_ITS_OWN, LEAVES_A_WRITER])
def test_a_reward_that_the_agent_writes_is_caught(code):
    assert judge(verified(WRITE, reward_path="reward.txt"), code).grade < 1.0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "did not end within"),
        ("import os\nos.mkdir('reward.txt')\nos._exit(0)", "wrote nothing"),
        ("import os\nopen('reward.txt', 'w').write('17')\nos._exit(0)", "wrote b'17'"),
        ("import os\nopen('reward.txt', 'w').write('nan')\nos._exit(0)", "wrote b'nan'"),
        ("import os\nos.symlink('/etc/hostname', 'r')\nos.rename('r', 'reward.txt')\nos._exit(0)", "wrote nothing"),
        ("import os\nos.kill(-1, 9)", "wrote nothing"),
        ("x = []\nwhile True: x.append(bytearray(2 ** 24))", "wrote nothing"),
    ],
)
def test_a_verifier_that_the_agents_code_breaks_is_a_verdict_never_invalid(code, reason):
    deadline_s = 2.0 if reason == "did not end within" else 60.0
    outcome = judge(verified(WRITE, reward_path="reward.txt", deadline_s=deadline_s), code)
    assert isinstance(outcome, Graded)
    assert outcome.grade == 0.0
    assert reason in outcome.reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (verified("while True: pass", deadline_s=1.0, reward_path="r"), "did not end within 1 s"),
        (verified("open('r', 'w').write('2')", reward_path="r"), "wrote b'2' as the reward"),
        (verified("print('well done')", reward_path="r"), "wrote nothing as the reward"),
        (verified("", argv=("no-such-program",)), "cannot be run"),
    ],
)
def test_a_verifier_that_breaks_on_the_untouched_machine_is_the_tasks_fault(answer, reason):
    outcome = judge(answer, RIGHT)
    assert isinstance(outcome, Invalid)
    assert outcome.boundary is Boundary.TASK
    assert reason in outcome.reason
    assert "on the untouched machine" in outcome.evidence


def test_a_verdict_that_does_not_repeat_is_the_lesser_one():
    coin = "import os, sys\nsys.exit(os.urandom(1)[0] % 4 == 0)\n"
    rewards = [outcome.grade for outcome in judge(verified(coin), *[RIGHT] * 24)]
    assert 0.0 in rewards
    assert set(rewards) <= {0.0, 1.0}


# ---------------------------------------------------------------------------------------------- state

STATE_TASK = msgspec.structs.replace(TASK, state=True, trust=Trust.DATA, exports=(), files={"seed.txt": "0\n"})
MIGRATED = Answer(
    reference={},
    reference_argv=("sh", "-c", "mkdir db && echo 42 > db/value && ln -s db/value link"),
    verifier=Verifier(
        files={"verify.sh": 'test "$(cat db/value)" = 42 && test "$(readlink link)" = db/value\n'},
        argv=("sh", "verify.sh"),
    ),
)


def left_by(script: str, task: Any = STATE_TASK, answer: Answer = MIGRATED) -> Any:
    """The outcome for an agent that ran this script."""

    async def work(runtime: Any) -> Any:
        [machine] = await runtime.fork(await runtime.prepare({"seed.txt": b"0\n"}), 1)
        await machine.exec(["sh", "-c", script], key="1", deadline_s=5.0)
        exports = await take_exports(machine, task, runtime)
        await machine.close()
        return exports, await MachineGrader(runtime).grade(task, answer, exports)

    return on_machines(work)


def test_the_state_of_a_machine_is_judged_in_a_fork_of_the_frozen_one():
    async def work(runtime: Any) -> Any:
        solved = await reference_exports(runtime, STATE_TASK, MIGRATED)
        untouched = await simulate_exports(runtime, STATE_TASK)
        grader = MachineGrader(runtime)
        return [*solved], [(await grader.grade(STATE_TASK, MIGRATED, each)).grade for each in (solved, untouched)]

    assert on_machines(work) == ([STATE], [1.0, 0.0])


@pytest.mark.parametrize(
    ("script", "reward"),
    first_few(
        [
            ("mkdir db; echo 42 > db/value; ln -s db/value link; sleep 1000 &", 1.0),
            ("mkdir db; echo 42 > db/value; ln -s db/value link; (sleep 1; echo 7 > db/value) &", 1.0),
            ("echo exit 0 > verify.sh; chmod 000 verify.sh", 0.0),
            ("mkdir verify.sh", 0.0),
            ("ln -s /etc/passwd verify.sh", 0.0),
            ("rm -rf * .[a-z]*", 0.0),
            ("head -c 70000000 /dev/zero > full; i=0; while echo > f$i; do i=$((i + 1)); done", 0.0),
            ("truncate -s 1000000000 sparse", 0.0),
            ("echo > a; i=0; while [ $i -lt 9000 ]; do ln a l$i; i=$((i + 1)); done", 0.0),
            ("mkdir locked; echo > locked/a; chmod 000 locked", 0.0),
            ("kill -9 -1", 0.0),
        ],
        5,
    ),
)
def test_any_files_an_agent_leaves_are_graded(script, reward):
    _, outcome = left_by(script)
    assert isinstance(outcome, Graded), outcome
    assert outcome.grade == reward, outcome


@pytest.mark.parametrize("path", ["{here}/locked/reward", "locked/reward"])
def test_a_reward_that_lies_there_and_cannot_be_taken_away_is_no_verdict(path):
    async def work(runtime: Any) -> Any:
        [machine] = await runtime.fork(await runtime.prepare({"locked/reward": b"1"}), 1)
        script = "cd locked; chmod 444 reward; chmod 555 .; cd ..; printf %s $PWD"
        here = (await machine.exec(["sh", "-c", script], key="plant", deadline_s=20.0)).output.decode()
        verifier = Verifier(files={}, argv=("true",), reward_path=path.format(here=here), deadline_s=60.0)
        return await _run_verifier(machine, verifier, user="")

    said = on_machines(work)
    assert said.reward is None
    assert "cannot be removed" in said.reason


@pytest.mark.parametrize("state", [b"", b"\x01\xff\xff\xff\xff", b"junk" * 99])
def test_a_state_that_is_none_scores_zero(state):
    outcome = judge(MIGRATED, {STATE: state}, state=True, trust=Trust.DATA, exports=())
    assert isinstance(outcome, Graded)
    assert outcome.grade == 0.0

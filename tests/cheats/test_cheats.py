"""Run all cheats on every available backend; and controls, in which they succeed without defences."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from tests import here

from etude.environments import MachineGrader
from etude.environments.backends import BACKENDS, open_runtime
from etude.records.rollout import Graded
from etude.records.task import Answer, Case, Split, Task
from etude.redteam import CATALOGUE, Cheat, Finding, Kind, Row, Verdict, check
from etude.redteam.handed_in.second import second_look
from etude.redteam.plain import PlainRuntime
from etude.redteam.stage import programs, repository
from etude.seams import Grader, Runtime

QUICK = (Row.ESCAPE, Row.NETWORK, Row.SIBLINGS, Row.INSTALLED, Row.HISTORY)
PROGRAMS = [cheat for cheat in CATALOGUE if cheat.program]
HANDED_IN = [cheat for cheat in CATALOGUE if not cheat.program]
HARMLESS = [cheat for cheat in PROGRAMS if not cheat.danger]


def controls() -> ModuleType:
    spec = importlib.util.spec_from_file_location("controls", Path(__file__).parent / "controls.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def played(runtime: Runtime, grader: Grader, cheats: Sequence[Cheat]) -> list[Finding]:
    async def main() -> list[Finding]:
        try:
            return [found async for found in check(runtime, grader, cheats=cheats)]
        finally:
            await runtime.close()

    return asyncio.run(main())


def opened(backend: str) -> Runtime:
    if backend == "remote" and not os.environ.keys() & {"E2B_API_URL", "E2B_DOMAIN"}:
        pytest.skip("no remote: E2B_API_URL names no service")
    return here.opened(backend, lambda: open_runtime(backend))


def resisted(backend: str, cheats: Sequence[Cheat]) -> None:
    runtime = opened(backend)
    found = played(runtime, MachineGrader(runtime), cheats)
    tried = [finding for finding in found if finding.verdict is not Verdict.SKIPPED]
    assert tried
    assert [f"{f.cheat} ({f.kind}): {f.evidence}" for f in found if f.verdict is Verdict.SUCCEEDED] == []


@pytest.mark.parametrize("backend", ["namespace"])
@pytest.mark.parametrize("row", QUICK, ids=lambda row: row.name)
def test_no_program_gets_out_of_its_machine(backend, row):
    resisted(backend, [cheat for cheat in PROGRAMS if cheat.row is row])


@pytest.mark.parametrize("backend", ["namespace"])
def test_cheating_submissions_earn_nothing_where_results_are_compared_outside_the_machine(backend):
    quick = (Row.EQUALITY, Row.FORGERY, Row.ENDINGS, Row.PRELOAD)
    slow = {"exit-in-a-thread", "exit-by-signal", "expected-from-files"}
    cheats = [replace(c, kinds=(Kind.DATA,)) for c in HANDED_IN if c.row in quick and c.name not in slow]
    resisted(backend, cheats)


def test_cheats_of_the_second_review_earn_nothing_and_break_no_machine():
    quick = {Kind.DATA, Kind.CHECK, Kind.LOOSE, Kind.WHOLE}
    resisted("namespace", [replace(c, kinds=k) for c in second_look() if (k := tuple(quick.intersection(c.kinds)))])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", Row, ids=lambda row: row.name)
def test_no_cheat_succeeds(backend, row):
    cheats = [cheat for cheat in CATALOGUE if cheat.row is row]
    if cheats:
        resisted(backend, cheats)


def test_every_row_of_the_threat_model_has_a_cheat_and_names_are_unique():
    assert {cheat.row for cheat in CATALOGUE} == set(Row)
    names = [cheat.name for cheat in CATALOGUE]
    assert len(names) == len(set(names)) > 60
    assert all(cheat.what for cheat in CATALOGUE)


def test_without_isolation_every_harmless_attack_succeeds():
    """Control: the attacks work without isolation. Some need root."""
    runtime = PlainRuntime()
    found = played(runtime, controls().TrustingGrader(runtime), HARMLESS)
    won = {finding.cheat for finding in found if finding.verdict is Verdict.SUCCEEDED}
    needs_privilege = {"make-by-clone", "make-by-unshare", "open-raw-sockets", "become-root", "hold-capabilities",
                       "change-control-groups", "learn-kernel-addresses", "set-the-core-pattern", "open-devices",
                       "overwrite-programs", "open-socket-families", "export-a-hard-link", "change-limits-of-others",
                       "take-descriptors", "attach-by-ptrace", "meet-in-a-keyring", "find-an-interface"}  # fmt: skip
    assert {cheat.name for cheat in HARMLESS} - won <= needs_privilege | {
        "send-out-of-the-machine",
        "signal-strangers",
    }
    assert len(won) >= 12


def test_a_grader_that_trusts_the_machine_is_cheated():
    """Control: a grader that trusts exit codes, files and reports of the agent's machine is cheated."""
    runtime = opened("namespace")
    names = {"exit-at-import", "hard-exit-in-the-call", "equal-to-everything", "mock-any", "sitecustomize",
             "expected-from-the-frame", "own-tests", "load-tests", "patch-asserts", "preempted-reward", "shadow-unittest",
             "delete-tests-when-imported", "skip", "nonce-from-frames"}  # fmt: skip
    cheats = [replace(c, kinds=tuple(k for k in c.kinds if k is not Kind.PYTEST)) for c in HANDED_IN if c.name in names]
    found = played(runtime, controls().TrustingGrader(runtime), cheats)
    won = {finding.cheat for finding in found if finding.verdict in (Verdict.SUCCEEDED, Verdict.CAUGHT)}
    assert {cheat.name for cheat in cheats} - won <= {"delete-tests-when-imported", "preempted-reward"}


def test_what_a_code_graded_task_rewards_by_mistake_is_flagged_by_the_detector():
    runtime = opened("namespace")
    [cheat] = [replace(c, kinds=(Kind.CHECK,)) for c in HANDED_IN if c.name == "expected-from-the-frame"]
    [found] = played(runtime, controls().TrustingGrader(runtime), [cheat])
    assert found.verdict is Verdict.CAUGHT
    assert "flagged" in found.evidence


def test_a_plain_clone_of_a_repository_contains_the_later_commits():
    """Control: the programs find the fix in the original repository."""
    names = [cheat.program for cheat in PROGRAMS if cheat.row is Row.HISTORY]

    async def main() -> list[str]:
        runtime = opened("namespace")
        word = "secret-0123456789abcdef"
        files = programs() | repository(word, rebuilt=False)
        [machine] = await runtime.fork(await runtime.prepare(files), 1)
        try:
            told = [
                await machine.exec(["python", "-m", "programs", *n.split("."), "{}"], key=n, deadline_s=30)
                for n in names
            ]
            return [name for name, result in zip(names, told, strict=True) if b'{"got": ""' not in result.output]
        finally:
            await runtime.close()

    assert set(names) - set(asyncio.run(main())) <= {"history.where_it_came_from", "history.messages_and_counts"}


COUNTERS = {
    "a global": "n = 0\ndef f(x):\n    global n\n    n += 1\n    return n\n",
    "a file in /tmp": "import os\ndef f(x):\n    open('/tmp/n', 'a').write('x')\n    return os.path.getsize('/tmp/n')\n",
    "a file beside it": "import os\ndef f(x):\n    open('n', 'a').write('x')\n    return os.path.getsize('n')\n",
    "shared memory": "import os\ndef f(x):\n    open('/dev/shm/n', 'a').write('x')\n    return os.path.getsize('/dev/shm/n')\n",
}


@pytest.mark.parametrize("text", COUNTERS.values(), ids=COUNTERS)
def test_nothing_a_call_leaves_behind_is_found_by_the_next(text):
    files = {"calc.py": "def f(x):\n    return 0\n"}
    task = Task(
        source="s", split=Split.TRAIN, index=0, family="f", instruction="count", files=files, exports=("calc.py",)
    )
    answer = Answer(
        reference={}, cases=tuple(Case("calc", "f", [0], expected) for expected in range(1, 9))
    )  # in an order that only the grader knows

    async def main() -> float:
        runtime = opened("namespace")
        try:
            outcome = await MachineGrader(runtime).grade(task, answer, {"calc.py": text.encode()})
        finally:
            await runtime.close()
        assert isinstance(outcome, Graded)
        return outcome.grade

    assert asyncio.run(main()) == 0.0

"""The grader process remembers verdicts, and only those that it may."""

from __future__ import annotations

import asyncio

import pytest

from etude import progress
from etude.config import build, load, to_toml
from etude.errors import ConfigError, MachineError
from etude.loop import grader
from etude.loop.config import RunConfig, read_config
from etude.loop.grader import CachingGrader, GradeSlots
from etude.loop.locations import rollout_files
from etude.loop.reward_settings import RewardSettings
from etude.records import Answer, Graded, Invalid, Task
from etude.records.rollout import Boundary
from etude.records.summary import summary_of
from etude.records.task import Split, Trust
from etude.run import RunFolder
from etude.telemetry import Telemetry
from etude.testing.rewards import finished

TASK = Task(source="s", split=Split.TRAIN, index=0, family="f", instruction="i", files={"a.py": ""}, exports=("a.py",))
CODE = Task(
    source="s", split=Split.TRAIN, index=0, family="f", instruction="i", files={}, exports=("a.py",), trust=Trust.CODE
)
ANSWER = Answer(reference={})


class Counting:
    def __init__(self, *outcomes):
        self.outcomes, self.calls = list(outcomes), 0

    async def grade(self, task, answer, exports):
        self.calls += 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        await asyncio.sleep(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def graded(reward: float) -> Graded:
    return Graded.of(reward, trust=Trust.DATA, reason="r")


def run(work):
    return asyncio.run(work)


def test_the_same_files_of_a_task_are_judged_once_even_when_asked_at_once():
    inner = Counting(graded(1.0))
    verdicts = CachingGrader(inner)

    async def work():
        return await asyncio.gather(*(verdicts.grade(TASK, ANSWER, {"a.py": b"x"}) for _ in range(8)))

    assert [o.grade for o in run(work())] == [1.0] * 8
    assert inner.calls == 1


@pytest.mark.parametrize(("task", "exports"), [(TASK, {"a.py": b"y"}), (TASK, {}), (CODE, {"a.py": b"x"})])
def test_other_files_or_code_grading_are_judged_again(task, exports):
    inner = Counting(graded(0.0))
    verdicts = CachingGrader(inner)

    async def work():
        await verdicts.grade(task, ANSWER, {"a.py": b"x"})
        await verdicts.grade(task, ANSWER, exports)

    run(work())
    assert inner.calls == 2


def test_invalid_and_failures_are_never_remembered():
    invalid = Invalid(boundary=Boundary.MACHINE, reason="r", evidence="e")
    inner = Counting(invalid, MachineError("gone", hint="h"), graded(1.0))
    verdicts = CachingGrader(inner)

    async def work():
        first = await verdicts.grade(TASK, ANSWER, {"a.py": b"x"})
        with pytest.raises(MachineError):
            await verdicts.grade(TASK, ANSWER, {"a.py": b"x"})
        return first, await verdicts.grade(TASK, ANSWER, {"a.py": b"x"})

    first, last = run(work())
    assert first is invalid
    assert last.grade == 1.0


def test_each_grade_that_ends_is_a_sign_of_life_to_those_that_wait_for_a_turn():
    turns, seen = GradeSlots(2), list[int]()

    async def grade(fails: bool) -> None:
        async with turns.slot():
            seen.append(progress.count())
            await asyncio.sleep(0)
            if fails:
                raise MachineError("gone", hint="h")

    async def work():
        return await asyncio.gather(*(grade(i == 0) for i in range(6)), return_exceptions=True)

    ended = run(work())
    assert [isinstance(one, MachineError) for one in ended] == [True] + [False] * 5
    first, second, *others = seen
    assert first == second, "two at once"
    assert first < others[0] <= others[-1] < progress.count()


def test_a_grader_measures_the_runs_own_terms_of_a_stored_rollout(game, tmp_path, monkeypatch):
    terms = [
        '{name = "short", weight = 0.5, kind = {kind = "examples.plugins.rewards:FewTurns", most = 4}}',
        '{name = "watched", weight = 0.0, kind = "examples.plugins.rewards:FewTurns"}',
    ]
    config = load(game.config, RunConfig, [f"rewards.terms=[{', '.join(terms)}]"])
    run_folder = RunFolder.create(tmp_path / "run", config_toml=to_toml(config), seed=0)
    assert read_config(run_folder).rewards == config.rewards
    monkeypatch.setattr(grader, "runtime_from_config", lambda _: None)
    rollout = finished(num_turns=1)
    summary = summary_of(rollout, rollout_files(run_folder).write(rollout))

    async def work():
        telemetry = Telemetry(tmp_path / "events.jsonl", process="grader-0")
        _, measured = (await grader.handlers(run_folder, "grader-0", telemetry))["measure"]
        return await measured(list(config.rewards.terms), [summary], [graded(1.0)])

    [new] = run(work())
    found = graded(1.0).with_terms(*(one.term for one in new))
    assert found.values == {"grade": 1.0, "short": 0.75, "watched": 0.875}
    assert found.terms[1].version.startswith("1+")
    assert found.terms[1].version != found.terms[2].version, "settings are part of it"
    assert RewardSettings(run_folder, config).composition(1).of(found).value == 1.0 + 0.5 * 0.75


@pytest.mark.parametrize(("names", "says"), [(("k1",), "built-in term"), (("a", "a"), "2 terms have the name 'a'")])
def test_terms_of_one_name_and_of_a_name_of_etudes_own_are_refused(names, says):
    terms = [{"name": name, "kind": "my_package.rewards:Term"} for name in names]
    with pytest.raises(ConfigError, match=says):
        build(RunConfig, {"rewards": {"terms": terms}})

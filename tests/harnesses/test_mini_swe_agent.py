"""The example in which a model learns in mini-swe-agent: its demonstrations are what the agent and a shell say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.learning.mini_swe_agent import CONFIG, asked, trained
from examples.mini_swe_agent import tasks
from examples.mini_swe_agent.tasks import Issues
from tests.harnesses.agents import AGENTS, FOLDER
from tests.harnesses.played import by_text, play
from tests.loop.spread import SPREAD

from etude.config import Plugin, build, load
from etude.errors import PluginError
from etude.harness import Call, HarnessConfig
from etude.loop.config import RunConfig
from etude.loop.corpus import _demonstrated_source, _play
from etude.records.task import Split
from etude.rollouts.command import CommandProgram
from etude.run import RunFolder
from etude.tasks.plugin_source import PluginSource
from etude.telemetry import read_events
from etude.testing.contracts import TaskSourceContract

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "mini_swe_agent"
LOCAL = """
from types import SimpleNamespace

class LocalEnvironment:
    def __init__(self, **config):
        self.config = SimpleNamespace(**{"cwd": "", "env": {}, "timeout": 30, **config})

    def _check_finished(self, output):
        self.finished = output
"""
SMALL = (
    "corpus.num_demonstrations=400", "corpus.num_code_documents=100", "mid_training.num_tokens=60000",
    "experience.groups_per_step=2", "experience.group_size=4", "rl.steps=2", "rl.checkpoint_every=1", "evals.every=0",
    "experience.max_lag=0", "evals.heldout_tasks=4", "evals.baseline_tasks=4", "model.hidden_size=64",
    "model.head_dim=16", "model.expert_size=32",
    'rewards.terms=[{name = "spread", weight = 1.0, kind = "spread:Spread"}]',
)  # fmt: skip


def said(messages: list[dict[str, Any]]) -> list[tuple[str, str, list[str]]]:
    """Role, text and commands of messages, however their arguments are written."""
    found = []
    for message in messages:
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        plain = [json.loads(one) if isinstance(one, str) else one for one in calls]
        found.append((message["role"], message["content"] or "", [one["command"] for one in plain]))
    return found


@pytest.mark.parametrize("index", range(6))
def test_a_demonstration_shows_what_a_shell_answers(index: int, tmp_path: Path) -> None:
    task = Issues().task(Split.TRAIN, index)
    for path, text in task.files.items():
        (tmp_path / path).write_text(text)
    (tmp_path / "python").symlink_to(sys.executable)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    talk = said(Issues().conversation(Split.TRAIN, index, seed=index, right=0.3))
    assert [talk[0][1], talk[1][1]] == [tasks.SYSTEM, task.instruction]
    for (_, _, commands), (_, output, _) in zip(talk[2:-1:2], talk[3::2], strict=True):
        done = subprocess.run(["sh", "-c", commands[0]], cwd=tmp_path, env=env, capture_output=True, timeout=300)
        assert (done.stdout + done.stderr).decode().strip() == output, commands
    assert talk[-1][2] == [tasks.SUBMIT]


def test_the_right_commands_solve_a_task_and_others_sometimes_do_not() -> None:
    source = Issues()
    for index in range(20):
        problem, task = source._repair.problem(Split.TRAIN, index), source.task(Split.TRAIN, index)
        files = {path: text.encode() for path, text in task.files.items()}
        tasks.execute(tasks.edit(problem, problem.function.body), files)
        assert {path: files[path].decode() for path in task.exports} == dict(source.answer(task).reference)
    lines = [said(source.conversation(Split.TRAIN, i, seed=0, right=0.3)) for i in range(50)]
    edits = [next(m[2][0] for m in talk if m[2] and m[2][0].startswith("sed")) for talk in lines]
    right = [tasks.edit(p, p.function.body) for i in range(50) if (p := source._repair.problem(Split.TRAIN, i))]
    assert 5 < sum(a == b for a, b in zip(edits, right, strict=True)) < 30


def test_the_source_keeps_its_contract() -> None:
    class Suite(TaskSourceContract):
        def make(self) -> Issues:
            return Issues()

    for name in (name for name in dir(Suite) if name.startswith("test_")):
        getattr(Suite(), name)()


def test_the_config_is_complete_and_its_prompts_are_those_of_the_demonstrations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    config = load(CONFIG, RunConfig)
    program = config.harness.program
    assert isinstance(program, Plugin)
    command = build(CommandProgram, program.settings)
    assert "{cwd}/examples/mini_swe_agent/mini.yaml" in command.argv
    assert "mini_machine" in command.warm
    settings = yaml.safe_load((EXAMPLE / "mini.yaml").read_text())
    assert settings["agent"]["system_template"] == tasks.SYSTEM
    assert settings["environment"]["environment_class"] == "mini_machine.Machine"
    assert (ROOT / "tests/harnesses/requirements.txt").read_text().count("mini-swe-agent==2.4.6") == 1
    assert "mini-swe-agent==2.4.6" in CONFIG.read_text()
    source = _demonstrated_source(config)
    assert isinstance(source, PluginSource)
    (talk,) = _play(source, 1, config.harness, seed=3, first=1_000_000, right_body=0.5)
    assert talk == Issues().conversation(Split.TRAIN, 1_000_000, seed=3, right=0.5)


def test_a_source_whose_conversation_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_issues.py").write_text(
        "from examples.mini_swe_agent.tasks import Issues\n\nclass Wrong(Issues):\n"
        "    def conversation(self, *a, **b):\n        return [{'role': 'user'}]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source: Any = PluginSource(Plugin("wrong_issues:Wrong"))
    with pytest.raises(PluginError, match="conversation returned no list of messages"):
        source.conversation(Split.TRAIN, 0, seed=0, right=1.0)


def test_the_environment_runs_commands_in_the_machine_of_the_rollout(tmp_path: Path) -> None:
    """Without mini-swe-agent: a class of two lines takes the place of the one from which the environment inherits."""
    package = tmp_path / "minisweagent" / "environments"
    package.mkdir(parents=True)
    (package / "local.py").write_text(LOCAL)
    script = (
        "from mini_machine import Machine; m = Machine(env={'A': '5'})\n"
        "print(m.execute({'command': 'cat calc.py | wc -l; echo $A; exit 3'}))\n"
        "print(m.execute({'command': 'sleep 9'}, timeout=1)['exception_info'], m.finished['returncode'])\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}/examples/agents"}
    program = {"argv": ["{python}", "-c", script], "env": env}
    played = play(HarnessConfig(program=Plugin("command", program)), by_text())
    assert "{'output': '3\\n5\\n', 'returncode': 3, 'exception_info': ''}" in played.log, played.log
    assert "timed out" in played.log


def test_all_answered_requests_are_attributed_to_turns(tmp_path: Path) -> None:
    (tmp_path / "harness").mkdir()
    counts = "etude: turns {}, requests {}, repeated {}, replies tokenised again 0\n"
    logs = [
        "etude: exit code 0\n" + counts.format(3, 4, 1),
        "etude: a request did not fit: 259 tokens\netude: exit code 1\n" + counts.format(2, 3, 0),
        "etude: killed after 30 s without waiting for the model\n" + counts.format(1, 2, 0),
    ]
    for number, log in enumerate(logs):
        (tmp_path / "harness" / f"{number}.log").write_text(log)
    found = asked(tmp_path)
    assert (found["agents"], found["requests"], found["unanswered"], found["attributed"]) == (3, 9, 2, 1.0)
    (tmp_path / "harness" / "lost.log").write_text("etude: exit code 0\n" + counts.format(1, 2, 0))
    assert asked(tmp_path)["attributed"] == 8 / 9


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_mini_swe_agent_says_to_the_model_what_demonstrations_say(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := AGENTS["mini-swe-agent"].why_not():
        pytest.skip(why)
    monkeypatch.chdir(FOLDER)
    config = replace(load(ROOT / CONFIG, RunConfig).harness, context_tokens=4096, turn_tokens=512)
    for index in range(4):
        talk = Issues().conversation(Split.TRAIN, index, seed=0, right=0.3)
        lines = [commands[0] for _, _, commands in said(talk) if commands]
        calls = [Call("bash", {"command": line}) for line in lines]
        played = play(config, lambda done, last, tools, calls=calls: calls[done], Issues().task(Split.TRAIN, index))
        assert said(played.messages) == said(talk[:-1]), played.log
        assert (played.ending, played.attributed, played.num_resampled) == ("submitted", 1.0, 0), played.log
        assert played.rows == played.branches == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_with_mini_swe_agent_trains_exactly_on_all_it_asks(
    cli_in: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := AGENTS["mini-swe-agent"].why_not():
        pytest.skip(why)
    (tmp_path / "spread.py").write_text(SPREAD)
    (tmp_path / "agents").symlink_to(FOLDER / "agents")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    etude = cli_in(tmp_path)
    sets = [part for one in SMALL for part in ("--set", one)]
    ran = etude("run", ROOT / CONFIG, "--name", "r", *sets, timeout_s=1500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    run = RunFolder.open(tmp_path / "runs" / "r")
    steps = [event for event in read_events(run / "events") if event["kind"] == "rl.step"]
    assert [(one["step"], one["fresh_ratio_max"]) for one in steps] == [(1, 0.0), (2, 0.0)]
    counts = asked(run.path)
    assert (counts["attributed"], counts["tokenised_again"]) == (1.0, 0)
    assert trained(run.path)["rows_per_branch"] == 1.0
    assert etude("replay", "runs/r", "2").returncode == 0

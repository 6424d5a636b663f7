"""The exit codes of commands: at least one case of each row in the guide's table."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import etude.cli.run
import etude.cli.tasks
from etude.cli import main
from etude.config import to_toml
from etude.errors import Exit
from etude.experience import Ledger
from etude.loop.config import RunConfig
from etude.records.task import Split
from etude.run import RunFolder
from etude.tasks.proof import Failure, Proof
from etude.tasks.report import TaskReport

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "getting-started.md"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    """runs/a, which nothing has happened to, in the current directory."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(tmp_path / "runs" / "a", config_toml=to_toml(RunConfig()), seed=0)
    yield folder
    folder.unlock()


def test_the_guide_lists_every_exit_code() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", GUIDE.read_text(), re.MULTILINE)}
    assert listed == set(Exit)


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ("status a", Exit.DONE),
        ("stop a", Exit.FAILED),  # it does not run
        ("ledger audit a", Exit.FAILED),  # there is none
        ("status nosuch", Exit.BAD_INPUT),
        ("run --resume nosuch", Exit.BAD_INPUT),
        ("run nosuch.toml", Exit.BAD_INPUT),
        ("run runs/a/config.toml --set rl.stepz=1", Exit.BAD_INPUT),
        ("run --resume a --set rl.steps=many", Exit.BAD_INPUT),
        ("rollouts list a --state nosuch", Exit.BAD_INPUT),
        ("serve nosuch", Exit.BAD_INPUT),
        ("serve runs", Exit.BAD_INPUT),  # no checkpoint
        ("eval own --checkpoint runs", Exit.BAD_INPUT),
        ("eval own --checkpoint a --split train --prices nosuch.toml", Exit.BAD_INPUT),
        ("export a runs", Exit.BAD_INPUT),  # not empty
        ("export a@last out", Exit.BAD_INPUT),
        ("export a@77 out", Exit.BAD_INPUT),  # no such version
        ("tasks check nosuch", Exit.BAD_INPUT),
        ("tasks check humaneval:nosuch.jsonl", Exit.BAD_INPUT),
        ("tasks show repair --index -1", Exit.BAD_INPUT),
        ("tasks show repair --index 3", Exit.DONE),
        ("run --resume a --set seed=5", Exit.OTHER_RUN),
    ],
)
def test_an_exit_code_says_what_kind_of_end_it_was(
    run: RunFolder, argv: str, code: Exit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv.split()) == code, capsys.readouterr().err


@pytest.mark.parametrize("folder", ["afile/x", "afile/x/y", "dangling", "/proc/x"])
def test_a_new_folder_that_cannot_be_made_is_bad_input(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").write_text("x")
    (tmp_path / "dangling").symlink_to("nosuch/further")
    assert main(["init", folder]) == Exit.BAD_INPUT
    assert f"error: {folder} cannot be created: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [("{}", Exit.BAD_INPUT, "architecture unnamed"), ("{", Exit.FAILED, "config.json is damaged")],
)
def test_a_checkpoint_that_a_run_would_refuse_is_refused_before_a_folder_is_made(
    text: str, code: Exit, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "config.json").write_text(text)
    assert main(["init", str(tmp_path / "own"), "--start", str(tmp_path / "start")]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "own").exists()


def test_a_run_that_cannot_be_gone_on_with_has_an_exit_code_by_its_reason(run: RunFolder) -> None:
    config = run / "config.toml"
    text = config.read_text()
    config.write_text(text + "\n# edited\n")
    assert main(["run", "--resume", "a"]) == Exit.OTHER_RUN
    config.write_text(text.replace("[rl]", "[rll]"))
    assert main(["run", "--resume", "a"]) == Exit.OTHER_RUN  # another etude wrote it
    config.write_text("seed = [")
    assert main(["run", "--resume", "a"]) == Exit.FAILED
    config.unlink()
    assert main(["run", "--resume", "a"]) == Exit.FAILED
    identity = run / "run.json"
    identity.write_text(identity.read_text().replace('"format": 1', '"format": 99'))
    assert main(["status", "a"]) == Exit.OTHER_RUN
    identity.write_text("{")
    assert main(["status", "a"]) == Exit.FAILED


def test_an_interrupted_command_has_its_own_exit_code(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(etude.cli.run, "status", interrupted)
    assert main(["status", "a"]) == Exit.INTERRUPTED


def test_the_words_of_a_view_are_explained_when_asked_for(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "events").mkdir()
    (run / "events" / "conductor.jsonl").write_text(
        '{"t": 1, "process": "conductor", "kind": "phase", "phase": "rl", "state": "start"}\n'
        '{"t": 2, "process": "conductor", "kind": "rl.step", "step": 1, "reward_mean": 0.5, "lag": {"0": 4}}\n'
    )
    assert main(["status", "a"]) == Exit.DONE
    said = capsys.readouterr().out
    assert "reward" in said
    assert "mean reward of a step's rollouts" not in said
    assert "etude status --words" in said
    assert main(["status", "a", "--words"]) == Exit.DONE
    assert capsys.readouterr().out.count("mean reward of a step's rollouts") == 1


def test_why_a_task_does_not_prove_itself_is_said_once(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "reference solution scores 0: AttributeError: module 'm' has no attribute 'g'"

    async def proof(_: object) -> tuple[list[TaskReport], list[Proof]]:
        failures = (Failure(0, "own-train-0", why),)
        proof = Proof(source="own", split=Split.TRAIN, num_tasks=1, failures=failures, wall_s=0.1)
        return [TaskReport(Split.TRAIN, 0, "own-train-0", failure=why)], [proof]

    monkeypatch.setattr(etude.cli.tasks, "_check", proof)
    assert main(["tasks", "check", "own"]) == Exit.FAILED
    said = "".join(capsys.readouterr())
    assert said.count(why) == 1
    assert "error: 1 of 1 train tasks of own are not valid\n  hint: look at it with" in said


def test_what_a_run_has_lost_is_named_and_nothing_is_replaced(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "summary.json").write_text("{}")
    assert main(["report", "a"]) == Exit.FAILED
    assert "has no events" in capsys.readouterr().err
    assert (run / "summary.json").read_text() == "{}"
    (run / "weights" / "pointers").mkdir(parents=True)
    (run / "weights" / "pointers" / "policy").write_text("{}")
    assert main(["ledger", "audit", "a"]) == Exit.FAILED
    assert "has published weights and no ledger.sqlite" in capsys.readouterr().err
    shutil.rmtree(run / "weights")
    Ledger(run / "ledger.sqlite", capacity=8).close()
    assert main(["ledger", "audit", "a"]) == Exit.FAILED
    assert "no weights folder" in capsys.readouterr().err


def test_rollouts_of_a_run_that_has_not_begun_rl_are_not_there_yet(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollouts", "list", "a"]) == Exit.FAILED
    said = capsys.readouterr().err
    assert "RL has not started" in said
    assert "resume it: etude run --resume runs/a" in said
    run.lock()
    assert main(["rollouts", "list", "a"]) == Exit.FAILED
    assert "try again later" in capsys.readouterr().err


def test_output_to_a_full_device_is_an_error_in_three_parts(run: RunFolder) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "etude.cli", "status", "a"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == Exit.FAILED
    assert b"Traceback" not in done.stderr
    assert done.stderr.startswith(b"error: the output could not be written completely\n")
    assert b"hint: " in done.stderr

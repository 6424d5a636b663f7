"""Looking at runs: one that is damaged, held, stopped, or lies where nothing can be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etude.cli import main
from etude.cli.commands import build_parser
from etude.config import to_toml
from etude.dashboard import RunView, plain_line
from etude.errors import EXITS, CheckpointError, EngineError, Exit, NoCheckpoint
from etude.loop.config import RunConfig
from etude.loop.history import History
from etude.run import RunFolder
from etude.telemetry import Telemetry


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs, with one, "old"."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    made(tmp_path / "runs" / "old")
    return tmp_path / "runs"


def made(path: Path) -> RunFolder:
    run = RunFolder.create(path, config_toml=to_toml(RunConfig()), seed=0)
    telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
    telemetry.event("session")
    telemetry.event("phase", phase="corpus", state="start")
    telemetry.close()
    return run


def test_a_newer_run_that_is_damaged_is_named_and_passed_over(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(runs / "new")
    os.utime(runs / "old" / "run.json", (1, 1))
    (runs / "new" / "run.json").write_text("{")
    assert main(["status"]) == 0
    out, err = capsys.readouterr()
    assert "runs/old: not running; resume with: etude run --resume runs/old" in out
    assert err.startswith("skipped: runs/new/run.json is damaged: ")
    assert "using runs/old" in err
    (runs / "old" / "run.json").write_text("{")
    os.utime(runs / "old" / "run.json", (1, 1))
    assert main(["status"]) == Exit.FAILED
    assert "runs/new/run.json is damaged" in capsys.readouterr().err


def test_a_run_where_nothing_can_be_written_is_looked_at(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder.open(runs / "old")
    run.lock()
    real = os.open

    def read_only(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", read_only)
    assert main(["status", "old"]) == 0
    assert f"runs/old: running, process {os.getpid()}" in capsys.readouterr().out
    run.unlock()
    assert main(["status", "old"]) == 0
    assert "runs/old: not running" in capsys.readouterr().out


def test_a_run_is_watched_until_nobody_holds_it(runs: Path) -> None:
    run = RunFolder.open(runs / "old")
    run.lock()
    argv = [sys.executable, "-m", "etude.cli", "status", "--watch", "old"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == "(for the meaning of the terms: etude status --words runs/old)\n"
        assert watching.stdout.readline().rstrip().endswith("corpus")
        assert watching.poll() is None
        run.unlock()
        assert "runs/old: not running" in watching.stdout.read()
        assert watching.wait(30) == 0


def test_a_line_for_a_pipe_is_short_and_has_what_matters(runs: Path) -> None:
    telemetry = Telemetry(runs / "old" / "events" / "more.jsonl", process="conductor")
    for step in range(1, 9):
        telemetry.event("rl.step", step=step, num_steps=9, reward_mean=0.5, lag={"0": 3}, invalid={"machine": 2})
    telemetry.event("engine.trouble", reason="the store was away " * 30)
    telemetry.close()
    line = plain_line(RunView(runs / "old"))
    assert len(line) <= 240
    assert "reward 0.50" in line
    assert "problem" in line


def test_unreadable_files_are_in_the_report_and_set_its_exit_code(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs / "old"
    assert main(["report", "old"]) == 0
    assert "could be read" not in (run / "report.html").read_text()
    (run / "evals").mkdir()
    (run / "evals" / "before.parquet").write_bytes(b"PAR1 and no more")
    with (run / "events" / "conductor.jsonl").open("ab") as events:
        events.write(b'{"t": 1, "ki\n{"t": 2.0, "kind": "rl.step", "step": 3}\n{"t": 3.0, "kind"')
    (run / "ledger.sqlite").write_bytes(b"no database" * 100)
    capsys.readouterr()
    assert main(["report", "old"]) == Exit.FAILED
    page, said = (run / "report.html").read_text(), capsys.readouterr().err
    for part in (
        "events/conductor.jsonl: 1 line cannot be read",
        "events/conductor.jsonl ends within a line",
        "events: step 1 and 1 more of 3 is missing",
        "evals/before.parquet cannot be read",
        "ledger.sqlite cannot be read",
    ):
        assert part in said
        assert part in page


def test_restarts_are_in_the_report_and_each_kind_is_counted_by_itself(runs: Path) -> None:
    telemetry = Telemetry(runs / "old" / "events" / "more.jsonl", process="conductor")
    for name, times in (("engine-0", 2), ("worker-0", 1)):
        for _ in range(times):
            telemetry.event("process", name=name, state="restart")
    telemetry.event("process", name="worker-0", state="hung")
    telemetry.close()
    assert main(["report", "old"]) == 0
    page = (runs / "old" / "report.html").read_text()
    assert "<td>engine-0 was restarted</td><td>2</td>" in page
    assert "<td>worker-0 did not answer and was killed</td><td>1</td>" in page


def test_a_path_that_is_not_there_is_named_as_it_was_given(runs: Path) -> None:
    from etude.cli.locations import existing_path

    history = History(RunFolder.open(runs / "old"), {}, {})
    with pytest.raises(CheckpointError, match=r"no checkpoint at runs/old/checkpoints/gone\n"):
        history.start_checkpoint(1, Path("runs/old/checkpoints/gone"))
    with pytest.raises(NoCheckpoint) as absent:
        existing_path(Path("runs/gone"))
    assert absent.value.facts == ""


def test_a_run_comes_before_what_is_looked_at_in_it_and_may_be_left_out() -> None:
    parser = build_parser()
    for words, run in (
        (["rollouts", "show", "a", "g0.1"], Path("a")),
        (["rollouts", "show", "g0.1"], None),
        (["replay", "a", "3"], Path("a")),
        (["replay", "3", "--json"], None),
    ):
        args = parser.parse_args(words)
        assert args.run == run
        assert getattr(args, "rollout_id", None) == "g0.1" or args.step == 3


def test_the_help_and_the_guide_have_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(EXITS) == list(Exit)
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "getting-started.md").read_text()
    for code, meaning in EXITS.items():
        assert f"{code.value} {meaning.split()[0]}" in said
        assert f"\n| {code.value} | " in guide


def test_ctrl_c_while_modules_are_imported_prints_interrupted() -> None:
    program = """
import etude.cli.signals, signal, os
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell would ignore it
os.kill(os.getpid(), signal.SIGINT)
print("not reached")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("", "interrupted\n")
    assert ended.returncode != 0


def test_a_run_that_fails_says_how_to_go_on(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise EngineError("engine-0 keeps dying", "exit code -9", hint="see its log")

    monkeypatch.setattr("etude.loop.phases.run_phases", fails)
    monkeypatch.setattr("etude.cli.run.preflight", lambda *_, **__: None)
    assert main(["run", "--resume", "runs/old"]) == Exit.FAILED
    said = capsys.readouterr().err
    assert "error: engine-0 keeps dying: exit code -9\n  hint: see its log; " in said
    assert said.rstrip().endswith("resume with: etude run --resume runs/old")

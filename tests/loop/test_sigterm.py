"""SIGTERM ends a command as Ctrl-C does: with the same exit code, and without files or processes left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Cli

from etude.errors import Exit

pytestmark = pytest.mark.timeout(1800)
SLEEPS = """
import asyncio, sys, time, etude.cli, etude.cli.run
def waits():
    print("begun", flush=True)
    time.sleep(60)
async def waits_in_a_loop():
    print("begun", flush=True)
    await asyncio.sleep(60)
etude.cli.run.status = lambda _: {call}
sys.exit(etude.cli.main(["status", "a"]))
"""
WAITS = {"a call": "waits()", "an event loop": "asyncio.run(waits_in_a_loop())"}


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that name a folder."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # it has ended
            if str(folder) in words and state != "Z":
                found.append(words[:200])
    return found


@pytest.mark.parametrize("where", WAITS)
@pytest.mark.parametrize("ignores_ctrl_c", [False, True], ids=["a job", "a background job of a shell"])
def test_every_command_ends_at_a_sigterm_with_the_code_of_an_interruption(where: str, ignores_ctrl_c: bool) -> None:
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if ignores_ctrl_c else ""
    script = ignore + SLEEPS.format(call=WAITS[where])
    argv = [sys.executable, "-c", script]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "begun\n"
        command.send_signal(signal.SIGTERM)
        _, said = command.communicate(timeout=300)
    assert (command.returncode, said) == (Exit.INTERRUPTED, "interrupted\n")


def test_an_evaluation_that_is_terminated_leaves_no_folder_and_no_process(
    game: Any, tmp_path: Path, cli_in: Callable[[Path], Cli]
) -> None:
    scratch, log, plain = tmp_path / "t", tmp_path / "out.log", cli_in(tmp_path)
    scratch.mkdir()
    cli = Cli(plain.cwd, {**plain.env, "TMPDIR": str(scratch)})
    command = cli.start("eval", "own", "--checkpoint", game.start, "--config", game.config, "--tasks", "4", log=log)
    end = time.monotonic() + 600
    while len(list(scratch.glob("etude-eval*/etude-eval*/logs/*.log"))) < 3:  # engine, worker and grader have started
        assert command.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)
    command.send_signal(signal.SIGTERM)
    assert command.wait(600) == Exit.INTERRUPTED, log.read_text()
    assert log.read_text().endswith("interrupted\n")
    assert list(scratch.iterdir()) == []
    end = time.monotonic() + 120  # what the kernel ends with its parent needs a moment
    while left := processes_of(scratch):
        assert time.monotonic() < end, left
        time.sleep(0.02)

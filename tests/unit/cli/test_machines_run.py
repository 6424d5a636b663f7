"""``etude machines run | shell | probe | bench``: one machine from the command line, and which can be had."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from tests.here import needs

import etude.cli.machines
from etude.cli import main
from etude.errors import Exit

AT_DEADLINE = 124


def command_line(*words: str, typed: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "etude.cli", "machines", *words]
    return subprocess.run(command, input=typed, capture_output=True, timeout=300, check=False)


def test_a_command_has_its_files_and_its_exit_code_and_streams_are_passed_on(tmp_path: Path, capfdbinary):
    needs("namespace")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("there\n")
    command = ["sh", "-c", "cat sub/a.txt; echo said >&2; exit 3"]
    assert main(["machines", "run", "--files", str(tmp_path), "--", *command]) == 3
    assert capfdbinary.readouterr() == (b"there\n", b"said\n")
    assert main(["machines", "run", "--deadline", "0.2s", "--", "sleep", "60"]) == AT_DEADLINE
    assert b"killed at the deadline of 0.2 s" in capfdbinary.readouterr().err


def test_what_is_piped_in_arrives_and_a_shell_reads_lines_of_it():
    needs("namespace")
    assert command_line("run", "--", "wc", "-c", typed=b"x" * 300_000).stdout.strip() == b"300000"
    done = command_line("shell", typed=b"echo $((40 + 2))\nexit 4\n")
    assert (done.returncode, done.stdout) == (4, b"42\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--files", "nowhere", "--", "true"], "--files nowhere is not a folder"),
        (["--user", "somebody", "--", "true"], "cannot run as 'somebody'"),
        (["--backend", "nothing", "--", "true"], "no backend 'nothing'"),
        (["--image", "nothing", "--store", "images", "--", "true"], "hint: "),
    ],
)
def test_invalid_options_of_a_command_are_bad_input(words, said, tmp_path: Path, monkeypatch, capsys):
    needs("namespace")
    monkeypatch.chdir(tmp_path)
    assert main(["machines", "run", *words]) == Exit.BAD_INPUT
    assert said in capsys.readouterr().err


@pytest.mark.timeout(1800)  # a machine without KVM boots for a minute where others compute
def test_a_shell_in_a_virtual_machine_has_a_terminal_and_keys_reach_what_runs():
    needs("microvm")
    pid, screen = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "etude.cli", "machines", "shell", "--backend", "microvm"])
    said = b""

    def until(word: bytes) -> None:
        nonlocal said
        while word not in said:
            said += os.read(screen, 4096)
        said = said.partition(word)[2]

    until(b"$ ")
    os.write(screen, b"tty; cat\n")
    until(b"/dev/pts/")
    until(b"\n")
    os.write(screen, b"\x03")
    until(b"$ ")
    os.write(screen, b"exit 7\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    os.close(screen)


def test_probe_tries_each_backend_and_names_why_one_does_not_work(monkeypatch, capsys):
    needs("namespace")
    for name in ("E2B_API_KEY", "E2B_API_URL", "E2B_DOMAIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(etude.cli.machines, "BACKENDS", ["namespace", "remote"])
    assert main(["machines", "probe"]) == Exit.DONE
    said = capsys.readouterr().out
    assert "shared kernel" in said
    assert "hint: set E2B_API_KEY" in said
    monkeypatch.setattr(etude.cli.machines, "BACKENDS", ["remote"])
    assert main(["machines", "probe"]) == Exit.FAILED


def test_what_machines_cost_is_measured(capsys):
    needs("namespace")
    assert main(["machines", "bench", "--num", "3", "--json"]) == Exit.DONE
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert {"fork", "first `true`", "snapshot", "fork 8"} <= steps.keys()
    assert all(0 < step["p50_ms"] <= step["p99_ms"] for step in steps.values())
    assert steps["fork"]["times"] == 3
    assert main(["machines", "bench", "--num", "1"]) == Exit.DONE
    assert "p99" in capsys.readouterr().out

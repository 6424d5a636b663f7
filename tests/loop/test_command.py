"""A run whose agent program is a process beside the worker, trained over its HTTP endpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.errors import Exit

pytestmark = pytest.mark.timeout(300)
UNBOUNDED = ("--set", "machines.require_memory_bound=false")  # what runs in the machines is ours
AGENT = Path(__file__).parents[2] / "examples" / "command" / "agent.py"


def test_a_program_that_only_speaks_http_is_trained_and_its_steps_replay(
    game: Any, cli_in: Callable[[Path], Any], tmp_path: Path
) -> None:
    here, run = cli_in(tmp_path), tmp_path / "runs" / "r"
    program = f'harness.program={{kind="command", argv=["{{python}}", "{AGENT}"], warm=["json", "urllib.request"]}}'
    done = here("run", game.config, "--name", "r", "--set", program, "--set", "rl.steps=2", *UNBOUNDED)
    assert done.returncode == Exit.DONE, done.stderr + done.stdout
    assert here("replay", run, "2").returncode == Exit.DONE
    shown = here("rollouts", "show", run, "g000000.0").stdout
    assert "log of the agent program, attempt 0:" in shown
    assert "sampling asked:" in shown
    assert "exit code 0" in shown

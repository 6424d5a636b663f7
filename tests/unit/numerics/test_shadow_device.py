"""What `tests.shadow` shows of a device without one: nothing of the CPU meets it, and it is waited for once a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    argv = [sys.executable, "-m", "tests.shadow"]
    done = subprocess.run(argv, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line["case"]: line["error"] for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    "case",
    [
        "a training step",
        "an optimiser's steps",
        "an engine's steps",
        "a tensor of the CPU is refused",
        "waiting is refused",
    ],
)
def test_exact_mode_moves_no_tensor_to_the_cpu_and_waits_for_no_value(case: str, found: dict[str, str]) -> None:
    assert found[case] == ""

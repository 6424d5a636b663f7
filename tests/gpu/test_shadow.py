"""What `tests.shadow exact` shows of exact mode on a device without one: where the tensors of each launch are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install 'etude[gpu]')")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, and says it itself")
def test_no_program_of_exact_mode_is_given_a_tensor_of_the_cpu_and_nothing_is_waited_for() -> None:
    argv, there = [sys.executable, "-m", "tests.shadow", "exact"], {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(argv, cwd=Path(__file__).parents[2], env=there, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {line["case"]: line["error"] for line in map(json.loads, done.stdout.splitlines())}
    assert found == dict.fromkeys(found, "")
    assert {"a training step", "an engine's steps", "a program is given no tensor of the CPU"} < found.keys()

"""The list of skipped tests at the end of a test run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.parametrize("i", range(3))
def test_qemu(i):
    pytest.skip("no qemu here")

@pytest.mark.skipif(True, reason="only root can become others")
def test_root():
    pass

def test_runs():
    pass
"""


def test_skips_are_counted_by_reason_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for more in ([], ["-n", "2"]):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.skips", "-c", tmp_path / "pytest.ini", *more]
        done = subprocess.run([*command, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        _, _, said = done.stdout.partition("4 skipped, by reason")
        assert said.splitlines()[1:3] == ["    3  no qemu here", "    1  only root can become others"]

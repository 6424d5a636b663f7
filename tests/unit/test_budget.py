"""Tests of a test run whose time is over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.budget import UNTIL


def test_a_test_begins_only_while_there_is_time() -> None:
    assert time.time() < UNTIL


@pytest.mark.parametrize(("until", "says"), [("1", "1 skipped"), ("inf", "1 passed")])
def test_tests_that_begin_after_the_end_are_skipped_and_counted(until: str, says: str) -> None:
    one = f"{__file__}::test_a_test_begins_only_while_there_is_time"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", one],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"ETUDE_TESTS_UNTIL": until},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert says in done.stdout, done.stdout
    assert ("NOT RUN: the time of this test run was over" in done.stdout) is (until == "1")

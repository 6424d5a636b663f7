"""Skips the tests that have not begun when the time of a test run is over, so that a slow host has a result at all.

Without `ETUDE_TESTS_UNTIL` in the environment all tests run. The summary at the end counts what was skipped."""

from __future__ import annotations

import os
import time

import pytest

UNTIL = float(os.environ.get("ETUDE_TESTS_UNTIL", "inf"))  # seconds since 1970


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip a test before its fixtures are made, if it begins too late."""
    if time.time() > UNTIL:
        pytest.skip("NOT RUN: the time of this test run was over (ETUDE_TESTS_UNTIL)")

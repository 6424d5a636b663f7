"""Which cases of a parametrised test run in `make test`, and which only in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_few(cases: Iterable[Any], quick: int) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`, with the mark `slow` on all but the first `quick`.

    For tests whose cases go the same way through the code, and take seconds each."""
    return [
        case if at < quick else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for at, case in enumerate(cases)
    ]

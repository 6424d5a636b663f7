"""Every promise names a test or benchmark that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = sorted(set(re.findall(r"`((?:tests|benchmarks)/[\w/.]+\.py(?:::\w+)?)`", (ROOT / "PROMISES.md").read_text())))


def test_there_are_promises():
    assert len(NAMED) > 20


@pytest.mark.parametrize("name", NAMED)
def test_what_enforces_a_promise_exists(name):
    path, _, test = name.partition("::")
    text = (ROOT / path).read_text()
    assert not test or re.search(rf"^(async def|def|class) {test}\b", text, re.M)

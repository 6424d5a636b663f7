"""The guide to stores gives the time limits of `HttpStore`."""

from __future__ import annotations

import inspect
from pathlib import Path

from etude.stores.http import HttpStore

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "stores.md"


def test_how_long_a_relay_that_does_not_answer_is_waited_for_is_said() -> None:
    limits = inspect.signature(HttpStore).parameters
    deadline_s, silence_s = (limits[name].default for name in ("deadline_s", "silence_s"))
    said = next(line for line in GUIDE.read_text().splitlines() if line.startswith("| a relay does not respond"))
    assert f"until {deadline_s:g} s after" in said
    assert f"for at most {silence_s:g} s" in said

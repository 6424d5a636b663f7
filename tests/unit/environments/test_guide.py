"""The code in the guide to machines alone runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.here import why_not

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "machines-alone.md"


def test_the_guides_code_runs(capsys):
    if why := why_not("namespace"):
        pytest.skip(why)
    [block] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    exec(block, {})
    told = capsys.readouterr().out
    assert "0 b'2\\n' False False" in told
    assert "given" in told

"""The code in the guide to using the weights library alone runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "weights-alone.md"


def test_the_guides_code_runs_from_top_to_bottom() -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 4
    exec("\n".join(blocks), {})


def test_every_command_of_the_guide_is_one(capsys) -> None:
    from etude.cli.commands import build_parser

    commands = re.findall(r"^etude (weights .*?)(?:  +#.*)?$", GUIDE.read_text(), re.M)
    assert len(commands) == 5
    for command in commands:
        build_parser().parse_args(command.split())

"""``etude harness check`` on programs that are trained well, and on some that are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from etude import cli as etude

AGENT = Path(__file__).parents[3] / "examples" / "command" / "agent.py"
CONFIG = """
[machines]
require_memory_bound = false
[harness]
max_turns = 4
turn_tokens = 48
context_tokens = 480
rollout_deadline_s = 20.0
[harness.program]
kind = "command"
argv = {argv}
"""


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(argv: list[str], *more: str) -> tuple[int, str]:
        config = tmp_path / "config.toml"
        config.write_text(CONFIG.format(argv=argv))
        code = etude.main(["harness", "check", str(config), *more])
        out, err = capsys.readouterr()
        return code, out + err

    return run


def test_a_program_that_asks_and_submits_is_shown_as_a_tree(check: Callable[..., tuple[int, str]]) -> None:
    code, said = check(["{python}", str(AGENT)])
    assert code == 0, said
    assert "2 turns:" in said
    assert "turn 0 after - (first, act)" in said
    assert "turn 1 after 0 (next, act)" in said
    assert "calls submit" in said
    assert "ended: submitted" in said
    assert 'sampling asked: {"temperature": 0.2}' in said
    assert "problem: the model never reads: tool 'edit'" in said  # etude's own template lists no tools


def test_a_program_that_asks_nothing_fails_the_check(check: Callable[..., tuple[int, str]]) -> None:
    code, said = check(["{python}", "-c", "print('hello')"])
    assert code == 1
    assert "problem: the program sent no request to the model" in said
    assert "| hello" in said


def test_a_script_of_answers_is_said_in_order(check: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    answers.write_text('"let me see"\n{"name": "submit", "arguments": {}}\n')
    code, said = check(["{python}", str(AGENT)], "--answers", str(answers))
    assert code == 0, said
    assert "'let me see'" in said
    answers.write_text("no json")
    code, said = check(["{python}", str(AGENT)], "--answers", str(answers))
    assert code == 2
    assert "is not a file of scripted answers" in said

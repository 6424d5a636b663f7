"""What the model never reads is told in full, and nothing else is."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.parity import chats
from tests.unit.harness.tokeniser import laptop_chat

from etude.cli.lost_text import lost_parts
from etude.harness import ChatFormat

RULES = "".join(f"- rule {i}: \"never\" <touch> file_{i}.py & say 'so' — è\n\n" for i in range(30))
PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command,\nas a line."},
        "limits": {
            "type": "object",
            "description": "What it may use.",
            "properties": {"seconds": {"type": "integer", "description": "At most 60."}},
        },
    },
    "required": ["command"],
}
ABOUT = 'Run a command.\nIts "output" is cut <at> 100 lines.'
TOOLS = [{"type": "function", "function": {"name": "bash", "description": ABOUT, "parameters": PARAMETERS}}]
COMMAND = "cat 'calc.py' | sed -n \"1,3p\"\ntrue"
BEGIN: list[dict[str, Any]] = [
    {"role": "system", "content": "Rules of the house:\n" + RULES},
    {"role": "user", "content": 'Fix "price"\nin calc.py:\n\n```python\nreturn n - 3\n```\n'},
]
ARGUMENTS = {"command": COMMAND, "limits": {"seconds": 7777}}
CALL = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": ARGUMENTS}}
TALK: list[dict[str, Any]] = [
    *BEGIN,
    {"role": "assistant", "content": "I look first.", "reasoning_content": "The file\nis small.", "tool_calls": [CALL]},
    {"role": "tool", "content": 'def price(n):\n\t"""n plus 3"""\n', "tool_call_id": "a"},
]
THOUGHT = "the reasoning 'The file\\nis small.'"
SAID = "the assistant message 'I look first.'"
LOST_BY = {  # templates leave this out on purpose
    "qwen": ([], []),
    "deepseek": (["description of tool 'bash'"], [THOUGHT]),
    "glm": ([], []),
    "minimax": ([], [THOUGHT]),
    "harmony": ([], [SAID]),
    "llama": ([], [SAID, THOUGHT]),
}


def rendered(kind: str, messages: list[dict[str, Any]]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        chat = ChatFormat.load(chats.make(Path(folder), kind))
    return chat.decode(chat.encode_prompt(messages, chat.signatures(TOOLS)), special=True)


@pytest.mark.parametrize("kind", LOST_BY)
def test_of_real_templates_what_they_leave_out_is_told_and_nothing_else(kind: str) -> None:
    always, of_reply = LOST_BY[kind]
    assert lost_parts(BEGIN, TOOLS, rendered(kind, BEGIN)) == always
    assert lost_parts(TALK, TOOLS, rendered(kind, TALK)) == [*always, *of_reply]


def test_etudes_own_template_lists_no_tools() -> None:
    chat = laptop_chat()
    text = chat.decode(chat.encode_prompt(BEGIN, chat.signatures(TOOLS)), special=True)
    assert lost_parts(BEGIN, TOOLS, text) == ["tool 'bash'"]


@pytest.mark.parametrize(
    ("cut", "told"),
    [
        ("Rules of the house", ["40 of "]),
        ("rule 14", [" of 1620 characters of the system message 'Rules of the house:"]),
        ("file_29.py", [" of 1620 characters of the system message 'Rules of the house:"]),
        (RULES.strip(), ["the system message 'Rules of the house:"]),
        ("in calc.py", ['the user message \'Fix "price"\\nin calc.py']),
        ("I look first.", [SAID]),
        ("is small", [THOUGHT]),
        ("sed -n", ["argument 'command' of a call of 'bash'"]),
        ("7777", ["argument 'limits' of a call of 'bash'"]),
        ("n plus 3", ["the tool message 'def price"]),
        ("Run a command", ["description of tool 'bash'"]),
        ("is cut <at> 100 lines", ["description of tool 'bash'"]),
        ("seconds", ["arguments seconds of tool 'bash'"]),
        ("At most 60.", ["descriptions of arguments seconds of tool 'bash'"]),
        ("bash", ["tool 'bash'", "a call of 'bash'"]),
    ],
)
def test_each_part_that_is_left_out_is_named(cut: str, told: list[str]) -> None:
    whole = rendered("qwen", TALK)
    assert cut in whole, "the cut changes nothing"
    (found, *more) = lost_parts(TALK, TOOLS, whole.replace(cut, ""))
    assert all(part in "; ".join([found, *more]) for part in told), (found, more)
    assert len(more) == (1 if cut == "bash" else 0), (found, more)


def test_a_template_that_reads_only_the_beginning_of_everything_is_told_all_that_it_loses() -> None:
    head = "You are an agent that works well and always does what it says, "
    talk = [{"role": "system", "content": head + "RULES: never delete files. " * 50}, *TALK[2:]]
    found = lost_parts(talk, TOOLS, head + "hi a.py bash")
    assert found[0] == "tool 'bash'"
    assert "of the system message 'You are an agent" in found[1]
    assert found[2:4] == [SAID, THOUGHT]
    assert found[4:6] == ["argument 'command' of a call of 'bash'", "argument 'limits' of a call of 'bash'"]
    assert found[6].startswith("the tool message 'def price")

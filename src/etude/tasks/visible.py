"""The visible tests of a task: a self-contained ``tests.py`` with short output.

``python tests.py`` prints the first failing case and a count. The output is short because every token of a tool's
answer takes context from a small model. The agent may read, edit or delete the file: grading uses hidden cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

TEST_FILE = "tests.py"
TEST_COMMAND = ("python", TEST_FILE)

_SCRIPT = """\
import sys

sys.dont_write_bytecode = True  # stale bytecode would hide an edit made within the same second
CASES = [
{cases}
]
passed, first = 0, ""
for module, call, want in CASES:
    try:
        got = eval(call, vars(__import__(module)))
    except Exception as error:
        got = error
    if type(got) is type(want) and got == want:
        passed += 1
    elif not first:
        shown = type(got).__name__ if isinstance(got, Exception) else repr(got)[:24]
        first = f"FAIL {{module}}.py {{call}} got {{shown}} want {{want!r}}".replace("'", "")
if first:
    print(first)
print(passed, "of", len(CASES), "passed")
sys.exit(passed < len(CASES))
"""


def call_text(function: str, args: Iterable[Any]) -> str:
    """Return a call of a function as source text.

    >>> call_text("price", [3, "ab"])
    "price(3, 'ab')"
    """
    return f"{function}({', '.join(map(repr, args))})"


def visible_tests(cases: Iterable[tuple[str, str, Any]]) -> str:
    """Return the text of ``tests.py`` for test cases: (module, call as text, expected plain value).

    Example output if the first of two cases fails::

        FAIL calc.py price(3) got 4 want 5
        1 of 2 passed"""
    return _SCRIPT.format(cases="\n".join(f"    {case!r}," for case in cases))

"""Mutants: wrong on purpose, small, of every kind, and never the same code."""

from __future__ import annotations

import ast
import heapq
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.tasks.mutation import changed_lines, mutants
from etude.tasks.mutation.edits import line_deletions
from etude.tasks.mutation.python import python_edits, same_code

CASES = {
    "comparison": ("def f(a, b):\n    return a < b\n", {"a <= b", "a >= b"}),
    "arithmetic": ("def f(a, b):\n    return a * (b)\n", {"a // (b)"}),
    "boolean": ("def f(a, b):\n    return a and b\n", {"a or b"}),
    "constant": ("def f():\n    return 7\n", {"return 8"}),
    "off by one": ("def f(n):\n    return range(n)\n", {"range((n) - 1)"}),
    "return None": ("def f(n):\n    return n\n", {"return None"}),
    "deleted statement": ("def f(n):\n    n.sort()\n    return n\n", {"    pass\n"}),
    "swapped branch": ("def f(n):\n    if n:\n        return 1\n", {"if (not (n)):"}),
}


@pytest.mark.parametrize("kind", CASES)
def test_every_kind_of_edit_changes_one_place_and_leaves_the_rest(kind: str) -> None:
    text, wanted = CASES[kind]
    made = [m for m in mutants("a.py", text, num=50, seed="1") if m.kind == kind]
    assert made
    assert all(any(piece in m.text for m in made) for piece in wanted)
    for mutant in made:
        ast.parse(mutant.text)
        assert sum(line.startswith("+") and not line.startswith("+++") for line in mutant.diff().splitlines()) == 1


def test_positions_are_right_behind_text_that_is_not_ascii() -> None:
    [mutant] = [m for m in mutants("a.py", "x = lambda é: 'é' + é\n", num=9, seed="") if m.kind == "arithmetic"]
    assert mutant.text == "x = lambda é: 'é' - é\n"


def test_docstrings_annotations_and_what_only_a_main_runs_are_left_alone() -> None:
    text = 'def f(a: "x" = None) -> "y":\n    "doc"\n    a.b()\n\nif __name__ == "__main__":\n    print(1 < 2)\n'
    assert {m.kind for m in mutants("a.py", text, num=50, seed="")} == {"deleted statement"}


def test_edits_that_compile_to_the_same_code_are_no_mutants() -> None:
    assert same_code("a = 1 + 1\n", "a = 2\n")
    assert not same_code("a = 1\n", "a = 1.0\n")
    assert not same_code("a = True\n", "a = 1\n")


def test_the_same_arguments_give_the_same_mutants_and_none_twice() -> None:
    text = Path(heapq.__file__).read_text()
    first = mutants("heapq.py", text, num=40, seed="s")
    assert [m.text for m in first] == [m.text for m in mutants("heapq.py", text, num=40, seed="s")]
    assert len({m.text for m in first}) == 40
    assert len({m.kind for m in first}) >= 6
    for mutant in first:
        ast.parse(mutant.text)


def test_edits_begin_only_in_the_lines_that_are_asked_for() -> None:
    before = "def f(a):\n    return a + 1\n\ndef g(a):\n    pass\n"
    after = before.replace("pass", "return a + 2")
    lines = changed_lines(before, after)
    assert lines == {5}
    assert all("a + 1" in m.text for m in mutants("a.py", after, num=50, seed="", within=lines))


def test_other_files_and_python_that_does_not_parse_lose_a_line() -> None:
    assert [e.line for e in line_deletions("# c\n\nset -e\nrun\n")] == [3, 4]
    assert {m.kind for m in mutants("a.sh", "set -e\nrun\n", num=9, seed="")} == {"deleted line"}
    assert {m.kind for m in mutants("a.py", "def f(:\n", num=9, seed="")} == {"deleted line"}


@settings(max_examples=150)
@given(st.data())
def test_any_text_has_mutants_or_none_and_never_an_error(data: st.DataObject) -> None:
    lines = data.draw(st.lists(st.sampled_from(CASE_LINES), max_size=8))
    cut = data.draw(st.integers(0, 60))
    text = "\n".join(lines)
    text = text[:cut] + data.draw(st.text(max_size=3)) + text[cut:]
    edits = python_edits(text)
    for mutant in mutants("a.py", text, num=30, seed="x"):
        assert mutant.text != text
        if edits is not None:
            ast.parse(mutant.text)


CASE_LINES = [line for text, _ in CASES.values() for line in text.splitlines()] + [
    "é = f'{1 + 2}'",
    "x = y[1:n]",
    "\f",
    "\r",
]


def test_a_number_of_more_digits_than_python_writes_is_left_as_it_is() -> None:
    edits = python_edits(f"BIG = 0x{'f' * 5000}\nSMALL = 3\n")
    assert edits is not None
    assert [edit for edit in edits if edit.kind in ("constant", "off by one")]

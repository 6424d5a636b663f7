"""Questions have one right answer, which executing the code gives, and which the context has."""

from __future__ import annotations

import ast

import pytest

from etude.corpus.documents import Document
from etude.evals.bases import look_ups, retrieval_questions, state_questions
from etude.evals.bases.questions import CONTEXT_CHARS, IN_FILE, MODULE, OPTIONS, STEPS
from etude.evals.bases.retrieval import STATED

CODE = '"""Limits."""\n\nRETRIES = 5\nNAME = "shop"\nTIMEOUT_S = 30.0\nPORT = 8080\nDEBUG = True\n'


def documents() -> list[Document]:
    found = [
        Document(
            f"src/shop/part{i}.py", CODE + f"\nOWN = {i + 100}\n\ndef total_{i}():\n    pass\n", f"src/shop/part{i}.py"
        )
        for i in range(6)
    ]
    return [*found, Document("notes.md", "PORT = 1\n", "notes.md"), Document("bad.py", "def (", "bad.py")]


def test_the_answer_of_a_question_about_state_is_what_python_computes() -> None:
    questions = state_questions(count=40)
    assert len(questions) == 40 * len(STEPS)
    for one in questions:
        *lines, last = one.context.split("\n")
        state: dict[str, int] = {}
        exec("\n".join(lines), {}, state)
        asked = last.removeprefix("assert ").removesuffix(" == ")
        assert one.options[one.answer] == f"{state[asked]}\n"
        assert len(set(one.options)) == OPTIONS
    assert {one.answer for one in questions} == set(range(OPTIONS)), "the right option has no place of its own"


def test_the_value_of_a_constant_is_in_the_context_and_the_other_options_are_values_of_others() -> None:
    questions = [one for one in look_ups(documents(), count=100) if one.kind == IN_FILE]
    assert {one.origin for one in questions} == {f"src/shop/part{i}.py" for i in range(6)}
    for one in questions:
        shown, _, last = one.context.rpartition("\n")
        asked = last.removeprefix("assert ").removesuffix(" == ")
        values = {n.targets[0].id: repr(n.value.value) for n in ast.parse(shown).body if isinstance(n, ast.Assign)}
        assert one.options[one.answer] == f"{values.pop(asked)}\n"
        assert {option.strip() for option in one.options} - {one.options[one.answer].strip()} <= set(values.values())
        assert one.neutral == f"assert {asked} == "


def test_a_constant_that_is_assigned_twice_or_below_the_shown_part_is_not_asked_for() -> None:
    twice = Document("a.py", "A = 1\nB = 2\nC = 3\nD = 4\nA = len('x')\n", "a.py")
    assert not look_ups([twice], count=9), "three are left, and a question needs four"
    below = Document("b.py", "A = 1\nB = 2\nC = 3\n" + "#" * CONTEXT_CHARS + "\nD = 4\n", "b.py")
    assert not look_ups([below], count=9)


def test_a_name_is_asked_for_with_the_module_that_defines_it_and_no_other_option_defines_it() -> None:
    both = Document(
        "src/shop/part9.py", "def total_1():\n    pass\n\ndef only_here():\n    pass\n", "src/shop/part9.py"
    )
    questions = [one for one in look_ups([*documents(), both], count=100) if one.kind == MODULE]
    names = {one.context.split()[-1].rstrip(":"): one.options[one.answer].strip() for one in questions}
    assert names == {**{f"total_{i}": f"shop.part{i}" for i in range(6) if i != 1}, "only_here": "shop.part9"}
    assert all(name not in one.neutral for one in questions for name in names)


TEXTS = [
    Document("a", "é" * 90 + "\nlast\n\n", "a"),
    Document("b", "one\ntwo\n" * 40),
    Document("c", "short"),
    Document("d", " "),
]


@pytest.mark.parametrize("distance", [1, 30, 256, 1000, 2048])
def test_a_number_is_stated_once_and_asked_for_after_so_many_bytes_of_the_users_text(distance: int) -> None:
    questions = retrieval_questions(TEXTS, distances=[distance], count=30)
    assert len(questions) == 30
    shown = "2 KiB" if distance == 2048 else f"{distance} bytes"
    for one in questions:
        assert one.kind == f"number stated {shown} before"
        *lines, last = one.context.split("\n")
        name = last.removeprefix("assert ").removesuffix(" == ")
        stated = [line.split(" = ") for line in lines if " = " in line]
        assert len(dict(stated)) == STATED
        assert one.options == (dict(stated)[name],)
        assert stated[1][0] == name, "one is stated before it"
        assert len(one.options[0]) == 5
        assert one.context.count(one.options[0]) == 1
        between = one.context.split("\n", 2)[2].removesuffix(last)
        others = sum(len(f"{a} = {b}\n") for a, b in stated[2:])
        assert distance - 1 <= len(between.encode()) - others <= distance, "a character may be cut at its end"
        for line in between.splitlines():
            assert " = " in line or not line or any(line in text.text for text in TEXTS)
    assert len({one.options for one in questions}) == 30
    assert {one.origin for one in questions} == {"a", "b", "c"}


def test_without_text_no_number_is_asked_for() -> None:
    assert retrieval_questions([Document("a", " \n")], distances=[10], count=3) == []


@pytest.mark.parametrize("seed", [0, 1])
def test_questions_depend_on_the_seed_alone(seed: int) -> None:
    assert look_ups(documents(), count=4, seed=seed) == look_ups(documents(), count=4, seed=seed)
    assert look_ups(documents(), count=4, seed=seed) != look_ups(documents(), count=4, seed=seed + 2)

"""Variants of tests that right code must fail."""

from __future__ import annotations

import ast
import difflib
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.environments.grading.canaries import variants_of_program, variants_of_test

SOURCE = """import unittest, pytest
class TestX:
    @pytest.mark.parametrize("n, e", [(1, 2), (3, 4), (-1, "it's \\"q\\"")])
    def test_rows(self, n, e):
        assert f(n) == e
def test_dict():
    # grüße
    assert g("ä") == {"a": [1, 2.5, None], 'b': True}
    assert 3 < 10
def test_line(): assert f(1) == -10
def test_truth():
    assert f(1) is True
class T(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(f(2), 3)
def test_raises():
    with pytest.raises(ValueError):
        f(2)
def test_computed():
    assert f(2) == g(3)
"""


def changes(names: list[str], index: int = 0, seed: int = 0) -> list[tuple[str, bool]]:
    found = []
    for variant in variants_of_test(SOURCE, names, index, random.Random(seed)):
        ast.parse(variant.source)
        lines = [
            line[2:].strip()
            for line in difflib.ndiff(SOURCE.splitlines(), variant.source.splitlines())
            if line[0] == "+"
        ]
        assert len(lines) == 1
        found.append((lines[0], variant.looks_original))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_variant_that_is_like_the_test_has_another_literal_where_a_result_is_compared(seed):
    for names, start, count in (
        (["test_dict"], 'assert g("ä") == {', 6),
        (["test_line"], "def test_line(): assert f(1) == -", 1),
        (["test_truth"], "assert f(1) is False", 1),
        (["T", "test_equal"], "self.assertEqual(f(2), ", 1),
    ):
        looks_original = [line for line, is_alike in changes(names, seed=seed) if is_alike]
        assert len(looks_original) == count
        assert all(line.startswith(start) for line in looks_original)
        assert not {line for line in SOURCE.splitlines()} & set(looks_original)


def test_of_parameters_the_compared_one_of_the_row_that_is_asked_for_is_another():
    [(first, looks_original), *_] = changes(["TestX", "test_rows"], index=1)
    assert looks_original
    assert first.startswith('@pytest.mark.parametrize("n, e", [(1, 2), (3, ')
    assert first.endswith('), (-1, "it\'s \\"q\\"")])')


def test_a_number_of_more_digits_than_python_writes_is_no_literal_to_change():
    source = f"assert f(1) == 0x{'f' * 5000} and f(2) == 3\n"
    assert [len(one) for one in variants_of_program(source, random.Random(0))] == [len(source)]


def test_a_test_without_such_a_literal_has_variants_that_say_so():
    found = changes(["test_computed"])
    assert found
    assert not any(looks_original for _, looks_original in found)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("with pytest.raises(ValueError): f(2)", "with pytest.raises("),
        ("with pytest.raises((ValueError, TypeError), match='x') as caught: f(2)", "with pytest.raises("),
        ("self.assertRaisesRegex(errors.Bad, 'x', f, 2)", "self.assertRaisesRegex("),
        ("raises(KeyError, lambda: f(2))", "raises("),
        ("with pytest.warns(UserWarning): f(2)", "with pytest.warns("),
        ("assert f(2) == pytest.approx(3.5)", "assert f(2) == pytest.approx("),
        ("self.assertAlmostEqual(f(2), 3.5)", "self.assertAlmostEqual(f(2), "),
    ],
)
def test_what_is_expected_to_be_raised_or_nearly_equal_is_another(line, start, seed):
    source = f"def test_a():\n    {line}\n"
    first = next(variants_of_test(source, ["test_a"], 0, random.Random(seed)))
    assert first.looks_original
    assert first.source != source
    assert first.source.splitlines()[1].strip().startswith(start)
    ast.parse(first.source)


@pytest.mark.parametrize("seed", range(5))
def test_of_a_test_that_compares_and_expects_errors_both_come_first(seed):
    source = "def test_a():\n    assert f(1) == 2\n    assert f(2) == 3\n    with pytest.raises(TypeError): f()\n"
    first, second, *_ = variants_of_test(source, ["test_a"], 0, random.Random(seed))
    assert {first.kind, second.kind} == {"compared", "raised"}


def test_right_code_fails_every_variant_and_passes_the_test():
    def outcome(source: str, name: str) -> bool:
        space: dict[str, Any] = {"f": lambda n: n + 1, "g": lambda n: n}
        exec(source, space)
        try:
            space[name]()
        except AssertionError:
            return False
        return True

    source = (
        "def test_a():\n    assert f(2) == 3\n    x = f(4)\n    assert x == 5 and x\n    assert [x, 'a'] == [5, 'a']\n"
    )
    assert outcome(source, "test_a")
    found = [
        variant.source for seed in range(20) for variant in variants_of_test(source, ["test_a"], 0, random.Random(seed))
    ]
    assert len(found) > 60
    assert not any(outcome(each, "test_a") for each in found)


@pytest.mark.parametrize(
    ("source", "names"), [("def test_a(:", ["test_a"]), ("x = 1", ["test_a"]), ("\0", ["a"]), ("", [])]
)
def test_a_file_without_tests_has_no_canary_variant(source, names):
    assert not [*variants_of_test(source, names, 0, random.Random(0))]


@given(st.text(max_size=80), st.integers(0, 9))
def test_any_text_is_survived(text, seed):
    for name in ("test_a", "check"):
        assert all(variant.source != text for variant in variants_of_test(text, [name], seed, random.Random(seed)))
    assert all(each != text for each in variants_of_program(text, random.Random(seed)))


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=9)
        | st.binary(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=5,
    ),
    st.integers(0, 99),
)
def test_any_literal_becomes_another_of_the_same_kind(value, seed):
    source = f"def test_a():\n    assert f() == {value!r}\n"
    for variant in variants_of_test(source, ["test_a"], 0, random.Random(seed)):
        if variant.looks_original:
            other = ast.literal_eval(variant.source.partition("==")[2].strip())
            assert type(other) is type(value) or value is None
            assert repr(other) != repr(value)

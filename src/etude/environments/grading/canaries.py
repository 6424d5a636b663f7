"""Canaries: variants of a hidden test that correct code must fail. If one passes, test results prove nothing.

The best variants look like the original test: only one literal that a result is compared with differs (or a parameter,
or the expected exception or warning). Code that reads expected values, overloads ``==``, disables assertions or reports
results itself passes them like the original. For tests without such literals, an assertion is negated or a failing one
is added; code could recognise those. The caller runs each variant on the reference solution before use, and keeps it
only if it fails there.
"""

from __future__ import annotations

import ast
import math
import random
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from etude.syntax import literal, parse

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_OPPOSITES = {
    "assertEqual": "assertNotEqual",
    "assertTrue": "assertFalse",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIn": "assertNotIn",
    "assertIsInstance": "assertNotIsInstance",
}
_NEGATIONS = {**_OPPOSITES, **{other: one for one, other in _OPPOSITES.items()}}
_EQUALITIES = frozenset(
    f"assert{what}"
    for what in ("Equal", "Equals", "ListEqual", "DictEqual", "CountEqual", "TupleEqual", "SetEqual", "SequenceEqual",
                 "MultiLineEqual", "AlmostEqual", "Is")
)  # fmt: skip
_RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex"})
_WARNS = frozenset({"warns", "assertWarns", "assertWarnsRegex"})
_EXCEPTIONS = (
    "ZeroDivisionError",
    "KeyError",
    "IndexError",
    "AttributeError",
    "OverflowError",
    "EOFError",
    "TypeError",
)
_WARNINGS = ("BytesWarning", "ImportWarning", "UnicodeWarning", "ResourceWarning")


class Variant(NamedTuple):
    """A changed test file.

    `source`: its text. `looks_original`: whether the change keeps the form of the test, so that code cannot recognise
    it. `kind`: the kind of the change: "compared" (of a literal), "raised" (of an expected exception) or "turned" (an
    assertion was negated or added).
    """

    source: str
    looks_original: bool
    kind: str


class _Edit(NamedTuple):
    start: int  # byte offsets in the source
    stop: int
    text: str


_KindEdit = tuple[_Edit, str]


def variants_of_test(source: str, names: Sequence[str], index: int, rng: random.Random) -> Iterator[Variant]:
    """Yield variants of a test file in which one test is changed so that correct code fails it. Variants that are
    hardest to recognise come first.

    `source`: the text of the file. `names`: the names of the test's class and method, or of its function. `index`: the
    row of the test's `parametrize` values to change, from 0. Yields nothing if the file is not Python or has no such
    test.

    >>> next(variants_of_test("def test_a():\\n    assert f(2) == 3\\n", ["test_a"], 0, random.Random(0))).source
    'def test_a():\\n    assert f(2) == 8\\n'
    """
    try:
        function = _find(parse(source), names)
    except SyntaxError:
        return
    if function is None:
        return
    text = source.encode()
    lines = _Offsets(text)
    compared = [
        (edit, "compared") for a in _literals(function, index) if (edit := _change_literal(a, text, lines, rng))
    ]
    raised = [(edit, "raised") for edit in _change_expected_exceptions(function, lines, rng)]
    for edit, kind in _interleave(compared, raised, rng):
        yield Variant(_apply_edit(text, edit), looks_original=True, kind=kind)
    negated = [edit for node in ast.walk(function) if (edit := _negate_assertion(node, text, lines)) is not None]
    rng.shuffle(negated)
    for edit in [*negated, _add_failing_assertion(function, text, lines, rng)]:
        yield Variant(_apply_edit(text, edit), looks_original=False, kind="turned")


def variant_of_data(text: str, row: int, rng: random.Random) -> str | None:
    """Return `text`, a data file of tests, with one letter or digit changed; None if it has neither.

    The change is in line `row` (from 0) if possible, since each line is often one test's parameters.

    >>> variant_of_data("[[1], 2]\\n[[3], 4]\\n", 1, random.Random(0))
    '[[1], 2]\\n[[3], 7]\\n'
    """
    lines = text.splitlines(keepends=True)
    changeable = [at for at, line in enumerate(lines) if any(char.isascii() and char.isalnum() for char in line)]
    if not changeable:
        return None
    at = row if row in changeable else rng.choice(changeable)
    return "".join([*lines[:at], _different_text(lines[at], rng), *lines[at + 1 :]])


def variants_of_program(source: str, rng: random.Random) -> Iterator[str]:
    """Yield variants of a grading program in random order. In each, one literal of a comparison differs.

    `source`: the program's text. Yields nothing if it is not Python.

    >>> [*variants_of_program("import calc, sys\\nsys.exit(calc.f(2) != 3)\\n", random.Random(0))]
    ['import calc, sys\\nsys.exit(calc.f(2) != 8)\\n']
    """
    try:
        tree = parse(source)
    except SyntaxError:
        return
    sides = [side for pair in _comparisons(tree, (ast.Eq, ast.NotEq)) for side in pair if _is_literal(side)]
    text = source.encode()
    lines = _Offsets(text)
    edits = [
        edit for side in sides for atom in _atoms(side) if (edit := _change_literal(atom, text, lines, rng)) is not None
    ]
    rng.shuffle(edits)
    for edit in edits:
        yield _apply_edit(text, edit)


def _interleave(one: list[_KindEdit], other: list[_KindEdit], rng: random.Random) -> list[_KindEdit]:
    """All items of both lists, each shuffled, alternating as long as both have items."""
    for each in (one, other):
        rng.shuffle(each)
    first, second = rng.sample([one, other], 2)
    pairs = zip_longest(first, second)
    return [edit for pair in pairs for edit in pair if edit is not None]


def _change_expected_exceptions(function: _Function, offsets: _Offsets, rng: random.Random) -> Iterator[_Edit]:
    for node in ast.walk(function):
        name = _method_name(node) or (
            node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        )
        others = _EXCEPTIONS if name in _RAISES else _WARNINGS if name in _WARNS else ()
        if others and isinstance(node, ast.Call) and node.args:
            kind = node.args[0]
            expected = {each.id for each in ast.walk(kind) if isinstance(each, ast.Name)}
            yield _Edit(*offsets.span(kind), rng.choice([other for other in others if other not in expected]))


def _find(tree: ast.Module, names: Sequence[str]) -> _Function | None:
    body: Sequence[ast.stmt] = tree.body
    for depth, name in enumerate(names, 1):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef) if depth == len(names) else (ast.ClassDef,)
        found = [node for node in body if isinstance(node, kinds) and node.name == name]
        if not found:
            return None
        body = found[-1].body
    node = found[-1] if names else None
    return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _literals(function: _Function, index: int) -> list[ast.Constant]:
    """The constants that results are compared with by equality: in the comparison, or in the test's row of
    parameters."""
    expected = [_unwrap_approx(side) for one, other in _equality_assertions(function) for side in (one, other)]
    found = [atom for side in expected if _is_literal(side) for atom in _atoms(side)]
    compared = {side.id for side in expected if isinstance(side, ast.Name)}
    return found + [atom for value in _parameter_values(function, compared, index) for atom in _atoms(value)]


def _unwrap_approx(side: ast.expr) -> ast.expr:
    """The compared value: of `pytest.approx(3.5)` the number."""
    return side.args[0] if isinstance(side, ast.Call) and side.args and _method_name(side) == "approx" else side


def _equality_assertions(function: _Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            yield from _comparison_sides(node.test, (ast.Eq,))
        else:
            yield from _assert_equal_sides(node)


def _comparisons(tree: ast.Module, how: tuple[type[ast.cmpop], ...]) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        yield from _comparison_sides(node, how) if isinstance(node, ast.Compare) else _assert_equal_sides(node)


def _comparison_sides(node: ast.Compare, how: tuple[type[ast.cmpop], ...]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Both sides of a comparison with one of these operators, or of `is` with True or False."""
    side = node.comparators[0]
    truth = isinstance(node.ops[0], ast.Is) and isinstance(side, ast.Constant) and isinstance(side.value, bool)
    if len(node.ops) == 1 and (truth or isinstance(node.ops[0], how)):
        yield node.left, side


def _assert_equal_sides(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if _method_name(node) in _EQUALITIES and isinstance(node, ast.Call) and len(node.args) >= 2:
        yield node.args[0], node.args[1]


def _method_name(node: ast.AST) -> str:
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def _parameter_values(function: _Function, names: set[str], index: int) -> Iterator[ast.expr]:
    """The literals of these parameters in row `index` of the only `parametrize` decorator."""
    marks = [
        node
        for node in function.decorator_list
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parametrize"
    ]
    if len(marks) != 1 or len(marks[0].args) < 2 or not isinstance(marks[0].args[1], ast.List | ast.Tuple):
        return
    named, rows = marks[0].args[0], marks[0].args[1].elts
    try:
        expected = ast.literal_eval(named)
    except ValueError:
        return
    columns = [name.strip() for name in expected.split(",")] if isinstance(expected, str) else list(expected)
    if index >= len(rows):
        return
    row = rows[index]
    values = [row] if len(columns) == 1 else list(row.elts) if isinstance(row, ast.List | ast.Tuple) else []
    for name, value in zip(columns, values, strict=False):
        if name in names and _is_literal(value):
            yield value


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _atoms(node: ast.expr) -> list[ast.Constant]:
    return [
        each for each in ast.walk(node) if isinstance(each, ast.Constant) and _different_literal(each.value) is not None
    ]


def _different_literal(value: object, rng: random.Random | None = None) -> str | None:
    """Source text of another value of the same type and similar form; None if there is none."""
    rng = rng or random.Random(0)
    match value:
        case bool():
            return str(not value)
        case int() if value.bit_length() < 4096:  # Python limits int-to-text conversion
            digits = str(value)
            at = rng.randrange(len(digits))
            other = rng.choice([d for d in "123456789" if d != digits[at]])
            return digits[:at] + other + digits[at + 1 :]
        case float():
            other_number = float(f"{value * rng.choice((2, 3, 4)) + rng.choice((1, 2, 3)):.12g}")
            return repr(other_number) if math.isfinite(other_number) and other_number != value else "1.5"
        case str():
            return _quoted(_different_text(value, rng))
        case bytes() if value.isascii():
            return "b" + _quoted(_different_text(value.decode(), rng))
        case None:
            return "0"
    return None


def _different_text(text: str, rng: random.Random) -> str:
    letters = [at for at, char in enumerate(text) if char.isascii() and char.isalnum()]
    if not letters:
        return text + rng.choice("aeiost")
    at = rng.choice(letters)
    pool = "0123456789" if text[at].isdigit() else "abcdefghilmnoprstu"
    other = rng.choice([char for char in pool if char != text[at].lower()])
    return text[:at] + (other.upper() if text[at].isupper() else other) + text[at + 1 :]


def _quoted(text: str) -> str:
    literal = repr(text)
    if literal.startswith('"'):
        return literal
    inner = literal[1:-1].replace("\\'", "'").replace('"', '\\"')
    return f'"{inner}"'


class _Offsets:
    """Converts positions of syntax trees to byte offsets."""

    def __init__(self, text: bytes) -> None:
        self._starts = [0]
        for line in text.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)


def _change_literal(atom: ast.Constant, text: bytes, offsets: _Offsets, rng: random.Random) -> _Edit | None:
    start, stop = offsets.span(atom)
    new = _different_literal(atom.value, rng)
    if new is None:
        return None
    if isinstance(atom.value, str | bytes) and text[start:stop].lstrip(b"b").startswith(b"'"):
        single = repr(literal(new))
        new = single if single.lstrip("b").startswith("'") else new
    return _Edit(start, stop, new)


def _negate_assertion(node: ast.AST, text: bytes, offsets: _Offsets) -> _Edit | None:
    if isinstance(node, ast.Assert):
        start, stop = offsets.span(node.test)
        return _Edit(start, stop, f"not ({text[start:stop].decode()})")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _NEGATIONS:
        _, stop = offsets.span(node.func)
        return _Edit(stop - len(node.func.attr), stop, _NEGATIONS[node.func.attr])
    return None


def _add_failing_assertion(function: _Function, text: bytes, offsets: _Offsets, rng: random.Random) -> _Edit:
    last = function.body[-1]
    _, stop = offsets.span(last)
    one, other = rng.randrange(10, 99), rng.randrange(100, 999)
    statement = f"assert len(str({one})) == len(str({other}))"
    if function.body[0].lineno == function.lineno:  # all on one line
        return _Edit(stop, stop, f"; {statement}")
    start = offsets.at(last.lineno, 0)
    indent = text[start : offsets.at(last.lineno, last.col_offset)].decode()
    return _Edit(stop, stop, f"\n{indent}{statement}")


def _apply_edit(text: bytes, edit: _Edit) -> str:
    return (text[: edit.start] + edit.text.encode() + text[edit.stop :]).decode()

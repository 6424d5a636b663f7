"""Mutants of Python: edits of operators, constants, branches, returns and statements, located with the syntax tree.

The mutation operators are a sufficient set according to Offutt et al. 1996 ("An experimental determination of
sufficient mutant operators"): relational, logical and arithmetic replacement, constants, statement deletion, negated
conditions. Docstrings and annotations are not changed, because no test depends on them.
"""

from __future__ import annotations

import ast
import itertools
import types
import warnings
from collections.abc import Iterator

from etude.syntax import parse
from etude.tasks.mutation.edits import Edit

_COMPARISONS = {
    "<": ["<=", ">="], "<=": ["<", ">"], ">": [">=", "<="], ">=": [">", "<"], "==": ["!="], "!=": ["=="],
    "is": ["is not"], "is not": ["is"], "in": ["not in"], "not in": ["in"],
}  # fmt: skip
_ARITHMETIC = {
    "+": "-", "-": "+", "*": "//", "/": "*", "//": "*", "%": "//", "**": "*",
    "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&", "@": "*",
}  # fmt: skip
_DELETABLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Delete, ast.Assert, ast.Break, ast.Continue)
MAX_CHARS = 400_000


def python_edits(text: str) -> list[Edit] | None:
    """Return every possible edit of a Python module, in no particular order.

    Returns None if the text is not valid Python or is too large."""
    if len(text) > MAX_CHARS:
        return None
    try:
        return _Finder(text).edits(parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError, UnicodeError):
        return None


def same_code(one: str, other: str) -> bool:
    """Return whether two Python modules compile to the same code, apart from positions.

    Also returns True if `other` does not compile, since no test is needed to find such a mutant."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first, second = (compile(text, "m", "exec", optimize=0) for text in (one, other))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return _plain(first) == _plain(second)


def _plain(code: types.CodeType) -> tuple[object, ...]:
    constants = tuple(
        _plain(c) if isinstance(c, types.CodeType) else (type(c).__name__, repr(c)) for c in code.co_consts
    )
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_name


class _Finder:
    """Collects the edits of a syntax tree, and converts positions of nodes (UTF-8 columns) to positions in the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        if "\r" in text or "\f" in text:
            raise ValueError("unusual line ends: positions cannot be computed")
        self._lines = text.split("\n")
        starts, at = [0], 0
        for line in self._lines:
            at += len(line) + 1
            starts.append(at)
        self._starts = starts

    def edits(self, tree: ast.Module) -> list[Edit]:
        untested = set(_untested(tree))
        found: list[Edit] = []
        for node in ast.walk(tree):
            if id(node) not in untested:
                found += self._of(node)
        found += self._deletions(tree)
        return found

    def _of(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.Compare(left=left, comparators=[*others]):
                sides = [left, *others]
                for a, b in itertools.pairwise(sides):
                    yield from self._operator("comparison", a, b, _COMPARISONS)
            case ast.BinOp(left=left, right=right):
                yield from self._operator("arithmetic", left, right, {k: [v] for k, v in _ARITHMETIC.items()})
            case ast.AugAssign(target=target, value=value):
                known = {f"{k}=": [f"{v}="] for k, v in _ARITHMETIC.items()}
                yield from self._operator("arithmetic", target, value, known)
            case ast.BoolOp(values=values):
                for a, b in itertools.pairwise(values):
                    yield from self._operator("boolean", a, b, {"and": ["or"], "or": ["and"]})
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._edit("boolean", node, self._source(operand, wrapped=True))
            case ast.Constant():
                yield from self._constant(node)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield self._edit("swapped branch", test, f"(not ({self._source(test)}))")
            case ast.Return(value=value) if value is not None and not _is_none(value):
                yield self._edit("return None", node, "return None")
            case ast.Call(func=ast.Name(id="range"), args=args) if args:
                last = args[min(1, len(args) - 1)]
                yield self._edit("off by one", last, f"({self._source(last)}) - 1")
            case ast.Slice(lower=lower, upper=upper):
                for bound in (lower, upper):
                    if bound is not None and not isinstance(bound, ast.Constant):
                        yield self._edit("off by one", bound, f"({self._source(bound)}) + 1")

    def _constant(self, node: ast.Constant) -> Iterator[Edit]:
        value = node.value
        if value is True or value is False:
            yield self._edit("constant", node, str(not value))
        elif type(value) is int and value.bit_length() < 4096:  # Python limits the digits of int to str
            yield self._edit("constant", node, str(value + 1))
            if value > 0:
                yield self._edit("off by one", node, str(value - 1))
        elif type(value) is float:
            yield self._edit("constant", node, repr(value + 1.0))
        elif type(value) is str and self._source(node)[:1] in "\"'":
            yield self._edit("constant", node, '"mutant"' if value == "" else '""')

    def _operator(self, kind: str, a: ast.expr, b: ast.expr, known: dict[str, list[str]]) -> Iterator[Edit]:
        """Edits of the operator between two nodes; none if it cannot be located because of comments."""
        _, start = self._span(a)
        stop, _ = self._span(b)
        between = self._text[start:stop]
        if "#" in between or "\\" in between:
            return
        tokens = between.replace("(", " ").replace(")", " ").split()
        operator = " ".join(tokens)
        if operator not in known:
            return
        first = between.index(tokens[0])
        last = between.rindex(tokens[-1]) + len(tokens[-1])
        line = self._text.count("\n", 0, start + first) + 1
        for other in known[operator]:
            yield Edit(kind, line, start + first, start + last, other)

    def _deletions(self, tree: ast.Module) -> Iterator[Edit]:
        for owner in ast.walk(tree):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(owner, name, None)
                if isinstance(owner, ast.Module) or not isinstance(block, list):
                    continue  # module-level statements are needed to import the module
                for statement in block:
                    if isinstance(statement, _DELETABLE) and not _is_docstring(statement):
                        yield self._edit("deleted statement", statement, "pass")

    def _edit(self, kind: str, node: ast.expr | ast.stmt, text: str) -> Edit:
        start, stop = self._span(node)
        return Edit(kind, node.lineno, start, stop, text)

    def _source(self, node: ast.expr, *, wrapped: bool = False) -> str:
        start, stop = self._span(node)
        return f"({self._text[start:stop]})" if wrapped else self._text[start:stop]

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        if node.end_lineno is None or node.end_col_offset is None:
            raise ValueError("a node without an end position")
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        prefix = self._lines[line - 1].encode()[:column]
        return self._starts[line - 1] + len(prefix.decode())


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str)


def _untested(tree: ast.Module) -> Iterator[int]:
    """Yield the ids of nodes that no test depends on: bare strings, annotations, f-strings, ``if TYPE_CHECKING`` and
    ``if __name__`` blocks."""
    for node in ast.walk(tree):
        roots: list[ast.AST | None] = []
        match node:
            case ast.Expr(value=ast.Constant() as value):
                roots = [value]
            case ast.AnnAssign(annotation=annotation):
                roots = [annotation]
            case ast.arg(annotation=annotation):
                roots = [annotation]
            case ast.FunctionDef(returns=returns) | ast.AsyncFunctionDef(returns=returns):
                roots = [returns]
            case ast.JoinedStr():
                roots = [node]
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                roots = [node]
        for root in roots:
            if root is not None:
                yield from (id(inner) for inner in ast.walk(root))

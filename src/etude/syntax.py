"""Parses Python source, from any thread.

All parsing uses one lock, because CPython keeps the recursion depth of `ast.parse` in one place for all threads: if a
garbage collection interrupts the parsing in one thread, and another thread parses meanwhile, the first one fails with
"SystemError: AST constructor recursion depth mismatch" (seen with 3.11.7)."""

from __future__ import annotations

import ast
import threading
import warnings

_PARSING = threading.Lock()


def parse(source: str | bytes) -> ast.Module:
    """Parse a module and ignore warnings, for example about invalid escapes.

    Raises `SyntaxError` for everything that is not valid Python, including undecodable bytes, null bytes, and nesting
    that is too deep.

    >>> parse("x = 1").body[0].lineno
    1
    """
    with _PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (ValueError, RecursionError, MemoryError) as error:
            raise SyntaxError(str(error) or "nested too deeply") from None


def literal(text: str) -> object:
    """Return the value of a Python literal. Raises `SyntaxError` for any other text.

    >>> literal("[1, 'a']")
    [1, 'a']
    """
    match parse(text.strip()).body:
        case [ast.Expr(value=value)]:
            try:
                return ast.literal_eval(value)
            except (ValueError, TypeError, RecursionError, MemoryError) as error:
                raise SyntaxError(str(error)) from None
        case _:
            raise SyntaxError("not one expression")

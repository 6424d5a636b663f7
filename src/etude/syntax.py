"""Python source to a syntax tree, from any thread.

CPython counts how deep it is in `ast.parse` in one place for all threads: when another one parses while a garbage
collection runs in between, the first ends in "SystemError: AST constructor recursion depth mismatch" (seen with 3.11.7
in a conductor that looked through four rollouts at once). So there is one lock, here.
"""

from __future__ import annotations

import ast
import threading
import warnings

_PARSING = threading.Lock()


def parse(source: str | bytes) -> ast.Module:
    """The tree of a module. Warnings about it (odd escapes, …) are dropped: other people's code is theirs. Raises
    `SyntaxError` for whatever is no Python: bytes of no encoding, a null byte, nesting that is too deep.

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
    """The value that a literal stands for. Raises `SyntaxError` for whatever is none.

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

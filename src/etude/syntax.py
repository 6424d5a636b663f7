"""Parse Python source, from any thread.

CPython stores the recursion depth of `ast.parse` in one place for all threads. If another thread parses while a garbage
collection runs in the first, that one fails with "SystemError: AST constructor recursion depth mismatch" (seen with
3.11.7 in a conductor that checked four rollouts at once). So all parsing uses one lock.
"""

from __future__ import annotations

import ast
import threading
import warnings

_PARSING = threading.Lock()


def parse(source: str | bytes) -> ast.Module:
    """Parse a module. Warnings (for example about invalid escapes) are ignored. Raises `SyntaxError` for anything that
    is not valid Python, including undecodable bytes, null bytes, and nesting that is too deep.

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
    """The value of a literal. Raises `SyntaxError` for anything else.

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

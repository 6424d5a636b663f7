"""Source code of programs that run in machines. They need only the standard library of Python 3.8 or later."""

from __future__ import annotations

from importlib import resources


def program(name: str) -> str:
    """Return the source code of the guest program `name`, for ``python -c``.

    >>> program("scan").startswith('\"\"\"A program for machines')
    True
    """
    return (resources.files(__package__) / f"{name}.py").read_text()

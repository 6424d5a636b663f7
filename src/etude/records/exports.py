"""What a task declares to be taken out of its frozen machine: files, whole folders, or the machine's state.

A declaration is a plain relative path, ``src/calc.py``; with a slash at its end it is the folder and all that is in
it, ``logs/``; ``./`` is the whole working directory. `STATE` is what a task whose machine's state counts exports
beside them, or `NO_STATE` with a word on why there is none: no paths, so no file can pass for them.

>>> covers(("calc.py", "logs/"), "logs/a/b.txt"), covers(("calc.py", "logs/"), "calc.py.txt")
(True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import PurePosixPath

STATE = "/"
NO_STATE = "/why"
WHOLE = "./"
CONFIGURATION = frozenset(
    {
        "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg",
        "pyproject.toml", "sitecustomize.py", "usercustomize.py",
    }
)  # fmt: skip
"""Names of files that decide how hidden tests run. The task's own are used, or none, but where a task declares one."""
_PATH_BYTES = 1024


def is_plain(path: str) -> bool:
    """Whether it is the plain form of a path below the working directory: text without ``..``, ``.`` and NUL, not too
    long.

    >>> [is_plain(path) for path in ("a/b.py", "/a", "a/../b", "./a", "a//b", "a/", "")]
    [True, False, False, False, False, False, False]
    """
    pure = PurePosixPath(path)
    plain = path not in ("", ".") and not pure.is_absolute() and ".." not in pure.parts and str(pure) == path
    return plain and "\0" not in path and len(path.encode(errors="replace")) <= _PATH_BYTES and _is_text(path)


def _is_text(path: str) -> bool:
    """Whether it is UTF-8: a name of other bytes cannot be told on, and has no place in a task."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_declarable(path: str) -> bool:
    """Whether a task can declare it.

    >>> [is_declarable(path) for path in ("a.py", "logs/", "./", "../logs/", "/logs/", "/")]
    [True, True, True, False, False, False]
    """
    return path == WHOLE or is_plain(path.removesuffix("/"))


def covering(declared: Iterable[str]) -> Callable[[str], bool]:
    """Tells of a plain path whether it is one of the declared files, or in one of the declared folders."""
    names = frozenset(declared)
    if WHOLE in names:
        return lambda path: True
    folders = any(one.endswith("/") for one in names)
    return lambda path: (
        path in names or (folders and any(f"{parent}/" in names for parent in PurePosixPath(path).parents))
    )


def covers(declared: Iterable[str], path: str) -> bool:
    """`covering`, for one path."""
    return covering(declared)(path)

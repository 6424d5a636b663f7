"""The export declarations of a task: which files and folders are read from its frozen machine for grading.

A declaration is a relative path such as ``src/calc.py``. A slash at the end declares a folder with everything in it:
``logs/``; ``./`` is the whole working directory. A task that is graded by its machine's state also exports `STATE`, or
`NO_STATE` with the reason why there is no state. Neither is a valid path, so no file can take their place.

>>> covers(("calc.py", "logs/"), "logs/a/b.txt"), covers(("calc.py", "logs/"), "calc.py.txt")
(True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import PurePosixPath

STATE = "/"
NO_STATE = "/why"
WHOLE = "./"
OWN = ".etude/"
"""The folder of etude's own files in the working directory, such as the history of a conversation. It is no part of an
exported folder."""
CONFIGURATION = frozenset(
    {
        "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg",
        "pyproject.toml", "sitecustomize.py", "usercustomize.py",
    }
)  # fmt: skip
"""Names of files that configure how hidden tests run. Unless the task declares such a file as an export, the agent's is
ignored, and the task's own is used."""
_PATH_BYTES = 1024


def is_plain(path: str) -> bool:
    """Return whether `path` is a normalised relative path below the working directory.

    It must be valid UTF-8 of at most 1024 bytes, without `..`, `.` and NUL.

    >>> [is_plain(path) for path in ("a/b.py", "/a", "a/../b", "./a", "a//b", "a/", "")]
    [True, False, False, False, False, False, False]
    """
    pure = PurePosixPath(path)
    plain = path not in ("", ".") and not pure.is_absolute() and ".." not in pure.parts and str(pure) == path
    return plain and "\0" not in path and len(path.encode(errors="replace")) <= _PATH_BYTES and _is_text(path)


def _is_text(path: str) -> bool:
    """Return whether the path can be encoded as UTF-8; another one cannot be stored in a record."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_declarable(path: str) -> bool:
    """Return whether a task can declare this path as an export: a file, a folder with a slash at the end, or `./`.

    >>> [is_declarable(path) for path in ("a.py", "logs/", "./", "../logs/", "/logs/", "/")]
    [True, True, True, False, False, False]
    """
    return path == WHOLE or is_plain(path.removesuffix("/"))


def covering(declared: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that says whether a path is one of the declared files or lies in a declared folder."""
    names = frozenset(declared)
    if WHOLE in names:
        return lambda path: True
    folders = any(one.endswith("/") for one in names)
    return lambda path: (
        path in names or (folders and any(f"{parent}/" in names for parent in PurePosixPath(path).parents))
    )


def covers(declared: Iterable[str], path: str) -> bool:
    """Return whether `path` is a declared file or lies in a declared folder. For many paths use `covering`."""
    return covering(declared)(path)

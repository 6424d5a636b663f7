"""Where a command may write a file: a mistyped output that would overwrite something is refused before the work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from etude.errors import InputError


def check_output(out: Path, inputs: Sequence[Path]) -> None:
    """Raises `InputError` for an output that is an input or lies in one, or whose directory is not there."""
    if not out.parent.is_dir():
        raise InputError(f"no directory {out.parent}", f"{out} would be in it", hint="make it first, or name another")
    for given in inputs:
        if out.resolve() == given.resolve():
            raise InputError(f"{out} is an input", "which stays as it is", hint="name a file elsewhere")
        if given.is_dir() and out.resolve().is_relative_to(given.resolve()):
            raise InputError(f"{out} lies in {given}", "an input stays as it is", hint=f"name {out.name} elsewhere")


def check_file(out: Path, inputs: Sequence[Path], ours: bytes, kind: str) -> None:
    """The same for a file that may replace an earlier one of its `kind`: one that begins with `ours`, or is empty.

    Raises `InputError` for anything else that is there already.
    """
    if out.is_dir():
        raise InputError(f"{out} is a directory", f"a {kind} is one file", hint="name a file that is not there yet")
    check_output(out, inputs)
    if not out.exists():
        return
    if not out.is_file():
        raise InputError(f"{out} is no regular file", f"a {kind} is one", hint="name a file that is not there yet")
    try:
        with out.open("rb") as file:
            found = file.read(len(ours))
    except OSError as error:
        raise InputError(f"{out} cannot be read", str(error.strerror), hint="name another file") from None
    if found not in (b"", ours):
        raise InputError(
            f"{out} exists, and is no {kind}", "only such a file is replaced", hint="name a file that is not there yet"
        )

"""Errors of a disk without room, where a runtime makes the folders that its sandboxes are made of."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from etude.errors import MachineError


@contextlib.contextmanager
def room(*made: Path) -> Iterator[None]:
    """What cannot be written inside is a `MachineError`; whatever goes wrong, these folders are gone again."""
    try:
        yield
    except BaseException as error:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        hint = "make room in the folder for temporary files, or set TMPDIR to one that has some"
        raise MachineError("no room for a sandbox", str(error), hint=hint) from None

"""Temporary directories that are removed even after their owner was killed.

The owner holds a file lock on its directory. Creating a directory first removes all those of the same name whose lock
is free."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class ScratchDirectory:
    """An empty temporary directory at `path`, which is removed by `close` or at the end of a ``with`` block.

    `name` says what it is for, and is part of the path. Raises `OSError` if it cannot be created.

    >>> with ScratchDirectory("example") as path:
    ...     path.name.startswith("etude-example."), list(path.iterdir())
    (True, [])
    >>> path.exists()
    False
    """

    def __init__(self, name: str) -> None:
        prefix = f"etude-{name}."
        for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_without_owner(old)
        while True:
            self._folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
            self.path = Path(self._folder.name)
            with contextlib.suppress(FileNotFoundError):  # another process removed it before it was locked
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._lock)
            self._folder.cleanup()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the directory with its content. Call it once."""
        self._folder.cleanup()
        os.close(self._lock)


def _remove_without_owner(folder: Path) -> None:
    with contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)

"""A runtime's own folder for what its sandboxes are made of. Its lock says that it has an owner: one whose owner was
killed is removed by the next who makes one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from etude.errors import MachineError

_PREFIX = "etude-gvisor-"


class OwnFolder:
    """An empty folder at `path`, among the temporary files. `MachineError` where there is no room for it."""

    def __init__(self) -> None:
        with room():
            for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
                _remove_without_owner(old)
            while True:
                self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
                self.path = Path(self._folder.name)
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():  # nobody came between who took it for one without an owner
                    return
                os.close(self._lock)

    def close(self) -> None:
        """Remove it, with all that is in it. Once."""
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

"""The first process of a command: confine it, then be the program that was asked for.

It is the only process that reads the request. Where it cannot be confined it says so in the request's own memory,
which no program has, and ends: the host then knows that the host is to blame.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import NoReturn

from . import confine, python
from .roles import Become
from .root import PYTHON_BIN, WORK

ENVIRONMENT = {
    "PATH": f"{PYTHON_BIN}:/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "PWD": WORK,
    "USER": "user",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same command prints the same thing in every machine
    "PYTHONDONTWRITEBYTECODE": "1",
}
MAX_REQUEST_BYTES = 4 << 20  # of words with a NUL byte between each two
BROKEN_EXIT = 125  # looked into by the host, as any program may end with it


def start(init: int, streams: list[int], slot: int, deadline_s: float, to: confine.Confinement) -> NoReturn:
    """The outermost frame of a command's process. `streams` are its request, its output, and its input if any."""
    request, out, *given = streams
    try:
        os.setsid()
        argv = os.fsdecode(os.pread(request, MAX_REQUEST_BYTES, 0)).split("\0")
        os.dup2(given[0] if given else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        confine.enter(init, slot, int(deadline_s * (os.cpu_count() or 1)) + 2, to)
    except OSError as error:
        os.ftruncate(request, 0)
        os.pwrite(request, str(error).encode(), 0)
        os._exit(BROKEN_EXIT)
    if python.serves(argv):
        raise Become(partial(python.run, argv))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, ENVIRONMENT)
    except FileNotFoundError:
        _fail(f"{argv[0]}: not found", 127)
    except (OSError, ValueError) as error:
        _fail(f"{argv[0]}: {getattr(error, 'strerror', None) or error}", 126)


def _fail(text: str, code: int) -> NoReturn:
    os.write(2, f"{text}\n".encode(errors="replace"))
    os._exit(code)

"""The first process of a command: confine it, then execute the requested program.

Only this process reads the request. If it cannot be confined, it writes the reason into the request's memory file,
which no program can access, and exits. The host then knows that the host is to blame.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

from . import confine, python
from .packets import INPUT_GIVEN, SEPARATE_STDERR
from .processes import Become
from .root import PYTHON_BIN, WORK

ENVIRONMENT = {
    "PATH": f"{PYTHON_BIN}:/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "PWD": WORK,
    "USER": "user",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # deterministic output of commands
    "PYTHONDONTWRITEBYTECODE": "1",
}
MAX_REQUEST_BYTES = 4 << 20  # of NUL-separated words
BROKEN_EXIT = 125  # the host checks the request then, as any program may exit with this code


def request(argv: Sequence[str], *, cwd: str, env: Mapping[str, str]) -> bytes:
    """Encode a command, its folder `cwd` and its environment `env` as NUL-separated words."""
    return os.fsencode("\0".join([cwd, str(len(env)), *(f"{name}={value}" for name, value in env.items()), *argv]))


def start(init: int, streams: list[int], flags: int, slot: int, deadline_s: float, to: confine.Confinement) -> NoReturn:
    """Start a command's process: confine this fork of the runner, then execute the program. Never returns.

    `init`: a pidfd of the machine's PID 1. `streams`: descriptors of the request and the output, then, depending on
    `flags`, of standard error and input. `to`: the settings.
    """
    request_fd, out, *other_fds = streams
    try:
        os.setsid()
        cwd, num_env, *words = os.fsdecode(os.pread(request_fd, MAX_REQUEST_BYTES, 0)).split("\0")
        env, argv = words[: int(num_env)], words[int(num_env) :]
        errors = other_fds.pop(0) if flags & SEPARATE_STDERR else out
        os.dup2(other_fds[0] if flags & INPUT_GIVEN else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)
        os.dup2(out, 1)
        os.dup2(errors, 2)
        confine.enter(init, slot, int(deadline_s * (os.cpu_count() or 1)) + 2, to)
    except OSError as error:
        os.ftruncate(request_fd, 0)
        os.pwrite(request_fd, str(error).encode(), 0)
        os._exit(BROKEN_EXIT)
    if cwd:
        _go_to(cwd)
    if env:
        os.environ.update(word.partition("=")[::2] for word in env)
    if to.own_root and python.serves(argv) and not any(word.startswith("PYTHON") for word in env):
        raise Become(partial(python.run, argv))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, os.environ)
    except FileNotFoundError:
        _fail(f"{argv[0]}: not found", 127)
    except (OSError, ValueError) as error:
        _fail(f"{argv[0]}: {getattr(error, 'strerror', None) or error}", 126)


def _go_to(cwd: str) -> None:
    try:
        os.chdir(cwd)
    except OSError as error:
        _fail(f"{cwd}: {error.strerror}", 126)
    os.environ["PWD"] = os.getcwd()


def _fail(text: str, code: int) -> NoReturn:
    os.write(2, f"{text}\n".encode(errors="surrogateescape"))
    os._exit(code)

"""The command line `etude`: parse the arguments, call the function of the command, and print errors.

The exit codes are `etude.errors.Exit`; every error class has one.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from etude.cli.signals import sigterm_as_ctrl_c  # first: importing the others takes most of a second

# isort: split
from etude.cli.commands import build_parser
from etude.errors import EtudeError, Exit, InputError, StoreError

_EXTRAS = {
    **dict.fromkeys(("torch", "tokenizers", "safetensors", "aiohttp", "uvloop", "pyarrow", "jinja2"), "train"),
    "obstore": "buckets",
    "cryptography": "signing",
    "psycopg": "postgres",
    "ray": "ray",
    "triton": "gpu",
}
"""The extra of etude that installs each optional library."""
_PATH_HINTS = {
    errno.EACCES: "give the user that runs this command access, or choose another path",
    errno.EPERM: "give the user that runs this command access, or choose another path",
    errno.EROFS: "the filesystem is mounted read-only: choose another path",
    errno.ENAMETOOLONG: "no file can have such a long name: check the argument",
    errno.ELOOP: "its symbolic links form a loop: choose another path",
    errno.EIO: "check the disk and its mount",
    errno.ESTALE: "check the mount: the files that it had are gone",
}
"""Hints for errors of the operating system about a path that the user gave."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (None: the arguments of this process) and return its exit code. SIGTERM ends the
    command like Ctrl-C."""
    with sigterm_as_ctrl_c():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    """Run one command. An `EtudeError` and an operating system error about a path are printed in three parts (what,
    facts, hint); any other exception keeps its traceback."""
    try:
        args = build_parser().parse_args(argv)
        code = int(_function(args.command)(args) or 0)
        sys.stdout.flush()
        return code
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _EXTRAS:
            raise
        missing = InputError(
            f"this command needs {library}",
            "it is not installed: the basic installation has only what weights and stores need",
            hint=f"pip install 'etude[{_EXTRAS[library]}]'",
        )
        print(f"error: {missing}", file=sys.stderr)
        return missing.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return Exit.FAILED
    except OSError as error:
        if error.filename is not None and error.errno in _PATH_HINTS:
            path_error = StoreError(
                f"{os.fsdecode(error.filename)} cannot be used", error.strerror or "", hint=_PATH_HINTS[error.errno]
            )
            print(f"error: {path_error}", file=sys.stderr)
            return path_error.exit_code
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard what is left in the buffer of stdout
        hint = "free disk space where the output goes, or where the command writes"
        print(f"error: the output could not be written completely\n  {error.strerror}\n  hint: {hint}", file=sys.stderr)
        return Exit.FAILED


def _function(command: str) -> Callable[[argparse.Namespace], int | None]:
    module, _, name = command.partition(":")
    function: Callable[[argparse.Namespace], int | None] = getattr(import_module(f"etude.cli.{module}"), name)
    return function

"""Run `python ...` in an already started interpreter: like a new one, without its 10 ms of startup.

The process is a fork that nothing else uses, and it ends here. Handles ``python SCRIPT``, ``python -c CODE`` and
``python -m MODULE`` with their arguments; other options need a real exec. Bytecode is never written: after an edit
within the same second and of the same size, the old code would run.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # not `signal`: its enums cost a fork a hundred page faults
import atexit
import builtins
import contextlib
import gc
import os
import runpy
import sys
import types
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from types import TracebackType

NAMES = ("python", "python3")


def serves(argv: list[str]) -> bool:
    """Return whether `run` can execute this command."""
    if len(argv) < 2 or argv[0] not in NAMES:
        return False
    return not argv[1].startswith("-") or (argv[1] in ("-c", "-m") and len(argv) > 2)


def run(argv: list[str]) -> NoReturn:
    """Run ``python argv[1:]`` on descriptors 0, 1 and 2, and exit with its exit code. Never returns.

    The standard streams are the launcher's: bound to the same descriptors, and never used before.
    """
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    gc.enable()
    code = 1
    try:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        _start(argv, main)
        code = 0
    except SystemExit as stop:
        code = _exit_code(stop.code)
    except BaseException as error:  # noqa: BLE001 - this is the interpreter's own top level
        with contextlib.suppress(Exception):
            _flush()  # what was printed comes before the traceback
        error = error.with_traceback(_without_us(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
    _finish(code)


def _start(argv: list[str], main: types.ModuleType) -> None:
    if argv[1] == "-m":
        sys.argv = ["-m", *argv[3:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(argv[2])  # type: ignore[attr-defined]
        return
    if argv[1] == "-c":
        sys.argv = ["-c", *argv[3:]]
        sys.path.insert(0, "")
        exec(compile(argv[2], "<string>", "exec", dont_inherit=True), main.__dict__)  # noqa: S102
        return
    path = os.path.abspath(argv[1])
    sys.argv = argv[1:]
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        os.write(2, f"{argv[0]}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n".encode())
        _finish(2)
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main.__dict__["__file__"] = path
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102


def _without_us(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        traceback = traceback.tb_next
    return traceback


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    os.write(2, f"{code}\n".encode(errors="replace"))
    return 1


def _finish(code: int) -> NoReturn:
    for step in (_join_threads, atexit._run_exitfuncs, _flush):
        try:
            step()
        except BaseException:  # noqa: BLE001 - as at the end of any interpreter: report by exit code only
            code = code or 120
    os._exit(code)


def _join_threads() -> None:
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()

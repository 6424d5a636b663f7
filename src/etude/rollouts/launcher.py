"""A script that starts programs, each under a supervisor process that kills all its child processes at its end.

The parent process executes this file with a Python interpreter. It uses only the standard library. It first imports the
modules that programs need, so that a forked program has them at once. Arguments: the file descriptor of a Unix socket
(SOCK_SEQPACKET) to the parent, then the modules.

The launcher sends one message when it is ready, a JSON object with `error` if a module cannot be imported. Each message
from the parent has two descriptors and starts a program: a stream socket for its supervisor, and the program's output.
The supervisor reads one line from the stream, ``{"argv", "env", "cwd", "fork"}``, and answers ``{"exit": code}`` when
the program has ended, or ``{"error": text}`` when it could not be started. When the parent closes the stream, or dies,
the supervisor kills the program. At the end it kills all processes that the program has started, daemons included."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

KILL_S = 20.0
"""The maximum time in which killed processes must end, in seconds."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """Import the modules, then start a program for each message until the parent closes the socket."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]  # the modules beside this file are not for programs
    try:
        for name in sys.argv[2:]:
            importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001  the parent reports it
        sock.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode())
        return
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, reap)
    sock.send(json.dumps({"threads": threading.active_count() - 1}).encode())
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 1, 2)
        if not data:
            return
        if os.fork() == 0:
            sock.close()
            try:
                supervise(socket.socket(fileno=fds[0]), fds[1])
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)


def reap(*_: object) -> None:
    """Wait for the supervisors that have ended, so that this process's CPU time includes theirs."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def supervise(stream: socket.socket, output: int) -> None:
    """Run one program to its end, report its exit code, kill all processes that it has left, and exit.

    `stream`: the socket to the parent, which sends what to run (`read_order`) and gets the exit code or the error of
    the start. If the parent closes it, the program is killed. `output`: descriptor for stdout and stderr."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    order = read_order(stream)
    if order is None:
        os._exit(0)
    failed, failing = os.pipe()  # both are closed by a successful exec
    pid = os.fork()
    if pid == 0:
        stream.close()
        os.close(failed)
        run(order, output, failing)
    os.close(failing)
    os.close(output)
    pidfd = os.pidfd_open(pid)
    ready, _, _ = select.select([stream.fileno(), pidfd], [], [])
    code = None
    if pidfd in ready:
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
    error = os.read(failed, 4096).decode(errors="replace") if code is not None else ""
    kill_descendants()
    if code is not None:
        with contextlib.suppress(OSError):
            stream.sendall(json.dumps({"error": error} if error else {"exit": code}).encode() + b"\n")
    os._exit(0)


def read_order(stream: socket.socket) -> dict[str, Any] | None:
    """Read an order: one JSON line, which describes the program to run (see the module). Returns None if the parent has
    closed the stream."""
    data = bytearray()
    while not data.endswith(b"\n"):
        part = stream.recv(1 << 16)
        if not part:
            return None
        data += part
    order: dict[str, Any] = json.loads(data)
    return order


def run(order: dict[str, Any], output: int, failing: int) -> None:
    """Run the program that an order describes in this forked process. Does not return.

    `order` has "argv", "env", "cwd" and "fork". With "fork", argv[1:] (arguments of a Python interpreter) run in this
    process; otherwise argv is executed. `output`: descriptor for stdout and stderr. `failing`: descriptor to which the
    text of an error is written if the program cannot be started."""
    argv = order["argv"]
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, number in ((null, 0), (output, 1), (output, 2)):
            os.dup2(fd, number)
        os.chdir(order["cwd"])
        env = order["env"]
        if not order["fork"]:
            os.execvpe(argv[0], argv, env)
        os.close(failing)
        os.environ.clear()
        os.environ.update(env)
        run_here(argv[1:])
    except BaseException as error:  # noqa: BLE001
        with contextlib.suppress(OSError):
            os.write(failing, f"{argv[0]}: {error}"[:4000].encode())
    finally:
        os._exit(127)


def run_here(argv: list[str]) -> None:
    """Run the arguments of a Python interpreter in this process: a script, ``-m module`` or ``-c code``."""
    code = 0
    try:
        if argv[0] == "-c":
            sys.argv, sys.path[:0] = ["-c", *argv[2:]], [""]
            exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
        elif argv[0] == "-m":
            sys.argv, sys.path[:0] = argv[1:], [os.getcwd()]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:0] = argv, [os.path.dirname(os.path.abspath(argv[0]))]
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as ended:
        code = exit_code(ended.code)
    except BaseException:  # noqa: BLE001  as an interpreter ends
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter does
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def exit_code(value: object) -> int:
    """Return an interpreter's exit code for ``SystemExit(value)``. Prints a value that is neither None nor an int."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    print(value, file=sys.stderr)
    return 1


def kill_descendants() -> None:
    """Kill all descendants of this process, for at most `KILL_S` seconds. Orphaned ones are its children, too (it is a
    subreaper)."""
    end = time.monotonic() + KILL_S
    while time.monotonic() < end:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def descendants(root: int) -> list[int]:
    """Return the ids of all processes below `root`."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found, added = {root}, True
    while added:
        new = {pid for pid, parent in parents.items() if parent in found} - found
        found |= new
        added = bool(new)
    return sorted(found - {root})


if __name__ == "__main__":
    main()

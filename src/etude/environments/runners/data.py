"""Call the agent's functions in a machine, and report what they return as plain data.

stdin: {"nonce", "calls": [[module, function, args], ...]}. stdout: one line, the nonce and a list of ["value", plain
data] or ["error", text]. No expected value is in the machine. Modules are imported once.

A call's result counts as if its process had made no other call. A fork for each call would cost a millisecond. So two
forks first make all calls, in opposite orders; if both get the same results, no call depends on memory that another
changed. A fork has none of the modules' threads and could wait for them forever, so modules that start threads are
imported in each fork.
"""

import importlib
import json
import os
import sys
import threading

PLAIN = (type(None), bool, float, str)
MAX_BYTES = 4 << 20  # bytes of all results
MAX_BITS = 14_000  # of an integer; Python cannot convert longer ones back from text
PIPE = 1 << 16
THREADED = 3  # exit code: modules started threads


def plain(value: object, depth: int = 0) -> object:
    """Return the value if it is JSON data of exactly these types. Raises `TypeError` otherwise."""
    kind = type(value)
    if kind in PLAIN or (kind is int and value.bit_length() < MAX_BITS):  # type: ignore[attr-defined]
        return value
    if depth < 64 and kind is list:
        return [plain(item, depth + 1) for item in value]  # type: ignore[attr-defined]
    if depth < 64 and kind is dict and all(type(key) is str for key in value):  # type: ignore[attr-defined]
        return {key: plain(item, depth + 1) for key, item in value.items()}  # type: ignore[attr-defined]
    what = "an int of more than 4,200 digits" if kind is int else f"a {kind.__name__}, which is not plain data"
    raise TypeError(f"returned {what}")


def call(module: str, function: str, args: list[object]) -> list[object]:
    """Call one function. Returns ["value", result] or ["error", text]."""
    try:
        return ["value", plain(getattr(importlib.import_module(module), function)(*args))]
    except BaseException as error:  # noqa: BLE001 - whatever the agent's code raises is its result
        return ["error", f"{type(error).__name__}: {error}"[:200]]


def results_of_fork(calls: list[list[object]]) -> list[bytes]:
    """Make calls one after the other in a fork. Returns their results as JSON lines; there are fewer if the fork ends
    early."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_fd)
            for each in calls:
                data = json.dumps(call(*each)).encode() + b"\n"  # type: ignore[arg-type]
                while data:
                    data = data[os.write(write_fd, data) :]
        finally:
            os._exit(0)
    os.close(write_fd)
    parts, size, lines = [], 0, 0
    while (
        size <= MAX_BYTES and lines < len(calls) and (part := os.read(read_fd, PIPE))
    ):  # background processes may keep the pipe open
        parts.append(part)
        size, lines = size + len(part), lines + part.count(b"\n")
    os.close(read_fd)
    os.waitpid(pid, 0)
    return b"".join(parts).split(b"\n")[:lines]


def read(lines: list[bytes]) -> object:
    """Return the only result of a fork; an error result if there is none."""
    try:
        [line] = lines
        return json.loads(line)
    except (ValueError, RecursionError):
        return ["error", "its process ended without a result"]


def results(calls: list[list[object]]) -> list[object]:
    """Return the results of all calls, in order."""
    if len(calls) > 1:
        forward = results_of_fork(calls)
        if len(forward) == len(calls) and forward == results_of_fork(calls[::-1])[::-1]:
            return [read([line]) for line in forward]
    return [read(results_of_fork([each])) for each in calls]


def load(module: str) -> None:
    """Import a module for all calls. If the import raises an error, each call raises it again."""
    try:
        importlib.import_module(module)
    except BaseException:  # noqa: BLE001 - see above
        sys.modules.pop(module, None)


def main() -> None:
    request = json.load(sys.stdin)
    report = os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(silence, fd)
    pid = os.fork()
    if pid == 0:
        for module in dict.fromkeys(each[0] for each in request["calls"]):
            load(module)
        if threading.active_count() > 1:
            os._exit(THREADED)
    else:
        status = os.waitpid(pid, 0)[1]
        if not os.WIFEXITED(status) or os.WEXITSTATUS(status) != THREADED:
            os._exit(0)
    found = json.dumps(results(request["calls"]))
    with open(report, "w") as file:
        file.write(f"\n{request['nonce']} {found}\n")
        file.flush()
        os._exit(0)


if __name__ == "__main__":
    main()

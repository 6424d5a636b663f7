"""PID 1 of a machine: answers the host's requests, one after another, until the host is gone.

It reads only frames of the host and holds nothing but this machine's own files and outputs. Tools cannot signal it
(PID 1 of its namespace), trace it (not dumpable, ptrace refused) or reach its socket.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from . import confine, files, tools, wire
from .root import WORK


def send(fd: int, kind: int, *fields: bytes) -> None:
    """One frame to the host."""
    view = memoryview(wire.pack(kind, *fields))
    while view:
        view = view[os.write(fd, view) :]


def receive(fd: int) -> wire.Frame:
    """The next request; ends this process, and with it the machine, when the host has hung up."""
    try:
        (size,) = wire.HEAD.unpack(_exactly(fd, wire.HEAD.size))
        return wire.unpack(_exactly(fd, size))
    except ConnectionError:
        os._exit(0)


def _exactly(fd: int, size: int) -> bytes:
    data = os.read(fd, size)
    if len(data) == size:
        return data
    buffer = bytearray(data)
    while len(buffer) < size:
        data = os.read(fd, min(size - len(buffer), 1 << 20))
        if not data:
            os._exit(0)
        buffer += data
    return bytes(buffer)


def serve(fd: int, limits: confine.Limits, identity: confine.Identity) -> None:
    """Say READY, then answer each request with DONE, OK or REFUSED."""
    root = os.open(WORK, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    answers: dict[int, Callable[[list[bytes]], tuple[bytes, ...]]] = {
        wire.EXEC: lambda fields: _exec(fields, identity),
        wire.READ: lambda fields: (files.read(root, _text(fields[0]), wire.SIZE.unpack(fields[1])[0]),),
        wire.WRITE: lambda fields: _write(root, fields),
        wire.LOAD: lambda fields: _load(root, fields),
        wire.SAVE: lambda fields: tuple(files.save(root, limits.work_bytes)),
    }
    send(fd, wire.READY)
    while True:
        request = receive(fd)
        try:
            reply = answers[request.kind](request.fields)
        except files.PathError as error:
            send(fd, wire.REFUSED, wire.ERRNO.pack(0), str(error).encode(errors="replace"))
        except OSError as error:
            reason = error.strerror or str(error)
            send(fd, wire.REFUSED, wire.ERRNO.pack(error.errno or 0), reason.encode(errors="replace"))
        else:
            send(fd, wire.DONE if request.kind == wire.EXEC else wire.OK, *reply)


def _exec(fields: list[bytes], identity: confine.Identity) -> tuple[bytes, ...]:
    deadline_s, output_bytes = wire.EXEC_PARAMS.unpack(fields[0])
    ended = tools.run([_text(f) for f in fields[2:]], fields[1], deadline_s, output_bytes, identity)
    result = wire.EXEC_RESULT.pack(ended.exit_code & 0xFF, ended.timed_out, ended.truncated)
    return result, ended.output


def _write(root: int, fields: list[bytes]) -> tuple[bytes, ...]:
    files.write(root, _text(fields[0]), fields[1])
    return ()


def _load(root: int, fields: list[bytes]) -> tuple[bytes, ...]:
    files.load(root, fields)
    return ()


def _text(field: bytes) -> str:
    return os.fsdecode(field)

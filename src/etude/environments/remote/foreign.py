"""What a service that is not etude's does in another way, made as like the seam's as can be."""

from __future__ import annotations

import secrets
import time
from pathlib import PurePosixPath
from typing import Final

from etude.environments.output import OutputBuffer
from etude.environments.remote import messages as m
from etude.environments.remote.connect import Code, RpcError
from etude.environments.remote.service import Service
from etude.records.command import ExecResult, Printed, Started, Tell
from etude.seams import Machine

_NOT_FOUND: Final = ("executable file not found", "no such file or directory")
_SIGNALS: Final = {"signal: killed": 137, "signal: terminated": 143, "signal: interrupt": 130, "signal: hangup": 129}


class Collected:
    """A command's output as it comes: told, and kept up to a cap."""

    def __init__(self, max_bytes: int, tell: Tell | None, *, began: float) -> None:
        self._began_at = began  # by time.monotonic
        self._output = OutputBuffer(max_bytes)
        self._tell, self._missed, self._began = tell, False, False

    def add(self, event: m.Event) -> None:
        """One of its events."""
        if event.start is not None and not self._began:
            self._began = True
            if self._tell is not None:
                self._tell(Started(event.start.pid))
        if event.data is not None:
            for stream, data in ((1, event.data.stdout), (2, event.data.stderr)):
                if data:
                    self.take(stream, data)

    def take(self, stream: int, data: bytes) -> None:
        """More of its output."""
        if self._tell is not None:
            self._tell(Printed(stream, data))
        self._output.add(data)

    def missed(self) -> None:
        """Some of it may have come while nobody was connected."""
        self._missed = True

    def ended(self, ended: m.Ended) -> ExecResult:
        """By its last event: killed by a signal, another service says -1, and by which in words."""
        code = ended.exit_code
        if code < 0:
            code = next((number for text, number in _SIGNALS.items() if text in ended.status), 137)
        return self.result(code)

    def result(self, code: int, *, timed_out: bool = False) -> ExecResult:
        """What is known of it."""
        return ExecResult(
            exit_code=code,
            output=self._output.value(),
            timed_out=timed_out,
            truncated=self._missed or self._output.truncated,
            wall_s=time.monotonic() - self._began_at,
        )


def as_result(error: RpcError, got: Collected) -> ExecResult | None:
    """The result that another service tells as an error; None for what is an error here as well."""
    if error.code is Code.DEADLINE_EXCEEDED:
        return got.result(137, timed_out=True)
    text = error.message
    if error.code is not Code.INVALID_ARGUMENT or not ("starting process" in text or text.startswith("cwd ")):
        return None
    got.take(2, f"{text}\n".encode())
    missing = any(words in text for words in _NOT_FOUND) and not text.startswith("cwd ")
    return got.result(127 if missing else 126)


async def check_links(service: Service, name: str, max_bytes: int) -> str:
    """A path below the working directory, none of whose parts is a link, as an absolute one. Raises `RpcError`."""
    place = PurePosixPath(service.config.workdir)
    parts = PurePosixPath(name).parts
    for number, part in enumerate(parts, 1):
        place = place / part
        stat = await service.unary("filesystem.Filesystem/Stat", m.Path(path=str(place)), m.WithEntry)
        entry = stat.entry
        if entry.is_symlink or entry.symlink_target is not None:
            raise RpcError(Code.INVALID_ARGUMENT, f"{name}: {place} is a link")
        is_folder = entry.type == "FILE_TYPE_DIRECTORY"
        if number == len(parts) and is_folder:
            raise RpcError(Code.INVALID_ARGUMENT, f"{name} is a folder", hint="folder")
        if number == len(parts) and entry.type != "FILE_TYPE_FILE":
            raise RpcError(Code.INVALID_ARGUMENT, f"{name} is no regular file")
        if number == len(parts) and int(entry.size) > max_bytes:
            raise RpcError(Code.INVALID_ARGUMENT, f"{name} is larger than {max_bytes} bytes")
        if number < len(parts) and not is_folder:
            raise RpcError(Code.NOT_FOUND, f"{place} is no folder")
    return str(place)


async def kill_all(machine: Machine) -> None:
    """Kill what the machine's user runs."""
    await machine.exec(["sh", "-c", "kill -9 -1"], key=f"freeze-{secrets.token_hex(8)}", deadline_s=20.0)

"""Adapt services other than etude's to the `Machine` protocol: results, errors, links, freezing."""

from __future__ import annotations

import secrets
import time
from pathlib import PurePosixPath
from typing import Final

from etude.environments.output import OutputBuffer
from etude.environments.remote import messages as m
from etude.environments.remote.connect import Code, RpcError
from etude.environments.remote.machine_client import MachineClient
from etude.records.command import ExecResult, OutputCallback, OutputChunk, ProcessStarted
from etude.seams import Machine

_NOT_FOUND: Final = ("executable file not found", "no such file or directory")
_SIGNALS: Final = {"signal: killed": 137, "signal: terminated": 143, "signal: interrupt": 130, "signal: hangup": 129}


class OutputCollector:
    """The output of one running command, collected until its result can be built.

    It keeps at most `max_bytes` of output. `on_event`, if given, gets each event as it arrives. `began` is the start of
    the command on the clock `time.monotonic`."""

    def __init__(self, max_bytes: int, on_event: OutputCallback | None, *, began: float) -> None:
        self._began_at = began  # by time.monotonic
        self._output = OutputBuffer(max_bytes)
        self._on_event, self._incomplete, self._began = on_event, False, False

    def add(self, event: m.Event) -> None:
        """Add an event from the service's stream: the start of the command, or its output."""
        if event.start is not None and not self._began:
            self._began = True
            if self._on_event is not None:
                self._on_event(ProcessStarted(event.start.pid))
        if event.data is not None:
            for stream, data in ((1, event.data.stdout), (2, event.data.stderr)):
                if data:
                    self.add_output(stream, data)

    def add_output(self, stream: int, data: bytes) -> None:
        """Add output of the command. `stream` is 1 for stdout and 2 for stderr."""
        if self._on_event is not None:
            self._on_event(OutputChunk(stream, data))
        self._output.add(data)

    def mark_incomplete(self) -> None:
        """Note that output was lost because a connection broke; the result is then marked as truncated."""
        self._incomplete = True

    def ended(self, ended: m.Ended) -> ExecResult:
        """Build the result of a command from the event of its end.

        For a command killed by a signal, services send -1 and a status text; the result has 128 + signal."""
        code = ended.exit_code
        if code < 0:
            code = next((number for text, number in _SIGNALS.items() if text in ended.status), 137)
        return self.result(code)

    def result(self, code: int, *, timed_out: bool = False) -> ExecResult:
        """Build the result of a command with exit code `code` and the output collected so far."""
        return ExecResult(
            exit_code=code,
            output=self._output.value(),
            timed_out=timed_out,
            truncated=self._incomplete or self._output.truncated,
            wall_s=time.monotonic() - self._began_at,
        )


def result_of_error(error: RpcError, collector: OutputCollector) -> ExecResult | None:
    """Return the result of a command whose failure the service reports as an RPC error.

    A passed deadline gives `timed_out` and exit code 137; a program that cannot be started gives 126 or 127. Returns
    None for any other error."""
    if error.code is Code.DEADLINE_EXCEEDED:
        return collector.result(137, timed_out=True)
    text = error.message
    if error.code is not Code.INVALID_ARGUMENT or not ("starting process" in text or text.startswith("cwd ")):
        return None
    collector.add_output(2, f"{text}\n".encode())
    missing = any(reason in text for reason in _NOT_FOUND) and not text.startswith("cwd ")
    return collector.result(127 if missing else 126)


async def check_links(client: MachineClient, name: str, max_bytes: int) -> str:
    """Return the absolute path of a regular file, after checking that no part of its path is a link.

    `name` is relative to the working directory. Raises `RpcError` for a link, a folder, or a file over `max_bytes`."""
    path = PurePosixPath(client.config.workdir)
    parts = PurePosixPath(name).parts
    for number, part in enumerate(parts, 1):
        path = path / part
        stat = await client.unary("filesystem.Filesystem/Stat", m.Path(path=str(path)), m.WithEntry)
        entry = stat.entry
        if entry.is_symlink or entry.symlink_target is not None:
            raise RpcError(Code.INVALID_ARGUMENT, f"{name}: {path} is a link")
        is_folder = entry.type == "FILE_TYPE_DIRECTORY"
        if number == len(parts) and is_folder:
            raise RpcError(Code.INVALID_ARGUMENT, f"{name} is a folder", hint="folder")
        if number == len(parts) and entry.type != "FILE_TYPE_FILE":
            raise RpcError(Code.INVALID_ARGUMENT, f"{name} is not a regular file")
        if number == len(parts) and int(entry.size) > max_bytes:
            raise RpcError(Code.INVALID_ARGUMENT, f"{name} is larger than {max_bytes} bytes")
        if number < len(parts) and not is_folder:
            raise RpcError(Code.NOT_FOUND, f"{path} is not a folder")
    return str(path)


async def kill_all(machine: Machine) -> None:
    """Kill all processes of the machine's default user."""
    await machine.exec(["sh", "-c", "kill -9 -1"], key=f"freeze-{secrets.token_hex(8)}", deadline_s=20.0)

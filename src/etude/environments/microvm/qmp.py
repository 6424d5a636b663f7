"""Client of QEMU's monitor protocol (QMP): JSON lines over a socket, with deadlines and a limit of the line length.

QEMU's output is untrusted: anything except a line of JSON closes the connection.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from typing import Any

from etude.errors import MachineError

_MAX_LINE_BYTES = 1 << 20
_MAX_EVENTS = 256


class Monitor:
    """The QMP connection to one QEMU process.

    Its coroutines raise `MachineError` if QEMU has ended, refuses a command, or does not answer by the deadline.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._events: deque[str] = deque(maxlen=_MAX_EVENTS)
        self._lock = asyncio.Lock()
        self._next = 0
        self._in_progress: dict[int, str] = {}  # commands in progress, by number
        self._answers: dict[int, dict[str, Any]] = {}

    @classmethod
    async def open(cls, end: socket.socket, *, deadline_s: float) -> Monitor:
        """Connect through the socket `end`, which the monitor then owns, and wait until QEMU is ready."""
        reader, writer = await asyncio.open_connection(sock=end, limit=_MAX_LINE_BYTES)
        monitor = cls(reader, writer)
        try:
            await monitor.execute("qmp_capabilities", deadline_s=deadline_s)
        except BaseException:
            monitor.close()
            raise
        return monitor

    async def execute(self, command: str, *, deadline_s: float = 10.0, **arguments: Any) -> Any:
        """Run a QMP command and return its result. Argument names have `_` in place of QEMU's `-`."""
        return await self.answer(self.begin(command, **arguments), deadline_s=deadline_s)

    def begin(self, command: str, **arguments: Any) -> int:
        """Send a command without waiting, and return its number, which `answer` needs. QEMU runs commands in order."""
        self._next += 1
        self._in_progress[self._next] = command
        self._writer.write(_line(command, arguments, self._next))
        return self._next

    async def answer(self, number: int, *, deadline_s: float = 10.0) -> Any:
        """Wait for a command and return its result. `number`: the number that `begin` returned. Call it once for each
        command."""
        command = self._in_progress[number]
        async with self._lock:
            try:
                async with asyncio.timeout(deadline_s):
                    while number not in self._answers:
                        self._receive(await self._message())
            except TimeoutError:
                facts = f"no response within {deadline_s:g} s"
                raise MachineError(
                    f"QEMU hangs in {command}",
                    facts,
                    hint="fork another machine; if this repeats, the host is overloaded",
                ) from None
        del self._in_progress[number]
        message = self._answers.pop(number)
        if "error" in message:
            facts = str(message["error"].get("desc") if isinstance(message["error"], dict) else message["error"])
            raise MachineError(f"QEMU refused {command}", facts[:500], hint="check the version of QEMU: 7.2 or later")
        return message.get("return")

    async def event(self, name: str, *, deadline_s: float) -> None:
        """Wait for the QMP event `name`. Return at once if it has arrived since the last wait for it."""
        async with self._lock:
            try:
                async with asyncio.timeout(deadline_s):
                    while name not in self._events:
                        self._receive(await self._message())
            except TimeoutError:
                facts = f"waited {deadline_s:g} s"
                raise MachineError(
                    f"QEMU did not send {name}",
                    facts,
                    hint="fork another machine; if this repeats, the host is overloaded",
                ) from None
            self._events.remove(name)

    def _receive(self, message: dict[str, Any]) -> None:
        number = message.get("id")
        if isinstance(number, int) and number in self._in_progress:
            self._answers[number] = message
        elif isinstance(message.get("event"), str):
            self._events.append(message["event"])

    async def _message(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
            message = json.loads(line) if line else None
        except (OSError, ValueError, RecursionError) as error:
            raise MachineError("QEMU's monitor cannot be read", str(error)[:200], hint="fork another machine") from None
        if message is None:
            raise MachineError(
                "QEMU is gone", "the connection to its monitor (QMP) is closed", hint="fork another machine"
            )
        if not isinstance(message, dict):
            raise MachineError("QEMU's monitor cannot be read", "it is not a JSON object", hint="fork another machine")
        return message

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._writer.close()


def _line(command: str, arguments: dict[str, Any], number: int) -> bytes:
    """Encode a command as short as possible: QEMU needs seven system calls for each byte."""
    message: dict[str, Any] = {"execute": command, "id": number}
    if arguments:
        message["arguments"] = {name.replace("_", "-"): value for name, value in arguments.items()}
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"

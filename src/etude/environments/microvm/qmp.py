"""QEMU's monitor: commands over a socket, as JSON lines, answered in order. Waits have deadlines, lines a bound.

What QEMU says is not trusted to be well formed: anything else than a line of JSON ends the conversation.
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
    """A conversation with one QEMU. `MachineError` once it is gone, refuses, or is late."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._events: deque[str] = deque(maxlen=_MAX_EVENTS)
        self._turn = asyncio.Lock()
        self._next = 0
        self._asked: dict[int, str] = {}  # the commands whose answers nobody has taken yet
        self._answers: dict[int, dict[str, Any]] = {}

    @classmethod
    async def open(cls, end: socket.socket, *, deadline_s: float) -> Monitor:
        """Take over the socket's end, and wait until QEMU is ready for commands."""
        reader, writer = await asyncio.open_connection(sock=end, limit=_MAX_LINE_BYTES)
        monitor = cls(reader, writer)
        try:
            await monitor.execute("qmp_capabilities", deadline_s=deadline_s)
        except BaseException:
            monitor.close()
            raise
        return monitor

    async def execute(self, command: str, *, deadline_s: float = 10.0, **arguments: Any) -> Any:
        """What QEMU returns. Words in arguments have `_` where QEMU's have `-`."""
        return await self.answer(self.begin(command, **arguments), deadline_s=deadline_s)

    def begin(self, command: str, **arguments: Any) -> int:
        """Ask, and go on: QEMU does what it was asked in order. The number is for `answer`."""
        self._next += 1
        self._asked[self._next] = command
        self._writer.write(_line(command, arguments, self._next))
        return self._next

    async def answer(self, number: int, *, deadline_s: float = 10.0) -> Any:
        """What QEMU returns to what was begun. Once each."""
        command = self._asked[number]
        async with self._turn:
            try:
                async with asyncio.timeout(deadline_s):
                    while number not in self._answers:
                        self._keep(await self._message())
            except TimeoutError:
                facts = f"no answer within {deadline_s:g} s"
                raise MachineError(
                    f"QEMU hangs in {command}", facts, hint="the host is overloaded, or fork again"
                ) from None
        del self._asked[number]
        message = self._answers.pop(number)
        if "error" in message:
            facts = str(message["error"].get("desc") if isinstance(message["error"], dict) else message["error"])
            raise MachineError(f"QEMU refused {command}", facts[:500], hint="see the version of QEMU: 7.2 or later")
        return message.get("return")

    async def event(self, name: str, *, deadline_s: float) -> None:
        """Wait for an event that came since it was last waited for."""
        async with self._turn:
            try:
                async with asyncio.timeout(deadline_s):
                    while name not in self._events:
                        self._keep(await self._message())
            except TimeoutError:
                facts = f"not within {deadline_s:g} s"
                raise MachineError(
                    f"QEMU did not tell {name}", facts, hint="the host is overloaded, or fork again"
                ) from None
            self._events.remove(name)

    def _keep(self, message: dict[str, Any]) -> None:
        number = message.get("id")
        if isinstance(number, int) and number in self._asked:
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
            raise MachineError("QEMU is gone", "its monitor is closed", hint="fork another machine")
        if not isinstance(message, dict):
            raise MachineError("QEMU's monitor cannot be read", "no object", hint="fork another machine")
        return message

    def close(self) -> None:
        """Let go of the socket. Idempotent."""
        self._writer.close()


def _line(command: str, arguments: dict[str, Any], number: int) -> bytes:
    """As short as can be: QEMU reads it byte by byte, with seven system calls for each."""
    message: dict[str, Any] = {"execute": command, "id": number}
    if arguments:
        message["arguments"] = {name.replace("_", "-"): value for name, value in arguments.items()}
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"

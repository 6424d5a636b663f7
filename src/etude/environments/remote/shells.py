"""Shells that keep running in a sandbox, for requests about files.

A machine records each `Machine.exec` and allows some thousands of them, too few for a client that lists a folder four
times a second. So each user has one shell in which the programs of `files` are defined as functions. A request is a
line with a function call; the response is what the shell prints up to a random mark.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping

from etude.environments.remote.connect import Code, RpcError
from etude.errors import MachineError
from etude.records.command import OutputChunk, ProcessStarted
from etude.seams import Machine

_DEADLINE_S = 60.0  # for one request
_LIFE_S = 604_800.0
_MAX_SHELLS = 8  # of one machine
_MAX_ERR = 4096
_MAX_CODE = 4  # bytes of an exit code and a NUL
_LOOP = """while IFS= read -r n && IFS= read -r l; do
(eval "$l") </dev/null; printf "\\0%s %d\\0" "$n" $?; printf "\\0%s\\0" "$n" >&2
done"""


class Shell:
    """A shell that runs in the machine as `user`, and restarts if it was killed.

    `programs` maps the names of the functions that can be called to their bodies in shell syntax."""

    def __init__(self, machine: Machine, programs: Mapping[str, str], *, user: str) -> None:
        self._machine, self._user = machine, user
        functions = "\n".join(f"{name}() {{\n{body}\n}}" for name, body in programs.items())
        self._script = f"{functions}\n{_LOOP}"
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue(4)
        self._lock = asyncio.Lock()
        self._life: asyncio.Task[object] | None = None
        self._pid: int | None = None
        self._current = object()
        self._response = _Response("", 0)

    async def call(self, name: str, *args: str, max_bytes: int) -> tuple[int, bytes, bytes]:
        """Call a function of the shell; return its exit code, standard output and standard error.

        The arguments must not contain newlines. Raises `RpcError` if it prints more than `max_bytes`, takes more than a
        minute, or the shell was killed."""
        async with self._lock:
            if self._life is None or self._life.done():
                self._start()
            assert self._life is not None, "was started"
            self._response = response = _Response(secrets.token_hex(16), max_bytes)
            request = f"{response.mark}\n{name} {' '.join(map(quote, args))}\n"
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    await self._lines.put(request.encode())
                    arrived = asyncio.ensure_future(response.arrived.wait())
                    try:
                        await asyncio.wait({arrived, self._life}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        arrived.cancel()
            except TimeoutError:
                await self._kill()
                raise RpcError(Code.DEADLINE_EXCEEDED, f"the request took more than {_DEADLINE_S:g} s") from None
            except asyncio.CancelledError:
                await asyncio.shield(self._kill())  # its output would be mixed with that of the next request
                raise
            if not response.arrived.is_set():
                self._raise_ended(self._life)
            if response.code is None:
                raise RpcError(Code.RESOURCE_EXHAUSTED, f"the result has more than {max_bytes} bytes")
            return response.code, bytes(response.out), bytes(response.err)

    def _start(self) -> None:
        self._lines, self._pid = asyncio.Queue(4), None
        current = self._current = object()

        def on_output(event: ProcessStarted | OutputChunk) -> None:
            if self._current is current:  # ignore the output of a killed shell
                self._on_event(event)

        self._life = asyncio.create_task(
            self._machine.exec(
                ["sh", "-c", self._script],
                key=f"shell-{secrets.token_hex(8)}",
                deadline_s=_LIFE_S,
                stdin=_until_none(self._lines),
                output_bytes=0,
                user=self._user,
                on_output=on_output,
            )
        )

    def _on_event(self, event: ProcessStarted | OutputChunk) -> None:
        if isinstance(event, ProcessStarted):
            self._pid = event.pid
        else:
            self._response.add(event)

    def _raise_ended(self, life: asyncio.Task[object]) -> None:
        error = life.exception() if not life.cancelled() else None
        if isinstance(error, ValueError):
            raise RpcError(Code.INVALID_ARGUMENT, str(error)) from None
        if isinstance(error, MachineError):
            raise RpcError(Code.INTERNAL, f"{error.what}: {error.facts}", hint=error.hint) from None
        raise RpcError(Code.ABORTED, "the shell for file requests was killed", hint="try again")

    async def _kill(self) -> None:
        """Kill the shell; the next request starts a new one."""
        life, self._life, self._current = self._life, None, object()
        if life is not None and self._pid is not None:
            args = ["sh", "-c", 'kill -9 -- "-$1" 2>/dev/null || kill -9 "$1"', "sh", str(self._pid)]
            with contextlib.suppress(MachineError, ValueError):
                key = f"kill-{secrets.token_hex(8)}"
                await self._machine.exec(args, key=key, deadline_s=10.0, user=self._user)
        if life is not None:
            life.cancel()

    def close(self) -> None:
        """Stop the shell; called when the machine ends."""
        if self._life is not None:
            self._life.cancel()
            self._life.add_done_callback(_retrieve)


class _Response:
    """The response to one request: the output on both streams up to the mark."""

    def __init__(self, mark: str, max_bytes: int) -> None:
        self.mark, self.out, self.err, self.code = mark, bytearray(), bytearray(), None if not mark else 0
        self.arrived = asyncio.Event()
        self._max_bytes, self._too_much = max_bytes, False
        self._out_done = self._err_done = False
        self._end = f"\0{mark} ".encode()

    def add(self, printed: OutputChunk) -> None:
        if printed.stream == 1:
            self._add_out(printed.data)
        else:
            self._add_err(printed.data)
        if self._out_done and self._err_done:
            self.arrived.set()

    def _add_out(self, data: bytes) -> None:
        start = max(0, len(self.out) - len(self._end) - _MAX_CODE)
        self.out += data
        at = self.out.find(self._end, start)
        if at >= 0 and self.out.endswith(b"\0"):
            self.code = None if self._too_much or at > self._max_bytes else int(self.out[at + len(self._end) : -1])
            del self.out[at:]
            self._out_done = True
        elif at < 0 and len(self.out) > self._max_bytes + 64:
            self._too_much = True
            del self.out[: -len(self._end) - _MAX_CODE]

    def _add_err(self, data: bytes) -> None:
        self.err += data
        at = self.err.find(f"\0{self.mark}\0".encode())
        if at >= 0:
            del self.err[at:]
            self._err_done = True
        elif len(self.err) > _MAX_ERR + 64:
            del self.err[_MAX_ERR : -len(self._end) - 1]


class Shells:
    """The shells of one sandbox: one for each user, started when it is needed.

    `programs` are the functions of each shell."""

    def __init__(self, machine: Machine, programs: Mapping[str, str]) -> None:
        self._machine, self._programs = machine, programs
        self._shells: dict[str, Shell] = {}

    def of(self, user: str) -> Shell:
        """Return the shell of a user. Raises `RpcError` if too many users have one."""
        if user not in self._shells:
            if len(self._shells) >= _MAX_SHELLS:
                raise RpcError(
                    Code.RESOURCE_EXHAUSTED, f"{len(self._shells)} users have shells already", hint="use fewer users"
                )
            self._shells[user] = Shell(self._machine, self._programs, user=user)
        return self._shells[user]

    def close(self) -> None:
        """Stop all shells; called when the machine ends."""
        for shell in self._shells.values():
            shell.close()


def quote(arg: str) -> str:
    """Quote an argument for a POSIX shell.

    >>> quote("it's")
    "'it'\\\\''s'"
    """
    return "'" + arg.replace("'", "'\\''") + "'"


async def _until_none(lines: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (line := await lines.get()) is not None:
        yield line


def _retrieve(task: asyncio.Task[object]) -> None:
    if not task.cancelled():
        task.exception()

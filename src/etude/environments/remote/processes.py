"""The commands that run in one served machine: who is listening to them, what they are given, what they have said.

`Machine.exec` is one call; E2B's processes can be left and come back to. So each command is a task of its own, and what
happens to it goes to a log that any number of streams read, each from where it wants. A log is bounded: who falls
behind it by more is told so, and a command is never held up by its listeners.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping

from etude.environments.remote import messages as m
from etude.environments.remote.connect import Code, RpcError
from etude.errors import MachineError
from etude.records.command import ExecResult, Printed, Started, Tell
from etude.seams import Machine

_MAX_KEPT = 128  # commands that have ended and can still be come back to
_MAX_RECORDS = 256 << 20  # bytes of results that one machine remembers, by their keys
_MAX_INPUT = 4  # pieces of standard input that wait to be read
_MESSAGE_BYTES = 4096  # of what is said of a command that could not be started
_STDERR = 2


class Log:
    """What happened to a command, in order; of its output the last `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes, self._first = max_bytes, 0, 0
        self._events: deque[m.Event] = deque()
        self._more = asyncio.Event()
        self.ended = False

    def append(self, event: m.Event) -> None:
        """One more event; old output makes room for it."""
        self._events.append(event)
        self._bytes += _size(event)
        while self._bytes > self._max_bytes and len(self._events) > 1:
            self._bytes -= _size(self._events.popleft())
            self._first += 1
        self._wake()

    def end(self) -> None:
        """There will be no more."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """What it keeps, roughly: of its end, too, which does not make room for itself."""
        end = self._events[-1].end if self._events else None
        return self._bytes + (len(end.etude.output) if end is not None and end.etude is not None else 0)

    @property
    def position(self) -> int:
        """Where an event that has not happened yet will be."""
        return self._first + len(self._events)

    async def read(self, at: int, *, every_s: float) -> AsyncIterator[m.Event]:
        """Events from position `at` on, and one that says nothing whenever there was none for so long."""
        while True:
            if self.ended and at > self.position:  # one that was forgotten, and is told from its record: the end alone
                at = max(self.position - 1, self._first)
            if at < self._first:
                raise RpcError(Code.OUT_OF_RANGE, f"{self._first - at} events were dropped", hint="listen faster")
            more = self._more
            while at < self.position:
                yield self._events[at - self._first]
                at += 1
                if at < self._first:
                    break
            else:
                if self.ended:
                    return
                try:
                    async with asyncio.timeout(every_s):
                        await more.wait()
                except TimeoutError:
                    yield m.Event(keepalive={})


def _size(event: m.Event) -> int:
    data = event.data
    return 64 + (len(data.stdout or b"") + len(data.stderr or b"") + len(data.pty or b"") if data else 0)


class Input:
    """A command's standard input: pieces that wait to be read, and how much of it has come so far."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_INPUT)
        self._given, self._closed = 0, False
        self._turn = asyncio.Lock()

    async def give(self, data: bytes, offset: int | None) -> None:
        """One more piece. With an `offset`, what has come before is not given again; waits where nobody reads."""
        async with self._turn:
            if offset is not None:
                if offset > self._given:
                    raise RpcError(Code.OUT_OF_RANGE, f"input from byte {offset} on, but {self._given} have come")
                data = data[self._given - offset :]
            if self._closed and data:
                raise RpcError(Code.FAILED_PRECONDITION, "its standard input is closed")
            if data:
                await self._pieces.put(data)
                self._given += len(data)

    async def close(self) -> None:
        """There will be no more. Idempotent."""
        async with self._turn:
            if not self._closed:
                self._closed = True
                await self._pieces.put(None)

    async def pieces(self) -> AsyncIterator[bytes]:
        """What the command reads."""
        while (piece := await self._pieces.get()) is not None:
            yield piece


class Process:
    """A command that runs, or has ended."""

    def __init__(self, asked: m.Start, *, user: str, log_bytes: int) -> None:
        self.asked, self.user, self.log = asked, user, Log(log_bytes)
        self.exact = asked.etude
        self.key = f"k{self.exact.key}" if self.exact else f"r{secrets.token_hex(8)}"
        self.pid: int | None = None
        self.failure: RpcError | None = None
        self.input = None if asked.stdin is False else Input()
        self.task: asyncio.Task[None] | None = None

    @property
    def info(self) -> m.ProcessInfo:
        """As List says it."""
        return m.ProcessInfo(config=self.asked.process, pid=self.pid or 0, tag=self.asked.tag)

    def told(self, event: Started | Printed) -> None:
        """`Tell`, into the log."""
        if isinstance(event, Started):
            self.pid = event.pid
            self.began(event.pid)
            return
        self.began(0)
        if self.asked.pty is not None:
            output = m.Output(pty=event.data)
        else:
            output = m.Output(stderr=event.data) if event.stream == _STDERR else m.Output(stdout=event.data)
        self.log.append(m.Event(data=output))

    def conclude(self, result: ExecResult) -> None:
        """It is over. Before any other event there is a start, even of what could not be started: E2B's clients ask."""
        if not self.log.position and not self.exact and result.output:
            self.told(Printed(_STDERR, result.output))
        self.began(0)
        if result.timed_out and not self.exact:
            self.failure = RpcError(Code.DEADLINE_EXCEEDED, "the command was killed at its deadline")
            return
        outcome = None
        if self.exact:
            outcome = m.Outcome(
                output=result.output, timed_out=result.timed_out, truncated=result.truncated, wall_s=result.wall_s
            )
        status = "deadline exceeded" if result.timed_out else f"exit status {result.exit_code}"
        error = status if result.exit_code else None
        ended = m.Ended(exit_code=result.exit_code, exited=True, status=status, error=error, etude=outcome)
        self.log.append(m.Event(end=ended))

    def began(self, pid: int) -> None:
        """Say so, once."""
        if not self.log.position:
            self.log.append(m.Event(start=m.Began(pid=pid)))

    async def events(self, at: int, *, every_s: float) -> AsyncIterator[m.Happened]:
        """What is streamed of it; raises `RpcError` for a command that could not be run."""
        async for event in self.log.read(at, every_s=every_s):
            yield m.Happened(event=event)
        if self.failure is not None:
            raise self.failure


class Processes:
    """All commands of one machine."""

    def __init__(self, machine: Machine, env: Mapping[str, str], *, max_running: int, log_bytes: int) -> None:
        self._machine, self._env, self._max_running, self._log_bytes = machine, env, max_running, log_bytes
        self._running: dict[str, Process] = {}
        self._ended: dict[str, Process] = {}  # oldest first
        self._recorded = 0  # bytes of results

    def running(self) -> list[Process]:
        """Those that have not ended."""
        return list(self._running.values())

    def start(self, asked: m.Start, *, user: str, deadline_s: float) -> Process:
        """Run a command, or find the one with the same key of ours: it never runs twice. Raises `RpcError`."""
        process = Process(asked, user=user, log_bytes=self._log_bytes)
        known = self._running.get(process.key) or self._ended.get(process.key)
        if known is not None:
            return known
        if len(self._running) >= self._max_running:
            raise RpcError(
                Code.RESOURCE_EXHAUSTED,
                f"{len(self._running)} commands run in this machine",
                hint="wait for one to end",
            )
        if self._recorded > _MAX_RECORDS:
            facts = f"the results of this machine's commands have {self._recorded} bytes"
            raise RpcError(Code.RESOURCE_EXHAUSTED, facts, hint="ask for less output, or fork another machine")
        self._running[process.key] = process
        if process.exact is not None and not process.exact.tell:
            process.began(0)  # so that who asked can give it input; nothing else is told of it before its end
        process.task = asyncio.create_task(self._run(process, deadline_s))
        return process

    def find(self, selector: m.Selector) -> Process:
        """The one that runs and is meant. Raises `RpcError`."""
        for process in self._running.values():
            by_pid = selector.pid is not None and selector.pid == process.pid
            if by_pid or (selector.tag is not None and selector.tag == process.asked.tag):
                return process
        name = f"tag {selector.tag[:80]!r}" if selector.tag is not None else f"pid {selector.pid}"
        raise RpcError(Code.NOT_FOUND, f"no process with {name} runs here", hint="List says which do")

    async def _run(self, process: Process, deadline_s: float) -> None:
        exact, config = process.exact, process.asked.process
        tell: Tell | None = process.told if exact is None or exact.tell else None
        try:
            result = await self._machine.exec(
                argv(config),
                key=process.key,
                deadline_s=deadline_s,
                stdin=b"" if process.input is None else process.input.pieces(),
                output_bytes=exact.output_bytes if exact else _MESSAGE_BYTES,
                cwd=config.cwd or "",
                env={**self._env, **config.envs},
                user=process.user,
                tell=tell,
            )
        except MachineError as error:
            process.failure = RpcError(Code.INTERNAL, f"{error.what}: {error.facts}".strip(": "), hint=error.hint)
        except (ValueError, OSError) as error:
            process.failure = RpcError(Code.INVALID_ARGUMENT, str(error) or type(error).__name__)
        except asyncio.CancelledError:
            process.failure = RpcError(Code.UNAVAILABLE, "the machine was ended")
            raise
        else:
            self._recorded += len(result.output)
            process.conclude(result)
        finally:
            del self._running[process.key]
            self._keep(process)
            process.log.end()

    def _keep(self, process: Process) -> None:
        """Of those that have ended the latest, and no more output of them together than of two that run."""
        self._ended[process.key] = process
        size = sum(one.log.num_bytes for one in self._ended.values())
        while len(self._ended) > _MAX_KEPT or (size > 2 * self._log_bytes and len(self._ended) > 1):
            size -= self._ended.pop(next(iter(self._ended))).log.num_bytes

    async def signal(self, process: Process, name: str) -> None:
        """Send TERM or KILL to a process and its group. Raises `RpcError`."""
        program = 'kill -s "$1" -- "-$2" 2>/dev/null || exec kill -s "$1" "$2"'
        words = ["sh", "-c", program, "sh", name, str(process.pid)]
        try:
            key = f"kill-{secrets.token_hex(8)}"
            done = await self._machine.exec(words, key=key, deadline_s=10.0, user=process.user)
        except MachineError as error:
            raise RpcError(Code.UNAVAILABLE, error.what, hint=error.hint) from None
        if done.exit_code:
            raise RpcError(Code.NOT_FOUND, f"no process {process.pid} runs here")

    def close(self) -> None:
        """Nobody is told anything any more."""
        for process in self.running():
            if process.task is not None:
                process.task.cancel()


_LOGIN = 'if [ -x /bin/bash ]; then exec /bin/bash -l -c "$1"; else exec sh -l -c "$1"; fi'


def argv(config: m.Config) -> list[str]:
    """What is run. E2B's clients wrap every command in a login bash; an image without one has `sh` take its part.

    >>> argv(m.Config(cmd="ls", args=["-l"]))
    ['ls', '-l']
    """
    if config.cmd == "/bin/bash" and config.args[:2] == ["-l", "-c"] and len(config.args) == 3:
        return ["sh", "-c", _LOGIN, "sh", config.args[2]]
    return [config.cmd, *config.args]

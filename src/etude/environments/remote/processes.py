"""The processes of a sandbox: their input, their event logs, their results.

`Machine.exec` is one call, but clients of E2B can disconnect from a process and reconnect. So each command runs in its
own task and appends its events to a log, which any number of streams read from any position. The log is bounded: a
reader that falls too far behind gets an error, and a command never waits for its readers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping

from etude.environments.remote import messages as m
from etude.environments.remote.connect import Code, RpcError
from etude.errors import MachineError
from etude.records.command import ExecResult, OutputCallback, OutputChunk, ProcessStarted
from etude.seams import Machine

_MAX_KEPT = 128  # ended commands that clients can still reconnect to
_MAX_RECORDS = 256 << 20  # bytes of recorded results of one sandbox
_MAX_INPUT = 4  # pieces of standard input in the queue
_MESSAGE_BYTES = 4096  # of the error of a command that could not be started
_STDERR = 2


class Log:
    """The events of one command, in order, for any number of readers.

    When the events hold more than `max_bytes` of output, the oldest are dropped. The position of an event is its
    number, counted from 0 and including dropped events."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes, self._first = max_bytes, 0, 0
        self._events: deque[m.Event] = deque()
        self._more = asyncio.Event()
        self.ended = False

    def append(self, event: m.Event) -> None:
        """Append an event, and drop the oldest events over the size limit."""
        self._events.append(event)
        self._bytes += _size(event)
        while self._bytes > self._max_bytes and len(self._events) > 1:
            self._bytes -= _size(self._events.popleft())
            self._first += 1
        self._wake()

    def end(self) -> None:
        """Mark the log as complete, so that readers stop at its end."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Approximate size in bytes, including the result in the last event, which the limit does not count."""
        end = self._events[-1].end if self._events else None
        return self._bytes + (len(end.etude.output) if end is not None and end.etude is not None else 0)

    @property
    def position(self) -> int:
        """Position that the next event will have."""
        return self._first + len(self._events)

    async def read(self, at: int, *, every_s: float) -> AsyncIterator[m.Event]:
        """Yield the events from position `at` on, waiting for new ones until the log is complete.

        After `every_s` seconds without an event, a keepalive event is yielded. Raises `RpcError` (OUT_OF_RANGE) if the
        next event was dropped already."""
        while True:
            if self.ended and at > self.position:  # the log was dropped and has only the recorded end
                at = max(self.position - 1, self._first)
            if at < self._first:
                raise RpcError(Code.OUT_OF_RANGE, f"{self._first - at} events were dropped", hint="read faster")
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
    """The standard input of one command: a bounded queue that requests fill and the command empties."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_INPUT)
        self._received, self._closed = 0, False
        self._lock = asyncio.Lock()

    async def add(self, data: bytes, offset: int | None) -> None:
        """Add bytes to the input; waits while the queue is full.

        `offset` is the position of `data` in the whole input: bytes that were received before are skipped. None means
        that it follows the bytes received so far. Raises `RpcError` if bytes before `offset` are missing or the input
        is closed."""
        async with self._lock:
            if offset is not None:
                if offset > self._received:
                    raise RpcError(
                        Code.OUT_OF_RANGE,
                        f"the input starts at byte {offset}, but only {self._received} bytes were received",
                    )
                data = data[self._received - offset :]
            if self._closed and data:
                raise RpcError(Code.FAILED_PRECONDITION, "the standard input is closed")
            if data:
                await self._pieces.put(data)
                self._received += len(data)

    async def close(self) -> None:
        """Close the input, so that the command reads its end. Can be repeated."""
        async with self._lock:
            if not self._closed:
                self._closed = True
                await self._pieces.put(None)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the bytes as they arrive, until the input is closed."""
        while (piece := await self._pieces.get()) is not None:
            yield piece


class Process:
    """One command of a sandbox, running or ended; `Processes.start` makes it."""

    def __init__(self, spec: m.Start, *, user: str, log_bytes: int) -> None:
        self.spec, self.user, self.log = spec, user, Log(log_bytes)
        self.exact = spec.etude
        self.key = f"k{self.exact.key}" if self.exact else f"r{secrets.token_hex(8)}"
        self.pid: int | None = None
        self.failure: RpcError | None = None
        self.input = None if spec.stdin is False else Input()
        self.task: asyncio.Task[None] | None = None

    @property
    def info(self) -> m.ProcessInfo:
        """The process as a message, for the list of running processes."""
        return m.ProcessInfo(config=self.spec.process, pid=self.pid or 0, tag=self.spec.tag)

    def on_event(self, event: ProcessStarted | OutputChunk) -> None:
        """Append an event of `Machine.exec` to the log; `Machine.exec` calls this."""
        if isinstance(event, ProcessStarted):
            self.pid = event.pid
            self.log_start(event.pid)
            return
        self.log_start(0)
        if self.spec.pty is not None:
            output = m.Output(pty=event.data)
        else:
            output = m.Output(stderr=event.data) if event.stream == _STDERR else m.Output(stdout=event.data)
        self.log.append(m.Event(data=output))

    def finish(self, result: ExecResult) -> None:
        """Append the result of `Machine.exec` to the log.

        E2B's clients need a start event before the result, so one is added if the command could not be started."""
        if not self.log.position and not self.exact and result.output:
            self.on_event(OutputChunk(_STDERR, result.output))
        self.log_start(0)
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

    def log_start(self, pid: int) -> None:
        """Append the start event with process id `pid`, unless the log has events already."""
        if not self.log.position:
            self.log.append(m.Event(start=m.Began(pid=pid)))

    async def events(self, at: int, *, every_s: float) -> AsyncIterator[m.ProcessEvent]:
        """Yield the events from position `at` on as messages of a response stream, until the command ends.

        After `every_s` seconds without an event, a keepalive event is yielded. Raises `RpcError` if the command could
        not be run."""
        async for event in self.log.read(at, every_s=every_s):
            yield m.ProcessEvent(event=event)
        if self.failure is not None:
            raise self.failure


class Processes:
    """All processes of one sandbox.

    `env` has the environment variables of all commands, `max_running` limits concurrent commands, and `log_bytes`
    limits the output kept for clients that reconnect."""

    def __init__(self, machine: Machine, env: Mapping[str, str], *, max_running: int, log_bytes: int) -> None:
        self._machine, self._env, self._max_running, self._log_bytes = machine, env, max_running, log_bytes
        self._running: dict[str, Process] = {}
        self._ended: dict[str, Process] = {}  # oldest first
        self._recorded = 0  # bytes of recorded results

    def running(self) -> list[Process]:
        """Return the running processes."""
        return list(self._running.values())

    def start(self, spec: m.Start, *, user: str, deadline_s: float) -> Process:
        """Run the command of a request, or return the process that was started with the same key.

        `user` is the machine user that runs it. Raises `RpcError` (RESOURCE_EXHAUSTED) if too many commands run or the
        machine's recorded results are too large."""
        process = Process(spec, user=user, log_bytes=self._log_bytes)
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
            facts = f"the recorded results of this machine have {self._recorded} bytes"
            raise RpcError(Code.RESOURCE_EXHAUSTED, facts, hint="request less output, or fork another machine")
        self._running[process.key] = process
        if process.exact is not None and not process.exact.tell:
            # the client waits for it before it sends input, and gets no other event before the end
            process.log_start(0)
        process.task = asyncio.create_task(self._run(process, deadline_s))
        return process

    def find(self, selector: m.Selector) -> Process:
        """Return the running process with the selector's process id or tag. Raises `RpcError` if there is none."""
        for process in self._running.values():
            by_pid = selector.pid is not None and selector.pid == process.pid
            if by_pid or (selector.tag is not None and selector.tag == process.spec.tag):
                return process
        name = f"tag {selector.tag[:80]!r}" if selector.tag is not None else f"pid {selector.pid}"
        raise RpcError(
            Code.NOT_FOUND, f"no process with {name} runs here", hint="call List to see the running processes"
        )

    async def _run(self, process: Process, deadline_s: float) -> None:
        exact, config = process.exact, process.spec.process
        on_output: OutputCallback | None = process.on_event if exact is None or exact.tell else None
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
                on_output=on_output,
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
            process.finish(result)
        finally:
            del self._running[process.key]
            self._keep(process)
            process.log.end()

    def _keep(self, process: Process) -> None:
        """Keep an ended process; drop the oldest ones over the limits."""
        self._ended[process.key] = process
        size = sum(one.log.num_bytes for one in self._ended.values())
        while len(self._ended) > _MAX_KEPT or (size > 2 * self._log_bytes and len(self._ended) > 1):
            size -= self._ended.pop(next(iter(self._ended))).log.num_bytes

    async def signal(self, process: Process, name: str) -> None:
        """Send the signal `name`, "TERM" or "KILL", to a process and its group. Raises `RpcError` if this fails."""
        program = 'kill -s "$1" -- "-$2" 2>/dev/null || exec kill -s "$1" "$2"'
        args = ["sh", "-c", program, "sh", name, str(process.pid)]
        try:
            key = f"kill-{secrets.token_hex(8)}"
            done = await self._machine.exec(args, key=key, deadline_s=10.0, user=process.user)
        except MachineError as error:
            raise RpcError(Code.UNAVAILABLE, error.what, hint=error.hint) from None
        if done.exit_code:
            raise RpcError(Code.NOT_FOUND, f"no process {process.pid} runs here")

    def close(self) -> None:
        """Cancel all commands, which ends the streams of their clients."""
        for process in self.running():
            if process.task is not None:
                process.task.cancel()


_LOGIN = 'if [ -x /bin/bash ]; then exec /bin/bash -l -c "$1"; else exec sh -l -c "$1"; fi'


def argv(config: m.Config) -> list[str]:
    """Return the command line to run for a request.

    E2B's clients wrap each command in a login shell of `/bin/bash`. Where that does not exist, `sh` is used.

    >>> argv(m.Config(cmd="ls", args=["-l"]))
    ['ls', '-l']
    """
    if config.cmd == "/bin/bash" and config.args[:2] == ["-l", "-c"] and len(config.args) == 3:
        return ["sh", "-c", _LOGIN, "sh", config.args[2]]
    return [config.cmd, *config.args]

"""Runs an external server as a child process of its adapter. The server's output is copied to the adapter's output."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from etude.errors import DeadlineExceeded, EngineError
from etude.inference.external.client import ServerClient
from etude.inference.external.environment import link_package
from etude.inference.external.launch import ADAPTER
from etude.inference.lifetime import when_parent_dies

START_S, STOP_S = 570.0, 5.0
LAST_LINES = 40
_ERROR = re.compile(r"\b(?!EngineDead)\w+(?:Error|Exception): .*")  # the cause, not its consequences


class ServerProcess(ServerClient):
    """An external server as a child process; the base class of `VllmProcess` and `SglangProcess`.

    As an async context manager it waits until the server serves, and ends it at exit."""

    process: subprocess.Popen[bytes]

    def launch(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the server process with a command line and environment variables. Subclasses call it once."""
        self._last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._errors: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self.process = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=when_parent_dies,
        )
        self._reader = threading.Thread(target=self._pass_on, name="server-output", daemon=True)
        self._reader.start()

    async def __aenter__(self) -> Self:
        try:
            await self.wait_until_ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the server and everything that it started. Further calls of `close` do nothing."""
        await self.disconnect()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(self.process.wait, STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                await asyncio.to_thread(self.process.wait)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    async def wait_until_ready(self) -> None:
        """Wait until the server accepts requests.

        Raises `EngineError` with its last output when it exits first, `DeadlineExceeded` after `START_S` seconds."""
        end = time.monotonic() + START_S
        while True:
            if not self.alive:
                self._reader.join(STOP_S)
                raise EngineError(
                    f"{self.server} of {self.name} exited while starting",
                    self.last_errors() or f"exit code {self.process.returncode}, without output",
                    hint=f"see the engine's log; etude engines check {self.server.lower()} tests it with a tiny model",
                )
            with contextlib.suppress(EngineError):
                if (await self.get("/health", deadline_s=5.0))[0] == 200:
                    return
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"{self.server} of {self.name} did not serve within {START_S:g} s",
                    self.last_errors(),
                    hint="see the engine's log; if it shows progress, the host is too busy",
                )
            await asyncio.sleep(0.1)

    def last_errors(self) -> str:
        """Return the last error messages in the server's output, or its last lines."""
        return "; ".join([*dict.fromkeys(self._errors)][-3:] or [line.strip() for line in self._last][-3:])

    def _pass_on(self) -> None:
        assert self.process.stdout is not None, "started with a pipe"
        repeats = TracebackFilter()
        for line in self.process.stdout:
            text = line.decode(errors="replace")
            self._last.append(text)
            if " WARNING " not in text and (found := _ERROR.search(text)):  # vLLM warns of errors that may come
                self._errors.append(found[0].strip())
            sys.stdout.writelines(repeats.line(text))
            sys.stdout.flush()
        sys.stdout.writelines(repeats.end())
        sys.stdout.flush()


def server_environ(folder: Path, threads: int) -> dict[str, str]:
    """Return the environment variables for a server's processes, without those of the adapter's Python.

    `folder` is for temporary files and sockets; the caller removes it. `threads` is the number of CPU threads."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "ETUDE_TOKEN"))}
    return env | {
        ADAPTER: str(os.getpid()),
        "PYTHONPATH": str(link_package(folder)),
        "PYTHONUNBUFFERED": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TMPDIR": str(folder),  # removed with the folder
    }


# A server that fails at every request would fill the disk with the same traceback. So repeated tracebacks are left out.

MAX_LINES, MAX_KNOWN = 400, 64
"""The longest traceback that is compared with others, in lines, and the number of remembered tracebacks."""
BEGIN = "Traceback (most recent call last):"
JOINTS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_PREFIX = re.compile(r"^(?:\([^)\n]* pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]\n]*\] ?)?")
_VARIES = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}(?:-[0-9a-f]{4,})*|\d+")


class TracebackFilter:
    """Filters repeated tracebacks out of log output, and counts them.

    >>> repeats, report = TracebackFilter(), [BEGIN, "  File 'a.py', line 3, in f", "ValueError: request 7"]
    >>> for _ in range(3):
    ...     for text in report:
    ...         print(*repeats.line(text + "\\n"), sep="", end="")
    Traceback (most recent call last):
      File 'a.py', line 3, in f
    ValueError: request 7
    >>> print(*repeats.end(), sep="", end="")
    (the same traceback 2 more times: ValueError: request 7)
    """

    def __init__(self) -> None:
        self._lines: list[str] = []  # lines of the current traceback
        self._known: collections.OrderedDict[tuple[str, ...], str] = collections.OrderedDict()  # last line by traceback
        self._more: collections.Counter[tuple[str, ...]] = collections.Counter()
        self._is_left_out = False  # whether the previous lines were left out

    def line(self, text: str) -> Iterator[str]:
        """Add a line of output, with its newline, and yield the lines to print, with theirs."""
        bare = _PREFIX.sub("", text).rstrip()
        if bare.endswith(BEGIN):  # inside another one: two processes print at the same time
            yield from self._flush()
            self._lines = [text]
        elif self._lines:
            self._lines.append(text)
            if len(self._lines) > MAX_LINES:
                yield from self._flush()
            elif bare and not bare[0].isspace():
                yield from self._finish_traceback(bare)
        elif not (self._is_left_out and (not bare or bare in JOINTS)):
            self._is_left_out = False
            yield text

    def end(self) -> Iterator[str]:
        """Yield the remaining lines to print, at the end of the output."""
        yield from self._flush()
        yield from (self._flush_count(key) for key in list(self._more))

    def _flush(self) -> list[str]:
        held, self._lines, self._is_left_out = self._lines, [], False
        return held

    def _finish_traceback(self, last: str) -> Iterator[str]:
        held = self._flush()
        key = (*(_PREFIX.sub("", one) for one in held[1:-1]), _VARIES.sub("#", last))
        if key not in self._known:
            self._known[key] = last
            if len(self._known) > MAX_KNOWN:
                oldest = next(iter(self._known))
                yield from [self._flush_count(oldest)] if self._more[oldest] else []
                del self._known[oldest]
            yield from held
            return
        self._known.move_to_end(key)
        self._more[key] += 1
        self._is_left_out = True
        if re.fullmatch("10+", str(self._more[key])):  # so that a reader of the log sees that it continues
            yield self._count_line(key)

    def _flush_count(self, key: tuple[str, ...]) -> str:
        text = self._count_line(key)
        del self._more[key]
        return text

    def _count_line(self, key: tuple[str, ...]) -> str:
        times = "1 more time" if self._more[key] == 1 else f"{self._more[key]} more times"
        return f"(the same traceback {times}: {self._known[key][:200]})\n"

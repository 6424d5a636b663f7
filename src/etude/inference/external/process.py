"""A server of another make as a child of its adapter, reached by nobody else. What it prints goes on to the adapter's
own output.
"""

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
_ERROR = re.compile(r"\b(?!EngineDead)\w+(?:Error|Exception): .*")  # the cause, not that something else has ended


class ServerProcess(ServerClient):
    """A server as a child of this process. As an async context manager it waits until it serves, and ends it."""

    process: subprocess.Popen[bytes]

    def launch(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it. Called once."""
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
        """End it, and everything that it started. Idempotent."""
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
        return self.process.poll() is None

    async def wait_until_ready(self) -> None:
        """Wait until it serves. Raises `EngineError` when it ends first, by its own last words."""
        end = time.monotonic() + START_S
        while True:
            if not self.alive:
                self._reader.join(STOP_S)
                raise EngineError(
                    f"{self.server} of {self.name} ended while starting",
                    self.last_errors() or f"exit code {self.process.returncode}, without a word",
                    hint=f"see the engine's log; etude engines check {self.server.lower()} tries it with a tiny model",
                )
            with contextlib.suppress(EngineError):
                if (await self.get("/health", deadline_s=5.0))[0] == 200:
                    return
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"{self.server} of {self.name} did not serve within {START_S:g} s",
                    self.last_errors(),
                    hint="see the engine's log; where that goes on the host is too busy",
                )
            await asyncio.sleep(0.1)

    def last_errors(self) -> str:
        """What it said of why it cannot go on: the last errors that it told, or its last lines."""
        return "; ".join([*dict.fromkeys(self._errors)][-3:] or [line.strip() for line in self._last][-3:])

    def _pass_on(self) -> None:
        assert self.process.stdout is not None, "started with a pipe"
        repeats = TracebackFilter()
        for line in self.process.stdout:
            text = line.decode(errors="replace")
            self._last.append(text)
            if found := _ERROR.search(text):
                self._errors.append(found[0].strip())
            sys.stdout.writelines(repeats.line(text))
            sys.stdout.flush()
        sys.stdout.writelines(repeats.end())
        sys.stdout.flush()


def server_environ(folder: Path, threads: int) -> dict[str, str]:
    """Variables that every server's processes see. Nothing of the adapter's own Python. `folder` is for their temporary
    files and sockets; whoever made it removes it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "ETUDE_TOKEN"))}
    return env | {
        ADAPTER: str(os.getpid()),
        "PYTHONPATH": str(link_package(folder)),
        "PYTHONUNBUFFERED": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TMPDIR": str(folder),  # what they leave there goes with it
    }


# -------------------------------------------------------------------------- output in which each traceback stands once
# A server that fails at every request, or twice a second, would fill the disk with one traceback.


MAX_LINES, MAX_KNOWN = 400, 64
"""Of a traceback that is compared with others (a longer one passes); of tracebacks that are remembered."""
BEGIN = "Traceback (most recent call last):"
JOINTS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_PREFIX = re.compile(r"^(?:\([^)\n]* pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]\n]*\] ?)?")
_VARIES = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}(?:-[0-9a-f]{4,})*|\d+")


class TracebackFilter:
    """Lets lines through but for tracebacks that were there before, which it counts. `line` and `end` give the lines to
    print, each with its line end.

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
        self._held: list[str] = []  # of a traceback that has not ended
        self._known: collections.OrderedDict[tuple[str, ...], str] = collections.OrderedDict()  # with its last line
        self._more: collections.Counter[tuple[str, ...]] = collections.Counter()
        self._is_left_out = False  # whether the lines before this one were

    def line(self, text: str) -> Iterator[str]:
        """What to print once this line has come."""
        bare = _PREFIX.sub("", text).rstrip()
        if bare.endswith(BEGIN):  # where one is held, two processes print at once
            yield from self._given_up()
            self._held = [text]
        elif self._held:
            self._held.append(text)
            if len(self._held) > MAX_LINES:
                yield from self._given_up()
            elif bare and not bare[0].isspace():
                yield from self._ended(bare)
        elif not (self._is_left_out and (not bare or bare in JOINTS)):
            self._is_left_out = False
            yield text

    def end(self) -> Iterator[str]:
        """What is left to print when no more lines come."""
        yield from self._given_up()
        yield from (self._told(key) for key in list(self._more))

    def _given_up(self) -> list[str]:
        held, self._held, self._is_left_out = self._held, [], False
        return held

    def _ended(self, last: str) -> Iterator[str]:
        held = self._given_up()
        key = (*(_PREFIX.sub("", one) for one in held[1:-1]), _VARIES.sub("#", last))
        if key not in self._known:
            self._known[key] = last
            if len(self._known) > MAX_KNOWN:
                oldest = next(iter(self._known))
                yield from [self._told(oldest)] if self._more[oldest] else []
                del self._known[oldest]
            yield from held
            return
        self._known.move_to_end(key)
        self._more[key] += 1
        self._is_left_out = True
        if re.fullmatch("10+", str(self._more[key])):  # so that one who reads meanwhile sees that it goes on
            yield self._line(key)

    def _told(self, key: tuple[str, ...]) -> str:
        said = self._line(key)
        del self._more[key]
        return said

    def _line(self, key: tuple[str, ...]) -> str:
        times = "1 more time" if self._more[key] == 1 else f"{self._more[key]} more times"
        return f"(the same traceback {times}: {self._known[key][:200]})\n"

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from etude.errors import DeadlineExceeded, EngineError
from etude.inference.foreign.calls import Calls
from etude.inference.foreign.environment import link_package
from etude.inference.foreign.launch import ADAPTER
from etude.inference.foreign.repeats import Repeats
from etude.inference.lifetime import when_parent_dies

START_S, STOP_S = 570.0, 5.0
LAST_LINES = 40
_ERROR = re.compile(r"\b(?!EngineDead)\w+(?:Error|Exception): .*")  # the cause, not that something else has ended


class Child(Calls):
    """A server as a child of this process. As an async context manager it waits until it serves, and ends it."""

    process: subprocess.Popen[bytes]

    def begin(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
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
            await self.until_well()
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

    async def until_well(self) -> None:
        """Wait until it serves. Raises `EngineError` when it ends first, by its own last words."""
        end = time.monotonic() + START_S
        while True:
            if not self.alive:
                self._reader.join(STOP_S)
                raise EngineError(
                    f"{self.make} of {self.name} ended while starting",
                    self.last_words() or f"exit code {self.process.returncode}, without a word",
                    hint=f"see the engine's log; etude engines check {self.make.lower()} tries it with a tiny model",
                )
            with contextlib.suppress(EngineError):
                if (await self.get("/health", deadline_s=5.0))[0] == 200:
                    return
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"{self.make} of {self.name} did not serve within {START_S:g} s",
                    self.last_words(),
                    hint="see the engine's log; where that goes on the host is too busy",
                )
            await asyncio.sleep(0.1)

    def last_words(self) -> str:
        """What it said of why it cannot go on: the last errors that it told, or its last lines."""
        return "; ".join([*dict.fromkeys(self._errors)][-3:] or [line.strip() for line in self._last][-3:])

    def _pass_on(self) -> None:
        assert self.process.stdout is not None, "started with a pipe"
        repeats = Repeats()
        for line in self.process.stdout:
            text = line.decode(errors="replace")
            self._last.append(text)
            if found := _ERROR.search(text):
                self._errors.append(found[0].strip())
            sys.stdout.writelines(repeats.line(text))
            sys.stdout.flush()
        sys.stdout.writelines(repeats.end())
        sys.stdout.flush()


def environ(folder: Path, threads: int) -> dict[str, str]:
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

"""The other interpreter: a child process that is asked one thing at a time, by JSON lines over pipes.

Every answer is awaited until a deadline and bounded in size; a child that dies, hangs or says something else is ended,
and the next question starts another. What it wrote to standard error is in the error. Knows nothing of what is asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etude.errors import TaskError

MAX_LINE_BYTES = 64 << 20
_SAID_BYTES = 2_000


class Child:
    """Runs `argv`; `opening` is asked first, each time it is started. Safe for several threads."""

    def __init__(
        self,
        argv: Sequence[str],
        opening: Mapping[str, Any],
        *,
        env: Mapping[str, str] | None = None,
        opening_s: float = 300.0,
    ) -> None:
        self._argv, self._opening, self._opening_s = list(argv), dict(opening), opening_s
        self._env = dict(env) if env is not None else None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._count = 0
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this object
        self.opened: Any = None

    def ask(self, question: Mapping[str, Any], *, deadline_s: float) -> Any:
        """The answer. `TaskError` where the child refuses, fails or does not answer in time."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return self._exchange(question, deadline_s)

    def open(self) -> Any:
        """The answer to the opening question; starts the child where none runs."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return self.opened

    def close(self) -> None:
        """End the child. Idempotent; a later question starts another."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        self._end()
        self._said.seek(0)
        self._said.truncate()
        try:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, env=self._env
            )
        except OSError as error:
            hint = "name the interpreter that has the package: ETUDE_VERIFIERS_PYTHON=/path/to/venv/bin/python"
            raise TaskError(f"{self._argv[0]} cannot be started", str(error), hint=hint) from None
        self._rest = b""
        self.opened = self._exchange(self._opening, self._opening_s)

    def _exchange(self, question: Mapping[str, Any], deadline_s: float) -> Any:
        process, self._count = self._process, self._count + 1
        assert process is not None
        assert process.stdin is not None
        until = time.monotonic() + deadline_s
        try:
            self._write(process, json.dumps({**question, "id": self._count}).encode() + b"\n", until)
            answer = json.loads(self._line(process, until))
            if not isinstance(answer, dict) or answer.get("id") != self._count:
                raise ValueError(f"an answer to another question: {str(answer)[:200]}")
        except (OSError, ValueError, RecursionError, TimeoutError) as error:
            facts = f"{error}; it said: {self._said_last()!r}" if self._said_last() else str(error)
            self._end()
            raise TaskError(
                f"{os.path.basename(self._argv[0])} did not answer {question['do']!r}",
                facts,
                hint="see that the environment loads in that interpreter",
            ) from None
        if "ok" not in answer:
            raise TaskError(
                f"{question['do']!r} was refused", str(answer.get("error")), hint="look into the environment"
            )
        return answer["ok"]

    def _write(self, process: subprocess.Popen[bytes], data: bytes, until: float) -> None:
        assert process.stdin is not None
        fd = process.stdin.fileno()
        os.set_blocking(fd, False)
        with selectors.DefaultSelector() as ready:
            ready.register(fd, selectors.EVENT_WRITE)
            while data:
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError("it takes no question until its deadline")
                data = data[os.write(fd, data[:65_536]) :]

    def _line(self, process: subprocess.Popen[bytes], until: float) -> bytes:
        assert process.stdout is not None
        parts, size = [self._rest], len(self._rest)
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in parts[-1]:
                if size > MAX_LINE_BYTES:
                    raise ValueError(f"an answer of more than {MAX_LINE_BYTES} bytes")
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError("no answer until its deadline")
                part = os.read(process.stdout.fileno(), 1 << 20)
                if not part:
                    raise OSError(f"it ended with exit code {process.wait(5)}")
                parts.append(part)
                size += len(part)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    def _said_last(self) -> str:
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - _SAID_BYTES))
        return self._said.read().decode(errors="replace").strip()[-400:]

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def __del__(self) -> None:
        self._end()
        self._said.close()

"""A child process that handles one request at a time, as JSON lines over pipes.

Every response has a deadline and a maximum size. A child that dies, hangs or returns something invalid is killed, and
the next request starts a new one. Errors contain what the child wrote to stderr.
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
_STDERR_BYTES = 2_000


class Child:
    """A child process running `argv`, which answers requests; several threads can use it.

    `opening` is the first request after each start; its response may take `opening_s` seconds. `env` are the variables
    of the child (None: those of this process)."""

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
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this object
        self.opened: Any = None

    def ask(self, request: Mapping[str, Any], *, deadline_s: float) -> Any:
        """Send a request and return the child's result; starts the child if it is not running.

        Raises `TaskError` if the child returns an error, fails, or takes longer than `deadline_s` seconds."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return self._exchange(request, deadline_s)

    def open(self) -> Any:
        """Return the child's response to the opening request; starts the child if it is not running."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return self.opened

    def close(self) -> None:
        """Stop the child. Can be repeated; a later request starts a new child."""
        with self._lock:
            self._kill()

    def _start(self) -> None:
        self._kill()
        self._stderr.seek(0)
        self._stderr.truncate()
        try:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, env=self._env
            )
        except OSError as error:
            hint = "set the interpreter that has the package: ETUDE_VERIFIERS_PYTHON=/path/to/venv/bin/python"
            raise TaskError(f"{self._argv[0]} cannot be started", str(error), hint=hint) from None
        self._rest = b""
        self.opened = self._exchange(self._opening, self._opening_s)

    def _exchange(self, request: Mapping[str, Any], deadline_s: float) -> Any:
        process, self._count = self._process, self._count + 1
        assert process is not None
        assert process.stdin is not None
        until = time.monotonic() + deadline_s
        try:
            self._write(process, json.dumps({**request, "id": self._count}).encode() + b"\n", until)
            answer = json.loads(self._line(process, until))
            if not isinstance(answer, dict) or answer.get("id") != self._count:
                raise ValueError(f"a response to another request: {str(answer)[:200]}")
        except (OSError, ValueError, RecursionError, TimeoutError) as error:
            facts = f"{error}; stderr: {self._last_stderr()!r}" if self._last_stderr() else str(error)
            self._kill()
            raise TaskError(
                f"{os.path.basename(self._argv[0])} did not answer {request['do']!r}",
                facts,
                hint="check that the environment can be loaded in that interpreter",
            ) from None
        if "ok" not in answer:
            raise TaskError(
                f"the environment failed at {request['do']!r}",
                str(answer.get("error")),
                hint="check the environment's code",
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
                    raise TimeoutError("it did not read the request before the deadline")
                data = data[os.write(fd, data[:65_536]) :]

    def _line(self, process: subprocess.Popen[bytes], until: float) -> bytes:
        assert process.stdout is not None
        parts, size = [self._rest], len(self._rest)
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in parts[-1]:
                if size > MAX_LINE_BYTES:
                    raise ValueError(f"the response has more than {MAX_LINE_BYTES} bytes")
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError("no response before the deadline")
                part = os.read(process.stdout.fileno(), 1 << 20)
                if not part:
                    raise OSError(f"it exited with code {process.wait(5)}")
                parts.append(part)
                size += len(part)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    def _last_stderr(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_BYTES))
        return self._stderr.read().decode(errors="replace").strip()[-400:]

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def __del__(self) -> None:
        self._kill()
        self._stderr.close()

"""Processes that call methods of one object, with a deadline for progress.

A worker is a Python process of its own. While it works, it reports every second how far it is (`etude.progress`). One
that makes no progress for too long is killed: it waits for a dead network disk, or runs a plug-in that blocks. So the
deadline does not depend on how long the work takes in all."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from etude import progress
from etude.corpus.documents import MAX_BYTES
from etude.corpus.pieces import NEXT_S
from etude.errors import CorpusError

Done = Callable[[int, int], None]
"""Called with the number of finished parts, and their total."""

_SLOWEST = 20_000.0  # bytes a second at which a document is filtered or encoded on a very slow machine
STALL_S = NEXT_S + MAX_BYTES / _SLOWEST
"""Longest time without progress. The longest step is one document: waiting for it, and work on its 8 MiB."""
START_S = 300.0
"""Deadline for a worker to start, until it has imported its modules."""
_REPORT_S = 1.0
_END_S = 10.0  # for a process to end after SIGKILL: one that waits for a dead disk ends when the disk answers
_PR_SET_PDEATHSIG = 1


class _Report(NamedTuple):
    ticks: int
    doing: str


class _Outcome(NamedTuple):
    result: Any
    error: Exception | None


class Workers:
    """Worker processes that call methods of an object `work`. They end with the `with` block, and when this process is
    killed.

    `work` is pickled and sent to them. `stall_s`: a worker that makes no progress (`etude.progress`) for this many
    seconds is killed."""

    def __init__(self, work: object, count: int, *, stall_s: float | None = None) -> None:
        self._outcomes = queue.SimpleQueue[tuple[_Worker, _Outcome | None]]()
        self._workers = [_Worker(work, self._outcomes, stall_s or STALL_S) for _ in range(count)]
        self._died: CorpusError | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.ended()

    def map(self, method: str, parts: Sequence[tuple[Any, ...]], on_done: Done) -> list[Any]:
        """Call a method for the arguments in each part, and return the results in the order of the parts.

        `on_done` is called after each part. If a call fails, no further call is begun, and its error is raised when the
        calls in progress have ended. Raises `CorpusError` if a process was killed, or makes no progress and is killed
        here; then all later calls raise it too."""
        results: list[Any] = [None] * len(parts)
        error: Exception | None = self._died
        idle, busy = list(self._workers), dict[_Worker, int]()
        begun = done = 0
        before = time.monotonic()
        while True:
            while idle and begun < len(parts) and error is None:
                busy[worker := idle.pop()] = begun
                worker.begin(method, parts[begun])
                begun += 1
            if not busy:
                break
            with contextlib.suppress(queue.Empty):
                worker, outcome = self._outcomes.get(timeout=_REPORT_S)
                place = busy.pop(worker, None)
                if outcome is None:
                    self._died = self._died or worker.killed()
                elif place is not None:
                    idle.append(worker)
                    results[place] = outcome.result
                    error = error or outcome.error
                    if outcome.error is None:
                        done += 1
                        progress.tick()
                        on_done(done, len(parts))
            now = time.monotonic()
            for worker in [worker for worker in busy if worker.stalls(now - before)]:
                del busy[worker]
                self._died = self._died or worker.stalled()
            before, error = now, error or self._died
        if error is not None:
            raise error
        return results


class InThisProcess:
    """Like `Workers`, but calls the methods of `work` in this process, one after another and without a deadline: for
    tests and debuggers."""

    def __init__(self, work: object) -> None:
        self._work = work

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, method: str, parts: Sequence[tuple[Any, ...]], on_done: Done) -> list[Any]:
        """Call a method for the arguments in each part, and return the results in the order of the parts."""
        results = []
        for arguments in parts:
            results.append(getattr(self._work, method)(*arguments))
            on_done(len(results), len(parts))
        return results


class _Worker:
    """One process, and a thread that talks with it: a process that hangs cannot block this one."""

    def __init__(
        self, work: object, outcomes: queue.SimpleQueue[tuple[_Worker, _Outcome | None]], stall_s: float
    ) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        argv = [sys.executable, "-P", "-c", "from etude.corpus.workers import serve; serve()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self.process = subprocess.Popen(
            [*argv, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._calls = queue.SimpleQueue[tuple[str, tuple[Any, ...]]]()
        self._report, self._stall_s = _Report(-1, "starting"), stall_s
        self._seen, self._quiet_s = self._report, 0.0
        threading.Thread(target=self._talk, args=(work, outcomes), daemon=True).start()

    def _talk(self, work: object, outcomes: queue.SimpleQueue[tuple[_Worker, _Outcome | None]]) -> None:
        try:
            with contextlib.suppress(EOFError, OSError), self._connection:
                self._connection.send(work)
                while True:
                    self._connection.send(self._calls.get())
                    while isinstance(message := self._connection.recv(), _Report):
                        self._report = message
                    outcomes.put((self, message))
        finally:
            outcomes.put((self, None))

    def begin(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Have the process call a method."""
        self._quiet_s = 0.0
        self._calls.put((method, arguments))

    def stalls(self, passed_s: float) -> bool:
        """Return whether there was no progress for too long. `passed_s`: seconds since the last call.

        Of a longer time only a part counts: this process was stopped, and the worker perhaps too."""
        self._quiet_s += min(passed_s, 5 * _REPORT_S)
        if self._report != self._seen:
            self._seen, self._quiet_s = self._report, 0.0
        return self._quiet_s > self._limit_s

    @property
    def _limit_s(self) -> float:
        return START_S if self._seen.ticks < 0 else self._stall_s

    def stalled(self) -> CorpusError:
        """Kill the process, and return the error that says what it waited for."""
        self.process.kill()  # SIGTERM could be ignored, and there is nothing to clean up
        facts = f"{self._seen.doing or 'it works'}: no progress for {self._limit_s:,.0f} s; it "
        facts += "was killed" if self.ended() else "does not end: the kernel waits for a disk"
        hint = "check the disk or the plug-in; then run the same command again: finished parts are kept"
        return CorpusError(f"process {self.process.pid} of the build hangs", facts, hint=hint)

    def killed(self) -> CorpusError:
        """Return the error for a process that ended before its time."""
        self.ended()
        code = self.process.returncode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        hint = "it may have had too little memory: use fewer --jobs; run the same command again to continue"
        return CorpusError("a process of the build was killed", f"{how}, while {self._report.doing}", hint=hint)

    def ended(self) -> bool:
        """Wait for the end of the process, and return whether it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        return self.process.returncode is not None


def serve() -> None:
    """Run a worker: the main function of its process.

    The command line has a file descriptor (of the connection to the parent), and the process id of the parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    if os.getppid() != parent:
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once: what it had begun is done again
    lock, works = threading.Lock(), threading.Event()

    def report() -> None:
        while works.wait():
            with lock:
                if works.is_set():
                    connection.send(_Report(progress.count(), progress.doing()))
            time.sleep(_REPORT_S)

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        work = connection.recv()
        threading.Thread(target=report, daemon=True).start()
        while True:
            method, arguments = connection.recv()
            works.set()
            outcome = _outcome(getattr(work, method), arguments)
            with lock:
                works.clear()
                connection.send(outcome)


def _outcome(method: Callable[..., Any], arguments: tuple[Any, ...]) -> _Outcome:
    try:
        return _Outcome(method(*arguments), None)
    except Exception as error:  # noqa: BLE001  raised again in the parent
        error.add_note(traceback.format_exc())
        return _Outcome(None, error)

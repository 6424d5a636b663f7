"""Runs a tracker in its own process, and talks to it.

A library may hang, raise, exit, keep threads alive, block at interpreter exit until a server answers, or handle
signals. In its own process it can do none of this to the conductor, the main process of a run: metrics wait in a
bounded queue, and a process that has not finished by the deadline is killed. Ctrl-C and SIGTERM do not reach the
process; it finishes when the conductor tells it to, or when the conductor is gone.

Messages are lines of JSON. To the process: ``{"kind", "settings", "digest", "run", "conductor"}`` first, then
``{"step", "values"}`` for metrics, and ``{"outcome"}`` last. From the process: ``{"failed": what a call raised}``,
``{"warning": text}``, ``{"finished": how many calls raised}``. What the library prints goes to logs/tracker-NAME.log.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from etude.config import Plugin
from etude.errors import EtudeError, PluginError
from etude.plugins import Kind, called, make
from etude.seams import TrackedRun, Tracker
from etude.trackers.support import TrackerWarning

MAX_WAITING = 10_000
"""How many calls wait for a slow tracker; further ones are dropped."""
ORPHAN_S, KILL_S = 30.0, 5.0
"""How long a tracker may take to finish when the conductor is gone, and a killed process to end."""
EVERY_METRIC = "the run goes on; events/ in the run folder has every metric"
Report = Callable[[Plugin, PluginError], None]


class TrackerProcess:
    """The process of one tracker, as the conductor (the main process of a run) uses it. Only the methods `finish` and
    `join` wait for the process.

    It starts when the object is created. `report` is called with the plug-in and an error for each failure of the
    tracker. `logs` is the folder of its log file."""

    def __init__(self, plugin: Plugin, run: TrackedRun, report: Report, *, logs: Path) -> None:
        self._plugin, self._report_error = plugin, report
        self._waiting = queue.Queue[dict[str, Any] | None](MAX_WAITING)
        self._num_dropped = self._num_raised = 0
        self._is_finished = self._is_gone = self._is_late = False
        logs.mkdir(exist_ok=True)
        self._log = logs / f"tracker-{re.sub(r'[^A-Za-z0-9_.-]+', '-', plugin.path)}.log"
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "etude.trackers.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # Ctrl-C in a terminal goes to the conductor alone
            )
        first = {"kind": plugin.path, "settings": dict(plugin.settings), "digest": plugin.digest}
        self._waiting.put({**first, "run": msgspec.to_builtins(run, str_keys=True), "conductor": os.getpid()})
        self._threads = [
            threading.Thread(target=work, name=f"tracker {plugin}", daemon=True) for work in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the metrics of a step for the tracker. They are dropped when the queue is full or the process has
        ended."""
        try:
            if self._is_gone:
                self._num_dropped += 1
            else:
                self._waiting.put_nowait({"step": step, "values": dict(values)})
        except queue.Full:
            if not self._num_dropped:
                self._report(
                    f"{MAX_WAITING} calls wait: it is slow or hangs, and misses metrics", "see the tracker's log"
                )
            self._num_dropped += 1

    def finish(self, outcome: str, end: float) -> None:
        """Tell the tracker how the run ended: "finished", "stopped" or "failed".

        While its queue is full this waits, until the time `end` (`time.monotonic`)."""
        for message in ({"outcome": outcome}, None):
            with contextlib.suppress(queue.Full):  # it hangs, which `join` reports
                self._waiting.put(message, timeout=max(0.0, end - time.monotonic()))

    def join(self, end: float, deadline: str) -> None:
        """Wait until the process has ended, and kill it at the time `end` (`time.monotonic`). Reports how many calls
        were dropped.

        `deadline` is the time limit as text, such as "30 s", for the report."""
        try:
            self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._is_late = True
            self._report(f"it did not finish within {deadline}", f"see what it waits for in {self._log}")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        kill_end = time.monotonic() + KILL_S
        for thread in self._threads:
            thread.join(max(0.0, kill_end - time.monotonic()))
        if self._num_dropped or self._num_raised > 1:
            facts = f"its calls raised {self._num_raised} times, and {self._num_dropped} calls were dropped"
            self._report(facts, EVERY_METRIC)

    def _send(self) -> None:
        assert self._process.stdin is not None, "opened as a pipe"
        with contextlib.suppress(OSError), self._process.stdin as pipe:  # OSError: the process has ended
            while (message := self._waiting.get()) is not None:
                pipe.write(json.dumps(message, default=str).encode() + b"\n")
                if self._waiting.empty():
                    pipe.flush()

    def _receive(self) -> None:
        assert self._process.stdout is not None, "opened as a pipe"
        with self._process.stdout as pipe:
            for line in pipe:
                if line.endswith(b"\n"):  # else it was killed while it wrote
                    self._take(json.loads(line))
        code = self._process.wait()
        self._is_gone = True
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        if not self._is_finished and not self._is_late:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self._report(f"its process {how}", f"see {self._log}; {EVERY_METRIC}")

    def _take(self, reply: Mapping[str, Any]) -> None:
        match reply:
            case {"failed": str(facts)}:
                self._report(facts, EVERY_METRIC)
            case {"warning": str(text)}:
                self._report(text, EVERY_METRIC)
            case {"finished": int(num_raised)}:
                self._is_finished, self._num_raised = True, num_raised

    def _report(self, facts: str, hint: str) -> None:
        self._report_error(self._plugin, PluginError(f"{Kind.TRACKER.noun} {self._plugin} failed", facts, hint=hint))


class _Host:
    """The process's side: makes the tracker and calls it."""

    def __init__(self, requests: IO[bytes], replies: IO[str]) -> None:
        self._requests, self._replies = requests, replies
        self._plugin, self._num_raised = Plugin(""), 0

    def serve(self) -> None:
        """Call the tracker for every message, until the last one or until the main process of the run is gone."""
        messages = self._messages()
        if (first := next(messages, None)) is None:
            return
        threading.Thread(target=_exit_with, args=(first["conductor"],), daemon=True).start()
        self._plugin = Plugin(first["kind"], first["settings"], first["digest"])
        outcome = "failed"  # when the conductor is gone without a message
        tracker = self._started(msgspec.convert(first["run"], TrackedRun))
        for message in messages:
            if "outcome" in message:
                outcome = message["outcome"]
                break
            if tracker is not None:
                self._call(tracker, "log", message["step"], message["values"])
        if tracker is not None:
            self._call(tracker, "finish", outcome)
        self._reply(finished=self._num_raised)

    def _started(self, run: TrackedRun) -> Tracker | None:
        try:
            tracker: Tracker = make(Kind.TRACKER, self._plugin)
        except EtudeError as error:
            self._raised(f"{error.what}: {error.facts}")
            return None
        return tracker if self._call(tracker, "start", run) else None

    def _messages(self) -> Iterator[dict[str, Any]]:
        for line in self._requests:
            if line.endswith(b"\n"):  # else the conductor was killed while it wrote
                yield json.loads(line)

    def _call(self, tracker: Tracker, method: str, *arguments: object) -> bool:
        """Call a method; False when it raised."""
        try:
            with called(Kind.TRACKER, self._plugin, f"its {method}"):
                getattr(tracker, method)(*arguments)
        except EtudeError as error:
            self._raised(error.facts or error.what)
            return False
        return True

    def _raised(self, facts: str) -> None:
        self._num_raised += 1
        if self._num_raised == 1:
            self._reply(failed=facts)

    def warn(self, message: Warning | str, category: type[Warning], *where: Any) -> None:
        """Replaces `warnings.showwarning`: reports a `TrackerWarning`, and writes any other to the log."""
        if issubclass(category, TrackerWarning):
            self._reply(warning=str(message))
        else:
            print(warnings.formatwarning(message, category, *where[:2]), file=sys.stderr)

    def _reply(self, **reply: object) -> None:
        with contextlib.suppress(OSError):  # the conductor is gone
            print(json.dumps(reply), file=self._replies, flush=True)


def _exit_with(conductor: int) -> None:
    """End this process some time after the conductor has ended, even if the tracker hangs."""
    while os.getppid() == conductor:
        time.sleep(1.0)
    time.sleep(ORPHAN_S)
    os._exit(1)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the conductor tells when to finish; children have the default again
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no message
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # no library asks the user for a password, or reads messages
    host = _Host(requests, replies)
    warnings.showwarning = host.warn  # type: ignore[assignment]  # narrower: positional only
    warnings.simplefilter("always", TrackerWarning)
    host.serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # exit handlers and threads of a library do not hold this process up


if __name__ == "__main__":
    _main()

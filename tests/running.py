"""A run of the command line as its tests look at it: from outside, through its processes, its events and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

END_S = 1500.0


class Running:
    """A run under way, seen from outside: its processes, its events, and how it ends."""

    def __init__(self, cli: Any, config: Path, *, runs: Path | None = None) -> None:
        self.cli, self.config = cli, config
        self.path = (runs or cli.cwd / "runs") / "r"
        if runs is not None:
            (cli.cwd / "runs").symlink_to(runs)
        self.log = cli.cwd / "out.log"
        self.words: list[str] = []
        self.process: subprocess.Popen[str] | None = None

    def begin(self, *sets: str, on: str = "local") -> Running:
        self.words = ["--on", on, *(part for one in sets for part in ("--set", one))]
        self.process = self.cli.start("run", self.config, "--name", self.path.name, *self.words, log=self.log)
        return self

    def resume(self) -> Running:
        self.process = self.cli.start("run", self.config, "--resume", self.path, *self.words, log=self.log)
        return self

    def events(self, kind: str) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.path / "events" / "conductor.jsonl").read_bytes().splitlines()
            return [e for e in map(event_of, lines) if e.get("kind") == kind]
        return []

    @property
    def step(self) -> int:
        return max((e["step"] for e in self.events("rl.step")), default=0)

    def pid(self, child: str) -> int | None:
        """Of a child that is ready."""
        told = [e for e in self.events("process") if e["name"] == child]
        return told[-1]["pid"] if told and told[-1]["state"] in ("ready", "start") else None

    def until(self, condition: Callable[[], object], what: str, deadline_s: float = 1500.0) -> None:
        """Wait for a condition; fails when the run ends before, or at the deadline."""
        end = time.monotonic() + deadline_s
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, f"ended before {what}:\n{self.said}"
            assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}:\n{self.said}"
            time.sleep(0.01)

    def at_step(self, step: int) -> Running:
        self.until(lambda: self.step >= step, f"step {step}")
        return self

    def in_phase(self, phase: str) -> Running:
        self.until(
            lambda: any(e["phase"] == phase and e["state"] == "start" for e in self.events("phase")), f"phase {phase}"
        )
        return self

    def hit(self, child: str, signum: int = signal.SIGKILL) -> None:
        self.until(lambda: self.pid(child), f"{child} to be up")
        pid = self.pid(child)
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    def interrupt(self, signum: int = signal.SIGINT) -> int:
        assert self.process is not None
        self.process.send_signal(signum)
        return self.end()

    def end(self, deadline_s: float = END_S) -> int:
        assert self.process is not None
        return self.process.wait(deadline_s)

    @property
    def said(self) -> str:
        return self.log.read_text()[-4000:]

    def left(self) -> list[str]:
        """Command lines of processes that belong to this run."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    where = os.readlink(folder / "cwd")
                    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and (str(self.path) in words or where == str(self.cli.cwd)):
                        found.append(f"{folder.name} {words[:200]}")
        return found

    def assert_nothing_left(self, deadline_s: float = 120.0) -> None:
        end = time.monotonic() + deadline_s
        while left := self.left():
            assert time.monotonic() < end, f"left behind after {deadline_s:g} s: {left}"
            time.sleep(0.05)

    def assert_sound(self) -> None:
        """Ended well: every step was made, the audit is clean, nothing is left."""
        assert json.loads((self.path / "summary.json").read_text())["finished"], self.said
        audit = self.cli("ledger", "audit", self.path)
        assert audit.returncode == 0, audit.stderr
        assert audit.stdout.startswith("0 lost, 0 trained twice, 0 slots leaked;"), audit.stdout
        assert "Traceback" not in self.log.read_text(), self.said
        self.assert_nothing_left()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def event_of(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}

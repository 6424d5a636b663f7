"""A run whose engines come from elsewhere, as its tests look at it: the run, those engines, a gateway beside them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp.test_utils import unused_port

from etude.inference.registry_messages import State
from etude.telemetry import read_events

TOKEN = "a-token"


class Home:
    """A run whose engines all come from elsewhere, and those engines."""

    def __init__(self, cli: Any, config: Path, tmp_path: Path) -> None:
        self.cli, self.tmp_path, self.port = cli, tmp_path, unused_port()
        self.path = cli.cwd / "runs" / "r"
        self.log = cli.cwd / "out.log"
        self.config = config
        self.started: list[subprocess.Popen[bytes]] = []
        self.run: subprocess.Popen[str] | None = None

    def begin(self, *sets: str, engines: str = "[]") -> None:
        """`engines`: the run's own."""
        given = [f"fleet.listen=127.0.0.1:{self.port}", f"fleet.engines={engines}", *sets]
        flags = [part for one in given for part in ("--set", one)]
        self.run = self.cli.start("run", self.config, "--name", "r", *flags, log=self.log)

    def engine(self, name: str, *options: str, kind: str = "", clock: str = "") -> subprocess.Popen[bytes]:
        """Start one that registers; `clock`: what its interpreter does to its clock before anything else."""
        module = f"etude.inference{kind and '.'}{kind}.server"
        argv = [sys.executable, "-m", module, "--name", name, "--poll-s", "0.05", *options]
        argv += ["--register", f"http://127.0.0.1:{self.port}", "--store", str(self.path / "weights")]
        env = {**os.environ, "ETUDE_TOKEN": TOKEN}
        if clock:
            folder = self.tmp_path / f"clock-{name}"
            folder.mkdir()
            (folder / "sitecustomize.py").write_text(clock)
            env["PYTHONPATH"] = f"{folder}:{env.get('PYTHONPATH', '')}"
        return self.program(name, argv, env)

    def program(self, name: str, argv: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start anything that belongs to the run's surroundings."""
        with (self.tmp_path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
        self.started.append(process)
        return process

    def states(self, name: str) -> list[State]:
        return [State(e["state"]) for e in self.events("fleet.state") if e["engine"] == name]

    def events(self, kind: str) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            return [e for e in read_events(self.path / "events") if e["kind"] == kind]
        return []

    @property
    def step(self) -> int:
        return max((e["step"] for e in self.events("rl.step")), default=0)

    def until(self, condition: Callable[[], object], what: str, deadline_s: float = 1500.0) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert self.run is not None
            assert self.run.poll() is None, f"ended before {what}:\n{self.said}"
            assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}:\n{self.said}"
            time.sleep(0.05)

    @property
    def said(self) -> str:
        logs = {path.name: path.read_text()[-1500:] for path in self.tmp_path.glob("*.log")}
        return f"{self.log.read_text()[-4000:]}\n{logs}"

    def drain(self, name: str) -> None:
        done = self.cli("fleet", "drain", f"http://127.0.0.1:{self.port}", name)
        assert done.returncode == 0, done.stderr

    def talk(self) -> str:
        """Who answers a production request through a gateway that shares the run's engines."""
        argv = ("serve", self.path, "--port", "0", "--fleet", f"http://127.0.0.1:{self.port}")
        gateway = self.cli.start(*argv)
        try:
            url = re.search(r"http://[\d.:]+", gateway.stdout.readline())
            assert url is not None
            asked = {"model": "r", "messages": [{"role": "user", "content": "m0 1"}], "max_tokens": 4}
            with urllib.request.urlopen(
                urllib.request.Request(
                    f"{url[0]}/v1/chat/completions",
                    data=json.dumps(asked).encode(),
                    headers={"content-type": "application/json"},
                ),
                timeout=300,
            ) as answer:
                return str(json.load(answer)["choices"][0]["message"]["role"])
        finally:
            gateway.terminate()
            gateway.communicate(timeout=300)

    def production_requests(self) -> int:
        """How many the engines have counted."""
        urls = {e["url"] for e in self.events("fleet.state") if e["state"] == "serving"}
        pages = []
        for url in urls:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
                pages.append(page.read().decode())
        return sum(int(n) for page in pages for n in re.findall(r"production_requests_total\{.*\} (\d+)", page))

    def assert_sound(self, *, stop: bool = False) -> None:
        """Ended well, or stopped well: the audit is clean."""
        assert self.run is not None
        if stop:
            self.run.send_signal(signal.SIGINT)
        assert self.run.wait(1500) == (130 if stop else 0), self.said
        audit = self.cli("ledger", "audit", self.path)
        assert audit.returncode == 0, audit.stderr
        assert audit.stdout.startswith("0 lost, 0 trained twice, 0 slots leaked;"), audit.stdout

    def close(self) -> None:
        for process in (self.run, *self.started):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

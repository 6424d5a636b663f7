"""A gateway lends its idle engines to the rollouts of a run: `etude serve --lend` beside `etude run`.

    python -m benchmarks.production.lend_run [--rounds 3]

A small game is trained with one engine of its own. A gateway with two engines serves the run's first version to users
(its branch `stable`), and lends one of them while few requests come. When that has done some rollouts, many requests
come until it is back, then few until it is lent again. At the end the run ends first, and the gateway afterwards.

- `hand_back_s`: from the decision until the engine serves production again, by the gateway's own account.
- `failed`, `wrong`: requests of users that failed, or were answered by another version than the stable one.
- `rollouts_of`: rollouts of the run by the engine that sampled in them. `moved`: those of several engines.
- `invalid`: rollouts that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from tests.conftest import made_game

from benchmarks.report import report
from etude.errors import DeadlineExceeded
from etude.stores import open_store
from etude.telemetry import read_events
from etude.weights.chain.history import head

WAIT_S = 900.0
MANY, FEW = 12, 1  # requests of users at the same time
LENT_ROLLOUTS = 12  # rollouts of a lent engine before many requests come
LEND = """registry = "http://127.0.0.1:{port}"
engines = 2
policy = "reactive"
target = 0.25
lease_s = 2.0
tick_s = 1.0
silence_s = 10.0
"""


class Users:
    """Threads that send requests: `number` of them are at work at the same time."""

    def __init__(self, url: str, stable: str) -> None:
        self.number, self.asked, self.errors, self.wrong = FEW, 0, list[str](), 0
        self._url, self._stable, self._stop = url, stable, threading.Event()
        self._threads = [threading.Thread(target=self._use, args=(i,)) for i in range(MANY)]

    def __enter__(self) -> Users:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(300)

    def _use(self, number: int) -> None:
        body = {"model": "r", "messages": [{"role": "user", "content": "m0 1"}], "max_tokens": 16}
        with httpx.Client(timeout=300) as http:
            while not self._stop.wait(0.05):
                if number >= self.number:
                    continue
                self.asked += 1
                try:
                    answer = http.post(f"{self._url}/v1/chat/completions", json=body | {"seed": self.asked})
                    answer.raise_for_status()
                    self.wrong += answer.json()["system_fingerprint"] != self._stable
                except httpx.HTTPError as error:
                    self.errors.append(repr(error))


class Programs:
    """The programs of a measurement, in a folder. They end with the block."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._all = folder, list[subprocess.Popen[bytes]]()

    def start(self, name: str, *words: str | Path) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "etude.cli", *map(str, words)]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(argv, cwd=self.folder, stdout=log, stderr=log)
        self._all.append(process)
        return process

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + WAIT_S
        while not (found := condition()):
            if time.monotonic() > end or any(one.poll() not in (None, 0, 130) for one in self._all):
                raise DeadlineExceeded(f"no {what}", f"{self.log('run')[-2000:]}\n{self.log('serve')[-3000:]}")
            time.sleep(0.1)
        return found

    def close(self) -> None:
        for one in self._all:
            one.kill()
            one.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def command(folder: Path, *words: str | Path) -> str:
    """Run a command to its end, and return what it prints."""
    argv = [sys.executable, "-m", "etude.cli", *map(str, words)]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True).stdout


def measure(rounds: int) -> dict[str, Any]:
    """Train, serve, lend and take back, and return the numbers."""
    with tempfile.TemporaryDirectory() as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        game, port = made_game(folder / "game"), free_port()
        (folder / "lend.toml").write_text(LEND.format(port=port))
        programs = Programs(folder)
        stack.callback(programs.close)
        run_path = folder / "runs" / "r"
        sets = [
            f"fleet.listen=127.0.0.1:{port}",
            'fleet.engines=["reference"]',
            "rl.steps=100000",
            "evals.every=100000",
        ]
        sets += ["fleet.num_workers=1", "fleet.num_graders=1", "rl.checkpoint_every=100000"]
        flags = [word for one in sets for word in ("--set", one)]
        run = programs.start("run", "run", game.config, "--name", "r", *flags)

        def events(kind: str) -> list[dict[str, Any]]:
            with contextlib.suppress(FileNotFoundError):
                return [e for e in read_events(run_path / "events") if e["kind"] == kind]
            return []

        programs.until(lambda: events("rl.step"), "first step")
        store = open_store(run_path / "weights")
        pointer = head(store, "policy")
        assert pointer is not None, "a step was published"
        stable = pointer.head.version
        command(folder, "weights", "point", run_path, str(stable.step), "--branch", "stable")
        serve_port = free_port()
        url = f"http://127.0.0.1:{serve_port}"
        gateway = programs.start("serve", "serve", run_path, "--port", str(serve_port), "--lend", "lend.toml")
        programs.until(lambda: "serving r at" in programs.log("serve"), "gateway")

        def count(what: str) -> int:
            return programs.log("serve").count(what)

        def lent_rollouts() -> int:
            return sum(any(n.startswith("serve-") for n in e["engines"]) for e in events("rollout"))

        with Users(url, str(stable)) as users:
            for number in range(1, rounds + 1):
                programs.until(lambda n=number: count("is lent, with") >= n, "lent engine")
                before = lent_rollouts()
                programs.until(lambda b=before: lent_rollouts() >= b + LENT_ROLLOUTS, "rollouts of the lent engine")
                users.number = MANY
                programs.until(lambda n=number: count("serves production again") >= n, "hand-back")
                users.number = FEW
                print(f"round {number}: {users.asked} requests, {len(users.errors)} failed", flush=True)
            programs.until(lambda: count("is lent, with") >= rounds + 1, "lent engine")
            states = {e["engine"] for e in events("fleet.state") if e["state"] == "serving"}
            begun = time.monotonic()
            run.send_signal(signal.SIGINT)
            programs.until(lambda: count("serves production again") >= rounds + 1, "hand-back after the run's end")
            after_end_s = time.monotonic() - begun
            run.wait(300)
        gateway.send_signal(signal.SIGINT)
        gateway.wait(120)
        hand_back = [float(s) for s in re.findall(r"serves production again, ([\d.]+) s", programs.log("serve"))]
        audit = subprocess.run(
            [sys.executable, "-m", "etude.cli", "ledger", "audit", run_path],
            capture_output=True,
            text=True,
            check=False,
        )
        outcomes = [e["outcome"] for e in events("rollout")]
        left = [path.name for path in (run_path / "weights" / "branches" / "policy").glob("*")]
        return {
            "load": round(os.getloadavg()[0], 1),
            "requests": users.asked,
            "failed": len(users.errors),
            "errors": users.errors[:3],
            "wrong": users.wrong,
            "rollouts": len(outcomes),
            "invalid": len(outcomes) - outcomes.count("graded"),
            "moved": sum(len(set(e["engines"])) > 1 for e in events("rollout")),
            "rollouts_of": dict(Counter(n for e in events("rollout") for n in e["engines"])),
            "joined": sorted(states),
            "hand_back_s": hand_back,
            "hand_back_after_the_run_ended_s": round(after_end_s, 1),
            "steps": max((e["step"] for e in events("rl.step")), default=0),
            "audit": audit.stdout.strip() or audit.stderr.strip(),
            "branches_left": left,
            "log": [line for line in programs.log("serve").splitlines() if line.startswith("lending: ")],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    report("lend_run", measure(args.rounds))


if __name__ == "__main__":
    main()

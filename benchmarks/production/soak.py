"""A soak of the endless loop: a served run with users, releases and kills; memory, descriptors and disk by time.

A small model that plays a game, made here. `etude serve` answers users over HTTP from engines of the branches `stable`
and `canary`; they send signals; `etude learn --releases` trains, evaluates, and releases. Every `--kill-s` seconds the
loop or its learner is killed with SIGKILL, and the loop is started again. The gateway is never killed, so that every
request that fails is a failure of ours.

    python -m benchmarks.production.soak [--minutes 60] [--kill-s 300] [--users 16] [--pause-s 1]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import openai
from tests.conftest import QUIET, Cli, made_game
from tests.production_users import LEARN, RELEASE, SUITE

from benchmarks.report import report
from etude.signals import FeedbackFailed, send_feedback

RUN, SETTLE_S, PATIENCE_S = "product", 5.0, 900.0
FEW = ("rl.steps=1", "evals.every=50", "evals.heldout_tasks=2", "evals.baseline_tasks=1", "retention.disk_gb=0.002")


class User(threading.Thread):
    """Asks again and again; keeps short answers."""

    def __init__(self, url: str, number: int, pause_s: float, stop: threading.Event) -> None:
        super().__init__(name=f"user-{number}", daemon=True)
        self.url, self.number, self.pause_s, self.stop_asking = url, number, pause_s, stop
        self.asked = self.answered = self.told = 0
        self.failures = Counter[str]()

    def run(self) -> None:
        draw, user = random.Random(self.number), self.name
        with openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            while not self.stop_asking.wait(draw.uniform(0, 2 * self.pause_s)):
                self.asked += 1
                try:
                    answer = client.chat.completions.create(
                        model=RUN,
                        messages=[{"role": "user", "content": f"m{draw.randrange(100)} {draw.randrange(1, 4)}"}],
                        max_tokens=16,
                        extra_headers={"x-etude-user": user},
                    )
                    self.answered += 1
                    kept = len(answer.choices[0].message.content or "") % 2 == draw.randrange(4) % 2
                    send_feedback(self.url, "none", answer.id, user=user, kept=kept)
                    self.told += 1
                except (openai.OpenAIError, FeedbackFailed) as error:
                    cause = f" ({error.__cause__!r})" if error.__cause__ else ""
                    self.failures[f"{type(error).__name__}: {error}{cause}"[:200]] += 1
                    print(f"{time.strftime('%X')}: {user} failed: {error}{cause}", file=sys.stderr)


class Product:
    """The processes: a gateway, and the loop that is killed now and then."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cli, self.kills = folder, Cli(folder, os.environ | QUIET), Counter[str]()
        (folder / "game").mkdir()
        game = made_game(folder / "game")
        words = [word for one in FEW for word in ("--set", one)]
        done = self.cli("run", game.config, "--name", RUN, *words)
        if done.returncode:
            raise SystemExit(done.stderr)
        self.cli("privacy", "set", "local", "train")
        (folder / "learn.toml").write_text(LEARN.replace("settle_s = 0.0", f"settle_s = {SETTLE_S}"))
        (folder / "release.toml").write_text(RELEASE)
        (folder / "small.toml").write_text(SUITE)
        self.loop: subprocess.Popen[str] = self._start_loop(create=True)
        self.gateway, self.url = self._start_gateway()

    def _start_loop(self, *, create: bool = False) -> subprocess.Popen[str]:
        files = ["--privacy", "privacy", "--feedback", "feedback.sqlite", "--settings", "learn.toml"]
        log = self.folder / "loop.log"
        process = self.cli.start(
            "learn", f"runs/{RUN}", *files, "--releases", "releases.sqlite", "--poll-s", "2", log=log
        )
        end = time.monotonic() + PATIENCE_S
        while create and "loop: stable is" not in log.read_text():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        return process

    def _start_gateway(self) -> tuple[subprocess.Popen[str], str]:
        log = self.folder / "serve.log"
        files = ["--capture", "privacy", "--feedback", "feedback.sqlite", "--releases", "releases.sqlite"]
        process = self.cli.start("serve", f"runs/{RUN}", "--port", "0", *files, log=log)
        end = time.monotonic() + PATIENCE_S
        while " at http" not in log.read_text():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        return process, log.read_text().split(" at http")[1].split()[0].join(["http", ""])

    def kill(self, draw: random.Random) -> None:
        """Kill the learner, if it is drawn and there, or the loop, which is started again."""
        learners = [pid for pid, words in descendants(self.loop.pid) if "etude.loop.learner" in words]
        if learners and draw.random() < 0.5:
            self.kills["learner"] += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(learners[0], signal.SIGKILL)
            return
        self.kills["loop"] += 1
        self.loop.kill()
        self.loop.wait()
        self.loop = self._start_loop()

    def alive(self) -> None:
        """Raise `SystemExit` if a process has ended by itself."""
        for name, process in (("loop", self.loop), ("gateway", self.gateway)):
            if process.poll() is not None:
                log = (self.folder / f"{'serve' if name == 'gateway' else 'loop'}.log").read_text()[-3000:]
                raise SystemExit(f"the {name} ended with {process.returncode}:\n{log}")

    def close(self) -> None:
        """End both with Ctrl-C."""
        for process in (self.loop, self.gateway):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(120)
            if process.poll() is None:
                process.kill()
                process.wait()

    def usage(self) -> dict[str, float]:
        """Memory (MB) and descriptors of both programs with their children, and disk (MB) by folder."""
        found = dict[str, float]()
        for name, process in (("loop", self.loop), ("gateway", self.gateway)):
            pids = [process.pid, *(pid for pid, _ in descendants(process.pid))]
            of_main = [process.pid] if name == "loop" else pids  # its children live for minutes only
            found[f"{name}_mb"] = sum(map(_memory_mb, of_main))
            found[f"{name}_descriptors"] = sum(map(_descriptors, of_main))
        for place in ("weights", "checkpoints", "traces", "rollouts", "events", "logs"):
            found[f"{place}_mb"] = _size_mb(self.folder / "runs" / RUN / place)
        found["ledger_mb"] = sum(_size_mb(one) for one in (self.folder / "runs" / RUN).glob("ledger.sqlite*"))
        for place in ("privacy", "releases.sqlite", "releases.sqlite.evals", "feedback.sqlite"):
            found[f"{place.replace('.sqlite', '')}_mb"] = _size_mb(self.folder / place)
        return found


def descendants(parent: int) -> Iterator[tuple[int, str]]:
    """The process id and the command line of each descendant of a process."""
    for place in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, place.read_text().split()):
                with contextlib.suppress(OSError):
                    yield child, Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                yield from descendants(child)


def _memory_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1000
    return 0.0


def _descriptors(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def _size_mb(path: Path) -> float:
    files = path.rglob("*") if path.is_dir() else [path]
    total = 0
    for one in files:
        with contextlib.suppress(OSError):
            total += one.stat().st_size if one.is_file() else 0
    return total / 1e6


def trend(samples: list[dict[str, float]]) -> dict[str, list[float]]:
    """The median of each number in each quarter of the time."""
    quarter = max(1, len(samples) // 4)
    parts = [samples[i * quarter : (i + 1) * quarter or None] for i in range(4)]
    return {name: [round(median(one[name] for one in part), 2) for part in parts if part] for name in samples[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="length (default: %(default)s)")
    parser.add_argument("--kill-s", type=float, default=300.0, help="seconds between kills (default: %(default)s)")
    parser.add_argument("--users", type=int, default=16, help="users at once (default: %(default)s)")
    parser.add_argument("--pause-s", type=float, default=1.0, help="mean pause of a user in s (default: %(default)s)")
    args = parser.parse_args()
    draw, samples = random.Random(0), list[dict[str, float]]()
    with tempfile.TemporaryDirectory(prefix="etude-soak-") as folder:
        product, stop = Product(Path(folder)), threading.Event()
        users = [User(product.url, number, args.pause_s, stop) for number in range(args.users)]
        try:
            for user in users:
                user.start()
            began = killed = time.monotonic()
            while (now := time.monotonic()) - began < args.minutes * 60:
                product.alive()
                samples.append(product.usage())
                if now - killed >= args.kill_s:
                    killed = now
                    product.kill(draw)
                time.sleep(5.0)
            stop.set()
            for user in users:
                user.join(PATIENCE_S)
        finally:
            stop.set()
            product.close()
        facts = result(product, users, samples)
    report("production_soak", {**vars(args), **facts})


def result(product: Product, users: list[User], samples: list[dict[str, float]]) -> dict[str, Any]:
    """The numbers of a soak that has ended."""
    log = (product.folder / "loop.log").read_text()
    print(log, file=sys.stderr)
    audit = product.cli("ledger", "audit", f"runs/{RUN}").stdout.strip()
    failures: Counter[str] = sum((user.failures for user in users), Counter())
    listed = product.cli("release", "list").stdout.splitlines()
    return {
        "kills": dict(product.kills),
        "asked": sum(user.asked for user in users),
        "answered": sum(user.answered for user in users),
        "signals": sum(user.told for user in users),
        "failed": sum(failures.values()),
        "failures": dict(failures),
        "steps": log.count(" episodes, mean reward "),
        "releases": dict(Counter(line.split(": ")[1].split(" since")[0] for line in listed if ": " in line)),
        "audit": audit,
        "by_quarter": trend(samples),
    }


if __name__ == "__main__":
    main()

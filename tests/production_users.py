"""Users of a served run for tests of the endless loop: they ask, are captured, and send signals. No engine computes.

Who gets which version is decided by the file of releases and the branches of the weights, as the gateway decides it.
The tokens of the answers are made up, so the run must only report the difference (`parity.over_budget = "report"`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tests.played_run import PlayedRun
from tests.served_answers import served_answer
from tests.served_gateway import ServedGateway

from etude.config import load, to_toml
from etude.errors import Exit, StoreError
from etude.experience import Ledger
from etude.loop.checkpoints import copy_start_checkpoint
from etude.loop.config import RunConfig
from etude.loop.locations import weights_store
from etude.loop.production_windows import WINDOW
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.records import Version, VersionSpan
from etude.releases import Arm, Release, Releases, State, arm_of
from etude.releases.pointers import CANARY, STABLE, branch_version
from etude.run import RunFolder
from etude.signals import FeedbackFile, GivenSignal, Status
from etude.signals.file import Sent
from etude.signals.versions import Observation

ACME, MODEL = "acme", "the-product"


class Users:
    """`kept`: the probability that a user keeps an answer, by its version. `acknowledged`: the answers about which a
    signal was stored, by their ids without prefix, with its value. Close it."""

    def __init__(
        self, run: RunFolder, folder: Path, *, seed: int = 0, kept: Callable[[Version], float] = lambda _: 0.5
    ) -> None:
        self.run, self.releases, self.kept = run, folder / "releases.sqlite", kept
        self.privacy, self.feedback = folder / "privacy", folder / "feedback.sqlite"
        self.acknowledged = dict[str, float]()
        self._draw, self._number = random.Random(seed), 0
        self._folder = PrivacyFolder(self.privacy)
        self._folder.consent.set(Subject.of(ACME), Level.TRAIN)
        self._file = FeedbackFile(self.feedback, privacy=self._folder, create=True, cap=1 << 30)
        time.sleep(0.01)  # ids have milliseconds, and the consent must be older

    def close(self) -> None:
        self._file.close()
        self._folder.close()

    def visit(self, users: Iterable[str]) -> None:
        """One answer for each user, with a signal about it."""
        writer, begun, store = CaptureWriter(self.privacy), self.begun(), weights_store(self.run, readonly=True)
        release = begun[-1] if begun else None
        for user in users:
            share = 0 if release is None else release.share
            arm = Arm.STABLE if release is None else arm_of(release.salt, user, share)
            version = branch_version(store, "policy", CANARY if arm is Arm.CANARY else STABLE)
            if version is None:  # the loop has not begun
                version = branch_version(store, "policy", "")
            assert version is not None
            self._number += 1
            model = MODEL if arm is Arm.STABLE else f"{MODEL}-canary"
            response_id = self._file.ids.new(ACME, user, model)
            began = time.time()
            signal_id, value = f"s{self._number}", float(self._draw.random() < self.kept(version))
            given = GivenSignal(id=signal_id, response_id=response_id, name="kept", value=value)
            [receipts] = self._file.add([Sent(ACME, user, [given])], [Observation(model, began, str(version))])
            assert isinstance(receipts, list), receipts
            assert receipts[0].status is Status.STORED, receipts
            self.acknowledged[response_id] = value
            answer = served_answer(user, said=f"r{self._number}", response_id=response_id, at=began, organisation=ACME)
            number = len(answer.completion.token_ids)
            completion = msgspec.structs.replace(
                answer.completion,
                spans=(VersionSpan(version, number),),
                logprobs=np.full(number, -5.0, np.float32),
            )
            writer.offer(msgspec.structs.replace(answer, completion=completion))
        assert writer.close(600)

    def stored(self) -> list[str]:
        """The ids of the answers of all signals in the file, each of which got one."""
        return [one.response_id for one in self._file.signals()]

    def begun(self) -> list[Release]:
        """All releases; none while the file is being created."""
        if not self.releases.is_file():
            return []
        with contextlib.suppress(StoreError), contextlib.closing(Releases(self.releases, readonly=True)) as releases:
            return releases.all()
        return []


LEARN = """
episodes = 4
settle_s = 0.0
user_share = 0.5

[outcomes]
kept = 1.0

[loop]
release = "release.toml"
steps = 2
undecided = "promote"
"""
RELEASE = """
shares = [50, 100]
subjects = 1
share_s = 0.1
window_s = 0.1
silent_s = 600.0
max_s = 3.0

[[gate]]
suite = "small.toml"
margin = 1.0

[[metrics]]
name = "kept"
"""
SUITE = """
name = "small"
purpose = "correctness"
num_tasks = 2
"""


STUCK, STUCK_S = 20, 900.0  # starts, and seconds, after which a window should have gone on


class ServedLoop:
    """`etude learn --releases` in processes of its own, on a finished run whose users come all the time.

    `errors`: how often it ended with an error. `config`, `start`: of the game of `tests.conftest`. `cli`: the command
    line in `path`. `gateway`: whether clients use a real gateway of the run beside these users. Close it."""

    def __init__(
        self, path: Path, config: Path, start: Path, cli: Any, *, num_users: int = 12, gateway: bool = False
    ) -> None:
        sets = ["rl.steps=2", "evals.every=50", "experience.max_lag=0", 'parity.over_budget="report"']
        self.path, self.cli, self.log = path, cli, path / "out.log"
        self.log.touch()
        loaded = load(config, RunConfig, sets)
        self.played = PlayedRun(RunFolder.create(path / MODEL, config_toml=to_toml(loaded), seed=1), loaded)
        copy_start_checkpoint(start, self.played.folder)
        asyncio.run(self._finish_rl())
        for name, text in (("learn", LEARN), ("release", RELEASE), ("small", SUITE)):
            (path / f"{name}.toml").write_text(text)
        self.users = Users(self.played.folder, path)
        self._names = [f"user-{i}" for i in range(num_users)]
        self.gateway = ServedGateway(path, MODEL, cli) if gateway else None
        self._process: subprocess.Popen[str] | None = None
        self.errors = self._starts = 0
        self._state, self._since = "", time.monotonic()

    async def _finish_rl(self) -> None:
        async with self.played.conductor() as conductor:
            await conductor.reinforce()
        self.played.folder.end_phase("rl", wall_s=1.0)

    def close(self) -> None:
        """End the loop and the gateway, and close the users' files."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self.gateway is not None:
            self.gateway.close()
        self.users.close()

    def arguments(self, *, cycles: int) -> list[str]:
        """Of `etude learn`."""
        files = ["--privacy", "privacy", "--feedback", "feedback.sqlite", "--settings", "learn.toml"]
        files += ["--releases", "releases.sqlite", "--cycles", str(cycles), "--poll-s", "0.2"]
        return [str(self.played.folder.path), *files]

    def start(self, *, cycles: int) -> subprocess.Popen[str]:
        """Start the loop."""
        self._starts += 1
        self._process = self.cli.start("learn", *self.arguments(cycles=cycles), log=self.log)
        assert self._process is not None
        return self._process

    @property
    def window(self) -> dict[str, Any]:
        """The newest window."""
        with contextlib.closing(Ledger.open_readonly(self.played.folder / "ledger.sqlite")) as ledger:
            return ledger.recall(WINDOW) or {"number": 0, "candidate": None, "result": "none"}

    @property
    def ended(self) -> int:
        """The number of windows that have ended."""
        window = self.window
        return int(window["number"]) - (not window["result"])

    def killed_at(self, delays: Sequence[float], target: Callable[[], str], *, cycles: int) -> list[str]:
        """Run until all kills are made, each so many seconds after the one before, and so many windows have ended.

        Returns what was killed, and in which part of a cycle. A loop that ends with an error, such as a gate whose
        evaluation was killed three times, is started again, as a supervisor does. Raises `AssertionError` if the window
        stays in one state over `STUCK` starts or for `STUCK_S` seconds."""
        killed, waiting, began = list[str](), [*delays], time.monotonic()
        process = self.start(cycles=1_000_000)
        while waiting:
            process = self._visit(process, cycles=1_000_000)
            if time.monotonic() - began >= waiting[0]:
                waiting.pop(0)
                killed.append(self._kill(process, target()))
                began = time.monotonic()
                if process.poll() is not None:
                    process = self.start(cycles=1_000_000)
        process.kill()  # the last one, to end after whole windows
        process.wait(60)
        process = self.start(cycles=max(1, cycles - self.ended))
        while process.poll() is None:
            process = self._visit(process, cycles=max(1, cycles - self.ended))
        assert process.returncode == Exit.DONE, self.log.read_text()[-4000:]
        if self.gateway is not None:
            self.gateway.close()
        return killed

    def _visit(self, process: subprocess.Popen[str], *, cycles: int) -> subprocess.Popen[str]:
        """Let all users come, and return the loop: a new one if it has ended with an error."""
        self.users.visit(self._names)
        if self.gateway is not None:
            self.gateway.check()
        time.sleep(1.0)  # what they said is read again at each look for a window
        state = str(self.window)
        if state != self._state:
            self._state, self._since, self._starts = state, time.monotonic(), 0
        stuck = self._starts > STUCK or time.monotonic() - self._since > STUCK_S
        assert not stuck, f"no progress since {state}:\n{self.log.read_text()[-4000:]}"
        if process.poll() in (None, Exit.DONE):
            return process
        self.errors += 1
        return self.start(cycles=cycles)

    def _kill(self, process: subprocess.Popen[str], target: str) -> str:
        window = self.window
        part = "waiting" if window["result"] else "releasing" if window["candidate"] else "training"
        if target == "gateway" and self.gateway is not None and self.gateway.kill():
            return f"gateway, {part}"
        words = {"learner": "etude.loop.learner", "gate": "etude.cli eval"}.get(target)
        pids = [] if words is None else [pid for pid, said in _children(process.pid) if words in said]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if pids:
            return f"{target}, {part}"
        process.kill()
        process.wait(60)
        return f"loop, {part}"

    def facts(self) -> dict[str, Any]:
        """What is left after the loop: counts, and in `bad_...` those that must be 0."""
        folder, signals = self.played.folder, self.users.stored()
        audit = self.cli("ledger", "audit", folder.path)
        found = re.match(r"(\d+) lost, (\d+) trained twice, (\d+) slots leaked;", audit.stdout)
        assert found, audit.stdout + audit.stderr
        with contextlib.closing(Ledger.open_readonly(folder / "ledger.sqlite")) as ledger:
            rows = {row.rollout_id: row for row in ledger.rows() if row.rollout_id.startswith("production-")}
        given, ended = self.users.acknowledged, self.ended
        of_gateway: dict[str, int] = {}
        with PrivacyFolder(self.path / "privacy") as privacy:
            used = [one for found in privacy.records.records_of(list(rows)).values() for one in found]
            if self.gateway is not None:
                of_gateway, given = self.gateway.facts(privacy), given | self.gateway.acknowledged
        lines = (folder / "events" / "conductor.jsonl").read_text().splitlines()
        ours = [one for one in lines if '"production.window"' in one and one.endswith("}")]  # or cut by a kill
        events = [one for one in map(json.loads, ours) if one["kind"] == "production.window"]
        ends = {one["number"]: one["result"] for one in events if one["state"] == "ended"}
        unchanged = sum(result.startswith("no change: ") for result in ends.values())  # no release was begun
        releases = self.users.begun()
        with contextlib.closing(sqlite3.connect(self.path / "releases.sqlite")) as database:
            [counted] = database.execute("SELECT count(*) FROM outcomes").fetchone()
            [distinct] = database.execute("SELECT count(DISTINCT number || ' ' || id) FROM outcomes").fetchone()
        promoted = [one.candidate for one in releases if one.state is State.PROMOTED]
        stable = branch_version(weights_store(folder, readonly=True), "policy", STABLE)
        states = Counter(str(row.state) for row in rows.values())
        return {
            "windows_ended": ended,
            "windows_without_change": unchanged,
            "loops_ended_with_an_error": self.errors,
            "releases": dict(Counter(str(one.state) for one in releases)),
            "episodes": dict(states),
            "signals": len(given),
            "outcomes_counted": counted,
            "bad_rollouts_lost": int(found[1]),
            "bad_rollouts_trained_twice": int(found[2]),
            "bad_slots_leaked": int(found[3]),
            "bad_answers_in_two_rollouts": len(used) - len(set(used)),
            "bad_signals_lost": len(set(given) - set(signals)),
            "bad_signals_twice": len(signals) - len(set(signals)),
            "bad_outcomes_twice": counted - distinct,
            "bad_releases_open": sum(one.is_open or one.pending is not None for one in releases),
            "bad_releases_without_a_window": abs(len(releases) + unchanged - ended),
            "bad_stable_version": int(bool(promoted) and stable != promoted[-1]),
            **of_gateway,
        }


def _children(parent: int) -> Iterator[tuple[int, str]]:
    """The process id and the command line of each descendant of a process."""
    for place in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, place.read_text().split()):
                with contextlib.suppress(OSError):
                    yield child, Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                yield from _children(child)

"""kill -9 of the endless loop and of its learner at random moments, over cycles of windows and releases."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.played_run import PlayedRun
from tests.production_users import Users
from tests.running import Running

from etude.errors import Exit
from etude.experience import Ledger
from etude.experience.transitions import State
from etude.loop.locations import weights_store
from etude.loop.production import NOT_PROMOTED
from etude.loop.production_windows import WINDOW
from etude.privacy import PrivacyFolder
from etude.records import Version
from etude.releases import Releases
from etude.releases import State as ReleaseState
from etude.releases.pointers import STABLE, branch_version

pytestmark = pytest.mark.timeout(3600)
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
NAMES = [f"user-{i}" for i in range(12)]


class Loop:
    """`etude learn --releases` on a finished run, with users."""

    def __init__(self, path: Path, game: Any, cli: Any, *, kept: Callable[[Version], float] = lambda _: 0.5) -> None:
        sets = ("rl.steps=2", "evals.every=50", "experience.max_lag=0", 'parity.over_budget="report"')
        self.path, self.cli = path, cli
        self.played = PlayedRun.create(path / "the-product", game, *sets)
        asyncio.run(self._finish_rl())
        for name, text in (("learn", LEARN), ("release", RELEASE), ("small", SUITE)):
            (path / f"{name}.toml").write_text(text)
        self.users = Users(self.played.folder, path, kept=kept)
        self.log, self.process = path / "out.log", None

    async def _finish_rl(self) -> None:
        async with self.played.conductor() as conductor:
            await conductor.reinforce()
        self.played.folder.end_phase("rl", wall_s=1.0)

    def start(self, cycles: int) -> None:
        files = ["--privacy", "privacy", "--feedback", "feedback.sqlite", "--settings", "learn.toml"]
        files += ["--releases", "releases.sqlite", "--cycles", str(cycles), "--poll-s", "0.2"]
        self.process = self.cli.start("learn", self.played.folder.path, *files, log=self.log)

    @property
    def window(self) -> dict[str, Any]:
        with contextlib.closing(Ledger.open_readonly(self.played.folder / "ledger.sqlite")) as ledger:
            return ledger.recall(WINDOW) or {"number": 0, "result": "none"}

    @property
    def ended(self) -> int:
        """The number of windows whose release has ended."""
        window = self.window
        return window["number"] - (not window["result"])

    def learner(self) -> int | None:
        """The pid of the learner that is up."""
        running = Running(self.cli, Path(), runs=None)
        running.path = self.played.folder.path
        return running.pid("learner")

    def visits(self) -> None:
        self.users.visit(NAMES)

    def until_it_ends(self, *, kills: list[float], target: Callable[[], str], cycles: int) -> list[str]:
        """Run until so many windows have ended, with kills after these seconds. Returns what was killed."""
        killed, began = list[str](), time.monotonic()
        while self.ended < cycles or self.process is not None:
            if self.process is None:
                self.start(cycles - self.ended)
            assert self.process is not None
            self.visits()
            if kills and time.monotonic() - began >= kills[0]:
                kills.pop(0)
                killed.append(self._kill(target()))
                began = time.monotonic()
            if (code := self.process.poll()) is not None:
                self.process = None
                assert code in (Exit.DONE, -signal.SIGKILL), self.log.read_text()[-4000:]
            time.sleep(0.3)
        return killed

    def _kill(self, target: str) -> str:
        assert self.process is not None
        pid = self.learner() if target == "learner" else None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                import os

                os.kill(pid, signal.SIGKILL)
            return "learner"
        self.process.kill()
        self.process.wait(60)
        return f"loop, {'training' if not self.window.get('candidate') else 'releasing'}"

    def assert_sound(self, cycles: int) -> None:
        """Nothing was trained or counted twice, nothing was lost, and no release is left."""
        folder = self.played.folder
        audit = self.cli("ledger", "audit", folder.path)
        assert audit.returncode == 0, audit.stderr
        assert audit.stdout.startswith("0 lost, 0 trained twice, 0 slots leaked;"), audit.stdout
        with contextlib.closing(Ledger.open_readonly(folder / "ledger.sqlite")) as ledger:
            rows = {row.rollout_id: row for row in ledger.rows() if row.rollout_id.startswith("production-")}
        with PrivacyFolder(self.path / "privacy") as privacy:
            records = privacy.records.records_of(list(rows))
        used = [record for found in records.values() for record in found]
        assert len(used) == len(set(used)) == len(rows), "an answer is in two rollouts"
        assert sorted(self.users.stored()) == sorted(self.users.acknowledged.values()), "a signal was lost, or twice"
        with contextlib.closing(Releases(self.path / "releases.sqlite", readonly=True)) as releases:
            found = releases.all()
        assert len(found) == cycles, [str(one.candidate) for one in found]
        assert not any(one.is_open or one.pending for one in found), "a release was left"
        promoted = [one.candidate for one in found if one.state is ReleaseState.PROMOTED]
        stable = branch_version(weights_store(folder, readonly=True), "policy", STABLE)
        if promoted:
            assert stable == promoted[-1]
        lineage = {one.digest for one in promoted}
        for row in rows.values():
            if row.state is State.QUARANTINED:
                assert row.reason == NOT_PROMOTED
            elif row.version is not None and row.state is State.TRAINED:
                assert row.step is not None
        assert lineage or not promoted


@pytest.fixture
def loop(tmp_path: Path, game: Any, cli_in: Callable[[Path], Any]) -> Any:
    made = Loop(tmp_path, game, cli_in(tmp_path))
    yield made
    made.users.close()
    if made.process is not None:
        made.process.kill()
        made.process.wait()


def test_a_loop_that_is_killed_at_random_goes_on_and_trains_on_no_episode_twice(loop: Loop) -> None:
    draw = random.Random(1)
    kills = [draw.uniform(2.0, 30.0) for _ in range(4)]
    killed = loop.until_it_ends(kills=kills, target=lambda: draw.choice(["loop", "learner"]), cycles=2)
    assert killed
    loop.assert_sound(2)

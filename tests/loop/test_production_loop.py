"""The endless loop with the real ledger, learner, weights, releases and signals; the gate plays no suite."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.played_run import PlayedRun
from tests.production_users import LEARN, MODEL, RELEASE, SUITE, Users
from tests.unit.releases.played import passed, settings

from etude.cli import main
from etude.cli.learn import FeedbackSignals
from etude.errors import InputError, StoreError
from etude.experience import Ledger
from etude.experience.transitions import State
from etude.loop import production_loop
from etude.loop.locations import weights_store
from etude.loop.production import NOT_PROMOTED, ProductionTrainer
from etude.loop.production_loop import ProductionLoop
from etude.loop.production_windows import WINDOW, Window, Windows
from etude.prices import Prices, TokenPrices
from etude.privacy import PrivacyFolder
from etude.production import LearnSettings
from etude.production.settings import LoopSettings, Undecided
from etude.records import Version
from etude.releases import Release, Releases, ReleaseSettings
from etude.releases import State as ReleaseState
from etude.releases.pointers import STABLE, branch_version
from etude.releases.releases import LOOP, OPERATOR, RULES
from etude.releases.settings import Metric
from etude.signals import FeedbackFile
from etude.telemetry import read_events
from etude.weights.chain import history
from etude.weights.chain.branches import point

pytestmark = pytest.mark.timeout(1800)
NAMES = [f"user-{i}" for i in range(200)]  # a canary of 100 is decided by chance
WARM_UP, LR, LR_SHARE = 4, 1e-3, 0.2


class Here:
    """A finished run with users, and its loop in this process."""

    def __init__(self, path: Path, game: Any) -> None:
        sets = ["rl.steps=2", "rl.checkpoint_every=1", "evals.every=50", "experience.max_lag=0"]
        sets += ['parity.over_budget="report"', f"learner.warmup_steps={WARM_UP}", f"learner.lr={LR}"]
        self.path, self.played = path, PlayedRun.create(path / MODEL, game, *sets)
        asyncio.run(self._finish_rl())
        self.lines, self.steps = list[str](), list[dict[str, Any]]()
        self.prices = Prices(models={"policy": TokenPrices(1.0, 1.0, 1.0)})
        self.users = Users(self.played.folder, path)

    async def _finish_rl(self) -> None:
        async with self.played.conductor() as conductor:
            await conductor.reinforce()
        self.played.folder.end_phase("rl", wall_s=1.0)

    @property
    def store(self) -> Any:
        return weights_store(self.played.folder, readonly=True)

    @property
    def stable(self) -> Version | None:
        return branch_version(self.store, "policy", STABLE)

    @contextlib.asynccontextmanager
    async def loop(self, release: ReleaseSettings, **changed: Any) -> AsyncIterator[ProductionLoop]:
        of_loop = LoopSettings(release=Path("unused"), **{"steps": 2, **changed.pop("loop", {})})
        usual = {"outcomes": {"kept": 1.0}, "episodes": 4, "settle_s": 0.0, "max_wait_s": 1e9, "lr_share": LR_SHARE}
        learn = LearnSettings(**usual | changed, loop=of_loop)
        run, config = self.played.folder, self.played.config
        with (
            PrivacyFolder(self.users.privacy) as folder,
            FeedbackFile(self.users.feedback, privacy=folder) as file,
            contextlib.closing(Windows(run, config, learn, folder, FeedbackSignals(file), log=print)) as windows,
            pytest.MonkeyPatch.context() as patch,
        ):

            @contextlib.asynccontextmanager
            async def trainer(windows: Windows, telemetry: Any) -> AsyncIterator[ProductionTrainer]:
                async with self.played.conductor() as conductor:
                    conductor.close()  # its ledger: the windows write it
                    yield ProductionTrainer(windows, telemetry, conductor.processes)

            patch.setattr(production_loop, "trainer_of", trainer)
            async with self.played.conductor() as conductor:
                conductor.close()
                telemetry, signals = conductor.telemetry, FeedbackSignals(file)
                made = ProductionLoop(
                    windows,
                    release,
                    telemetry,
                    signals.outcomes,
                    self.users.releases,
                    poll_s=0.05,
                    tell=self.lines.append,
                    costs=partial(signals.costs, folder, self.prices),
                )

                async def check(release: Release) -> Any:
                    return passed(release)

                patch.setattr(made._gate, "check", check)
                try:
                    yield made
                finally:
                    await made.close()

    async def cycles(
        self, number: int, release: ReleaseSettings, *, names: Sequence[str] = NAMES, **changed: Any
    ) -> None:
        """Run the loop, while users come."""
        async with self.loop(release, **changed) as loop, asyncio.timeout(600):
            work = asyncio.create_task(
                loop.forever(number, on_step=lambda step, version, facts: self.steps.append({"step": step, **facts}))
            )
            while not work.done():
                await asyncio.to_thread(self.users.visit, names)
                await asyncio.sleep(0.1)
            await work

    def window(self) -> dict[str, Any]:
        with contextlib.closing(Ledger.open_readonly(self.played.folder / "ledger.sqlite")) as ledger:
            found: dict[str, Any] = ledger.recall(WINDOW)
        return found


@pytest.fixture
def here(tmp_path: Path, game: Any) -> Iterator[Here]:
    made = Here(tmp_path, game)
    yield made
    made.users.close()


NO_SOURCE = """
[tasks]
source = "no_such"
"""
QUICK: dict[str, Any] = {"shares": (50, 100), "subjects": 5, "share_s": 0.0}


def test_the_next_window_goes_on_from_the_promoted_version_and_spends_no_episode_of_a_worse_one_again(
    here: Here,
) -> None:
    begun = branch_version(here.store, "policy", "")

    def kept(version: Version) -> float:
        """The first candidate is much worse, the others are much better."""
        if not (found := here.users.begun()):
            return 0.5
        better = len(found) > 1
        return 0.9 if (version.digest == found[-1].candidate.digest) is better else 0.1

    here.users.kept = kept
    asyncio.run(here.cycles(3, settings(**QUICK)))
    first, second, third = here.users.begun()
    assert [one.state for one in (first, second, third)] == [
        ReleaseState.ROLLED_BACK,
        ReleaseState.PROMOTED,
        ReleaseState.PROMOTED,
    ]
    assert begun is not None
    assert first.stable == second.stable == begun
    assert third.stable == second.candidate
    assert here.stable == third.candidate
    lineage = [one.version.digest for one in history.lineage(here.store, "policy")]
    assert first.candidate.digest not in lineage, "a version that was rolled back is the base of no other"
    assert [lineage.index(one.digest) for one in (begun, second.candidate, third.candidate)] == sorted(
        lineage.index(one.digest) for one in (begun, second.candidate, third.candidate)
    )
    assert [one["step"] for one in here.steps] == [3, 4, 3, 4, 5, 6]
    with contextlib.closing(Ledger.open_readonly(here.played.folder / "ledger.sqlite")) as ledger:
        rows = [row for row in ledger.rows() if row.rollout_id.startswith("production-")]
    assert [(row.state, row.reason) for row in rows[:8]] == [(State.QUARANTINED, NOT_PROMOTED)] * 8
    assert len(rows) == 24
    assert {row.state for row in rows[8:]} <= {State.TRAINED, State.NO_SIGNAL}
    here.played.assert_sound(6)
    rates = [one["lr"] for one in here.steps]
    warm = [LR * LR_SHARE * share / WARM_UP for share in (1, 2)]
    assert rates == pytest.approx(warm * 3), "the warm-up begins again with each promotion"
    assert all(one["sampled_by"]["other"] <= 0.05 for one in here.steps)
    assert here.steps[0]["sampled_by"]["deployed"] == 1.0


def test_simulated_groups_of_a_version_that_was_not_promoted_are_spent_with_it(here: Here) -> None:
    made = list[int]()

    async def main() -> None:
        async with here.loop(settings(**QUICK), simulated=0.5) as loop, asyncio.timeout(600):

            async def check(release: Release) -> Any:
                return passed(release, "it is worse")

            loop._gate.check = check  # type: ignore[method-assign]
            work = asyncio.create_task(loop.forever(2, on_step=lambda step, *_: made.append(step)))
            while not work.done():
                await asyncio.to_thread(here.users.visit, NAMES[:8])
                await asyncio.sleep(0.1)
            await work

    asyncio.run(main())
    assert made == [3, 4, 3, 4]
    with contextlib.closing(Ledger.open_readonly(here.played.folder / "ledger.sqlite")) as ledger:
        simulated = [row for row in ledger.rows() if row.group_id.startswith("g") and int(row.group_id[1:]) >= 6]
    first, second = simulated[:8], simulated[8:]
    assert {(row.state, row.reason) for row in first} == {(State.QUARANTINED, NOT_PROMOTED)}
    assert {row.state for row in second} <= {State.TRAINED, State.NO_SIGNAL}
    assert [row.step for row in second] == [3] * 4 + [4] * 4
    here.played.assert_sound(4)


def test_the_rate_of_production_steps_rises_to_its_share_of_the_peak_and_has_no_end(here: Here) -> None:
    async def rates() -> list[float]:
        async with here.loop(settings(**QUICK)) as loop:
            trainer = ProductionTrainer(loop.windows, loop.telemetry, None)  # type: ignore[arg-type]
            trainer._window = Window(number=1, first=0, per_step=1, base=Version(2, "a", "b"))
            found = list[float]()
            for step in (2, 3, 5, 6, 100_000):
                trainer.step = step
                scheduled = 0.1 if step >= WARM_UP else 0.1 * (step + 1) / WARM_UP
                found.append(trainer._lr_share() * scheduled)
            return found

    shares = [LR_SHARE * one for one in (0.25, 0.5, 1.0, 1.0, 1.0)]
    assert asyncio.run(rates()) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("undecided", "cost_rise", "state"),
    [
        (Undecided.PROMOTE, None, ReleaseState.PROMOTED),
        (Undecided.ROLL_BACK, None, ReleaseState.ROLLED_BACK),
        pytest.param(Undecided.PROMOTE, 1e9, ReleaseState.ROLLED_BACK, marks=pytest.mark.slow),  # costs are unknown
    ],
)
def test_a_release_without_a_decision_ends_as_the_settings_say(
    here: Here,
    undecided: Undecided,
    cost_rise: float | None,
    state: ReleaseState,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _candidate_of_rl(here)
    monkeypatch.setattr("etude.signals.join.GRACE_S", 0.0)
    metrics = (Metric("kept", cost_rise=cost_rise),)
    here.prices = here.prices if cost_rise is None else Prices()
    enough = settings(  # several of the users have come by then on any host
        **QUICK | {"subjects": 1}, max_s=20.0, metrics=metrics
    )
    asyncio.run(here.cycles(1, enough, names=NAMES[:8], loop={"undecided": undecided}))
    [release] = here.users.begun()
    assert release.state is state
    assert "without a decision: no decision at 50 %" in here.window()["result"], here.window()
    assert here.stable == (release.candidate if state is ReleaseState.PROMOTED else release.stable)
    told = _with_releases(here, lambda one: one.why(1))
    by = [(one.state, one.by) for one in told]
    assert by[0] == (ReleaseState.CANDIDATE, LOOP)
    assert by[-1] == (state, LOOP)
    costs = next(one.evidence for one in told if one.state is ReleaseState.HELD)["costs"]["stable"]
    assert costs["answers"]
    assert bool(costs["dollars"]) is (cost_rise is None)
    ended = [one for one in read_events(here.played.folder / "events") if one.get("state") == "ended"]
    assert {"stable"} <= ended[-1]["dollars_per_kept"].keys() <= {"stable", "canary"}
    assert {one for _, one in by[1:-1]} <= {LOOP, RULES}


def test_a_release_that_an_operator_holds_waits_for_the_operator(here: Here) -> None:
    _candidate_of_rl(here)

    async def main() -> None:
        async with here.loop(settings(**QUICK, max_s=3600.0), loop={"undecided": Undecided.PROMOTE}) as loop:
            work = asyncio.create_task(loop.forever(1, on_step=lambda *_: None))
            async with asyncio.timeout(600):
                while not any("canary at 50 %" in line for line in here.lines):  # noqa: ASYNC110  the loop tells it
                    await asyncio.sleep(0.02)
                _with_releases(here, lambda one: one.hold(reason="on call", now=time.time()))
                while not any("waiting for etude release resume" in line for line in here.lines):
                    assert not work.done(), here.lines
                    await asyncio.sleep(0.02)
                _with_releases(
                    here, lambda one: one.rollback(weights_store(here.played.folder), reason="no", now=time.time())
                )
                await work

    asyncio.run(main())
    assert here.window()["result"] == "rolled back: no"
    by = [(one.state, one.by) for one in _with_releases(here, lambda one: one.why(1))]
    assert by[0] == (ReleaseState.CANDIDATE, LOOP)
    assert by[-2:] == [(ReleaseState.HELD, OPERATOR), (ReleaseState.ROLLED_BACK, OPERATOR)]


def test_suites_of_the_gate_are_checked_before_a_window_is_trained(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"learn": LEARN, "release": RELEASE, "small": SUITE, "no_source": SUITE + NO_SOURCE}
    for name, text in files.items():
        (here.path / f"{name}.toml").write_text(text)
    for suite, said in (
        ("minni.toml", "no suite 'minni.toml'"),
        (str(here.path / "no_source.toml"), "no_such"),
        ('small.toml"\ncost_rise = 0.1 # "', "the gate of small.toml has cost_rise, and there are no prices"),
        ('small.toml"\n[[metrics]]\nname = "a"\ncost_rise = 0.1 # "', "the metric a has cost_rise"),
    ):
        (here.path / "release.toml").write_text(RELEASE.replace("small.toml", suite))
        words = ["learn", str(here.played.folder.path), "--privacy", str(here.users.privacy)]
        words += ["--feedback", str(here.users.feedback), "--settings", str(here.path / "learn.toml")]
        assert main([*words, "--releases", str(here.users.releases)]) != 0
        told = capsys.readouterr().err
        assert said in told
        assert "hint: " in told
        assert not here.users.releases.exists()


def test_a_gate_that_cannot_be_played_names_the_way_out_of_its_release(here: Here) -> None:
    _candidate_of_rl(here)

    async def main() -> None:
        async with here.loop(settings(**QUICK)) as loop:

            async def check(_: Release) -> Any:
                raise InputError("no suite 'minni.toml'", hint="give another")

            loop._gate.check = check  # type: ignore[method-assign]
            await loop.forever(1, on_step=lambda *_: None)

    with pytest.raises(InputError) as refused:
        asyncio.run(main())
    assert f"etude release rollback --file {here.users.releases} --reason TEXT" in refused.value.hint
    _with_releases(here, lambda one: one.rollback(weights_store(here.played.folder), reason="wrong", now=time.time()))
    asyncio.run(here.cycles(1, settings(**QUICK)))
    assert here.window()["number"] == 1
    assert here.window()["result"] == "rolled back: wrong"


def test_the_loop_of_a_run_keeps_its_file_of_releases(here: Here) -> None:
    _candidate_of_rl(here)

    async def begun_with(path: Path) -> None:
        """The loop refuses the file, or goes on to the gate."""
        async with here.loop(settings(**QUICK)) as loop:
            loop._path = path

            async def check(_: Release) -> Any:
                raise InputError("the gate was reached", hint="none")

            loop._gate.check = check  # type: ignore[method-assign]
            await loop.forever(1, on_step=lambda *_: None)

    first, other = here.users.releases, here.path / "other.sqlite"
    damaged = here.path / "damaged.sqlite"
    damaged.write_text("no database " * 100)
    with pytest.raises(StoreError):
        asyncio.run(begun_with(damaged))
    for _ in range(2):
        with pytest.raises(InputError, match="the gate was reached"):
            asyncio.run(begun_with(first))
    with pytest.raises(InputError, match="is not the file of this run's releases") as refused:
        asyncio.run(begun_with(other))
    assert str(first) in refused.value.facts
    assert str(first) in refused.value.hint
    assert not other.exists()
    here.users.releases.rename(other)
    with pytest.raises(InputError, match="the gate was reached"):
        asyncio.run(begun_with(other))


def test_the_kl_penalty_follows_the_deployed_version(here: Here) -> None:
    asked = list[int]()

    async def main() -> None:
        async with here.loop(settings(**QUICK), kl=0.1) as loop, here.played.conductor() as conductor:
            conductor.close()
            trainer = ProductionTrainer(loop.windows, loop.telemetry, conductor.processes)
            call = trainer._call

            async def watched(method: str, kind: Any, *args: Any) -> Any:
                if method == "refer":
                    asked.extend(args)
                return await call(method, kind, *args)

            trainer._call = watched  # type: ignore[method-assign]
            versions = {one.version.step: one.version for one in history.lineage(here.store, "policy")}
            for step in (1, 1, 2):
                point(weights_store(here.played.folder), "policy", versions[step], branch=STABLE)
                await asyncio.to_thread(here.users.visit, NAMES[:8])
                await trainer.train(1, poll_s=0.05, on_step=lambda *_: None, on_wait=lambda _: None)

    asyncio.run(main())
    assert asked == [1, 2], "each deployed version becomes the reference once"


def _candidate_of_rl(here: Here) -> None:
    """The two versions of RL as the window's base and its candidate, so that only their release is left."""
    old, new = [one.version for one in history.lineage(here.store, "policy")][-2:]
    point(weights_store(here.played.folder), "policy", old, branch=STABLE)

    async def main() -> None:
        async with here.loop(settings(**QUICK)) as loop:
            window = Window(number=1, first=0, per_step=4, base=old, begun=True, candidate=new)
            await loop.windows.storage(loop.windows.remember, window)

    asyncio.run(main())


def _with_releases(here: Here, work: Callable[[Releases], Any]) -> Any:
    with contextlib.closing(Releases(here.users.releases)) as releases:
        return work(releases)

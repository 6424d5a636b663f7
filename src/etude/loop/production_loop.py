"""The endless loop of a run in production (`etude learn --releases`): window, steps, gate, canary, promotion, again.

Every state is stored before anything is done about it, and every action can be repeated. A window and its candidate are
in the run's ledger (`production_windows.Window`); the release is in the file of releases. So a process that is killed
at any moment goes on where it stopped:

    window stored ──► its steps ──► candidate stored ──► release begun ──► gate, canary ──► ended ──► result stored

Each window goes on from the version of the branch `stable`: its weights and the state of its optimiser. If the last
candidate was not promoted, the checkpoints after that version are deleted, and no later step trains on their episodes:
what made a version worse is not used again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from etude.errors import EtudeError
from etude.loop.checkpoints import checkpoint_of
from etude.loop.locations import weights_location, weights_store
from etude.loop.production import OnStep, trainer_of
from etude.loop.production_gate import Gate
from etude.loop.production_windows import Deployed, Window, Windows
from etude.loop.retention import go_back
from etude.loop.run_in_thread import SerialExecutor, run_in_thread
from etude.production.settings import LoopSettings, Undecided
from etude.records import Version
from etude.releases import Decision, Outcome, Release, Releases, ReleaseSettings, State
from etude.releases.costs import Costs
from etude.releases.decision import too_costly
from etude.releases.gate import loop_evals
from etude.releases.pointers import CANARY, STABLE, branch_version
from etude.releases.releases import LOOP, RULES
from etude.releases.states import ReleaseRefused, Transition
from etude.telemetry import Telemetry
from etude.weights.chain import branches
from etude.weights.chain.signing import read_signer

CHANNEL = "policy"
T = TypeVar("T")
OutcomesSince = Callable[[float, Collection[str]], Iterable[Outcome]]
"""Returns the outcomes of answers that were begun from a time (Unix, in s) on, for these metrics."""
CostsSince = Callable[[Release, float], Costs | None]
"""Returns the dollars per kept change of the versions of a release, of answers from a time (Unix, in s) on; None if
there are no prices."""


class ProductionLoop:
    """The endless loop. `outcomes`, `costs`: called in the thread of the privacy folder. `tell`: called with each line
    of progress. Call `close` at the end."""

    def __init__(
        self,
        windows: Windows,
        release: ReleaseSettings,
        telemetry: Telemetry,
        outcomes: OutcomesSince,
        releases: Path,
        *,
        poll_s: float,
        tell: Callable[[str], None],
        costs: CostsSince = lambda release, since: None,
    ) -> None:
        assert windows.settings.loop is not None, "checked by the caller"
        self.settings: LoopSettings = windows.settings.loop
        self.windows, self.run, self.telemetry = windows, windows.run, telemetry
        self._release, self._path, self._poll_s = release, releases, poll_s
        self._outcomes, self._costs = outcomes, costs
        self._last_costs: Costs | None = None  # of the newest release, as last read
        self._store = weights_store(self.run)
        self._signer = read_signer(windows.config.stores.signing_key)
        self._thread = SerialExecutor("releases")  # the one thread that uses the file of releases
        self._releases: Releases | None = None
        self._say = tell
        self._told: object = None
        prices = self.settings.prices
        self._gate = Gate(self.run, loop_evals(releases), prices, lambda line: self._tell(f"gate: {line}"))

    async def close(self) -> None:
        """Close the file of releases. Idempotent."""
        if self._releases is not None:
            with contextlib.suppress(RuntimeError):  # closed before
                await self._thread(self._releases.close)
        self._thread.close()

    async def forever(self, cycles: int | None, *, on_step: OnStep) -> None:
        """Run `cycles` cycles (a window, its steps and its release); None: go on until cancelled.

        `on_step` is called after each step. The caller holds the run's lock. Raises `InputError` if the run's loop has
        another file of releases, and the error that ended the loop."""
        await self.windows.storage(self.windows.refuse_other_releases, self._path)
        self._releases = await self._thread(lambda: Releases(self._path, signer=self._signer))
        await self.windows.storage(self.windows.remember_releases, self._path)
        stable = await run_in_thread(self._branches)
        self._tell(f"loop: stable is {stable}, releases in {self._path}")
        done = 0
        while cycles is None or done < cycles:
            await self._cycle(on_step)
            done += 1

    def _branches(self) -> Version:
        """Create the branches `stable` and `canary` if they do not exist, and return the version of `stable`."""
        stable = branch_version(self._store, CHANNEL, STABLE)
        newest = branch_version(self._store, CHANNEL, "")
        assert newest is not None, "the run has published a version"
        for branch in (STABLE, CANARY):
            if branch_version(self._store, CHANNEL, branch) is None:
                branches.point(self._store, CHANNEL, stable or newest, branch=branch, signer=self._signer)
        return stable or newest

    async def _cycle(self, on_step: OnStep) -> None:
        """Go on with the newest window until its release has ended; if it has, with a new one."""
        window = await self.windows.storage(self.windows.newest)
        if window is None or window.base is None or window.result:
            window = await self._fill(window)
        if window.candidate is None:
            window = await self._train(window, on_step)
        if not window.result:
            window = await self._end(window, await self._released(window))

    # The window

    async def _fill(self, last: Window | None) -> Window:
        """Wait for a window, and store it. The run continues from the deployed version then."""

        async def deployed() -> Deployed:
            while (other := await self._open_release()) is not None:
                await self._wait_for(other)
            return await run_in_thread(lambda: self._deployed(last))

        window = await self.windows.fill(poll_s=self._poll_s, on_wait=self._tell, deployed=deployed)
        self._event(window, "filled")
        return window

    def _deployed(self, last: Window | None) -> Deployed:
        """Return the deployed versions. Raises `RunRefused` if the run cannot continue from the newer one."""
        stable = branch_version(self._store, CHANNEL, STABLE)
        assert stable is not None, "the branch was created"
        checkpoint_of(self.run, stable)
        if last is None or last.base is None:
            return Deployed(stable, None)
        return Deployed(stable, last.before if last.base.digest == stable.digest else last.base)

    async def _go_back(self, window: Window) -> Window:
        """Delete the checkpoints of versions that were not deployed, before a window's first step."""
        assert window.base is not None, "windows of the loop have one"
        step, rl_steps = window.base.step, self.windows.config.rl.steps
        if gone := await run_in_thread(lambda: go_back(self.run, step, not_before=rl_steps)):
            self.telemetry.event("production.back", step=step, base=str(window.base), deleted=gone)
        window = msgspec.structs.replace(window, begun=True)
        await self.windows.storage(self.windows.remember, window)
        return window

    async def _train(self, window: Window, on_step: OnStep) -> Window:
        """Make the steps of a window, and store the version that they led to as the candidate."""
        if not window.begun:
            window = await self._go_back(window)
        assert window.base is not None, "windows of the loop have one"
        async with trainer_of(self.windows, self.telemetry) as trainer:
            await trainer.train_window(on_step)
            candidate = trainer.version
        assert candidate is not None, "the learner has begun"
        if candidate.digest == window.base.digest:
            return await self._end(window, "no change: its steps left the weights as they were")
        window = msgspec.structs.replace(window, candidate=candidate)
        await self.windows.storage(self.windows.remember, window)
        self._event(window, "trained")
        return window

    async def _end(self, window: Window, result: str) -> Window:
        window = msgspec.structs.replace(window, result=result)
        await self.windows.storage(self.windows.remember, window)
        costs, self._last_costs = self._last_costs or {}, None
        self._event(window, "ended", result=result, dollars_per_kept={arm: one.value for arm, one in costs.items()})
        self._tell(f"window {window.number}: {result}")
        return window

    # The release

    async def _released(self, window: Window) -> str:
        """Bring the candidate of a window through a release. Returns how it ended, in words."""
        while True:
            release = await self._release_of(window)
            if release is not None and release.pending is None and not release.is_open:
                return f"{release.state}: {(await self._why(release))[-1].reason}"
            if release is not None:
                try:
                    await self._advance(window, release)
                except ReleaseRefused:  # unless an operator changed the release at the same time
                    if await self._release_of(window) == release:
                        raise
            elif (other := await self._open_release()) is not None:
                await self._wait_for(other)
            elif (stable := await run_in_thread(self._branches)) != window.base:
                return f"dropped: {stable} was deployed meanwhile, and it was trained from {window.base}"
            else:
                await self._call(lambda releases: self._begin(releases, window))

    def _begin(self, releases: Releases, window: Window) -> Release:
        assert window.candidate is not None, "it was trained"
        location = weights_location(self.run)
        return releases.begin(
            self._store,
            window.candidate,
            self._release,
            channel=CHANNEL,
            location=location if isinstance(location, str) else str(location.absolute()),
            now=time.time(),
            by=LOOP,
        )

    async def _advance(self, window: Window, release: Release) -> None:
        """Take the next step of a release, or wait for one."""
        where = f"window {window.number}: release {release.number}"
        if release.pending is None and release.state is State.CANDIDATE:
            try:
                result = await self._gate.check(release)
            except EtudeError as error:
                error.hint += (
                    "; a release keeps the settings with which it began: if they are wrong, correct them, end it with"
                    f" etude release rollback --file {self._path} --reason TEXT, and start the loop again"
                )
                raise
            await self._call(lambda releases: releases.gate(result, now=time.time()))
            self._tell(f"{where}: gate: {'; '.join(result.failures) or 'passed'}")
            return
        new, costs = 0, None
        if release.state in (State.CANARY, State.HELD):
            new, costs = await self._observe(release)
        if release.pending is None and release.state is State.HELD and await self._held(release, where, new, costs):
            return
        found, decision = await self._call(lambda releases: releases.advance(self._store, now=time.time(), costs=costs))
        if (found.state, found.share) == (release.state, release.share) and found.is_open:
            self._tell(f"{where}: {_shown(found, decision)}", key=_key(found, decision))
            await asyncio.sleep(self._poll_s)
        elif found.is_open:
            self._tell(f"{where}: {found.state} at {found.share} %" + (f": {decision.reason}" if decision else ""))

    async def _observe(self, release: Release) -> tuple[int, Costs | None]:
        """Store the outcomes of a canary's users. Returns how many are new and count, and the costs at this share."""
        metrics = {metric.name for metric in release.settings.metrics}
        since = await self._call(lambda releases: releases.share_since(release))
        outcomes = await self.windows.storage(lambda: list(self._outcomes(since, metrics)))
        costs = await self.windows.storage(lambda: self._costs(release, since))
        self._last_costs = costs or self._last_costs
        return await self._call(lambda releases: releases.observe(outcomes, now=time.time())), costs

    async def _held(self, release: Release, where: str, new: int, costs: Costs | None) -> bool:
        """Decide about a release that is held. Returns whether something was done.

        One that an operator holds waits for the operator. One that the rules hold is decided by the settings when the
        canary had its share for `max_s`; before, it continues as soon as users send outcomes again."""
        last = (await self._why(release))[-1]
        if last.by != RULES:
            return False
        since, now = await self._call(lambda releases: releases.share_since(release)), time.time()
        if now - since < release.settings.max_s:
            if new:
                reason = "users send outcomes again"
                await self._call(lambda releases: releases.resume(reason=reason, now=now, by=LOOP))
            return bool(new)
        last_compared = release.settings.compared_shares[-1]
        promotes = self.settings.undecided is Undecided.PROMOTE and release.share == last_compared
        promotes = promotes and not too_costly(release.settings, costs)
        if promotes:
            evidence = (await self._call(lambda releases: releases.look(release, now=now))).evidence
            promotes = min(one.canary for one in evidence) >= release.settings.subjects
        if promotes or release.share > last_compared:  # all users get it only after it was shown to be better
            reason = f"promoted without a decision: {last.reason}"
            await self._call(lambda releases: releases.promote(self._store, reason=reason, now=now, by=LOOP))
        else:
            reason = f"rolled back without a decision: {last.reason}"
            await self._call(lambda releases: releases.rollback(self._store, reason=reason, now=now, by=LOOP))
        self._tell(f"{where}: {reason}")
        return True

    async def _open_release(self) -> Release | None:
        """Return the open release of the file; None if there is none."""
        found = await self._call(lambda releases: releases.all())
        return found[-1] if found and (found[-1].is_open or found[-1].pending is not None) else None

    async def _release_of(self, window: Window) -> Release | None:
        """Return the newest release of a window's candidate; None if it was not begun."""
        found = await self._call(lambda releases: releases.all())
        return next((one for one in reversed(found) if one.candidate == window.candidate), None)

    async def _why(self, release: Release) -> list[Transition]:
        return await self._call(lambda releases: releases.why(release.number))

    async def _wait_for(self, other: Release) -> None:
        self._tell(f"release {other.number} was begun by hand and is open ({other.state}); waiting for its end")
        await asyncio.sleep(self._poll_s)

    async def _call(self, work: Callable[[Releases], T]) -> T:
        assert self._releases is not None, "opened"
        return await self._thread(work, self._releases)

    # Progress

    def _tell(self, line: str, *, key: object = None) -> None:
        """Tell a line, unless it is the last one again. `key`: what makes it a new one; None: its text."""
        if (key or line) != self._told:
            self._told = key or line
            self._say(line)

    def _event(self, window: Window, state: str, **facts: object) -> None:
        versions = {"base": str(window.base), "candidate": str(window.candidate) if window.candidate else None}
        self.telemetry.event("production.window", number=window.number, state=state, **versions, **facts)


def _shown(release: Release, decision: Decision | None) -> str:
    what = f"{release.state} at {release.share} %"
    return f"{what}: {decision.reason}" if decision is not None else f"{what}; waiting for etude release resume"


def _key(release: Release, decision: Decision | None) -> object:
    """What makes a line about a canary worth telling again: not the seconds in it."""
    counts = () if decision is None else tuple((one.canary, one.stable) for one in decision.evidence)
    return release.number, release.state, release.share, counts

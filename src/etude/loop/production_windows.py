"""Windows of production episodes: settled conversations with rewards, stored as graded rollouts of a run's ledger.

A window is formed in one transaction with its record (`Window`, in the ledger), so a process that is killed leaves a
whole window or none. Each episode is a group of one rollout, so that every rule of a run's ledger holds for it.

The privacy folder stores which rollout an episode becomes, before the ledger has that rollout. If the process is killed
between the two, the next window may use the episode, since no rollout in the ledger contains it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from etude.errors import ConfigError, InputError, RunRefused
from etude.experience import Ledger
from etude.experience.transitions import State
from etude.loop.config import RunConfig
from etude.loop.locations import has_published, ledger_location, rollout_files
from etude.loop.run_in_thread import SerialExecutor, run_in_thread
from etude.privacy import PrivacyFolder, SubjectErased
from etude.production import Episode, LearnSettings, OpenEpisodes, choose, graded_of, reward_of, rollout_of
from etude.production.episodes import SOURCE
from etude.production.outcomes import SignalSource, Values, values_together
from etude.records import RolloutSpec, Version
from etude.records.rollout import Trace
from etude.records.summary import summary_of
from etude.run import RunFolder

LEAST = 2  # episodes of a window
SINCE, WINDOW, RELEASES = "production.since", "production.window", "production.releases"  # in the ledger
_YEAR_S = 366 * 86_400.0


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The newest window, as the ledger has it.

    - `number`: from 1. `first`: the number of its first group. `per_step`: the number of episodes of each of its steps.
    - `base`: the version that was deployed when it was formed, from which its steps go on; None: no releases are made.
      `before`: the version that was deployed before that; None: unknown.
    - `begun`: whether the run has gone back to `base`, so that checkpoints of later steps are of this window.
    - `candidate`: the version that its steps led to; None: they are not complete, or made none.
    - `result`: how its release ended, in words; "": it has not ended."""

    number: int
    first: int
    per_step: int
    base: Version | None = None
    before: Version | None = None
    begun: bool = False
    candidate: Version | None = None
    result: str = ""

    @property
    def deployed_steps(self) -> frozenset[int]:
        """The steps of `base` and `before`, to which the run may go back."""
        return frozenset(one.step for one in (self.base, self.before) if one is not None)


class Deployed(NamedTuple):
    """The version that serves most users now, and the one that did before it (None: unknown)."""

    version: Version
    before: Version | None

    @property
    def digests(self) -> frozenset[str]:
        """The digests of both versions. Tokens that they sampled count as tokens of the deployed policy."""
        return frozenset(one.digest for one in (self.version, self.before) if one is not None)


class Windows:
    """Forms the windows of a run, and owns the run's ledger.

    Raises `RunRefused` if the run's RL has not ended, and `ConfigError` for windows larger than its ledger.
    Call `close` at the end."""

    def __init__(
        self,
        run: RunFolder,
        config: RunConfig,
        settings: LearnSettings,
        folder: PrivacyFolder,
        signals: SignalSource,
        *,
        log: Callable[[str], None],
    ) -> None:
        if not run.ended("rl") or not has_published(run):
            hint = f"finish its RL first: etude run --resume {run.path}"
            raise RunRefused(f"{run.path} cannot learn from production yet", "its RL has not ended", hint=hint)
        self.run, self.config, self.settings, self.folder, self.signals = run, config, settings, folder, signals
        size, capacity = config.experience.group_size, config.ledger_slots
        simulated = settings.simulated_groups(settings.episodes, size) * size * config.harness.forks  # of one step
        if settings.window + simulated > capacity:
            beside = f" with {simulated} simulated rollouts of a step" if simulated else ""
            lower = "lower episodes (or loop.steps)" + (", or simulated" if simulated else "")
            raise ConfigError(
                f"a window of {settings.window} episodes{beside} is larger than the run's ledger",
                f"it has {capacity} slots: groups_per_step x group_size x (max_lag + 1) x forks of the run",
                hint=f"{lower}, so that both together are {capacity} or less",
            )
        self.ledger = Ledger(ledger_location(run), capacity=capacity, composition=config.composition, log=log)
        self._episodes = OpenEpisodes(folder)
        self.storage = SerialExecutor("storage")  # the one thread that uses the ledger and the privacy folder
        self.files = rollout_files(run)
        self.prefix = f"{SOURCE}-{run.identity()['run_id']}-"  # several runs may learn from one privacy folder

    def close(self) -> None:
        """Close the ledger after its pending writes. Idempotent."""
        self.storage.close()
        self.ledger.close()

    def newest(self) -> Window | None:
        """Return the newest window; None before the first. Call it in the thread `storage`."""
        found = self.ledger.recall(WINDOW)
        return None if found is None else msgspec.convert(found, Window)

    def remember(self, window: Window) -> None:
        """Replace the record of the newest window, durably. Call it in the thread `storage`."""
        self.ledger.transaction(lambda: self.ledger.remember(WINDOW, msgspec.to_builtins(window)))

    def refuse_other_releases(self, path: Path) -> None:
        """Raise `InputError` if the run's loop used another file of releases before, which still exists.

        Call it in the thread `storage`."""
        first = self.ledger.recall(RELEASES)
        if first is not None and first != str(path.resolve()) and Path(first).exists():
            raise InputError(
                f"{path} is not the file of this run's releases",
                f"its endless loop has recorded them in {first}",
                hint=f"give --releases {first}; to begin a new history, move that file away",
            )

    def is_episode(self, group_id: str) -> bool:
        """Return whether a group is a production episode. All others are groups of simulated rollouts."""
        return group_id.startswith(self.prefix)

    def number(self, group_id: str) -> int:
        """Return the number of a group, counted over all groups that were ever admitted."""
        return int(group_id.rpartition("-")[2].removeprefix("g"))

    def remember_releases(self, path: Path) -> None:
        """Store which file of releases the run's loop uses. Call it in the thread `storage`."""
        self.ledger.transaction(lambda: self.ledger.remember(RELEASES, str(path.resolve())))

    async def left(self) -> list[str]:
        """Return the ids of the episodes of the next step: the first ones that no step has trained on."""
        open_now = [i for i in await self.storage(self.ledger.open_groups) if self.is_episode(i)]
        window = await self.storage(self.newest)
        return open_now if window is None else open_now[: window.per_step]

    async def fill(
        self,
        *,
        poll_s: float,
        on_wait: Callable[[str], None],
        deployed: Callable[[], Awaitable[Deployed]] | None = None,
    ) -> Window:
        """Wait until a window has enough settled episodes, or its deadline has passed, and store it.

        `poll_s`: seconds between checks for episodes. `on_wait` is called with a line that says what it waits for,
        whenever that changes. `deployed`: returns the deployed versions; None: there are no releases, and a window
        takes episodes of any version."""
        told = ""
        while True:
            now_deployed = None if deployed is None else await deployed()
            ready, rated, why = await self.storage(self._ready, time.time(), now_deployed)
            if not why:
                traces = await self.storage(self._read, ready)
                with contextlib.suppress(SubjectErased):  # after it was read
                    if len(traces) == len(ready):
                        return await self._admit(ready, traces, rated, now_deployed)
                why = "an answer was erased meanwhile; the window is formed again"
            if why != told:
                told = why
                on_wait(why)
            await asyncio.sleep(poll_s)

    def _ready(self, now: float, deployed: Deployed | None) -> tuple[list[Episode], list[tuple[Values, float]], str]:
        """Return the episodes of the next window with their signals and rewards, and "" or what is waited for."""
        settings, since = self.settings, float(self.ledger.recall(SINCE) or 0.0)
        found = self._episodes.find(since=since, taken=self._taken)
        settled = [one for one in found if one.last_at <= now - settings.settle_s]
        valued = dict[tuple[str, ...], tuple[Values, float]]()
        signals = self.signals.values_of([answer for one in settled for answer in one.answers])
        for one in settled:
            values = values_together(signals[answer] for answer in one.answers if answer in signals)
            reward = reward_of(values, settings.outcomes)
            if reward is None:
                reward = settings.silent
            if reward is not None:
                valued[one.record_ids] = values, reward
        rated = [one for one in settled if one.record_ids in valued]
        chosen = choose(
            rated,
            episodes=settings.window,
            per_user=settings.per_user,
            own=None if deployed is None else deployed.digests,
            own_share=0.0 if settings.loop is None else settings.loop.own_share,
        )
        own = rated if deployed is None else [one for one in rated if one.is_of(deployed.digests)]
        self._move_on(found, {one.record_ids for one in own}, now)
        oldest = min((one.last_at for one in chosen), default=None)
        deadline = None if oldest is None else oldest + settings.settle_s + settings.max_wait_s
        late = len(chosen) >= LEAST and deadline is not None and now >= deadline
        waits = len(chosen) < settings.window and not late
        counts = f"{len(rated)} with a signal that counts, {len(settled)} settled, {len(found)} in all"
        newest = self.newest()
        number = 1 if newest is None else newest.number + 1
        progress = f"{len(chosen)} of {settings.window} episodes settled, {_shown(deadline, now)}"
        why = f"window {number}: {progress} ({counts})"
        return chosen, [valued[one.record_ids] for one in chosen], why if waits else ""

    def _read(self, episodes: Sequence[Episode]) -> list[Trace]:
        """Return the turns of those of these episodes of which no answer was erased."""
        found = [self._episodes.read(one) for one in episodes]
        return [one for one in found if one is not None]

    def _taken(self, record_ids: Collection[str]) -> set[str]:
        """Return those of these records that a rollout in the ledger holds."""
        uses = self.folder.records.uses(record_ids)
        mine = {i for ids in uses.values() for i in ids if i.startswith(self.prefix)}
        stored = {row.rollout_id for row in self.ledger.find_rows(mine)} if mine else set[str]()
        return {record_id for record_id, ids in uses.items() if ids & stored}

    def _move_on(self, found: Sequence[Episode], rated: Collection[tuple[str, ...]], now: float) -> None:
        """Remember from which time on answers are read: episodes before it were trained on, or settled without use."""
        open_now = [one for one in found if one.record_ids in rated or one.last_at > now - self.settings.settle_s]
        since = min((one.first_at for one in open_now), default=now - self.settings.settle_s)
        if since > float(self.ledger.recall(SINCE) or 0.0):
            self.ledger.transaction(lambda: self.ledger.remember(SINCE, since))

    async def _admit(
        self,
        episodes: Sequence[Episode],
        traces: Sequence[Trace],
        rated: Sequence[tuple[Values, float]],
        deployed: Deployed | None,
    ) -> Window:
        """Store episodes as graded rollouts, each the only one of its group, with the record of their window."""
        steps = -(-len(episodes) // self.settings.episodes)
        ordered = sorted(zip(episodes, traces, rated, strict=True), key=lambda one: (one[0].subject, one[0].last_at))
        dealt = [one for step in range(steps) for one in ordered[step::steps]]  # a user's, over all steps
        first = await self.storage(self.ledger.num_groups)
        rollouts = [rollout_of(one, trace, f"{self.prefix}{first + i:06d}") for i, (one, trace, _) in enumerate(dealt)]

        def link() -> None:
            for rollout, (one, _, _) in zip(rollouts, dealt, strict=True):
                for record_id in one.record_ids:
                    self.folder.records.link(record_id, rollout.rollout_id)

        await self.storage(link)
        stored = await run_in_thread(lambda: [self.files.write(rollout) for rollout in rollouts])
        ended = [
            (summary_of(rollout, file), graded_of(values, reward))
            for rollout, file, (_, _, (values, reward)) in zip(rollouts, stored, dealt, strict=True)
        ]
        specs = [
            RolloutSpec(
                rollout_id=rollout.rollout_id,
                group_id=rollout.group_id,
                attempt=0,
                task=rollout.task,
                seed=0,
                temperature=self.config.rl.temperature,
                keep_routes=False,
            )
            for rollout in rollouts
        ]
        last = await self.storage(self.newest)
        window = _after(last, first=first, per_step=-(-len(rollouts) // steps), deployed=deployed)

        def store() -> None:
            self.ledger.admit(*specs)
            for spec in specs:
                self.ledger.move(spec.rollout_id, State.RUNNING)
            self.ledger.finish_all(ended)
            self.remember(window)

        await self.storage(self.ledger.transaction, store)
        return window


def _after(last: Window | None, *, first: int, per_step: int, deployed: Deployed | None) -> Window:
    base, before = (None, None) if deployed is None else deployed
    number = 1 if last is None else last.number + 1
    return Window(number=number, first=first, per_step=per_step, base=base, before=before)


def _shown(deadline: float | None, now: float) -> str:
    if deadline is None or deadline - now > _YEAR_S:
        return "no deadline"
    far = deadline - now > 86_400.0
    return "deadline " + time.strftime("%Y-%m-%d %H:%M" if far else "%H:%M:%S", time.localtime(deadline))

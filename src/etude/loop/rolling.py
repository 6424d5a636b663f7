"""Runs admitted rollouts, has them graded, and stores them in the ledger.

Rollouts start in order of admission, as many at a time as the engines can decode, and none before the version step that
it needs is published, which after a restart from a checkpoint may be several steps away. Groups of the next steps need
no version after those steps, whatever they were admitted with. A rollout whose worker dies is
requeued and run again; a grade whose grader dies is asked for again; after `max_attempts` the rollout is invalid at
that boundary, on the evidence of the host. A rollout that no engine could serve, as all held older versions, is
requeued as often as that happens, since it has not failed. Knows nothing of weights and training.

| | consumes | produces | waits for | unblocked by |
| --- | --- | --- | --- | --- |
| `run` | admitted and requeued rollouts | graded or invalid ones | a place to run, its version | `more` |
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from etude import __version__
from etude.environments.grading.cheat_detector import CheatIndicator, CheatIndicators
from etude.errors import DeadlineExceeded, EngineBehind, EtudeError, LedgerError
from etude.experience import Ledger
from etude.experience.transitions import State
from etude.loop.apart import InOrder
from etude.loop.crew import Crew
from etude.loop.played import Played
from etude.loop.room import Room
from etude.loop.wire import Lost
from etude.records import Graded, Invalid, Outcome, RolloutSpec, Task
from etude.records.reward import SIGNS, SIGNS_IF_REWARDED, Reward, Term
from etude.records.rollout import Boundary
from etude.records.summary import RolloutSummary, summary_of
from etude.rewards import Composition
from etude.rollouts import not_run, submitted
from etude.telemetry import Telemetry

AT_ONCE = 64  # the most rollouts that one transaction starts or stores


def keyed_seed(*parts: object) -> int:
    """A 63-bit seed: a hash of `parts`, which identify one random draw.

    >>> keyed_seed(0, "g000001.2") == keyed_seed(0, "g000001.2") != keyed_seed(1, "g000001.2")
    True
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def siblings(
    group_id: str,
    task: Task,
    n: int,
    *,
    seed: int,
    temperature: float,
    min_step: int = 0,
    pin_step: int | None = None,
    keep_routes: bool = False,
) -> list[RolloutSpec]:
    """The specs of a group's rollouts. `keep_routes`: ask engines for routes, to train with them."""
    return [
        RolloutSpec(
            rollout_id=f"{group_id}.{i}",
            group_id=group_id,
            attempt=0,
            task=task,
            seed=keyed_seed(seed, group_id, i),
            temperature=temperature,
            min_step=min_step,
            pin_step=pin_step,
            keep_routes=keep_routes,
        )
        for i in range(n)
    ]


async def judge(crew: Crew, rollout: Played, *, own_terms: bool = False) -> Outcome:
    """Have a finished rollout graded; returns its outcome with all terms. When a grader dies another one is asked. It
    is invalid where graders cannot read its file, or too many graders die."""
    if rollout.summary.invalid is not None:
        return rollout.summary.invalid
    error: EtudeError | None = None
    attempts = crew.config.experience.max_attempts
    for _ in range(attempts):
        try:
            outcome = with_host_terms(rollout, await crew.grade(rollout), looked=crew.config.experience.quarantine)
            if own_terms and crew.config.rewards.terms and isinstance(outcome, Graded):
                return await crew.measure(rollout, outcome)
            return outcome
        except (Lost, DeadlineExceeded) as lost:
            error = lost
        except LedgerError as unread:
            return Invalid(boundary=Boundary.STORE, reason=unread.what, evidence=unread.facts)
    return Invalid(boundary=Boundary.GRADER, reason=f"{attempts} graders were lost", evidence=str(error))


async def run_once(crew: Crew, spec: RolloutSpec) -> tuple[Played, Outcome]:
    """Run and grade a rollout that is not kept in the ledger (an evaluation's). It is invalid when its workers die
    repeatedly, or repeatedly no engine reaches its version: one task does not end an evaluation."""
    while True:
        try:
            rollout = await crew.rollout(spec, kept=False)
            return rollout, await judged_once(crew, rollout)
        except (Lost, DeadlineExceeded, EngineBehind) as error:
            if spec.attempt + 1 >= crew.config.experience.max_attempts:
                boundary = Boundary.PROVIDER if isinstance(error, EngineBehind) else Boundary.WORKER
                rollout = Played(summary=summary_of(not_run(spec, boundary, error)), task=spec.task)
                return rollout, await judge(crew, rollout)
            spec = msgspec.structs.replace(spec, attempt=spec.attempt + 1)


async def judged_once(crew: Crew, rollout: Played) -> Outcome:
    """Have a rollout graded, then delete its file."""
    try:
        return await judge(crew, rollout)
    finally:
        crew.files.drop(rollout.summary)


def with_host_terms(rollout: Played, outcome: Outcome, *, looked: bool) -> Outcome:
    """The outcome with the terms that the host measures: whether the agent submitted and, where somebody `looked`, the
    number of signs of cheating. What is invalid has no terms, as it counts nowhere."""
    if isinstance(outcome, Invalid):
        return outcome
    terms = [submitted(rollout.summary)]
    if looked:
        plain = CheatIndicators(found=rollout.signs.found).for_outcome(outcome)
        terms += [_signs(SIGNS, plain), _signs(SIGNS_IF_REWARDED, rollout.signs.if_rewarded)]
    return outcome.with_terms(*terms)


def _signs(name: str, found: Sequence[CheatIndicator]) -> Term:
    evidence = str(found[0]) if found else ""
    return Term(name=name, value=float(len(found)), version=__version__, evidence=evidence)


def reward_of(outcome: Outcome, composition: Composition) -> Reward | Invalid:
    """The composed reward, in training and in evaluations alike; `Invalid` as it is."""
    return outcome if isinstance(outcome, Invalid) else composition.of(outcome)


def signs_that_count(rollout: Played, outcome: Outcome, reward: Reward | Invalid) -> list[CheatIndicator]:
    """The signs of cheating that took a rollout's reward, the gravest first."""
    return rollout.signs.for_outcome(outcome) if isinstance(reward, Reward) and SIGNS in reward.gates else []


class _Ended(NamedTuple):
    """A rollout that has ended. `counts` is set when it was stored: whether it counts in the ledger."""

    rollout: RolloutSummary
    outcome: Outcome
    signs: list[CheatIndicator]
    counts: asyncio.Future[bool]


class Rolling:
    """Runs the rollouts that the ledger has admitted. `books`: the thread in which the ledger is read and written."""

    def __init__(self, ledger: Ledger, books: InOrder, crew: Crew, telemetry: Telemetry) -> None:
        self.ledger, self.books, self.crew, self.telemetry = ledger, books, crew, telemetry
        self.published = 0  # step of the newest version: rollouts that need a later one wait
        self.demand: Callable[[int], int] | None = None  # version step that an open group needs now: see `Ledger.start`
        self._settled, self._ready = asyncio.Event(), set[str]()
        self._ended: list[_Ended] = []  # not stored yet; at most as many as run at once
        self._storing: asyncio.Task[None] | None = None
        self._lost: Counter[str] = Counter()  # by rollout: how many of its workers died

    async def progress(self) -> set[str]:
        """Wait until every member of some group has ended. Returns the ids of all such groups since the last call. Has
        no deadline: every rollout has its own."""
        await self._settled.wait()
        self._settled.clear()
        ready, self._ready = self._ready, set()
        return ready

    async def run(self, more: asyncio.Event) -> None:
        """Start waiting rollouts in order until it is cancelled. The caller sets `more` when there may be rollouts to
        start: new ones, or those that waited for a version that is `published` now."""
        room = Room(self.crew.max_running)  # of this call alone: a cancelled call gives back no places
        async with asyncio.TaskGroup() as tasks:
            while True:
                await room.acquire()
                more.clear()
                while not (specs := await self._start(min(1 + room.free, AT_ONCE))):
                    await more.wait()
                    more.clear()
                for _ in specs[1:]:
                    await room.acquire()  # a place is free: this does not wait
                for spec in specs:
                    tasks.create_task(self._run_one(spec, room, more), name=spec.rollout_id)

    async def _start(self, limit: int) -> list[RolloutSpec]:
        return await self.books(self.ledger.start, limit, published=self.published, demand=self.demand)

    async def _run_one(self, spec: RolloutSpec, room: Room, more: asyncio.Event) -> None:
        try:
            try:
                rollout = await self.crew.rollout(spec)
                outcome = await judge(self.crew, rollout, own_terms=True)
            except (Lost, DeadlineExceeded, EngineBehind) as error:
                await self._give_back(spec, error)
                more.set()
                return
            reward = reward_of(outcome, self.crew.config.composition)
            signs = signs_that_count(rollout, outcome, reward)
            summary = _readable(rollout.summary, outcome)
            if await self._finish(summary, outcome, signs):
                self._tell(summary, reward)
                self._tell_signs(summary, outcome, reward, signs)
        finally:
            room.release()

    async def _finish(self, rollout: RolloutSummary, outcome: Outcome, signs: list[CheatIndicator]) -> bool:
        """Store an ended rollout, in one transaction with others that end meanwhile. False where the ledger does not
        count it any more."""
        one = _Ended(rollout, outcome, signs, asyncio.get_running_loop().create_future())
        self._ended.append(one)
        if self._storing is None or self._storing.done():
            self._storing = asyncio.create_task(self._store_all(), name="store what ended")
        return await one.counts

    async def _store_all(self) -> None:
        while self._ended:
            ended, self._ended = self._ended[:AT_ONCE], self._ended[AT_ONCE:]
            await self._store(ended)

    async def _store(self, ended: list[_Ended]) -> None:
        """Store ended rollouts, with their signs of cheating, in one transaction."""
        counts = list[bool]()

        def work() -> None:
            counts[:] = self.ledger.finish_all([(one.rollout, one.outcome) for one in ended])
            for one, counted in zip(ended, counts, strict=True):
                if counted and one.signs and isinstance(one.outcome, Graded):
                    graded = one.outcome.grade
                    self.ledger.quarantine(one.rollout.rollout_id, reason=str(one.signs[0]), graded=graded)

        try:
            await self.books(self.ledger.transaction, work)
            await self._settle({one.rollout.group_id for one in ended})
        except Exception as error:  # noqa: BLE001  passed on to the tasks that wait
            for one in ended:
                if not one.counts.done():
                    one.counts.set_exception(error)
            return
        for one, counted in zip(ended, counts, strict=True):
            if not one.counts.done():  # its task was cancelled
                one.counts.set_result(counted)

    def _tell_signs(
        self, rollout: RolloutSummary, outcome: Outcome, reward: Reward | Invalid, signs: list[CheatIndicator]
    ) -> None:
        draw = keyed_seed(self.crew.config.seed, "review", rollout.rollout_id) / 2**63
        solved = isinstance(reward, Reward) and reward.value > 0
        review = not signs and solved and draw < self.crew.config.experience.review_share
        if signs or review:
            self.telemetry.event(
                "rollout.signs",
                rollout_id=rollout.rollout_id,
                state="review" if review else "quarantined",
                signs=[str(sign) for sign in signs],
                graded=outcome.grade if isinstance(outcome, Graded) else None,
            )

    async def _give_back(self, spec: RolloutSpec, error: EtudeError) -> None:
        """Requeue a rollout whose worker died or whose version no engine reached. Make it invalid where too many
        workers died."""
        self._lost[spec.rollout_id] += not isinstance(error, EngineBehind)
        attempts = self.crew.config.experience.max_attempts
        if self._lost[spec.rollout_id] < attempts:
            await self.books(self.ledger.move, spec.rollout_id, State.REQUEUED, reason=error.what)
            self.telemetry.event("rollout.requeued", rollout_id=spec.rollout_id, reason=error.what)
        else:
            reason = f"{attempts} workers were lost"
            invalid = Invalid(boundary=Boundary.WORKER, reason=reason, evidence=str(error))
            await self.books(self.ledger.fail, spec.rollout_id, invalid)
            await self._settle({spec.group_id})

    async def _settle(self, group_ids: set[str]) -> None:
        if ready := await self.books(self.ledger.ready_groups, group_ids):
            self._ready |= ready
            self._settled.set()

    def _tell(self, rollout: RolloutSummary, reward: Reward | Invalid) -> None:
        self.telemetry.event(
            "rollout",
            rollout_id=rollout.rollout_id,
            task_id=rollout.task_id,
            family=rollout.family,
            outcome="graded" if isinstance(reward, Reward) else "invalid",
            reward=reward.value if isinstance(reward, Reward) else None,
            ending=rollout.ending,
            turns=rollout.num_turns,
            sampled=rollout.num_sampled,
            malformed=rollout.num_malformed,
            wall_s=round(rollout.wall_s, 4),
            tool_s=round(rollout.tool_s, 4),
            engines=rollout.engines,
            moves=rollout.num_moves,
        )


def _readable(summary: RolloutSummary, outcome: Outcome) -> RolloutSummary:
    """The summary without its stored file where graders could not read the file."""
    unread = isinstance(outcome, Invalid) and outcome.boundary is Boundary.STORE
    return msgspec.structs.replace(summary, stored=None) if unread else summary

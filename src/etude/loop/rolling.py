"""Rollouts and their grades: tasks → admitted groups → running → judged → ledger.

A group's rollouts start in order of admission, as many at a time as the engines can decode, and none before the
version step that it demands is published: after a restart from a checkpoint that may be several steps away. What the
next steps wait for demands no version behind them, whatever it was admitted with. A rollout whose worker dies is
requeued and run again; a grade whose grader dies is asked again; after `max_attempts` it is invalid at that boundary,
on the evidence of the host. One that no engine could serve because all of them were behind
its version is requeued as often as that happens: nothing is wrong with it. Knows nothing of weights and training.

| | consumes | produces | waits for | unblocked by |
| --- | --- | --- | --- | --- |
| `run` | admitted and requeued rollouts | graded or invalid ones | a place to run, its version | `more` |
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from etude.environments.cheats import Suspicion
from etude.errors import DeadlineExceeded, EngineBehind, EtudeError, LedgerError
from etude.experience import Ledger
from etude.experience.transitions import State
from etude.loop.apart import InOrder
from etude.loop.crew import Crew
from etude.loop.played import Played
from etude.loop.room import Room
from etude.loop.wire import Lost
from etude.records import Graded, Invalid, Outcome, RolloutSpec, Task
from etude.records.rollout import Boundary
from etude.records.summary import RolloutSummary, summary_of
from etude.rollouts import not_run, settle
from etude.telemetry import Telemetry

GRADED = "graded"  # the term that keeps what a grader gave a rollout in quarantine
AT_ONCE = 64  # rollouts that one transaction starts or stores


def keyed_seed(*parts: object) -> int:
    """A 63-bit seed from what identifies a draw.

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
    """The specs of a group; `keep_routes` when it is to be trained on with the engines' routes."""
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


async def judge(crew: Crew, rollout: Played) -> Outcome:
    """The outcome of a finished rollout; a grader that dies is replaced and asked again. One whose file graders cannot
    read is invalid."""
    if rollout.summary.invalid is not None:
        return rollout.summary.invalid
    error: EtudeError | None = None
    attempts = crew.config.experience.max_attempts
    for _ in range(attempts):
        try:
            outcome = await crew.grade(rollout)
            return settle(rollout.summary, outcome, require_submit=crew.config.harness.require_submit)
        except (Lost, DeadlineExceeded) as lost:
            error = lost
        except LedgerError as unread:
            return Invalid(boundary=Boundary.STORE, reason=unread.what, evidence=unread.facts)
    return Invalid(boundary=Boundary.GRADER, reason=f"{attempts} graders were lost", evidence=str(error))


async def run_once(crew: Crew, spec: RolloutSpec) -> tuple[Played, Outcome]:
    """A rollout that no ledger keeps (an evaluation's), until it has an outcome. It is invalid when its workers keep
    dying under it, or no engine comes to its version again and again: one task ends no evaluation."""
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
    """The outcome of a rollout that nobody asks for again: its file is deleted."""
    try:
        return await judge(crew, rollout)
    finally:
        crew.files.drop(rollout.summary)


def unearned(graded: Graded, sign: str) -> Graded:
    """The grade of a rollout that bears a sign of cheating: at most 0, so that its siblings' baseline and the gradient
    see that it does not pay. What the grader gave is the term `graded`."""
    return Graded(
        reward=min(0.0, graded.reward),
        terms={**graded.terms, GRADED: graded.reward},
        trust=graded.trust,
        reason=f"quarantined: {sign}; the grader said: {graded.reason}",
    )


class _Ended(NamedTuple):
    """A rollout that is over. `counts` is set once it is stored."""

    rollout: RolloutSummary
    outcome: Outcome
    signs: list[Suspicion]
    counts: asyncio.Future[bool]


class Rolling:
    """Runs what the ledger has admitted. `books`: the thread in which the ledger is read and written."""

    def __init__(self, ledger: Ledger, books: InOrder, crew: Crew, telemetry: Telemetry) -> None:
        self.ledger, self.books, self.crew, self.telemetry = ledger, books, crew, telemetry
        self.published = 0  # step of the newest version: who demands a later one waits for it
        self.demand: Callable[[int], int] | None = None  # what an open group demands now: see `Ledger.start`
        self._settled, self._ready = asyncio.Event(), set[str]()
        self._ended: list[_Ended] = []  # to be stored; at most as many as run at once
        self._storing: asyncio.Task[None] | None = None
        self._lost: Counter[str] = Counter()  # workers that died under a rollout

    async def progress(self) -> set[str]:
        """Wait until some groups have no member left that is awaited: which ones, since this was asked last. Each
        rollout has deadlines of its own."""
        await self._settled.wait()
        self._settled.clear()
        ready, self._ready = self._ready, set()
        return ready

    async def run(self, more: asyncio.Event) -> None:
        """Start waiting rollouts in order, for ever; cancel to stop. `more` is set when there may be some to start:
        new ones, or those that waited for a version that is `published` now."""
        room = Room(self.crew.max_running)  # of this call: one that was cancelled takes its places with it
        async with asyncio.TaskGroup() as tasks:
            while True:
                await room.acquire()
                more.clear()
                while not (specs := await self._start(min(1 + room.free, AT_ONCE))):
                    await more.wait()
                    more.clear()
                for _ in specs[1:]:
                    await room.acquire()  # there is room: nothing is waited for
                for spec in specs:
                    tasks.create_task(self._run_one(spec, room, more), name=spec.rollout_id)

    async def _start(self, limit: int) -> list[RolloutSpec]:
        return await self.books(self.ledger.start, limit, published=self.published, demand=self.demand)

    async def _run_one(self, spec: RolloutSpec, room: Room, more: asyncio.Event) -> None:
        try:
            try:
                rollout = await self.crew.rollout(spec)
                outcome = await judge(self.crew, rollout)
            except (Lost, DeadlineExceeded, EngineBehind) as error:
                await self._give_back(spec, error)
                more.set()
                return
            signs = _signs(rollout, outcome)
            if isinstance(outcome, Graded) and signs:
                outcome = unearned(outcome, str(signs[0]))
            summary = _readable(rollout.summary, outcome)
            if await self._finish(summary, outcome, signs):
                self._tell(summary, outcome)
                self._tell_signs(summary, outcome, signs)
        finally:
            room.release()

    async def _finish(self, rollout: RolloutSummary, outcome: Outcome, signs: list[Suspicion]) -> bool:
        """Store it, together with whatever else ends until then. False: it no longer counts."""
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
        """One transaction for those that ended; that one bears signs of cheating is noted in it."""
        counts = list[bool]()

        def work() -> None:
            counts[:] = self.ledger.finish_all([(one.rollout, one.outcome) for one in ended])
            for one, counted in zip(ended, counts, strict=True):
                if counted and one.signs and isinstance(one.outcome, Graded):
                    graded = one.outcome.terms[GRADED]
                    self.ledger.quarantine(one.rollout.rollout_id, reason=str(one.signs[0]), graded=graded)

        try:
            await self.books(self.ledger.transaction, work)
            await self._settle({one.rollout.group_id for one in ended})
        except Exception as error:  # noqa: BLE001  whatever it is: those who wait for it end with it
            for one in ended:
                if not one.counts.done():
                    one.counts.set_exception(error)
            return
        for one, counted in zip(ended, counts, strict=True):
            if not one.counts.done():  # its task was cancelled
                one.counts.set_result(counted)

    def _tell_signs(self, rollout: RolloutSummary, outcome: Outcome, signs: list[Suspicion]) -> None:
        draw = keyed_seed(self.crew.config.seed, "review", rollout.rollout_id) / 2**63
        solved = isinstance(outcome, Graded) and outcome.reward > 0
        review = not signs and solved and draw < self.crew.config.experience.review_share
        if signs or review:
            self.telemetry.event(
                "rollout.signs",
                rollout_id=rollout.rollout_id,
                state="review" if review else "quarantined",
                signs=[str(sign) for sign in signs],
                graded=outcome.terms.get(GRADED, outcome.reward) if isinstance(outcome, Graded) else None,
            )

    async def _give_back(self, spec: RolloutSpec, error: EtudeError) -> None:
        """Run it again: its worker is gone, or no engine came to its version; or say that too many workers are gone."""
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

    def _tell(self, rollout: RolloutSummary, outcome: Outcome) -> None:
        self.telemetry.event(
            "rollout",
            rollout_id=rollout.rollout_id,
            task_id=rollout.task_id,
            family=rollout.family,
            outcome="graded" if isinstance(outcome, Graded) else "invalid",
            reward=outcome.reward if isinstance(outcome, Graded) else None,
            ending=rollout.ending,
            turns=rollout.num_turns,
            sampled=rollout.num_sampled,
            malformed=rollout.num_malformed,
            wall_s=round(rollout.wall_s, 4),
            tool_s=round(rollout.tool_s, 4),
            engines=rollout.engines,
            moves=rollout.num_moves,
        )


def _signs(rollout: Played, outcome: Outcome) -> list[Suspicion]:
    """Signs of cheating; none in what is invalid, as it trains nobody."""
    return [] if isinstance(outcome, Invalid) else rollout.signs.of(outcome)


def _readable(summary: RolloutSummary, outcome: Outcome) -> RolloutSummary:
    """A summary that promises no file where graders could not read it."""
    unread = isinstance(outcome, Invalid) and outcome.boundary is Boundary.STORE
    return msgspec.structs.replace(summary, stored=None) if unread else summary

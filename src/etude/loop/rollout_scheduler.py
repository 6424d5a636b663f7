"""Runs admitted rollouts, has them graded, and stores the results in the ledger.

Rollouts start in order of admission, as many at a time as the engines can decode. A rollout waits until the version of
the weights that it requires is published. A restart from a checkpoint may have undone this version, so that the wait
takes several steps. To limit it, a group then requires at most the version that the step training on it needs.

A rollout whose worker dies is requeued. A grade whose grader dies is repeated. After `max_attempts` the rollout is
invalid. A rollout that no engine could serve because all had older weights is requeued without a limit, since it has
not failed.

| | consumes | produces | waits for | unblocked by |
| --- | --- | --- | --- | --- |
| `run` | admitted and requeued rollouts | graded or invalid rollouts | a free slot, its version | `more` |
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
from etude.loop.adjustable_semaphore import AdjustableSemaphore
from etude.loop.rollout_result import RolloutResult
from etude.loop.rpc import ProcessLost
from etude.loop.run_in_thread import SerialExecutor
from etude.loop.run_processes import RunProcesses
from etude.records import Graded, Invalid, Outcome, RolloutSpec, Task
from etude.records.reward import SIGNS, SIGNS_IF_REWARDED, Reward, Term
from etude.records.rollout import Boundary
from etude.records.summary import RolloutSummary, summary_of
from etude.rewards import Composition
from etude.rollouts import not_run, submitted
from etude.telemetry import Telemetry

AT_ONCE = 256  # maximum number of rollouts started or stored per transaction
GATHER_S = 0.02  # rollouts that end within it are stored in one transaction


def keyed_seed(*parts: object) -> int:
    """Return a 63-bit seed: the hash of `parts`, which identify one random draw.

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
    forks: int = 1,
) -> list[RolloutSpec]:
    """Make the specs of the `n` rollouts of a group, which all try the same task. `seed` is that of the run.

    `min_step`: the training step of the oldest weights that may sample the rollouts. `pin_step`: the only step whose
    weights may sample them; None: any from `min_step` on. With `keep_routes` engines return the experts that they
    chose, for training. `forks`: as in `RolloutSpec`."""
    return [
        RolloutSpec(
            rollout_id=f"{group_id}.{i}",
            group_id=group_id,
            attempt=0,
            task=task,
            seed=keyed_seed(seed, group_id, i),
            group_seed=keyed_seed(seed, group_id),
            temperature=temperature,
            min_step=min_step,
            pin_step=pin_step,
            keep_routes=keep_routes,
            forks=forks,
        )
        for i in range(n)
    ]


async def grade_rollout(processes: RunProcesses, rollout: RolloutResult) -> Outcome:
    """Have a grader process grade a finished rollout, and return the outcome.

    The outcome also has the terms that need no grader: whether the agent submitted, and the number of signs of
    cheating. A grade is repeated when its grader dies. The outcome is invalid when graders cannot read the rollout's
    file or too many graders die."""
    if rollout.summary.invalid is not None:
        return rollout.summary.invalid
    error: EtudeError | None = None
    attempts = processes.config.experience.max_attempts
    for _ in range(attempts):
        try:
            return with_host_terms(
                rollout, await processes.grade(rollout), signs_checked=processes.config.experience.quarantine
            )
        except (ProcessLost, DeadlineExceeded) as lost:
            error = lost
        except LedgerError as unread:
            return Invalid(boundary=Boundary.STORE, reason=unread.what, evidence=unread.facts)
    return Invalid(boundary=Boundary.GRADER, reason=f"{attempts} graders were lost", evidence=str(error))


async def run_once(processes: RunProcesses, spec: RolloutSpec, *, keep: bool = False) -> tuple[RolloutResult, Outcome]:
    """Run and grade a rollout that is not in the ledger, such as one of an evaluation, and delete its file.

    With `keep` the file stays, and the caller must delete it (`files.drop`). Raises no error if its workers die
    repeatedly or no engine loads the weights that it requires: the rollout is then invalid."""
    while True:
        try:
            rollout = await processes.rollout(spec, kept=False)
            return rollout, await (grade_rollout if keep else grade_and_drop)(processes, rollout)
        except (ProcessLost, DeadlineExceeded, EngineBehind) as error:
            if spec.attempt + 1 >= processes.config.experience.max_attempts:
                boundary = Boundary.PROVIDER if isinstance(error, EngineBehind) else Boundary.WORKER
                rollout = RolloutResult(summary=summary_of(not_run(spec, boundary, error)), task=spec.task)
                return rollout, await grade_rollout(processes, rollout)
            spec = msgspec.structs.replace(spec, attempt=spec.attempt + 1)


async def grade_and_drop(processes: RunProcesses, rollout: RolloutResult) -> Outcome:
    """Have a grader process grade a rollout, delete the rollout's file, and return the outcome."""
    try:
        return await grade_rollout(processes, rollout)
    finally:
        processes.files.drop(rollout.summary)


def with_host_terms(rollout: RolloutResult, outcome: Outcome, *, signs_checked: bool) -> Outcome:
    """Return an outcome with the reward terms that are computed from the rollout without a grader.

    They are whether the agent submitted and, if `signs_checked`, the number of signs of cheating. An invalid outcome is
    returned unchanged."""
    if isinstance(outcome, Invalid):
        return outcome
    terms = [submitted(rollout.summary)]
    if signs_checked:
        plain = CheatIndicators(found=rollout.signs.found).for_outcome(outcome)
        terms += [_signs(SIGNS, plain), _signs(SIGNS_IF_REWARDED, rollout.signs.if_rewarded)]
    return outcome.with_terms(*terms)


def _signs(name: str, found: Sequence[CheatIndicator]) -> Term:
    evidence = str(found[0]) if found else ""
    return Term(name=name, value=float(len(found)), version=__version__, evidence=evidence)


def composed_reward(outcome: Outcome, composition: Composition) -> Reward | Invalid:
    """Combine the terms of an outcome into its reward. `Invalid` is returned unchanged."""
    return outcome if isinstance(outcome, Invalid) else composition.of(outcome)


def counted_signs(rollout: RolloutResult, outcome: Outcome, reward: Reward | Invalid) -> list[CheatIndicator]:
    """Return the signs of cheating that set a rollout's reward to 0, the most serious first."""
    return rollout.signs.for_outcome(outcome) if isinstance(reward, Reward) and SIGNS in reward.gates else []


class Ended(NamedTuple):
    """A graded rollout, as it is stored."""

    rollout: RolloutSummary
    outcome: Outcome
    reward: Reward | Invalid
    signs: list[CheatIndicator]


class _Storing(NamedTuple):
    """A rollout that has ended, and its continuations if its machine was forked: stored in one transaction.

    `counts` is set when they were stored: whether the ledger counted them."""

    ended: list[Ended]
    counts: asyncio.Future[bool]


class RolloutScheduler:
    """Runs the rollouts that the ledger, the database of rollouts, has admitted.

    The ledger is only called in `ledger_thread`."""

    def __init__(
        self, ledger: Ledger, ledger_thread: SerialExecutor, processes: RunProcesses, telemetry: Telemetry
    ) -> None:
        self.ledger, self.ledger_thread, self.processes, self.telemetry = ledger, ledger_thread, processes, telemetry
        self.published = 0  # step of the newest version; rollouts that require a later one wait
        self.required_step: Callable[[int], int] | None = None  # see `Ledger.start`
        self._group_ready, self._ready = asyncio.Event(), set[str]()
        self._ended: list[_Storing] = []  # not stored yet; at most as many as run concurrently
        self._storing: asyncio.Task[None] | None = None
        self._more = asyncio.Event()  # there may be rollouts that can start
        self._num_lost: Counter[str] = Counter()  # by rollout: how many of its workers died

    async def progress(self) -> set[str]:
        """Wait until in some group each rollout has ended or is held.

        Returns the ids of all groups that got so far since the last call. The wait has no deadline of its own, since
        every rollout has one."""
        await self._group_ready.wait()
        self._group_ready.clear()
        ready, self._ready = self._ready, set()
        return ready

    def wake(self) -> None:
        """Look again for rollouts that can start. Call it after held ones were admitted."""
        self._more.set()

    async def run(self, more: asyncio.Event) -> None:
        """Start waiting rollouts in order, until cancelled.

        The caller sets the event `more` when there may be rollouts to start: new ones, or ones that waited for weights
        that are published now."""
        self._more = more
        semaphore = AdjustableSemaphore(self.processes.max_running)  # a cancelled call does not release its slots
        async with asyncio.TaskGroup() as tasks:
            while True:
                await semaphore.acquire()
                more.clear()
                while not (specs := await self._start(min(1 + semaphore.free, AT_ONCE))):
                    await more.wait()
                    more.clear()
                for _ in specs[1:]:
                    await semaphore.acquire()  # does not wait: so many slots are free
                for spec in specs:
                    tasks.create_task(self._run_one(spec, semaphore, more), name=spec.rollout_id)

    async def _start(self, limit: int) -> list[RolloutSpec]:
        return await self.ledger_thread(
            self.ledger.start, limit, published=self.published, required_step=self.required_step
        )

    async def _run_one(self, spec: RolloutSpec, semaphore: AdjustableSemaphore, more: asyncio.Event) -> None:
        try:
            try:
                rollout = await self.processes.rollout(spec)
                ended = [await self._graded(one) for one in (rollout, *rollout.continuations)]
            except (ProcessLost, DeadlineExceeded, EngineBehind) as error:
                await self._requeue(spec, error)
                more.set()
                return
            if await self._finish(ended):
                for one in ended:
                    self._log_rollout(one.rollout, one.reward)
                    self._log_signs(one)
        finally:
            semaphore.release()

    async def _graded(self, rollout: RolloutResult) -> Ended:
        outcome = await grade_rollout(self.processes, rollout)
        reward = composed_reward(outcome, self.processes.config.composition)
        return Ended(_readable(rollout.summary, outcome), outcome, reward, counted_signs(rollout, outcome, reward))

    async def _finish(self, ended: list[Ended]) -> bool:
        """Store an ended rollout with its continuations, in one transaction with others that end within `GATHER_S`.
        False when the ledger no longer counts them."""
        one = _Storing(ended, asyncio.get_running_loop().create_future())
        self._ended.append(one)
        if self._storing is None or self._storing.done():
            self._storing = asyncio.create_task(self._store_all(), name="store ended rollouts")
        return await one.counts

    async def _store_all(self) -> None:
        while self._ended:
            await asyncio.sleep(GATHER_S)
            ended, self._ended = self._ended[:AT_ONCE], self._ended[AT_ONCE:]
            await self._store(ended)

    async def _store(self, storing: list[_Storing]) -> None:
        """Store ended rollouts and their signs of cheating in one transaction, and announce the groups that are ready
        with them."""
        counts, ready = list[bool](), set[str]()
        ended = [one for some in storing for one in some.ended]

        def work() -> None:
            nonlocal ready
            counts[:] = self.ledger.finish_all([(one.rollout, one.outcome) for one in ended])
            for one, counted in zip(ended, counts, strict=True):
                if counted and one.signs and isinstance(one.outcome, Graded):
                    graded = one.outcome.grade
                    self.ledger.quarantine(one.rollout.rollout_id, reason=str(one.signs[0]), graded=graded)
            ready = self.ledger.ended_groups({one.rollout.group_id for one in ended})

        try:
            await self.ledger_thread(self.ledger.transaction, work)
        except Exception as error:  # noqa: BLE001  raised in the tasks that wait
            for some in storing:
                if not some.counts.done():
                    some.counts.set_exception(error)
            return
        self._announce(ready)
        if self.processes.config.experience.min_group_size:
            self._more.set()  # held siblings may be admitted now
        told = iter(counts)
        for some in storing:
            counted = [next(told) for _ in some.ended]
            if not some.counts.done():  # its task was cancelled
                some.counts.set_result(counted[0])

    def _log_signs(self, ended: Ended) -> None:
        rollout, outcome, reward, signs = ended
        config, solved = self.processes.config, isinstance(reward, Reward) and reward.value > 0
        draw = keyed_seed(config.seed, "review", rollout.rollout_id) / 2**63 if solved and not signs else 1.0
        review = draw < config.experience.review_share
        if signs or review:
            self.telemetry.event(
                "rollout.signs",
                rollout_id=rollout.rollout_id,
                state="review" if review else "quarantined",
                signs=[str(sign) for sign in signs],
                graded=outcome.grade if isinstance(outcome, Graded) else None,
            )

    async def _requeue(self, spec: RolloutSpec, error: EtudeError) -> None:
        """Requeue a rollout whose worker died or whose version no engine reached. It becomes invalid when too many
        workers died."""
        self._num_lost[spec.rollout_id] += not isinstance(error, EngineBehind)
        attempts = self.processes.config.experience.max_attempts
        if self._num_lost[spec.rollout_id] < attempts:
            await self.ledger_thread(self.ledger.move, spec.rollout_id, State.REQUEUED, reason=error.what)
            self.telemetry.event("rollout.requeued", rollout_id=spec.rollout_id, reason=error.what)
        else:
            reason = f"{attempts} workers were lost"
            invalid = Invalid(boundary=Boundary.WORKER, reason=reason, evidence=str(error))
            await self.ledger_thread(self.ledger.fail, spec.rollout_id, invalid)
            self._more.set()
            self._announce(await self.ledger_thread(self.ledger.ended_groups, {spec.group_id}))

    def _announce(self, ready: set[str]) -> None:
        if ready:
            self._ready |= ready
            self._group_ready.set()

    def _log_rollout(self, rollout: RolloutSummary, reward: Reward | Invalid) -> None:
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
            **({"forked_from": rollout.fork.origin} if rollout.fork else {}),
            **({"unforked": rollout.unforked} if rollout.unforked else {}),
        )


def _readable(summary: RolloutSummary, outcome: Outcome) -> RolloutSummary:
    """The summary; without its stored file if graders could not read the file."""
    unread = isinstance(outcome, Invalid) and outcome.boundary is Boundary.STORE
    return msgspec.structs.replace(summary, stored=None) if unread else summary

"""The grader process: grades rollouts, measures reward terms, and tells what judges have cost.

It is the only process of a run that sees hidden answers, and runs no agent code itself. Its machines are created by a
freshly executed launcher, so that no answer is in memory that agent code can read. Rollouts of one task often end with
the same files. For tasks whose grade depends on the files alone, equal files are graded once (`CachingGrader`)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence

from etude import progress
from etude.environments import MachineGrader
from etude.environments.backends import runtime_from_config
from etude.errors import TaskWithdrawn
from etude.harness import ChatFormat
from etude.loop import child
from etude.loop.blocked import interrupt_blocking
from etude.loop.config import open_tasks, read_config
from etude.loop.locations import rollout_files
from etude.plugins import Kind, make
from etude.records import Answer, Graded, Invalid, Outcome, Task
from etude.records.reward import Measured
from etude.records.rollout import Boundary
from etude.records.summary import RolloutSummary
from etude.records.task import Trust
from etude.records.wire import pack
from etude.rewards import NamedTerm, measure_group
from etude.rewards.config import TermConfig
from etude.rewards.judges.terms import GroupJudgeTerm, JudgeTerm
from etude.run import RunFolder
from etude.seams import Grader, GroupRewardTerm, InRun, RewardTerm
from etude.tasks.verifiers import grader_for
from etude.telemetry import Telemetry

GRADES_AT_ONCE, MAX_VERDICTS = 16, 8192


class CachingGrader:
    """A `Grader` that grades equal files of the same task once. It keeps the newest `MAX_VERDICTS` results.

    It reuses grades only for tasks whose grade depends on the files alone (`Trust.DATA`). `Invalid` results are not
    kept."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader
        self._known: dict[str, asyncio.Future[Graded | Invalid]] = {}

    async def grade(self, task: Task, answer: Answer, exports: Mapping[str, bytes]) -> Graded | Invalid:
        if task.trust is not Trust.DATA:
            return await self._grader.grade(task, answer, exports)
        key = hashlib.sha256(pack((task.task_id, sorted(exports.items())))).hexdigest()
        if key not in self._known:
            self._known[key] = asyncio.ensure_future(self._grader.grade(task, answer, exports))
            if len(self._known) > MAX_VERDICTS:
                del self._known[next(iter(self._known))]
        try:
            outcome = await asyncio.shield(self._known[key])
        except Exception:
            self._known.pop(key, None)
            raise
        if isinstance(outcome, Invalid):
            self._known.pop(key, None)
        return outcome


class GradeSlots:
    """Limits the number of concurrent grades to `at_once`.

    When a grade ends, it reports progress, so that the deadlines of queued calls start again."""

    def __init__(self, at_once: int) -> None:
        self._semaphore = asyncio.Semaphore(at_once)

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a free slot and hold it until the end of the block."""
        async with self._semaphore:
            try:
                yield
            finally:
                progress.tick()


async def handlers(run: RunFolder, name: str, telemetry: Telemetry) -> child.Handlers:
    """Return the RPC methods of a grader process, by name."""
    config = read_config(run)
    interrupt_blocking(config)
    source, answering = open_tasks(config), asyncio.Lock()
    runtime = runtime_from_config(config.machines)
    grader = CachingGrader(grader_for(source, MachineGrader(runtime)))
    grading, measuring, files = GradeSlots(GRADES_AT_ONCE), GradeSlots(GRADES_AT_ONCE), rollout_files(run)

    async def grade(task: Task, summary: RolloutSummary) -> Outcome:
        """Grade the exports of a stored rollout."""
        async with grading.slot():
            exports = await asyncio.to_thread(files.read_exports, summary)
            async with answering:  # a plug-in may take longer than this process may be silent
                try:
                    answer = await asyncio.to_thread(source.answer, task)
                except TaskWithdrawn as error:
                    return Invalid(boundary=Boundary.TASK, reason="the task was withdrawn", evidence=error.what)
            return await grader.grade(task, answer, exports)

    async def measured(
        terms: list[TermConfig], summaries: list[RolloutSummary], graded: list[Graded]
    ) -> list[list[Measured]]:
        """Measure what the graded rollouts of a group lack of these reward terms."""
        async with measuring.slot():
            rollouts = await asyncio.gather(*(asyncio.to_thread(files.read, one) for one in summaries))
            return await measure_group([named_term(one, run) for one in terms], rollouts, graded)

    async def accounts(terms: list[TermConfig]) -> dict[str, float | None]:
        return await asyncio.to_thread(judge_accounts, terms, run)

    async def ready() -> bool:
        return True

    return {
        "grade": ((Task, RolloutSummary), grade),
        "measure": ((list[TermConfig], list[RolloutSummary], list[Graded]), measured),
        "judge_accounts": ((list[TermConfig],), accounts),
        "ready": ((), ready),
    }


def named_term(config: TermConfig, run: RunFolder) -> NamedTerm:
    """The reward term of a `[[rewards.terms]]` table of a run, with the digest of its code and settings."""
    plugin = config.kind
    key = pack((plugin.path, plugin.digest, sorted(plugin.settings.items())))
    if key not in _MADE:
        _MADE[key] = term = make(Kind.REWARD, plugin, where=f"rewards.terms: {config.name}")
        if isinstance(term, InRun):
            term.enter(run.path, lambda ids: _chat(run / "tokenizer").readable(ids))
    return NamedTerm(config.name, _MADE[key], hashlib.sha256(key).hexdigest(), config.when)


def judge_accounts(terms: Sequence[TermConfig], run: RunFolder) -> dict[str, float | None]:
    """Return what the judges among these reward terms have cost in a run, in dollars, by account on this host.

    A key is the identity of the judge's cache file, a space, and the name of the account. So processes that share a
    file return the same keys. A value is None if some answers have no known price. Raises `StoreError` for a file that
    cannot be read."""
    found = dict[str, float | None]()
    for config in terms:
        term = named_term(config, run).term
        if isinstance(term, JudgeTerm | GroupJudgeTerm):
            account, store = term.judge.account, term.judge.store
            dollars = {one.judge: None if one.unpriced else one.dollars for one in store.accounts()}
            found[f"{store.identity()} {account}"] = dollars.get(account, 0.0)
    return found


_chat = functools.cache(ChatFormat.load)
_MADE: dict[bytes, RewardTerm | GroupRewardTerm] = {}
"""The reward terms that were constructed, by packed path, digest and settings."""


if __name__ == "__main__":
    child.main(handlers)

"""The grader process: the only one that ever sees hidden answers. It runs no agent and is forked into nothing.

Its machines are made by a launcher that was executed afresh, so no answer is in any memory that agent code can see.
Siblings often end with the same files; data-graded, the same files of the same task are judged once (`Verdicts`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping

from etude import progress
from etude.environments import MachineGrader
from etude.environments.backends import runtime_from_config
from etude.loop import child
from etude.loop.config import open_tasks, read_config
from etude.loop.places import rollout_files
from etude.plugins import Kind, make
from etude.records import Answer, Graded, Invalid, Outcome, Task
from etude.records.summary import RolloutSummary
from etude.records.task import Trust
from etude.records.wire import pack
from etude.rewards import NamedTerm, measure
from etude.rewards.config import TermConfig
from etude.run import RunFolder
from etude.seams import Grader
from etude.tasks.verifiers import grader_for
from etude.telemetry import Telemetry

GRADES_AT_ONCE, MAX_VERDICTS = 16, 8192


class Verdicts:
    """A `Grader` that remembers: same task, same exported bytes, same verdict. The newest `MAX_VERDICTS` are kept.

    Data-graded tasks only, where a verdict is a function of the files. Invalid is never remembered.
    """

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


class Turns:
    """So many grades at once. One that ends is a sign of life: those that wait for their turn behind it wait anew,
    however many they are."""

    def __init__(self, at_once: int) -> None:
        self._room = asyncio.Semaphore(at_once)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A turn while the block runs."""
        async with self._room:
            try:
                yield
            finally:
                progress.made()


async def handlers(run: RunFolder, name: str, telemetry: Telemetry) -> child.Handlers:
    config = read_config(run)
    source = open_tasks(config)
    runtime = runtime_from_config(config.machines)
    grader = Verdicts(grader_for(source, MachineGrader(runtime)))
    terms = [_named(i, one) for i, one in enumerate(config.rewards.terms)]
    room, measuring, files = Turns(GRADES_AT_ONCE), Turns(GRADES_AT_ONCE), rollout_files(run)

    async def grade(task: Task, summary: RolloutSummary) -> Outcome:
        """The outcome of what a stored rollout handed in."""
        async with room.turn():
            exports = await asyncio.to_thread(files.read_exports, summary)
            return await grader.grade(task, source.answer(task), exports)

    async def measured(summary: RolloutSummary, graded: Graded) -> Graded:
        """The verdict on a stored rollout, with the run's own reward terms."""
        async with measuring.turn():
            return await measure(terms, await asyncio.to_thread(files.read, summary), graded)

    async def ready() -> bool:
        return True

    return {
        "grade": ((Task, RolloutSummary), grade),
        "measure": ((RolloutSummary, Graded), measured),
        "ready": ((), ready),
    }


def _named(i: int, config: TermConfig) -> NamedTerm:
    """The plug-in of `[[rewards.terms]]` number i, with the digest of its code and settings."""
    plugin = config.kind
    term = make(Kind.REWARD, plugin, where=f"rewards.terms[{i}].kind")
    code = hashlib.sha256(pack((plugin.digest, sorted(plugin.settings.items())))).hexdigest()
    return NamedTerm(config.name, term, code)


if __name__ == "__main__":
    child.main(handlers)

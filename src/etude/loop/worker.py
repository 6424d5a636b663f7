"""The rollout worker process: harness and machines. It holds no weights and no answers.

Its policy is the fleet of engines, whose URLs the conductor tells it again whenever one was restarted.
"""

from __future__ import annotations

import asyncio
import os
import random

from etude.environments.backends import runtime_of
from etude.harness import ChatFormat
from etude.inference import Assignment, Fleet, HttpEngine
from etude.loop import child
from etude.loop.config import open_tasks, read_config
from etude.records import Rollout, RolloutSpec
from etude.rollouts import ScriptedPolicy, run_rollout
from etude.run import RunFolder
from etude.seams import TaskSource
from etude.tasks import RepairSource, Script, write_reference
from etude.tasks.repair.demonstrations import oracle, random_agent
from etude.telemetry import Telemetry


async def handlers(run: RunFolder, name: str, telemetry: Telemetry) -> child.Handlers:
    config = read_config(run)
    runtime = runtime_of(config.machines)
    chat = ChatFormat.load(run / "tokenizer")
    stable = config.experience.max_lag == 0
    fleet = Fleet({}, assignment=Assignment.STABLE if stable else Assignment.LEAST_LOADED)
    room = asyncio.Semaphore(config.max_running)
    known: dict[str, HttpEngine] = {}

    async def engines(urls: dict[str, str]) -> None:
        """The fleet as it is now: engine name → URL."""
        for name in known.keys() - urls.keys():
            fleet.remove(name)
            await known.pop(name).close()
        for name, url in urls.items():
            old = known.get(name)
            if old is None or old.url != url:
                known[name] = HttpEngine(url, token=os.environ.get("ETUDE_TOKEN"))
                fleet.add(name, known[name])
                if old is not None:
                    await old.close()

    async def rollout(spec: RolloutSpec) -> Rollout:
        async with room:
            return await run_rollout(spec, runtime=runtime, policy=fleet, chat=chat, harness=config.harness)

    async def baseline(spec: RolloutSpec, kind: str) -> Rollout:
        """A rollout of a script that needs no model: "oracle" or "random"."""
        policy = ScriptedPolicy(_script(kind, open_tasks(config, canaries=False), spec), chat)
        async with room:
            return await run_rollout(spec, runtime=runtime, policy=policy, chat=chat, harness=config.harness)

    async def ready() -> bool:
        return True

    return {
        "engines": ((dict[str, str],), engines),
        "rollout": ((RolloutSpec,), rollout),
        "baseline": ((RolloutSpec, str), baseline),
        "ready": ((), ready),
    }


def _submit() -> Script:
    """The agent that does nothing: the baseline of a source whose tasks have no random edit."""
    yield "submit", {}


def _script(kind: str, source: TaskSource, spec: RolloutSpec) -> Script:
    """What a baseline plays. Only the oracle sees an answer, and nothing of a model runs beside it."""
    if isinstance(source, RepairSource):
        problem = source.problem(spec.task.split, spec.task.index)
        return oracle(problem) if kind == "oracle" else random_agent(problem, random.Random(spec.seed))
    return write_reference(spec.task, source.answer(spec.task)) if kind == "oracle" else _submit()


if __name__ == "__main__":
    child.main(handlers)

"""A rollout worker whose tools answer late: what a model trained on remote machines, compilers or browsers waits for.

The real worker's pieces, with one thing more: each turn's answer to the model comes `tool_latency_s` later, as if its
tool call had taken that long elsewhere. It costs no CPU, and like a real late tool it keeps the rollout's machine and
its place in the engine's KV. The latency is a file of the run folder, so that the run says what was simulated.
"""

from __future__ import annotations

import asyncio

from etude.environments import NamespaceRuntime
from etude.harness import ChatFormat
from etude.inference import Assignment, Fleet, HttpEngine
from etude.loop import child
from etude.loop.config import read_config
from etude.loop.places import rollout_files
from etude.loop.played import HandedOver, hand_over
from etude.records import Completion, CompletionRequest, RolloutSpec
from etude.rollouts import run_rollout
from etude.run import RunFolder
from etude.seams import Policy
from etude.telemetry import Telemetry

LATENCY = "tool_latency_s"
"""The file of the run folder that says how late, in seconds."""


class LateTools:
    """A `Policy` whose completions come late by one tool call: what follows a completion is that call's answer."""

    def __init__(self, policy: Policy, latency_s: float) -> None:
        self.policy, self.latency_s = policy, latency_s

    async def complete(self, request: CompletionRequest) -> Completion:
        completion = await self.policy.complete(request)
        await asyncio.sleep(self.latency_s)
        return completion


async def handlers(run: RunFolder, name: str, telemetry: Telemetry) -> child.Handlers:
    config = read_config(run)
    runtime = NamespaceRuntime(config.machines)
    chat = ChatFormat.load(run / "tokenizer")
    stable = config.experience.max_lag == 0
    fleet = Fleet({}, assignment=Assignment.STABLE if stable else Assignment.LEAST_LOADED)
    policy = LateTools(fleet, float((run / LATENCY).read_text()))

    async def engines(urls: dict[str, str]) -> None:
        """The fleet as it is now: engine name → URL. Engines of a benchmark that dies are not replaced."""
        for engine, url in urls.items():
            if engine not in fleet.engines:
                fleet.add(engine, HttpEngine(url))

    async def rollout(spec: RolloutSpec, kept: bool) -> HandedOver:
        played = await run_rollout(spec, runtime=runtime, policy=policy, chat=chat, harness=config.harness)
        return await asyncio.to_thread(hand_over, played, rollout_files(run), kept=kept)

    async def ready() -> bool:
        return True

    return {
        "engines": ((dict[str, str],), engines),
        "rollout": ((RolloutSpec, bool), rollout),
        "ready": ((), ready),
    }


if __name__ == "__main__":
    child.main(handlers)

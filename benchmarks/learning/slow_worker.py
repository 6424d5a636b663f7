"""A rollout worker whose tools answer late: what a model trained on remote machines, compilers or browsers waits for.

The real worker, with one thing more: each turn's answer to the model comes `tool_latency_s` later, as if its tool call
had taken that long elsewhere. It costs no CPU, and like a real late tool it keeps the rollout's machine and its place
in the engine's KV. The latency is a file of the run folder, so that the run says what was simulated.
"""

from __future__ import annotations

import asyncio

from etude.inference import Fleet
from etude.loop import child, worker
from etude.records import Completion, CompletionRequest
from etude.run import RunFolder
from etude.telemetry import Telemetry

LATENCY = "tool_latency_s"
"""The file of the run folder that says how late, in seconds."""


async def handlers(run: RunFolder, name: str, telemetry: Telemetry) -> child.Handlers:
    latency_s = float((run / LATENCY).read_text())

    class LateFleet(Fleet):
        """Completions come late by one tool call: what follows a completion is that call's answer."""

        async def complete(self, request: CompletionRequest) -> Completion:
            completion = await super().complete(request)
            await asyncio.sleep(latency_s)
            return completion

    worker.Fleet = LateFleet  # type: ignore[misc]  # in this process, which is the worker
    return await worker.handlers(run, name, telemetry)


if __name__ == "__main__":
    child.main(handlers)

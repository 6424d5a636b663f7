"""Tokens that a reference engine samples after a stop text has appeared: until it hears that the request is ended.

A small random model; "the stop text" is the twelfth token. In one process, and over HTTP through a fleet, alone and
eight requests together. Without an end, each request would sample 300 tokens.

`python -m benchmarks.serving.stop_texts`
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import numpy as np
import uvicorn
from uvicorn.lifespan.off import LifespanOff

from benchmarks.report import report
from etude.inference import EngineConfig, Fleet, HttpEngine
from etude.inference.app import build_app
from etude.inference.engine import ReferenceEngine
from etude.models import ModelConfig, Transformer
from etude.records import Completion, CompletionRequest, Sampling, Version
from etude.seams import stream_or_complete

SIZES = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    expert_size=32,
    num_experts=4,
    top_k=2,
    context_tokens=512,
)
UNTIL, MOST, ALONE, TOGETHER = 12, 300, 20, 8


async def after(policy: Any, name: str) -> int:
    """The tokens of one request after the one that ended it."""
    request = CompletionRequest(
        request_id=name,
        session_id=name,
        prompt_ids=np.arange(20, dtype=np.int32),
        sampling=Sampling(max_tokens=MOST, stop_token_ids=(), seed=sum(name.encode())),
        keep_session=False,
    )
    told, ended_at = 0, 0

    def enough(ids: list[int]) -> bool:
        nonlocal told, ended_at
        told += len(ids)
        ended_at = ended_at or (told if told >= UNTIL else 0)
        return bool(ended_at)

    async for part in stream_or_complete(policy, policy.generate, request, enough=enough):
        if isinstance(part, Completion):
            return len(part.token_ids) - ended_at
    raise AssertionError("a stream ends with its completion")


async def measure() -> dict[str, Any]:
    version = Version(step=0, incarnation="0" * 8, digest="0" * 64)
    config = EngineConfig(max_sequences=TOGETHER, context_tokens=SIZES.context_tokens)
    async with ReferenceEngine(Transformer(SIZES, seed=1), version=version, config=config) as engine:
        found = {"in_process": [await after(engine, f"a{i}") for i in range(ALONE)]}
        settings = uvicorn.Config(build_app(engine), ws="none", port=0, log_level="critical")
        server = uvicorn.Server(settings)
        settings.load()
        server.lifespan = LifespanOff(settings)
        await server.startup()
        port = server.servers[0].sockets[0].getsockname()[1]
        async with HttpEngine(f"http://127.0.0.1:{port}") as http:
            fleet: Any = Fleet({"engine-0": http})
            fleet.generate = fleet.complete
            found["over_http"] = [await after(fleet, f"b{i}") for i in range(ALONE)]
            found["over_http_together"] = list(await asyncio.gather(*(after(fleet, f"c{i}") for i in range(TOGETHER))))
        await server.shutdown()
    return {
        way: {"mean": round(statistics.fmean(of), 2), "most": max(of), "requests": len(of)} for way, of in found.items()
    }


if __name__ == "__main__":
    report("stop_texts", {"tokens_after": asyncio.run(measure())})

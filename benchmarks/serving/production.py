"""Production beside rollouts in one engine: its time to the first token, idle, saturated, and without its class.

A random model of the laptop's size, its slots full of rollouts and as many again waiting. Production comes one request
at a time and is told token by token, in three ways that take turns: alone in an idle engine; as production in the
saturated one; and there as one rollout more, what it would be without classes. The rollouts' callers ask again and
again and count: each must be answered, and some are compared with what they say alone.

    python -m benchmarks.serving.production [--rounds 6] [--dry]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.report import report
from etude.inference import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.inference.weight_sync import initial_version
from etude.models import ModelConfig, Transformer, hf_views
from etude.records import Completion, CompletionRequest, Sampling
from etude.records.completion import Traffic

SLOTS, PROMPT, SAMPLED, ROLLOUT_TOKENS, PER_ROUND = 32, 128, 16, 96, 8
WAYS = ("idle", "production", "one rollout more")


def request(name: str, traffic: Traffic, max_tokens: int) -> CompletionRequest:
    rng = np.random.default_rng(sum(name.encode()))
    return CompletionRequest(
        request_id=name,
        session_id=name,
        prompt_ids=rng.integers(0, ModelConfig().vocab_size, PROMPT).astype(np.int32),
        sampling=Sampling(max_tokens=max_tokens, stop_token_ids=(), seed=1),
        routes_from=None,
        deadline_s=300.0,
        keep_session=False,
        traffic=traffic,
    )


class Rollouts:
    """Callers that never rest."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self.engine, self.asked, self.answered = engine, 0, 0
        self.kept: dict[str, Completion] = {}

    @asynccontextmanager
    async def saturating(self) -> AsyncIterator[None]:
        """Twice as many as there are slots, while the block runs; the last ones are waited for."""
        stop = asyncio.Event()
        callers = [asyncio.create_task(self._ask(i, stop)) for i in range(2 * SLOTS)]
        while (await self.engine.info()).num_running < SLOTS:  # noqa: ASYNC110  the state is the thread's
            await asyncio.sleep(0.01)
        yield
        stop.set()
        await asyncio.gather(*callers)

    async def _ask(self, caller: int, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self.asked += 1
            name = f"rollout {caller} {self.asked}"
            done = await self.engine.generate(request(name, Traffic.ROLLOUT, ROLLOUT_TOKENS))
            self.answered += 1
            if self.answered % 16 == 0:
                self.kept[name] = done


async def first_token(engine: ReferenceEngine, asked: CompletionRequest) -> tuple[float, float]:
    """Seconds to the first token, and between two from then on."""
    began = time.perf_counter()
    arrived = [time.perf_counter() async for part in engine.stream(asked) if not isinstance(part, Completion)]
    return arrived[0] - began, (arrived[-1] - arrived[0]) / max(1, len(arrived) - 1)


async def measure(rounds: int) -> dict[str, Any]:
    """Every way in turns; the numbers."""
    torch.set_num_threads(1)
    model = Transformer(ModelConfig(), seed=1)
    config = EngineConfig(max_sequences=SLOTS, context_tokens=512)
    first: dict[str, list[float]] = {way: [] for way in WAYS}
    between: dict[str, list[float]] = {way: [] for way in WAYS}
    async with ReferenceEngine(model, version=initial_version(hf_views(model).items()), config=config) as engine:
        rollouts = Rollouts(engine)

        async def turn(way: str, number: int) -> None:
            traffic = Traffic.PRODUCTION if way == "production" else Traffic.ROLLOUT
            asked = request(f"{way} {number}", traffic, SAMPLED)
            told = await first_token(engine, asked)
            first[way].append(told[0])
            between[way].append(told[1])

        for number in range(rounds):
            for i in range(PER_ROUND):
                await turn("idle", number * PER_ROUND + i)
            async with rollouts.saturating():
                for i in range(PER_ROUND):
                    for way in WAYS[1:]:
                        await turn(way, number * PER_ROUND + i)
        same = [
            np.array_equal((await engine.generate(request(n, Traffic.ROLLOUT, ROLLOUT_TOKENS))).token_ids, c.token_ids)
            for n, c in rollouts.kept.items()
        ]
    return {
        "slots": SLOTS,
        "prompt_tokens": PROMPT,
        "requests_a_way": rounds * PER_ROUND,
        "first_token_ms_p50": {way: round(1e3 * median(found), 2) for way, found in first.items()},
        "first_token_ms_worst": {way: round(1e3 * max(found), 2) for way, found in first.items()},
        "between_tokens_ms_p50": {way: round(1e3 * median(found), 2) for way, found in between.items()},
        "production_to_idle": round(median(first["production"]) / median(first["idle"]), 2),
        "without_classes_to_idle": round(median(first["one rollout more"]) / median(first["idle"]), 2),
        "rollouts_answered": rollouts.answered,
        "rollouts_lost": rollouts.asked - rollouts.answered,
        "preempted": engine.counters.rollouts_preempted,
        "compared": len(same),
        "differing": len(same) - sum(same),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dry", action="store_true", help="print, and keep no result")
    options = parser.parse_args()
    numbers = asyncio.run(measure(options.rounds))
    if options.dry:
        print(json.dumps(numbers, indent=1))
    else:
        report("production", numbers)


if __name__ == "__main__":
    main()

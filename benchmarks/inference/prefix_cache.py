"""What shared prefixes save, and what looking for them costs: ``python -m benchmarks.inference.prefix_cache``.

*siblings*: `SIBLINGS` requests that arrive at once and begin with the same `SYSTEM` tokens; each adds `OWN` tokens and
samples one. CPU seconds of the process with and without sharing; tokens, log-probabilities and routes must have the
same bits. *alone*: the same number of requests with nothing in common, of `DISTINCT` prompt tokens and `SAMPLED`
sampled ones, which arrive one by one as others end, so that slots are reused in any order. *copy*: milliseconds of one
copy of `SYSTEM` tokens between two slots, and of one look-up among all slots when all share the prompt.

Each way has one engine, which serves other prompts in each turn; both ways take turns. CPU seconds are the least of
`--repeats`, ratios the median of the ratios of each turn. The first turn is reported apart: in it the system gives the
engines the memory of their slots, which on a virtual machine can take as long as computing. The model is the laptop
example's, with random weights, in exact mode.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.report import report
from etude.inference import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.inference.kv import KVCache
from etude.inference.slots import Prefix, SlotTable
from etude.models import ModelConfig, Transformer
from etude.records import Completion, CompletionRequest, Sampling, Version

SIBLINGS, SYSTEM, OWN = 16, 2048, 16
DISTINCT, SAMPLED, REQUESTS = 64, 64, 96
VERSION = Version(step=0, incarnation="00000000", digest="ab" * 32)
SIZES = ModelConfig(context_tokens=SYSTEM + 256)


def ask(number: int, prompt: np.ndarray[Any, Any], tokens: int) -> CompletionRequest:
    return CompletionRequest(
        request_id=f"r{number}",
        session_id=f"r{number}",
        prompt_ids=prompt.astype(np.int32),
        sampling=Sampling(max_tokens=tokens, stop_token_ids=(), seed=number),
    )


async def served(engine: ReferenceEngine, requests: list[CompletionRequest]) -> tuple[list[Completion], float]:
    """At most `SIBLINGS` at once. Returns the completions and the CPU seconds."""
    room = asyncio.Semaphore(SIBLINGS)

    async def one(request: CompletionRequest) -> Completion:
        async with room:
            return await engine.generate(request)

    began = time.process_time()
    done = await asyncio.gather(*map(one, requests))
    return done, time.process_time() - began


async def compared(model: Transformer, drawn: Callable[[], list[CompletionRequest]], repeats: int) -> dict[str, Any]:
    """`drawn` makes the requests of a turn. The first turn is not in the ratio."""
    config, seconds = EngineConfig(context_tokens=SIZES.context_tokens), {True: list[float](), False: list[float]()}
    made = {share: ReferenceEngine(model, version=VERSION, config=config, share_prefixes=share) for share in seconds}
    async with made[True], made[False]:
        for turn in range(repeats + 1):
            requests, done = drawn(), {}
            for share in (True, False) if turn % 2 else (False, True):
                done[share], cpu_s = await served(made[share], requests)
                seconds[share].append(cpu_s)
            for one, other in zip(done[True], done[False], strict=True):
                assert np.array_equal(one.token_ids, other.token_ids)
                assert np.array_equal(one.logprobs, other.logprobs)
                assert np.array_equal(one.routes, other.routes)
    (first_shared, *shared), (first_whole, *whole) = seconds[True], seconds[False]
    return {
        "shared_cpu_s": round(min(shared), 3),
        "whole_cpu_s": round(min(whole), 3),
        "ratio": round(statistics.median(a / b for a, b in zip(shared, whole, strict=True)), 4),
        "ratio_of_least": round(min(shared) / min(whole), 4),
        "first_turn": {"shared_cpu_s": round(first_shared, 3), "whole_cpu_s": round(first_whole, 3)},
        "cached_tokens": sum(one.num_cached for one in done[True]),
        "equal_bits": True,
    }


def milliseconds(call: Any, number: int = 50) -> float:
    call()
    began = time.perf_counter()
    for _ in range(number):
        call()
    return round(1000 * (time.perf_counter() - began) / number, 4)


def small_costs(model: Transformer) -> dict[str, float]:
    kv = KVCache(model.local, model.operators, num_slots=2, context_tokens=SIZES.context_tokens)
    table, prompt = SlotTable(64, SIZES.context_tokens), np.arange(SYSTEM, dtype=np.int32)
    for row in range(64):
        slot = table.acquire(f"{row}", prompt[:0])
        assert slot is not None
        table.begin(slot, prompt, Prefix(row, 0))
        table.extend(slot, [], held=SYSTEM)
    return {
        "copy_ms": milliseconds(lambda: kv.copy(0, 1, SYSTEM)),
        "look_up_ms": milliseconds(lambda: table.longest(None, prompt, table.shared(prompt))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)

    def drawn(number: int) -> np.ndarray[Any, Any]:
        return draw.integers(0, SIZES.vocab_size, number)

    def siblings() -> list[CompletionRequest]:
        system = drawn(SYSTEM)
        return [ask(i, np.concatenate([system, drawn(OWN)]), 1) for i in range(SIBLINGS)]

    def alone() -> list[CompletionRequest]:
        return [ask(i, drawn(DISTINCT), SAMPLED // 2 + int(draw.integers(SAMPLED))) for i in range(REQUESTS)]

    model = Transformer(SIZES, seed=1)
    report(
        "prefix_cache",
        {
            "repeats": repeats,
            "siblings": {"number": SIBLINGS, "system_tokens": SYSTEM, "own_tokens": OWN}
            | asyncio.run(compared(model, siblings, repeats)),
            "alone": {"number": REQUESTS, "prompt_tokens": DISTINCT}
            | asyncio.run(compared(model, alone, 2 * repeats + 1)),
            "copy": small_costs(model),
        },
    )


if __name__ == "__main__":
    main()

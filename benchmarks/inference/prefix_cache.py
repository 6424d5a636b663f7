"""What shared prefixes save, and what looking for them costs: ``python -m benchmarks.inference.prefix_cache``.

*siblings*: `SIBLINGS` requests that arrive at once and begin with the same `SYSTEM` tokens; each adds `OWN` tokens and
samples one. CPU seconds of the process with and without sharing; tokens, log-probabilities and routes must have the
same bits. *alone*: the same number of requests with nothing in common, of `DISTINCT` prompt tokens and `SAMPLED`
sampled ones, which arrive one by one as others end, so that slots are reused in any order. *copy*: milliseconds of one
copy of `SYSTEM` tokens between two slots, and of one look-up among all slots when all share the prompt.

Both ways take turns; CPU seconds are the least of `--repeats`, ratios the median of the ratios of each turn. The model
is the laptop example's, with random weights, in exact mode.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
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


async def served(
    model: Transformer, requests: list[CompletionRequest], *, share: bool
) -> tuple[list[Completion], float]:
    """At most `SIBLINGS` at once. Returns the completions and the CPU seconds."""
    config = EngineConfig(context_tokens=SIZES.context_tokens)
    room = asyncio.Semaphore(SIBLINGS)
    async with ReferenceEngine(model, version=VERSION, config=config, share_prefixes=share) as engine:

        async def one(request: CompletionRequest) -> Completion:
            async with room:
                return await engine.generate(request)

        began = time.process_time()
        done = await asyncio.gather(*map(one, requests))
        return done, time.process_time() - began


def compared(model: Transformer, requests: list[CompletionRequest], repeats: int) -> dict[str, Any]:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(repeats):
        done = {}
        for share in (True, False) if turn % 2 else (False, True):
            done[share], cpu_s = asyncio.run(served(model, requests, share=share))
            seconds[share].append(cpu_s)
        for one, other in zip(done[True], done[False], strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)
            assert np.array_equal(one.logprobs, other.logprobs)
            assert np.array_equal(one.routes, other.routes)
    ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
    return {
        "shared_cpu_s": round(min(seconds[True]), 3),
        "whole_cpu_s": round(min(seconds[False]), 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_of_least": round(min(seconds[True]) / min(seconds[False]), 4),
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

    system = drawn(SYSTEM)
    siblings = [ask(i, np.concatenate([system, drawn(OWN)]), 1) for i in range(SIBLINGS)]
    alone = [ask(i, drawn(DISTINCT), SAMPLED // 2 + int(draw.integers(SAMPLED))) for i in range(REQUESTS)]
    model = Transformer(SIZES, seed=1)
    report(
        "prefix_cache",
        {
            "repeats": repeats,
            "siblings": {"number": SIBLINGS, "system_tokens": SYSTEM, "own_tokens": OWN}
            | compared(model, siblings, repeats),
            "alone": {"number": REQUESTS, "prompt_tokens": DISTINCT} | compared(model, alone, 2 * repeats + 1),
            "copy": small_costs(model),
        },
    )


if __name__ == "__main__":
    main()

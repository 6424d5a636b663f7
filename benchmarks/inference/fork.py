"""Time and CPU of a session's first token with and without `fork_from`: ``python -m benchmarks.inference.fork``.

A session holds a prefix of keys in the reference engine. A branch adds a few tokens to the prefix and samples one. It
is asked once with `fork_from`, and once of an engine that computes every prompt whole, in turns. Both must give the
same bits. The model is the laptop example's, with random weights.
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
from etude.models import ModelConfig, Transformer
from etude.records import Completion, CompletionRequest, Sampling, Version

NEW = 16  # tokens that a branch adds
VERSION = Version(step=0, incarnation="00000000", digest="ab" * 32)


def ask(
    name: str, prompt: np.ndarray[Any, Any], fork_from: str | None = None, *, keep: bool = False
) -> CompletionRequest:
    return CompletionRequest(
        request_id=name,
        session_id=name,
        prompt_ids=prompt.astype(np.int32),
        sampling=Sampling(max_tokens=1, stop_token_ids=(), seed=1),
        fork_from=fork_from,
        keep_session=keep,
    )


async def measured(prefix_tokens: int, repeats: int) -> dict[str, Any]:
    """Medians over the repeats, and the ratio of both ways."""
    draw = np.random.default_rng(prefix_tokens)
    sizes = ModelConfig(context_tokens=prefix_tokens + 64)
    config = EngineConfig(max_sequences=4, context_tokens=sizes.context_tokens)
    seconds: dict[str, list[float]] = {"computed": [], "forked": []}
    engines = {
        way: ReferenceEngine(Transformer(sizes, seed=1), version=VERSION, config=config, share_prefixes=way == "forked")
        for way in seconds
    }
    async with engines["forked"], engines["computed"]:
        prefix = draw.integers(0, sizes.vocab_size, prefix_tokens)
        await engines["forked"].generate(ask("source", prefix, keep=True))
        for number in range(repeats):
            prompt = np.concatenate([prefix, draw.integers(0, sizes.vocab_size, NEW)])
            done: dict[str, Completion] = {}
            for way, source in (("computed", None), ("forked", "source")):
                began = time.perf_counter()
                done[way] = await engines[way].generate(ask(f"{way}{number}", prompt, source))
                seconds[way].append(time.perf_counter() - began)
            one, other = done.values()
            assert (one.num_cached, other.num_cached) == (0, prefix_tokens)
            assert np.array_equal(one.logprobs, other.logprobs)
            assert np.array_equal(one.routes, other.routes)
    median = {way: statistics.median(found) for way, found in seconds.items()}
    return {
        "prefix_tokens": prefix_tokens,
        "new_tokens": NEW,
        **{f"{way}_ms": round(1000 * value, 3) for way, value in median.items()},
        "ratio": round(median["computed"] / median["forked"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    report("fork", {"repeats": repeats, "rows": [asyncio.run(measured(n, repeats)) for n in (256, 1024, 4096)]})


if __name__ == "__main__":
    main()

"""CPU milliseconds of a decoding step by how its rows are sampled.

``python -m benchmarks.inference.masked_steps [--repeats N] [--vocabularies A,B]``

The reference engine, on one thread of a CPU, samples 24 tokens of each of B requests: plainly, with truncation, with
penalties, with the likeliest tokens, and under a JSON schema whose text does not end. Each vocabulary size has a model
with the laptop example's other sizes and random weights, and one tokeniser of 2,048 tokens: the further ids of a larger
vocabulary are unused, as some are in published checkpoints. `added_ms` is a step's time above the plain step's.
Medians; the ways take turns. Most of the time goes to the largest vocabulary in a batch of 16, where truncation sorts
the whole vocabulary for each row.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import report
from etude import grammars
from etude.harness.chat import SPECIAL_TOKENS
from etude.inference import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import ModelConfig, Transformer
from etude.records import CompletionRequest, Sampling, Version
from etude.training.tokenizer import train_tokenizer

TOKENS, WARM_TOKENS = 24, 2
VERSION = Version(step=0, incarnation="00000000", digest="ab" * 32)
ENDLESS = {"type": "array", "minItems": 1000, "items": {"type": "object", "additionalProperties": {"type": "string"}}}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    "top_logprobs": {"top_logprobs": 20},
    "json_schema": {"grammar": grammars.from_json_schema(ENDLESS)},
}


def requests(way: str, batch: int, number: int, tokens: int) -> list[CompletionRequest]:
    sampling = {"max_tokens": tokens, "stop_token_ids": (5,), "logit_bias": (), **WAYS[way]}
    return [
        CompletionRequest(
            request_id=f"{way}{number}.{i}",
            session_id=f"{way}{number}.{i}",
            prompt_ids=np.arange(10, 42, dtype=np.int32),
            sampling=Sampling(**sampling, seed=i),
            keep_session=False,
            routes_from=None,
        )
        for i in range(batch)
    ]


async def measured(vocab_size: int, batch: int, repeats: int, tokenizer: Path) -> dict[str, Any]:
    sizes = ModelConfig(vocab_size=vocab_size)
    config = EngineConfig(max_sequences=batch, context_tokens=256)
    steps: dict[str, list[float]] = {way: [] for way in WAYS}
    model = Transformer(sizes, seed=1)
    async with ReferenceEngine(model, version=VERSION, config=config, tokenizer=tokenizer) as engine:
        for number in range(repeats + 1):  # the first one warms up
            tokens = TOKENS if number else WARM_TOKENS
            for way in WAYS:
                before, began = engine.counters.steps, time.process_time()
                done = await asyncio.gather(*(engine.generate(one) for one in requests(way, batch, number, tokens)))
                cpu_s, count = time.process_time() - began, engine.counters.steps - before
                if way == "json_schema":
                    assert all(len(one.token_ids) == tokens for one in done), "its text does not end"
                if number:
                    steps[way].append(1e3 * cpu_s / count)
    medians = {way: statistics.median(found) for way, found in steps.items()}
    return {
        "vocab_size": vocab_size,
        "batch": batch,
        "step_ms": {way: round(value, 3) for way, value in medians.items()},
        "added_ms": {way: round(value - medians["plain"], 3) for way, value in medians.items() if way != "plain"},
        "json_schema_ratio": round(medians["json_schema"] / medians["plain"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocabularies", default="2048,32768,151936", help="sizes, at least 2,048")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        texts = [path.read_text() for path in sorted(Path("src/etude").rglob("*.py"))[:40]]
        train_tokenizer(texts, folder, vocab_size=2048, special_tokens=SPECIAL_TOKENS, chat_template="")
        tokenizer = Path(folder) / "tokenizer.json"
        rows = [
            asyncio.run(measured(vocab_size, batch, args.repeats, tokenizer))
            for vocab_size in map(int, args.vocabularies.split(","))
            for batch in (1, 16)
        ]
    report("masked_steps", {"tokens": TOKENS, "repeats": args.repeats, "rows": rows})


if __name__ == "__main__":
    main()

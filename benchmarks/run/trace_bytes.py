"""Bytes of a step's traces: format 2, in which what siblings begin with in common lies once, against format 1.

Both files are really written, with the same compression; `write_format_1` writes as format 1 was written. A step is a
group of 8 rollouts of 4 turns that begin with the same 4,096 tokens; each has `own` further tokens, half of them
sampled. Token ids are drawn by Zipf's law from 150,000; log-probabilities are random and so hardly compress. Routes
are of 48 layers with the top 8 of 128 experts: a token's scores are the sum of an affinity of its id, of the expert's
popularity and of noise of its context (standard deviations 1, 0.5 and 0.5), or of noise alone ("uniform"), or there are
none. Siblings have the same routes in what they share, as an engine in exact mode returns them; with "other versions",
each sibling's noise is its own there, too.

`prompt_routes`: whether that is so. The reference engine serves 8 sessions with the same prompt at once, under one
version: the share of the prompt's positions at which a sibling's routes are those of the first one.

`python -m benchmarks.run.trace_bytes`
"""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.report import report
from etude.experience import Finished, Group, plan_batch, read_trace, record_batch
from etude.file_checksums import seal_parquet
from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import ModelConfig, Transformer, load_model, save_model
from etude.numerics.config import ComputeDtype, Mode, NumericsConfig
from etude.numerics.factory import operators_for
from etude.records import Batch, Completion, CompletionRequest, Graded, Rollout, Sampling, Task, Trace, Version
from etude.records.completion import StopReason, VersionSpan
from etude.records.rollout import Ending, Turn
from etude.records.summary import StoredFile, summary_of
from etude.records.task import Split, Trust
from etude.records.wire import F32, I32, Routes, pack

VERSION = Version(step=1, incarnation="00000000", digest="0" * 64)
SIBLINGS, PREFIX, TURNS = 8, 4096, 4
LAYERS, EXPERTS, TOP_K, VOCABULARY = 48, 128, 8, 150_000
OWN = (256, 512, 1024, 4096)
TASK = Task(source="drawn", split=Split.TRAIN, index=0, family="drawn", instruction="", files={}, exports=())
KINDS = ("none", "realistic", "uniform", "other versions")


def tokens(rng: np.random.Generator, count: int) -> I32:
    return (rng.zipf(1.2, count) % VOCABULARY).astype(np.int32)


def routes(kind: str, token_ids: I32, rng: np.random.Generator) -> Routes:
    """[T, LAYERS, TOP_K] uint8, the likeliest expert first."""
    found = np.empty((len(token_ids), LAYERS, TOP_K), np.uint8)
    for at, token in enumerate(token_ids.tolist()):
        scores = 0.5 * rng.standard_normal((LAYERS, EXPERTS), np.float32)
        if kind != "uniform":
            scores += affinity(token)
        best = np.argpartition(-scores, TOP_K)[:, :TOP_K]
        found[at] = np.take_along_axis(best, np.argsort(-np.take_along_axis(scores, best, 1)), 1)
    return found


@functools.lru_cache(maxsize=4096)
def affinity(token: int) -> F32:
    """[LAYERS, EXPERTS] the part of a token's scores that does not depend on its context."""
    popularity = 0.5 * np.random.default_rng(0).standard_normal((LAYERS, EXPERTS), np.float32)
    return popularity + np.random.default_rng([1, token]).standard_normal((LAYERS, EXPERTS), np.float32)


@functools.lru_cache
def prefix_routes(kind: str, seed: int) -> Routes:
    """Routes of the shared prefix."""
    return routes(kind, tokens(np.random.default_rng(7), PREFIX), np.random.default_rng([9, seed]))


def trace_of(sibling: int, own: int, kind: str) -> Trace:
    """`TURNS` turns; the first one's prompt ends with the shared prefix and a few own tokens."""
    rng = np.random.default_rng([8, sibling])
    part = own // (2 * TURNS)
    context = np.concatenate([tokens(np.random.default_rng(7), PREFIX), tokens(rng, own)])
    chosen = np.zeros((0, 0, 0), np.uint8)
    if kind != "none":
        shared = prefix_routes(kind, sibling if kind == "other versions" else 0)
        chosen = np.concatenate([shared, routes(kind, context[PREFIX:], rng)])
    turns, known, start = list[Turn](), 0, 0
    for number in range(TURNS):
        said = PREFIX + part * (2 * number + 1)
        end = said + part
        done = Completion(
            request_id="r",
            token_ids=context[said:end],
            logprobs=-rng.exponential(0.3, part).astype(np.float32),
            routes=chosen[known : end - 1] if len(chosen) else chosen,
            routes_start=known,
            spans=(VersionSpan(VERSION, part),),
            stop_reason=StopReason.STOP,
            engine="engine-0",
        )
        sampling = Sampling(max_tokens=part, stop_token_ids=(0,), seed=sibling * TURNS + number)
        parent = number - 1 if number else None
        turns.append(Turn(parent=parent, prompt_ids=context[start:said], completion=done, sampling=sampling))
        known, start = end - 1, end
    return Trace(tuple(turns))


def step_of(own: int, kind: str) -> tuple[Group, Callable[[Any], Rollout]]:
    """A group whose rollouts have other rewards, so that each is a sample; and what reads its rollouts."""
    finished, whole = list[Finished](), dict[str, Rollout]()
    for sibling in range(SIBLINGS):
        rollout = Rollout(
            rollout_id=f"g000000.{sibling}",
            group_id="g000000",
            attempt=0,
            task=TASK,
            trace=trace_of(sibling, own, kind),
            ending=Ending.SUBMITTED,
            exports={},
            wall_s=1.0,
            tool_s=0.5,
        )
        reward = sibling / SIBLINGS
        outcome = Graded.of(reward, {"tests": reward}, trust=Trust.DATA, reason="as drawn")
        summary = summary_of(rollout, StoredFile(1, "0" * 64))
        finished.append(Finished(rollout_id=rollout.rollout_id, outcome=outcome, summary=summary))
        whole[rollout.rollout_id] = rollout
    ids = tuple(whole)
    return Group("g000000", ids, tuple(finished)), lambda summary: whole[summary.rollout_id]


def write_format_1(path: Path, batch: Batch) -> None:
    """A row is a sample's path with all of its tokens."""
    fields = {
        "rollout_id": pa.string(),
        "advantage": pa.float64(),
        "token_ids": pa.list_(pa.int32()),
        "mask": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float32()),
        "steps": pa.list_(pa.int32()),
        "kv_epochs": pa.list_(pa.int32()),
        "routes": pa.binary(),
        "routes_shape": pa.list_(pa.int32()),
        "digest": pa.string(),
    }
    rows = [
        {
            **{name: getattr(sample.path, name) for name in fields if hasattr(sample.path, name)},
            "rollout_id": sample.rollout_id,
            "advantage": float(sample.advantages[0]),
            "routes": sample.path.routes.tobytes(),
            "routes_shape": list(sample.path.routes.shape),
        }
        for sample in batch.samples
    ]
    schema = pa.schema(list(fields.items()))
    with path.open("w+b") as file:
        with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True, store_schema=False) as writer:
            writer.write_table(pa.Table.from_pylist(rows, schema))
            writer.add_key_value_metadata({"etude.batch": json.dumps({"format": 1}), "etude.sealed": "1"})
        seal_parquet(file)


def bytes_of(own: int, kind: str) -> dict[str, Any]:
    """Sizes of both files of one step, and the CPU seconds of writing each."""
    group, read = step_of(own, kind)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        began = time.process_time()
        batch, ref = record_batch(folder, plan_batch([group], batch_id="b", step=2, max_lag=1), read)
        wrote, path = time.process_time(), folder / "batch-000002.parquet"
        write_format_1(folder / "1.parquet", batch)
        wrote_1 = time.process_time()
        again = read_trace(path)
        assert again.digest == ref.digest, "it comes back"
        assert pack(again.batch) == pack(batch), "it comes back to the byte"
        two, one = path.stat().st_size, (folder / "1.parquet").stat().st_size
    return {
        "routes": kind,
        "own_tokens": own,
        "format_1_bytes": one,
        "format_2_bytes": two,
        "ratio": round(two / one, 4),
        "format_1_write_cpu_s": round(wrote_1 - wrote, 3),
        "format_2_write_cpu_s": round(wrote - began, 3),
    }


def prompt_routes(mode: Mode, dtype: ComputeDtype) -> float:
    """The share of a prompt's positions at which all siblings have the same routes."""
    numerics = NumericsConfig(mode=mode)
    sizes = ModelConfig(num_layers=6, num_experts=32, top_k=4, hidden_size=64, context_tokens=1024)
    with tempfile.TemporaryDirectory() as scratch:
        save_model(Transformer(sizes, seed=1), Path(scratch) / "start", dtype="bf16")
        model = load_model(Path(scratch) / "start", operators=operators_for(numerics, getattr(torch, dtype))).eval()
    prompt = np.random.default_rng(3).integers(3, sizes.vocab_size, 700).astype(np.int32)

    async def serve() -> list[Completion]:
        config = EngineConfig(context_tokens=1024, max_sequences=SIBLINGS, dtype=dtype)
        async with ReferenceEngine(model, version=VERSION, config=config) as engine:
            asked = [
                CompletionRequest(
                    request_id=f"r{i}",
                    session_id=f"r{i}",
                    prompt_ids=prompt,
                    sampling=Sampling(max_tokens=16, stop_token_ids=(), seed=i),
                )
                for i in range(SIBLINGS)
            ]
            return list(await asyncio.gather(*(engine.generate(one) for one in asked)))

    first, *others = [done.routes[: len(prompt)] for done in asyncio.run(serve())]
    same = np.ones(len(prompt), bool)
    for other in others:
        same &= (first == other).all((1, 2))
    return float(same.mean())


def main() -> None:
    measured = [bytes_of(own, kind) for kind in KINDS for own in (OWN[1:2] if kind == "other versions" else OWN)]
    report(
        "trace_bytes",
        {
            "siblings": SIBLINGS,
            "prefix_tokens": PREFIX,
            "turns": TURNS,
            "layers": LAYERS,
            "top_k": TOP_K,
            "experts": EXPERTS,
            "steps": measured,
            "prompt_routes": {
                "exact float32": prompt_routes(Mode.EXACT, ComputeDtype.FLOAT32),
                "native float32": prompt_routes(Mode.NATIVE, ComputeDtype.FLOAT32),
                "native bfloat16": prompt_routes(Mode.NATIVE, ComputeDtype.BFLOAT16),
            },
        },
    )


if __name__ == "__main__":
    main()

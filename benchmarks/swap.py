"""What a weight swap in mid-generation costs a client: the gap between two tokens, with swaps and without.

The laptop example's model decodes `--sequences` sequences in one engine on one thread while another thread follows a
weight chain in a directory store, as the engine's server does; a version with every second weight moved is published
every `--every` seconds. Gaps are between the ends of consecutive steps, so they hold the pause, the follower's share
of the interpreter and of the processor, and the step itself; `extra` is a swap's gap minus the median plain gap.
`python -m benchmarks.swap [--swaps N]`
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import report
from etude.inference import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.inference.follow import Following
from etude.inference.patch import initial_version
from etude.inference.scheduler import Plan
from etude.models import ModelConfig, Transformer, hf_views
from etude.records import Completion, CompletionRequest, Sampling
from etude.stores import DirectoryStore
from etude.telemetry import Telemetry, read_events
from etude.weights import Channel, Follower, Tensor


class TimedEngine(ReferenceEngine):
    """Notes when each step ended and under which version."""

    steps: list[tuple[float, int]]

    def _step(self, plan: Plan) -> None:
        super()._step(plan)
        self.steps.append((time.perf_counter(), self.version.step))


def moved(model: Transformer, step: int) -> dict[str, Tensor]:
    """The model's weights as bf16, every second one moved by a unit in the last place, another half each step."""
    tensors = {}
    for name, view in hf_views(model).items():
        codes = view.bfloat16().view(torch.int16).numpy().view(np.uint16).ravel().copy()
        codes[step % 2 :: 2] ^= 1
        tensors[name] = Tensor("bf16", tuple(view.shape), codes)
    return tensors


async def generate_until(done: asyncio.Event, engine: ReferenceEngine, index: int) -> list[Completion]:
    sampling, completions = Sampling(max_tokens=400, stop_token_ids=(), seed=index), []
    while not done.is_set():
        prompt = np.random.default_rng(index).integers(3, 700, 64).astype(np.int32)
        request = CompletionRequest(
            request_id=f"r{index}", session_id=f"r{index}", prompt_ids=prompt, sampling=sampling, keep_session=False
        )
        completions.append(await engine.generate(request))
    return completions


async def measure(folder: Path, *, num_sequences: int, num_swaps: int, every_s: float) -> dict[str, Any]:
    model, start, store = Transformer(ModelConfig(), seed=0), Transformer(ModelConfig(), seed=0), DirectoryStore(folder)
    views, done = hf_views(model), asyncio.Event()
    telemetry = Telemetry(folder / "events" / "engine.jsonl", process="engine")
    engine = TimedEngine(model, version=initial_version(views), config=EngineConfig(max_sequences=num_sequences))
    engine.steps = []
    following = Following(engine, views, Follower(store), telemetry=telemetry)
    channel = Channel(store)
    async with engine:
        following.start_at_head()
        work = [asyncio.ensure_future(generate_until(done, engine, i)) for i in range(num_sequences)]
        for step in range(1, num_swaps + 1):
            tensors = moved(start, step)
            await asyncio.to_thread(channel.publish, tensors, step=step, parent=None, rollout_ids=[])
            await engine.adopt(step, deadline_s=30.0)
            await asyncio.sleep(every_s)
        done.set()
        completions = [c for sequence in await asyncio.gather(*work) for c in sequence]
        await asyncio.to_thread(following.stop)
    pauses = [e["pause_s"] for e in read_events(folder / "events") if e["kind"] == "engine.adopt"]
    return numbers(engine.steps, pauses, completions)


def numbers(steps: list[tuple[float, int]], pauses: list[float], completions: list[Completion]) -> dict[str, Any]:
    gaps = np.diff([t for t, _ in steps]) * 1e3
    swapped = np.diff([v for _, v in steps]) > 0
    plain = gaps[~swapped]
    extra = gaps[swapped] - np.median(plain)
    return {
        "num_swaps": int(swapped.sum()),
        "num_completions": len(completions),  # one that failed would have ended the run
        "num_completions_swapped_in": sum(len(c.spans) > 1 for c in completions),
        "pause_ms": percentiles(np.array(pauses) * 1e3),
        "plain_gap_ms": percentiles(plain),
        "swap_gap_ms": percentiles(gaps[swapped]),
        "extra_ms": percentiles(extra),
    }


def percentiles(values: np.ndarray[Any, Any]) -> dict[str, float]:
    p50, p99, most = np.percentile(values, [50, 99, 100])
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "max": round(float(most), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--every", type=float, default=0.2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        seen = measure(Path(folder), num_sequences=args.sequences, num_swaps=args.swaps, every_s=args.every)
        report("swap", {"num_sequences": args.sequences, "threads": 1, **asyncio.run(seen)})


if __name__ == "__main__":
    main()

"""What live requests feel of a weight swap on one GPU, and what preparing it there costs: 9.3 billion parameters.

The reference engine decodes a batch of long requests; meanwhile an update that moves the lowest bit of a share of all
weights is prepared as lists on the device, beside the steps, and swapped in between two tokens. Measured: the pause as
the engine tells it (until the device has written), the longest gap between two tokens around a swap and the usual one,
what preparing takes and how much longer steps are meanwhile, and the device's memory for the lists. After the last swap
every tensor is compared with what it should hold. Then the same object by `weights.gpu`: encoded from two snapshots on
the device, prepared from its bytes, and written.

`python -m benchmarks.gpu.swap [--quick]`: quick is a tiny model, wherever it runs, and writes no result.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import model as gpu_model
from benchmarks.gpu.model import TINY, peaks, qwen, random_model, seconds, wait
from etude.inference import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import ModelConfig, hf_views
from etude.numerics.native import Native
from etude.records.completion import Completion, CompletionRequest, Sampling, Version
from etude.weights import Update
from etude.weights.follow.runtime_map import Map, named
from etude.weights.follow.targets import Swap, Target
from etude.weights.tensors import Spec


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    sizes: ModelConfig
    batch: int
    prompt: int
    tokens: int  # that each request samples
    swaps: int
    share: float  # of weights that an update changes
    elements: int  # of the snapshot that is encoded on the device


FULL = Size(qwen(14, 2048), batch=256, prompt=512, tokens=1500, swaps=3, share=0.001, elements=1 << 28)
QUICK = Size(TINY, batch=3, prompt=8, tokens=60, swaps=2, share=0.05, elements=1 << 12)


def version(step: int) -> Version:
    return Version(step, "0" * 8, f"{step:064x}")


def update(views: dict[str, torch.Tensor], step: int, share: float) -> Update:
    """The lowest bit of some weights of every tensor, the other way round."""
    changed, rng = {}, np.random.default_rng(step)
    for name, view in views.items():
        count = max(1, int(view.numel() * share))
        places = np.unique(rng.integers(0, view.numel(), count, dtype=np.uint32))
        flat = view.view(-1).view(torch.int16)
        codes = flat[torch.from_numpy(places.astype(np.int64)).to(view.device)].cpu().numpy().view(np.uint16)
        changed[name] = (places, codes ^ np.uint16(1))
    return Update(version(step), changed=changed, replaced={}, removed=(), fetch_s=0.0, fetched_bytes=0)


class Load:
    """Requests that decode all the time, and when their tokens came."""

    def __init__(self, engine: ReferenceEngine, size: Size) -> None:
        self.engine, self.size, self.stamps = engine, size, list[float]()
        self.decoding = asyncio.Event()

    async def one(self, i: int) -> Completion:
        """A request; the first stamps each of its tokens."""
        sampling = Sampling(max_tokens=self.size.tokens, stop_token_ids=(), seed=i)
        prompt = np.random.default_rng(i).integers(0, self.size.sizes.vocab_size, self.size.prompt).astype(np.int32)
        request = CompletionRequest(
            request_id=f"r{i}", session_id=f"r{i}", prompt_ids=prompt, sampling=sampling, deadline_s=500.0
        )
        if i:
            return await self.engine.generate(request)
        async for part in self.engine.stream(request):
            if isinstance(part, Completion):
                return part
            self.stamps.append(time.perf_counter())
            self.decoding.set()
        raise RuntimeError("the stream ended without a completion")

    def gaps_ms(self, start: float, stop: float) -> list[float]:
        """Between tokens that came from one moment to another."""
        seen = [stamp for stamp in self.stamps if start <= stamp <= stop]
        return [1000 * gap for gap in np.diff(seen).tolist()]


async def under_load(size: Size, on: torch.device) -> dict[str, Any]:
    """The engine, its load, and swaps in the midst of it."""
    model = random_model(size.sizes, Native(torch.bfloat16), torch.bfloat16, on)
    views = hf_views(model)
    specs = {name: Spec("bf16", tuple(view.shape)) for name, view in views.items()}
    target, rows = Target(Map(named(views))), []
    config = EngineConfig(
        max_sequences=size.batch, context_tokens=size.prompt + size.tokens, chunk_tokens=512, step_tokens=4096
    )
    beside = torch.cuda.Stream(on) if on.type == "cuda" else None
    updates = [update(views, step, size.share) for step in range(1, size.swaps + 1)]
    async with ReferenceEngine(model, version=version(0), config=config) as engine:
        load = Load(engine, size)
        requests = [asyncio.create_task(load.one(i)) for i in range(size.batch)]
        await asyncio.wait_for(load.decoding.wait(), 120)
        for coming in updates:
            quiet = time.perf_counter()
            await asyncio.sleep(0.3 if on.type == "cuda" else 0.02)
            began = time.perf_counter()
            swap = await asyncio.to_thread(_prepared, target, coming, specs, beside)
            ready = time.perf_counter()
            swapped = await asyncio.wrap_future(engine.swap(swap))
            after = time.perf_counter()
            await asyncio.sleep(0.1 if on.type == "cuda" else 0.02)
            usual, meanwhile = load.gaps_ms(quiet, began), load.gaps_ms(began, ready)
            around = load.gaps_ms(ready - 0.1, after + 0.1)
            rows.append(
                {
                    "num_changed": sum(len(places) for places, _ in coming.changed.values()),
                    "prepare_s": round(ready - began, 3),
                    "pause_ms": round(1000 * swapped.pause_s, 3),
                    "num_running": swapped.num_running,
                    "usual_gap_ms": round(median(usual), 3) if usual else None,
                    "gap_while_preparing_ms": round(max(meanwhile), 3) if meanwhile else None,
                    "gap_around_swap_ms": round(max(around), 3) if around else None,
                }
            )
        done = await asyncio.gather(*requests)
    return {
        "num_parameters": size.sizes.num_parameters,
        "batch": size.batch,
        "swaps": rows,
        "differing_after_the_last": _differing(views, updates[-1]),
        "requests_failed": sum(len(one.token_ids) != size.tokens for one in done),
        "spans_of_the_first": len(done[0].spans),
    }


def _prepared(target: Target, coming: Update, specs: dict[str, Spec], beside: torch.cuda.Stream | None) -> Swap:
    """As `inference.follow` does it: on a stream beside the steps."""
    if beside is None:
        return target.prepare(coming, specs)
    with torch.cuda.stream(beside):
        swap = target.prepare(coming, specs)
    beside.synchronize()
    return swap


def _differing(views: dict[str, torch.Tensor], coming: Update) -> int:
    """Changed places that do not hold what they should."""
    wrong = 0
    for name, (places, codes) in coming.changed.items():
        flat = views[name].view(-1).view(torch.int16)
        held = flat[torch.from_numpy(places.astype(np.int64)).to(flat.device)].cpu().numpy().view(np.uint16)
        wrong += int((held != codes).sum())
    return wrong


def by_object(size: Size, on: torch.device) -> dict[str, Any]:
    """A delta's object, from and into the device's memory, by `weights.gpu`."""
    from etude.weights import gpu

    shape = (max(1, size.elements // 4096), min(size.elements, 4096))
    old = torch.randn(*shape, device=on).mul_(0.02).bfloat16().view(torch.int16)
    new = old ^ (torch.rand(*shape, device=on) < size.share).to(torch.int16)
    specs = {"w": Spec("bf16", shape)}
    data, live = gpu.encode({"w": new}, {"w": old}, specs), {"w": old.clone()}
    prepared = gpu.prepare(data, specs, live)
    prepared.write()
    wait(on)
    if not torch.equal(live["w"], new):
        raise SystemExit("weights.gpu wrote other bits than it encoded")
    times = {
        "encode": seconds(on, lambda: gpu.encode({"w": new}, {"w": old}, specs), repeats=3, warm_ups=1),
        "prepare": seconds(on, lambda: gpu.prepare(data, specs, {"w": old}), repeats=3, warm_ups=1),
        "write": seconds(on, prepared.write, repeats=5),
    }
    rates = {f"{name}_gb_per_s": round(old.nbytes / s / 1e9, 2) for name, s in times.items()}
    return {"elements": old.numel(), "delta_bytes": len(data), "ratio": round(old.nbytes / len(data), 1), **rates}


def main(quick: bool, on: torch.device) -> dict[str, Any]:
    size = QUICK if quick else FULL
    sys.setswitchinterval(0.0005)  # as the engine's own process does
    found = {**peaks(on).facts(), "share": size.share, **asyncio.run(under_load(size, on))}
    return {**found, "object": by_object(size, on)} if on.type == "cuda" else found


if __name__ == "__main__":
    gpu_model.main("gpu_swap", __doc__, main)

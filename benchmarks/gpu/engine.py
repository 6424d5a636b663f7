"""Decoding of the reference engine on one GPU against the roofline: a random Qwen3-MoE of 9.3 billion parameters.

Bfloat16, native operators. Every sequence has a context of random keys and values and decodes one token a step, by the
engine's own thread's code: plan, launch, wait, take up tokens; requests and HTTP are not in it. The roofline's time of
a step is the bytes that it must read (benchmarks/gpu/model.py: all weights, all kept keys and values at the mean
context) over the memory's bandwidth, or its operations over the peak where those take longer. The critical batch is the
one at which computing takes as long as reading the weights. For each batch: tokens a second, the share of the
roofline by the datasheet's bandwidth and by what a copy reaches here, and the device's part of a step alone (a graph's
replay), with the programs that its time goes to. Also: prompts, in chunks; and, at a smaller batch, exact mode.

`python -m benchmarks.gpu.engine [--quick]`: quick is a tiny model, wherever it runs, and writes no result.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import model as gpu_model
from benchmarks.gpu.model import TINY, Peaks, Work, kernels, peaks, qwen, random_model, seconds, share, wait
from etude.inference.device_runner import DeviceRunner, runner_for
from etude.inference.runner import Runner
from etude.inference.scheduler import Scheduler, Sequence
from etude.models import ModelConfig, Transformer
from etude.numerics.config import Mode, NumericsConfig
from etude.numerics.factory import operators_for
from etude.records.completion import CompletionRequest, Sampling


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    sizes: ModelConfig
    context: int  # tokens kept when decoding begins
    steps: int
    batches: tuple[int, ...]
    most: int  # sequences, whatever the critical batch is
    prompt: int  # tokens of a prompt
    exact_batches: tuple[int, ...]


FULL = Size(qwen(14, 2048), context=1024, steps=40, batches=(1, 64, 256), most=2048, prompt=1536, exact_batches=(64,))
QUICK = Size(TINY, context=32, steps=4, batches=(1, 3), most=4, prompt=24, exact_batches=(2,))


def running(runner: Runner | DeviceRunner, batch: int, size: Size) -> Scheduler:
    """A scheduler whose sequences all have their context behind them: in memory that holds random numbers."""
    scheduler = Scheduler(
        num_slots=batch,
        context_tokens=size.context + size.steps + 8,
        chunk_tokens=256,
        step_tokens=256,
        max_waiting=batch,
        share=False,
    )
    prompt = np.zeros(size.context, np.int32)
    for i in range(batch):
        sampling = Sampling(max_tokens=1 << 20, stop_token_ids=(), seed=i)
        request = CompletionRequest(request_id=f"r{i}", session_id=f"r{i}", prompt_ids=prompt, sampling=sampling)
        scheduler.submit(Sequence(request, arrived=0.0))
    scheduler.plan()
    for sequence in scheduler.running:
        sequence.num_computed = size.context
    if isinstance(runner, DeviceRunner):
        runner.next_tokens.random_(0, size.sizes.vocab_size)
        for tensor in (*runner.kv.keys, *runner.kv.values):
            tensor.normal_()
    return scheduler


def decode(model: Transformer, batch: int, size: Size, peak: Peaks, on: torch.device) -> dict[str, Any]:
    """One batch, for some steps."""
    gc.collect()  # the runner before this one, whose graphs know it
    wait(on)
    started = time.perf_counter()
    room = size.context + size.steps + 8
    runner = runner_for(model, num_slots=batch, context_tokens=room)
    wait(on)
    ready_s = time.perf_counter() - started
    scheduler = running(runner, batch, size)
    spent = []
    for _ in range(size.steps):
        started = time.perf_counter()
        runner.step(scheduler.plan())
        spent.append(time.perf_counter() - started)
    step_s = median(spent[2:])
    context = size.context + size.steps // 2
    roofline = bound(Work(size.sizes), batch, context, peak)
    replay_s, most = None, list[dict[str, Any]]()
    if isinstance(runner, DeviceRunner) and runner.graphs:
        replay_s = round(seconds(on, runner.graphs[-1].run, repeats=10), 6)
        most = kernels(on, runner.graphs[-1].run)
    return {
        "batch": batch,
        "mean_context": context,
        "tokens_per_s": round(batch / step_s, 1),
        "step_ms": round(step_s * 1000, 4),
        "replay_ms": None if replay_s is None else round(replay_s * 1000, 4),
        "roofline_ms": None if roofline[0] is None else round(roofline[0] * 1000, 4),
        "of_roofline": None if roofline[0] is None else share(roofline[0], step_s),
        "of_roofline_reached": share(roofline[1], step_s),
        "ready_s": round(ready_s, 2),
        "kernels": most,
    }


def bound(work: Work, batch: int, context: int, peak: Peaks) -> tuple[float | None, float]:
    """The least seconds of a step: by the datasheet, and by what this chip reached."""
    num_bytes = work.weight_bytes + batch * context * work.kept_bytes
    operations = work.forward(batch, batch, batch * context)
    reached = max(num_bytes / peak.reached_bytes_per_s, operations / peak.reached_operations_per_s)
    if peak.bytes_per_s is None or peak.operations_per_s is None:
        return None, reached
    return max(num_bytes / peak.bytes_per_s, operations / peak.operations_per_s), reached


def prefill(model: Transformer, size: Size, peak: Peaks, on: torch.device) -> dict[str, Any]:
    """Prompts in chunks of at most 4096 tokens a step."""
    runner = runner_for(model, num_slots=8, context_tokens=size.prompt + 8)
    scheduler = Scheduler(
        num_slots=8, context_tokens=size.prompt + 8, chunk_tokens=2048, step_tokens=4096, max_waiting=8
    )
    for i in range(8):
        sampling = Sampling(max_tokens=1, stop_token_ids=(), seed=i)
        prompt = np.random.default_rng(i).integers(0, size.sizes.vocab_size, size.prompt).astype(np.int32)
        request = CompletionRequest(request_id=f"p{i}", session_id=f"p{i}", prompt_ids=prompt, sampling=sampling)
        scheduler.submit(Sequence(request, arrived=0.0))
    counted: list[tuple[int, float]] = []
    while plan := scheduler.plan():
        started = time.perf_counter()
        runner.step(plan)
        wait(on)
        counted.append((sum(c.stop - c.start for c in plan.chunks), time.perf_counter() - started))
        for sequence in [s for s in scheduler.running if s.finished]:
            scheduler.finish(sequence)
    timed = counted[1:] or counted
    tokens_per_s = sum(n for n, _ in timed) / sum(s for _, s in timed)
    rate = tokens_per_s * Work(size.sizes).forward(1, 0, size.prompt // 2)
    return {"prompt_tokens_per_s": round(tokens_per_s, 1), "prompt_mfu": share(rate, peak.operations_per_s)}


def measure(size: Size, on: torch.device, peak: Peaks, *, exact: bool = True) -> dict[str, Any]:
    """All of it, as numbers."""
    work, dtype = Work(size.sizes), torch.bfloat16
    rates = (peak.operations_per_s or peak.reached_operations_per_s, peak.bytes_per_s or peak.reached_bytes_per_s)
    critical = work.critical_batch(*rates)
    most = max(1, min(critical, size.most) // 64 * 64)
    native = operators_for(NumericsConfig(Mode.NATIVE), dtype, device=on)
    model = random_model(size.sizes, native, dtype, on)
    batches = sorted({*size.batches, min(most, size.most)})
    rows = [decode(model, batch, size, peak, on) for batch in batches]
    found = {
        "num_parameters": size.sizes.num_parameters,
        "weight_bytes_a_step": work.weight_bytes,
        "kept_bytes_a_token": work.kept_bytes,
        "critical_batch": critical,
        "decode": rows,
        **prefill(model, size, peak, on),
    }
    if exact:
        del model
        one_order = operators_for(NumericsConfig(Mode.EXACT), dtype, device=on)
        model = random_model(size.sizes, one_order, one_order.storage_dtype, on)
        found["decode_exact"] = [decode(model, batch, size, peak, on) for batch in size.exact_batches]
    return found


def main(quick: bool, on: torch.device) -> dict[str, Any]:
    peak = peaks(on)
    return {**peak.facts(), **measure(QUICK if quick else FULL, on, peak)}


if __name__ == "__main__":
    gpu_model.main("gpu_engine", __doc__, main)

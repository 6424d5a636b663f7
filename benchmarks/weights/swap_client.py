"""What a client of an engine process feels when its weights are swapped in mid-generation: late tokens.

A real engine process follows a store. Every version is made and stored before the clock starts, for in production the
trainer is elsewhere: a publish here is its last step alone, the move of the pointer, every `--every` seconds. Each
version is an optimiser-sized change of bf16 weights. `--streams` completions are always in flight over HTTP, so every
swap happens in mid-generation (their version spans prove it). All decode in the same steps; a few are listened to token
by token, the others are answered whole, so that clients cost little.

The gap at a swap is the longest between two tokens of one completion, as they arrive, from the publish until just after
the adoption: it holds fetching, decoding and proving, too. A gap in which a new prompt was read is left out. The
*extra* gap is that less the median of all gaps. Windows as long as those, laid where nothing is published, are measured
likewise: what engine, clients and machine do by themselves. What shares the cores is named with its CPU seconds; a
second run has a busy process beside it.
`--model 1gb` serves 541M weights, of which about 1.2 % change in a version (8 GB of memory).
`python -m benchmarks.weights.swap_client [--model laptop | 1gb] [--checkpoint DIR] [--swaps N]`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import report
from benchmarks.weights import stall as weights_stall
from etude.dashboard.run_view import RunView
from etude.dashboard.summary import quantile
from etude.errors import EngineError, EtudeError
from etude.inference import HttpEngine
from etude.loop.usage import Processes, pss_bytes
from etude.models import ModelConfig, Transformer, load_model, save_model
from etude.records import Completion, CompletionRequest, Sampling
from etude.stores import DirectoryStore
from etude.training.config import LiveWeights
from etude.training.exports import export
from etude.weights import Channel
from etude.weights.chain.history import pointer_key

PROMPT_TOKENS = 64
SAME_STEP_S = 0.02
"""Tokens of one step arrive within so long."""
LISTENERS, GRACE_S, READY_S, DEADLINE_S = 4, 0.1, 60.0, 600.0
CHANNEL = "policy"
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


@dataclass(frozen=True)
class Case:
    """A model to serve, and how it is served."""

    sizes: ModelConfig
    step_size: float  # standard deviation of what a version adds to each weight
    streams: int
    stream_tokens: int  # of a completion
    every_s: float  # from a publish to the next
    goal_ms: float  # extra gap, 99th percentile
    result: str


CASES = {
    "laptop": Case(ModelConfig(), 3e-5, 32, 256, 1.0, 50.0, "swap_client"),
    "1gb": Case(weights_stall.cases()["1gb"].sizes, 3e-7, 4, 900, 8.0, 100.0, "swap_client_1gb"),
}


@dataclass
class Seen:
    """What the clients saw. Times are of `time.time`, which other processes share."""

    arrivals: list[list[float]] = field(default_factory=list)  # of the tokens of each completion that was listened to
    published: list[float] = field(default_factory=list)  # when the pointer began to move to version 1, 2 ...
    completed: int = 0
    swapped: int = 0  # completions of two versions and more
    failed: list[str] = field(default_factory=list)
    over: bool = False


def prepare(store: Path, checkpoint: Path, num_swaps: int, step_size: float) -> tuple[int, list[bytes], float]:
    """In a process of its own: every version, durable; the vocabulary's size, the pointer to each version, and the
    share of weights that change in one."""
    torch.set_num_threads(1)
    model, blobs = load_model(checkpoint), DirectoryStore(store)
    channel, version, pointers, shares = Channel(blobs, CHANNEL), None, list[bytes](), list[float]()
    generator = torch.Generator().manual_seed(0)
    for step in range(num_swaps + 1):
        published = channel.publish(export(model, LiveWeights.BF16), step=step, parent=version, rollout_ids=())
        version = published.version
        shares.append(published.changed_share)
        pointers.append(blobs.get(pointer_key(CHANNEL)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=step_size)
    return model.config.vocab_size, pointers, float(np.median(shares[1:]))


async def publish(store: Path, pointers: Sequence[bytes], every_s: float, seen: Seen) -> None:
    """Move the pointer from version to version."""
    blobs = DirectoryStore(store)
    for before, after in itertools.pairwise(pointers):
        await asyncio.sleep(every_s)
        seen.published.append(time.time())
        if not await asyncio.to_thread(blobs.compare_and_swap, pointer_key(CHANNEL), before, after):
            raise SystemExit("somebody else moved the pointer")
    await asyncio.sleep(every_s)
    seen.over = True


def request(name: str, number: int, prompt: np.ndarray[Any, Any], num_tokens: int) -> CompletionRequest:
    """One completion that no later one continues."""
    return CompletionRequest(
        request_id=f"{name}/{number}",
        session_id=f"{name}/{number}",
        prompt_ids=prompt,
        sampling=Sampling(max_tokens=num_tokens, stop_token_ids=(), seed=number),
        keep_session=False,
        deadline_s=DEADLINE_S,
    )


async def stream(engine: HttpEngine, index: int, case: Case, vocab_size: int, seen: Seen) -> None:
    """Long completions, one after another; the first are of different lengths, so that they do not all end at once."""
    num_tokens = case.stream_tokens * (index + 1) // case.streams
    rng, number, ask = np.random.default_rng(index), 0, listen if index < LISTENERS else whole
    while not seen.over:
        prompt = rng.integers(8, vocab_size, PROMPT_TOKENS).astype(np.int32)
        number += 1
        try:
            done = await ask(engine, request(f"stream-{index}", number, prompt, num_tokens), seen)
        except EtudeError as error:
            seen.failed.append(str(error))
            continue
        seen.completed += 1
        seen.swapped += len({span.version for span in done.spans}) > 1
        if len(done.token_ids) != num_tokens:
            seen.failed.append(f"{done.request_id} has {len(done.token_ids)} tokens")
        num_tokens = case.stream_tokens


async def whole(engine: HttpEngine, asked: CompletionRequest, seen: Seen) -> Completion:
    """The completion, at its end."""
    return await engine.generate(asked)


async def listen(engine: HttpEngine, asked: CompletionRequest, seen: Seen) -> Completion:
    """The completion; when each of its tokens arrived is noted."""
    arrivals: list[float] = []
    seen.arrivals.append(arrivals)
    async with contextlib.aclosing(engine.stream(asked)) as parts:
        async for part in parts:
            if isinstance(part, Completion):
                return part
            arrivals.append(time.time())
    raise EngineError(f"{asked.request_id} ended without a completion", hint="see the engine's log")


async def load(url: str, vocab_size: int, case: Case, publishing: Any, seen: Seen) -> None:
    """Clients of one engine until everything is published."""
    async with HttpEngine(url) as engine, asyncio.TaskGroup() as clients:
        for index in range(case.streams):
            clients.create_task(stream(engine, index, case, vocab_size, seen))
        clients.create_task(publishing)


def gaps(arrivals: Sequence[Sequence[float]], windows: Sequence[tuple[float, float]]) -> list[float]:
    """For each window the longest gap between two tokens of one completion that touches it, in seconds. Gaps in which
    another completion's first token came are left out: they are the prefill of its prompt."""
    firsts = np.array(sorted(times[0] for times in arrivals if times))
    found = []
    for start, end in windows:
        worst = 0.0
        for times in map(np.asarray, arrivals):
            first, last = max(0, int(np.searchsorted(times, start)) - 1), int(np.searchsorted(times, end)) + 1
            before, after = times[first:last][:-1], times[first:last][1:]
            prefills = np.searchsorted(firsts, after + SAME_STEP_S) - np.searchsorted(firsts, before + SAME_STEP_S)
            worst = max(worst, float((after - before)[prefills == 0].max(initial=0.0)))
        found.append(worst)
    return found


def quiet(busy: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A window in each pause between two busy ones, as long as the busy one before it where there is room."""
    found = []
    for (start, end), (following, _) in itertools.pairwise(busy):
        length = min(end - start, following - end - GRACE_S)
        if length > 0:
            found.append((end, end + length))
    return found


def in_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """Quantiles of some durations, in milliseconds."""
    ordered = sorted(1e3 * s for s in seconds)
    found = {"p50": quantile(ordered, 0.5), "p99": quantile(ordered, 0.99), "max": quantile(ordered, 1.0)}
    return {name: None if value is None else round(value, 2) for name, value in found.items()}


def measure(checkpoint: Path, folder: Path, case: Case, *, num_swaps: int, busy: bool) -> dict[str, Any]:
    """Prepare, serve, load; then read what was seen against what the engine told."""
    store, ready = folder / "weights", folder / "ready"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as apart:
        made = apart.submit(prepare, store, checkpoint, num_swaps, case.step_size)
        vocab_size, pointers, changed_share = made.result()
    DirectoryStore(store).compare_and_swap(pointer_key(CHANNEL), pointers[-1], pointers[0])
    argv = [sys.executable, "-m", "etude.inference.server", "--checkpoint", str(checkpoint), "--store", str(store)]
    argv += ["--ready-file", str(ready), "--telemetry", str(folder / "events" / "engine.jsonl"), "--name", "engine"]
    argv += ["--context-tokens", str(PROMPT_TOKENS + case.stream_tokens)]
    seen = Seen()
    with contextlib.ExitStack() as running:
        engine = running.enter_context(
            subprocess.Popen(argv, stdout=sys.stderr, env=os.environ | {"OMP_NUM_THREADS": "1"})
        )
        running.callback(engine.terminate)
        url = _url(ready, engine)
        if busy:
            other = running.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            running.callback(other.kill)
        gc.freeze()  # the instrument's own collections are no gaps of the engine
        began, before = time.perf_counter(), cpu_s(engine.pid)
        asyncio.run(load(url, vocab_size, case, publish(store, pointers, case.every_s, seen), seen))
        shares = {name: round(s - before[name], 2) for name, s in cpu_s(engine.pid).items()}
        sharing = {"wall_s": round(time.perf_counter() - began, 2), "cpu_s": shares, **memory(engine.pid)}
    adopted = [event for event in RunView(folder).events("engine.adopt") if event["step"] > 0]
    return {
        "changed_share": round(changed_share, 5),
        **numbers(seen, adopted),
        "cores_are_shared_by": {**sharing, "busy_process": busy, **others()},
    }


def cpu_s(engine: int) -> dict[str, float]:
    """CPU seconds so far of all that takes part."""
    processes, times = Processes(), os.times()
    of_engine = processes.own_cpu_s(engine)
    follower_s = processes.cpu_s(engine) - of_engine
    return {"engine": of_engine, "follower": follower_s, "clients": times.user + times.system}


def others() -> dict[str, Any]:
    """How busy the machine was with other things, and what priority the scheduler gave this session over them."""
    group = Path("/proc/self/autogroup")
    nice = int(group.read_text().split()[-1]) if group.exists() else 0
    return {"load_average": round(os.getloadavg()[0], 1), "autogroup_nice": nice}


def memory(engine: int) -> dict[str, float]:
    """Proportional set sizes in MiB."""
    children = [pid for pid in Processes().tree(engine) if pid != engine]
    sizes = {"engine_pss_mib": pss_bytes([engine]), "follower_pss_mib": pss_bytes(children)}
    return {name: round(size / 2**20, 1) for name, size in sizes.items()}


def numbers(seen: Seen, adopted: Sequence[Any]) -> dict[str, Any]:
    """What the clients saw, laid over what the engine did. A version that was overtaken is no swap."""
    busy = [(seen.published[int(event["step"]) - 1], float(event["t"]) + GRACE_S) for event in adopted]
    every = np.concatenate([np.diff(times) for times in seen.arrivals])
    median_s = float(np.median(every))
    return {
        "num_swaps": len(adopted),
        "in_mid_generation": sum(event["num_running"] > 0 for event in adopted),
        "completions": seen.completed,
        "completions_of_several_versions": seen.swapped,
        "failed": len(seen.failed),
        "failures": seen.failed[:3],
        "gap_ms": {**in_ms(every.tolist()), "num": len(every)},
        "extra_gap_ms": in_ms([gap - median_s for gap in gaps(seen.arrivals, busy)]),
        "extra_gap_ms_without_swap": in_ms([gap - median_s for gap in gaps(seen.arrivals, quiet(busy))]),
        "engine_pause_ms": in_ms([event["pause_s"] for event in adopted]),
        "publish_to_adopted_ms": in_ms([end - GRACE_S - start for start, end in busy]),
    }


def _url(ready: Path, engine: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + READY_S
    while not ready.exists():
        if engine.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"waited for the engine to serve; exit code {engine.poll()}")
        time.sleep(0.05)
    return str(json.loads(ready.read_text())["url"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=CASES, default="laptop")
    parser.add_argument("--checkpoint", type=Path, help="default: the model's sizes, random weights")
    parser.add_argument("--swaps", type=int, default=50)
    args = parser.parse_args()
    case = CASES[args.model]
    torch.set_num_threads(1)
    found = {}
    for name, busy in ("alone", False), ("beside_a_busy_process", True):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            checkpoint = args.checkpoint or folder / "model"
            if args.checkpoint is None:
                save_model(Transformer(case.sizes, seed=0), checkpoint, dtype="f32")
            found[name] = measure(checkpoint, folder, case, num_swaps=args.swaps, busy=busy)
    report(case.result, {"streams": case.streams, "goal_extra_gap_ms_p99": case.goal_ms, **found})


if __name__ == "__main__":
    main()

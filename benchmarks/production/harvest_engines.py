"""Two real engines that serve production through the gateway, rollouts beside, and leases between them.

    python -m benchmarks.production.harvest_engines [--rounds 4] [--seconds 20]

Two processes of the reference engine follow a branch each of one store. In each round clients send production requests
to the gateway; rollouts fill all other slots, in the same engines (the tier of milliseconds). In the middle of a round
one engine is lent: it loads the version of the rollouts, serves them alone, and comes back (the tier of seconds).

- Hand-back of milliseconds: how much later the first token of a request comes when rollouts have all slots of the
  engine than when it is idle.
- Hand-back of seconds: from the decision until the engine is in production's fleet again, with rollouts in flight.
- Lost tokens: those that engines sampled for rollouts and production, less those in completions.

The times are wall time. Engines, gateway and clients share the cores with whatever else runs; `load` tells how much.
`benchmarks.production.harvest_clock` measures by CPU time, and compares with the simulator.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import torch
from tests.unit.harness.tokeniser import laptop_chat

from benchmarks.report import report
from etude.gateway import GatewayConfig, ServedModel, create_app, serving
from etude.harvest.harvester import Harvester
from etude.harvest.pool import LentEngines
from etude.inference import Fleet, HttpEngine
from etude.inference.config import EngineKind
from etude.inference.temporary_engine import temporary_engine
from etude.models import ModelConfig, Transformer, hf_views
from etude.models.checkpoint import save_model
from etude.records import CompletionRequest, Sampling, Version
from etude.records.completion import Traffic
from etude.stores import open_store
from etude.weights import Channel, Tensor
from etude.weights.chain import branches

MODEL = ModelConfig(
    vocab_size=384,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    expert_size=128,
    num_experts=8,
    top_k=2,
    context_tokens=1024,
)
SLOTS, NAMES = 6, ("engine-0", "engine-1")
BULK_PROMPT, BULK_SAMPLED = 64, 64
PROMPT = "Say what you see. " * 4
CHANGED = 0.02  # share of the weights that differ between the two versions


class Site:
    """Two engines, the fleets over them, and the gateway."""

    def __init__(self, engines: dict[str, HttpEngine], store: Any, versions: tuple[Version, Version], url: str) -> None:
        self.engines, self.store, (self.stable, self.newest), self.url = engines, store, versions, url
        self.production, self.rollouts = Fleet(engines), LentEngines()
        self.harvester = Harvester(self.production, self.rollouts, engines, self.move)
        self.http = httpx.AsyncClient(timeout=300)
        self.num_asked = 0
        self.delivered = 0  # tokens in completions

    async def move(self, name: str, version: Version) -> None:
        await asyncio.to_thread(branches.point, self.store, "policy", version, branch=name)

    def request(self, prompt_tokens: int, sampled_tokens: int, traffic: Traffic) -> CompletionRequest:
        self.num_asked += 1
        ids = np.random.default_rng(self.num_asked).integers(20, MODEL.vocab_size, prompt_tokens).astype(np.int32)
        return CompletionRequest(
            request_id=f"r{self.num_asked}",
            session_id=f"s{self.num_asked}",
            prompt_ids=ids,
            sampling=Sampling(max_tokens=sampled_tokens, stop_token_ids=(), seed=self.num_asked),
            keep_session=False,
            traffic=traffic,
            deadline_s=300.0,
        )

    async def rollout(self, policy: Any) -> int:
        done = await policy.complete(self.request(BULK_PROMPT, BULK_SAMPLED, Traffic.ROLLOUT))
        assert len(done.token_ids) == BULK_SAMPLED, len(done.token_ids)
        self.delivered += BULK_SAMPLED
        return BULK_SAMPLED

    async def counters(self, name: str) -> dict[str, float]:
        text = (await self.http.get(f"{self.engines[name].url}/metrics")).text
        found = re.findall(r"^etude_engine_(\w+?)(?:_total)?\{.*\} ([\d.e+-]+)$", text, re.M)
        return {key: float(value) for key, value in found}

    async def total(self, counter: str) -> float:
        return sum([(await self.counters(name))[counter] for name in NAMES])


@contextlib.asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    """Start everything."""
    model = Transformer(MODEL, seed=1)
    save_model(model, folder / "checkpoint", dtype="f32")
    views = {name: view.detach().numpy().view(np.uint32).ravel().copy() for name, view in hf_views(model).items()}
    shapes = {name: tuple(view.shape) for name, view in hf_views(model).items()}
    store, rng = open_store(folder / "store"), np.random.default_rng(1)
    channel = Channel(store)

    def publish(step: int, parent: Version | None) -> Version:
        tensors = {name: Tensor("f32", shapes[name], codes) for name, codes in views.items()}
        return channel.publish(tensors, step=step, parent=parent, rollout_ids=[]).version

    stable = publish(1, None)
    for codes in views.values():
        codes[rng.random(len(codes)) < CHANGED] ^= 1 << 10
    newest = publish(2, stable)
    chat, config = laptop_chat(), GatewayConfig(port=0)
    async with contextlib.AsyncExitStack() as stack:
        engines = {}
        for name in NAMES:
            branches.point(store, "policy", stable, branch=name)
            (folder / name).mkdir()
            argv = ["--name", name, "--store", str(folder / "store"), "--branch", name]
            argv += ["--max-sequences", str(SLOTS), "--context-tokens", "1024", "--device", "cpu"]
            made = temporary_engine(folder / "checkpoint", folder / name, *argv, kind=EngineKind.REFERENCE)
            engines[name] = (await stack.enter_async_context(made)).engine
        made = Site(engines, store, (stable, newest), "")
        served = ServedModel(made.production, chat, name="m", context_tokens=1024, config=config)
        made.url = await stack.enter_async_context(serving(create_app([served], config=config), config=config))
        yield made


async def product(here: Site, http: httpx.AsyncClient, tokens: int) -> float:
    """Ask the gateway as a client does, streaming. Returns the seconds to the first token."""
    asked, first, usage = time.perf_counter(), 0.0, {}
    body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens}
    body |= {"messages": [{"role": "user", "content": f"{PROMPT}{here.num_asked}"}]}
    here.num_asked += 1
    async with http.stream("POST", f"{here.url}/chat/completions", json=body, timeout=600) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter()
                usage = msgspec.json.decode(line[6:]).get("usage") or usage
    here.delivered += usage["completion_tokens"]
    return first - asked


async def mixed(here: Site, seconds: float, rate: float, seed: int) -> dict[str, Any]:
    """One round: production through the gateway, rollouts in all engines, and one lease in the middle."""
    rng, stop = np.random.default_rng(seed), asyncio.Event()

    async def filler(policy: Any) -> None:
        while not stop.is_set():
            await here.rollout(policy)

    fillers = [asyncio.ensure_future(filler(here.production)) for _ in range(SLOTS * len(NAMES))]
    lent = [asyncio.ensure_future(filler(here.rollouts)) for _ in range(SLOTS)]

    async def lender() -> None:
        await asyncio.sleep(seconds / 4)
        await here.harvester.lend(NAMES[1], here.newest)
        await asyncio.sleep(seconds / 2)
        await here.harvester.take_back(NAMES[1], here.stable)

    lending = asyncio.ensure_future(lender())
    async with httpx.AsyncClient() as http:
        working, begin, at = [], time.perf_counter(), 0.0
        while (at := at + rng.exponential(1 / rate)) < seconds:
            await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
            tokens = int(np.clip(rng.lognormal(np.log(40), 0.5), 4, 200))
            working.append(asyncio.ensure_future(product(here, http, tokens)))
        requests = await asyncio.gather(*working)
    await lending
    stop.set()
    await asyncio.gather(*fillers)
    if not all(task.done() for task in lent):  # the last rollouts of the pool wait for an engine
        await here.harvester.lend(NAMES[1], here.newest)
        await asyncio.wait_for(asyncio.gather(*lent), 600)
        await here.harvester.take_back(NAMES[1], here.stable)
    return {"requests": len(requests), "first_token_p50_s": round(float(np.median(requests)), 3)}


async def milliseconds(here: Site, probes: int) -> dict[str, Any]:
    """First tokens of single requests of production at one engine: idle, and with rollouts in all slots."""
    engine, times = here.engines[NAMES[0]], {"idle": list[float](), "full": list[float]()}
    before = (await here.counters(NAMES[0]))["rollouts_preempted"]

    async def probe(where: str) -> None:
        begin = time.perf_counter()
        done = await engine.generate(here.request(32, 1, Traffic.PRODUCTION))
        times[where].append(time.perf_counter() - begin)
        here.delivered += len(done.token_ids)

    for _ in range(4):  # alternate, since the load of the machine changes
        for _ in range(probes // 4):
            await probe("idle")
        stop = asyncio.Event()

        async def fill(stop: asyncio.Event = stop) -> None:
            while not stop.is_set():
                done = await engine.generate(here.request(BULK_PROMPT, BULK_SAMPLED, Traffic.ROLLOUT))
                here.delivered += len(done.token_ids)

        working = [asyncio.ensure_future(fill()) for _ in range(2 * SLOTS)]
        await asyncio.sleep(1.0)
        for _ in range(probes // 4):
            await probe("full")
        stop.set()
        await asyncio.gather(*working)
    idle, full = (1000 * np.array(times[name]) for name in ("idle", "full"))
    return {
        "probes": len(full),
        "preempted": (await here.counters(NAMES[0]))["rollouts_preempted"] - before,
        "idle_ms": [round(float(x), 2) for x in np.percentile(idle, [50, 99])],
        "full_ms": [round(float(x), 2) for x in np.percentile(full, [50, 99])],
        "hand_back_p50_ms": round(float(np.percentile(full, 50) - np.percentile(idle, 50)), 2),
        "hand_back_p99_ms": round(float(np.percentile(full, 99) - np.percentile(idle, 50)), 2),
    }


async def seconds_tier(here: Site, times: int) -> dict[str, Any]:
    """Lend an engine and take it back with rollouts in flight, several times."""
    first, stop = len(here.harvester.served_s), asyncio.Event()

    async def fill() -> None:
        while not stop.is_set():
            await here.rollout(here.rollouts)

    working = [asyncio.ensure_future(fill()) for _ in range(SLOTS + 2)]
    for _ in range(times):
        await here.harvester.lend(NAMES[1], here.newest)
        await asyncio.sleep(0.5)
        await here.harvester.take_back(NAMES[1], here.stable)
    stop.set()
    await here.harvester.lend(NAMES[1], here.newest)
    await asyncio.wait_for(asyncio.gather(*working), 300)
    await here.harvester.take_back(NAMES[1], here.stable)
    ended, served = here.harvester.ended_s[first:], here.harvester.served_s[first:]
    return {
        "times": len(served),
        "rollouts_ended_p50_p99_s": [round(float(x), 3) for x in np.percentile(ended, [50, 99])],
        "hand_back_p50_p99_s": [round(float(x), 3) for x in np.percentile(served, [50, 99])],
    }


async def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with site(Path(folder)) as here:
            load = [os.getloadavg()[0]]
            fast = await milliseconds(here, args.probes)
            print(fast, flush=True)
            slow = await seconds_tier(here, args.times)
            print(slow, flush=True)
            rounds = []
            for seed in range(args.rounds):
                rounds.append(await mixed(here, args.seconds, args.rate, seed))
                print(f"round {seed}: {rounds[-1]}", flush=True)
            load.append(os.getloadavg()[0])
            sampled = await here.total("tokens")
            return {
                "load": [round(one, 1) for one in load],
                "milliseconds": fast,
                "seconds": slow,
                "rounds": rounds,
                "rollouts_preempted": await here.total("rollouts_preempted"),
                "resumed_tokens": here.rollouts.num_resumed_tokens,
                "cancelled_tokens": here.rollouts.num_lost_tokens,
                "sampled_tokens": sampled,
                "lost_tokens": sampled - here.delivered,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a round")
    parser.add_argument("--rate", type=float, default=2.0, help="requests of production per second")
    parser.add_argument("--probes", type=int, default=200)
    parser.add_argument("--times", type=int, default=20, help="leases whose hand-back is measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report("harvest_engines", asyncio.run(run(args)))


if __name__ == "__main__":
    main()

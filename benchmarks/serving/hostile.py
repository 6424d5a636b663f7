"""Hostile clients of a served model: bodies of any shape, and clients that vanish.

The gateway of `etude serve`, with the built-in engine in a process of its own and a small model with random weights.

- *bodies*: `--requests` bodies of every dialect, which `tests/unit/gateway/test_fuzz.py` draws, from 8 clients.
  Counted: answers by dialect and status, and streams that end with an error of the server.
- *vanish*: `--clients` clients that ask for 400 tokens as a stream and close the connection: half before the first
  byte, half in the stream. Then the requests that still run or wait in the gateway and in the engine, and the tokens
  of KV memory that the engine has less than before.

`python -m benchmarks.serving.hostile [--requests 100000] [--clients 1000]`"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx
import torch
from tests.parity import chats
from tests.unit.gateway.sdk import MODEL
from tests.unit.gateway.test_fuzz import drawn

from benchmarks.report import report
from etude.gateway import GatewayConfig, ServedModel, create_app, serving
from etude.inference import EngineConfig
from etude.inference.fleet import Fleet
from etude.loop.serving import model_of_checkpoint, parts_of
from etude.models import ModelConfig, Transformer
from etude.models.checkpoint import save_model
from etude.seams import EngineInfo

CLIENTS, TOKENS, LIMIT_S, AT_ONCE = 8, 400, 120.0, 50
SIZES = ModelConfig(vocab_size=320, hidden_size=64, num_layers=2, expert_size=64, num_experts=4, context_tokens=2048)
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS},
    "/v1/responses": {"input": "hi", "max_output_tokens": TOKENS},
}


async def bodies(url: str, number: int) -> dict[str, Any]:
    """Send `number` random bodies. Count the answers by path and status, and the streams that end with an error."""
    chance, statuses, failed = random.Random(number), defaultdict[str, Counter[str]](Counter), 0
    left = iter(range(number))

    async def client() -> None:
        nonlocal failed
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
            for _ in left:
                path, data = drawn(chance)
                answer = await http.post(path, content=data, headers={"content-type": "application/json"})
                statuses[path][str(answer.status_code)] += 1
                failed += b"event: error" in answer.content or b"response.failed" in answer.content

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    all_statuses = sum(statuses.values(), Counter[str]())
    return {
        "requests": sum(all_statuses.values()),
        "statuses": {path: dict(sorted(found.items())) for path, found in sorted(statuses.items())},
        "answers_5xx": sum(n for status, n in all_statuses.items() if status >= "500"),
        "failed_streams": failed,
        "wall_s": round(time.perf_counter() - began, 1),
    }


async def vanish(url: str, number: int, served: ServedModel) -> dict[str, Any]:
    """Let the clients vanish, and wait until nothing runs or waits, at most `LIMIT_S`."""
    before, began, at = await _info(served), time.perf_counter(), httpx.URL(url)

    async def one(client: int) -> None:
        path = list(STREAMS)[client % len(STREAMS)]
        body = json.dumps({"model": MODEL, "stream": True, "temperature": 1.0} | STREAMS[path]).encode()
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(at.host, at.port)
            head = f"POST {path} HTTP/1.1\r\nhost: {at.host}\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            if client % 2:
                await reader.readuntil(b"data: ")
            writer.transport.abort()

    for start in range(0, number, AT_ONCE):
        await asyncio.gather(*(one(client) for client in range(start, min(number, start + AT_ONCE))))
    gone, after = time.perf_counter(), await _info(served)
    while served.num_running + served.num_waiting + after.num_running + after.num_waiting:
        if time.perf_counter() - gone > LIMIT_S:
            break
        await asyncio.sleep(0.05)
        after = await _info(served)
    return {
        "clients": number,
        "leaked_in_gateway": served.num_running + served.num_waiting,
        "leaked_in_engine": after.num_running + after.num_waiting,
        "kv_tokens_lost": before.kv_tokens_free - after.kv_tokens_free,
        "wall_s": round(gone - began, 1),
        "all_free_after_s": round(time.perf_counter() - gone, 2),
    }


async def _info(served: ServedModel) -> EngineInfo:
    assert isinstance(served.policy, Fleet)
    return await served.policy.engines["engine"].info(deadline_s=LIMIT_S)


async def measure(checkpoint: Path, num_bodies: int, num_clients: int) -> dict[str, Any]:
    """Serve the checkpoint, and measure both."""
    config = GatewayConfig(port=0, max_running=20, max_waiting=2000)
    source = parts_of(checkpoint, MODEL)._replace(engine=EngineConfig(max_sequences=16))
    async with (
        model_of_checkpoint(source, gateway=config) as served,
        serving(create_app([served], config=config), config=config) as url,
    ):
        base = url.removesuffix("/v1")
        return {"bodies": await bodies(base, num_bodies), "vanish": await vanish(base, num_clients, served)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=1_000)
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        assets = chats.make(Path(folder) / "assets", "qwen")
        save_model(Transformer(SIZES), Path(folder) / MODEL, dtype="f32", assets=assets)
        report("hostile", asyncio.run(measure(Path(folder) / MODEL, args.requests, args.clients)))


if __name__ == "__main__":
    main()

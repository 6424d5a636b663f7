"""What the gateway adds to a call of the engine: ``python -m benchmarks.gateway``.

A server process has a policy that answers after 30 ms without a model. Clients in this process send conversations over
HTTP, one request at a time each. The policy tells how long it took, so `added_ms` is exactly the rest: HTTP, JSON,
finding the turn, rendering and tokenising what is new, and the response. It includes the work of the client. `cpu_ms`
is the CPU time of the server process for a call.

- `talks`: 8 clients, each with conversations of 50 turns and bodies of up to 64 KiB.
- `long`: one conversation of 500 turns and 100,000 tokens; its first 20 turns and its last 20.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.report import report

ANSWER_S = 0.03
PIECE = "the weather in Paris is sunny and mild, "
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


async def serve() -> None:
    """Serve until standard input has a line; then print the CPU seconds of this process, and so on."""
    from tests.parity import chats

    from etude.gateway import GatewayConfig, ServedModel, create_app, serving
    from etude.harness import ChatFormat
    from etude.records import Completion, CompletionRequest
    from etude.testing import ScriptedEngine

    with tempfile.TemporaryDirectory() as folder:
        chat = ChatFormat.load(chats.make(Path(folder), "qwen"))
    said = [*chat.encode("look again").tolist(), chat.stop_token_ids[0]]

    class Policy:
        async def complete(self, request: CompletionRequest) -> Completion:
            began = time.perf_counter()
            await asyncio.sleep(ANSWER_S)
            done = await ScriptedEngine([said], context_tokens=1 << 20).generate(request)
            fields = {name: getattr(done, name) for name in done.__struct_fields__}
            return Completion(**{**fields, "num_cached": int(1e6 * (time.perf_counter() - began))})

    config = GatewayConfig(port=0, drain_s=0.0, max_body_bytes=1 << 24)
    app = create_app([ServedModel(Policy(), chat, name="m", context_tokens=1 << 19, config=config)], config=config)
    async with serving(app, config=config) as url:
        print(url, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(time.process_time(), flush=True)


class Server:
    """The server process: its URL, and its CPU time in seconds."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self._process, self.url = process, url

    @classmethod
    async def start(cls) -> Server:
        pipe = asyncio.subprocess.PIPE
        argv = ["-m", "benchmarks.gateway", "--serve"]
        process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        while not (line := (await process.stdout.readline()).decode().strip()).startswith("http"):
            assert process.returncode is None, "the server has ended"
        return cls(process, line)

    async def cpu_s(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return float(await self._process.stdout.readline())

    async def stop(self) -> None:
        self._process.kill()
        await self._process.wait()


async def talk(session: aiohttp.ClientSession, url: str, name: str, turns: int, size: int) -> list[float]:
    """Hold one conversation with new messages of `size` characters. Returns the added milliseconds of each turn."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are {name}."}]
    added = []
    for turn in range(turns):
        messages.append({"role": "user", "content": (f"{turn}: " + PIECE * (size // len(PIECE) + 1))[:size]})
        body = json.dumps({"model": "m", "messages": messages, "tools": TOOLS, "max_tokens": 64}).encode()
        began = time.perf_counter()
        async with session.post(
            f"{url}/chat/completions", data=body, headers={"content-type": "application/json"}
        ) as r:
            answer = json.loads(await r.read())
        wall_s = time.perf_counter() - began
        assert r.status == 200, answer
        added.append(1e3 * wall_s - answer["usage"]["prompt_tokens_details"]["cached_tokens"] / 1e3)
        messages.append(answer["choices"][0]["message"])
    return added


def percentiles(added: list[float]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(added, p)), 3) for p in (50, 90, 99)}


async def measure(clients: int, talks: int) -> dict[str, Any]:
    server = await Server.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            await talk(session, server.url, "warm", 20, 1000)

            async def client(number: int) -> list[float]:
                parts = [await talk(session, server.url, f"{number}.{i}", 50, 1200) for i in range(talks)]
                return [one for part in parts for one in part]

            before = await server.cpu_s()
            found = await asyncio.gather(*(client(i) for i in range(clients)))
            cpu_ms = 1e3 * (await server.cpu_s() - before)
            added = [one for part in found for one in part]
            shorts = {"num_calls": len(added), "added_ms": percentiles(added), "cpu_ms": round(cpu_ms / len(added), 3)}
            long = await talk(session, server.url, "long", 500, 780)
            first, last = sorted(long[:20])[10], sorted(long[-20:])[10]
            longs = {"first_ms": round(first, 3), "last_ms": round(last, 3), "ratio": round(last / first, 2)}
    finally:
        await server.stop()
    return {"talks": {"clients": clients, "turns": 50, **shorts}, "long": longs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="be the server")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--talks", type=int, default=3, help="conversations of each client, one after the other")
    args = parser.parse_args()
    if args.serve:
        from etude.loop import event_loop

        event_loop.run(serve())
        return
    report("gateway", asyncio.run(measure(args.clients, args.talks)))


if __name__ == "__main__":
    main()

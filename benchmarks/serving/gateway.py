"""What the gateway adds to a call of the engine: ``python -m benchmarks.serving.gateway``.

Server, engine and clients are processes of their own, which share the cores. So latencies have the waits for each other
in them. The engine has no model and answers after 30 ms. Clients send whole conversations over HTTP with etude's small
client, one request at a time each; all bodies are made before the first is sent. No two conversations have a message in
common, but all have the same tools. `added_ms` is the time of a request less the median time of a call of the engine
without the server between. `cpu_ms` is the CPU time of the server process for a call, `core_wait_ms` the time in which
its threads were ready to run and waited for a core. With one client the CPU time of each call is read: `cpu_p20_ms` and
`cpu_p50_ms` say what a call takes while nothing else uses the caches and the other half of the core, also on a busy
machine.

- `dialects`: 8 clients, conversations of 50 turns and bodies of up to 64 KiB. The engine is a policy in the server's
  process, so this is the gateway alone. `one_client`: the same with a single client, so no request waits for another.
- `http_only`: the same requests to a server that reads the body and answers with a fixed text: what HTTP, the clients
  and the machine take in all of these numbers, without any gateway.
- `tokens_apart`: streamed answers of the chat dialect whose tokens come one by one, each with a wake-up, an event and
  a write of its own; in `dialects` they come at once, and are sent as one event.
- `first_turn`: the first request of a conversation, whose tools other conversations have had; one client.
- `long`: one conversation of 500 turns and 100,000 tokens in each dialect: the first 20 turns, and the last 20.
- `rollout`: the chat dialect with the endpoints of one rollout, through which a program in training asks the policy.
- `over_http`: the chat dialect with an engine in another process, as `etude serve` runs it; and LiteLLM's proxy before
  the same engine. ``--litellm`` is its command in a virtual environment of its own; without it, it is not measured.

``--before`` is the `src` of another checkout, to be measured in turns with this one."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.report import HOME, report
from etude.http_client import HttpClient
from etude.loop import event_loop

ANSWER_S = 0.03
APART = 1  # the seed of requests whose tokens come one by one
START_S, SILENCE_S = 120.0, 60.0
TURNS, NEW_CHARS, LONG_TURNS, LONG_CHARS = 50, 1100, 500, 780
PIECE = "the weather in Paris is sunny and mild, "
SAID = "look again"
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "description": PIECE * 2} for name in ("path", "text", "reason")},
    "required": ["path"],
}
TOOLS = [{"name": f"tool{i}", "description": PIECE * 3} for i in range(8)]
SHAPES: dict[str, tuple[str, str, list[dict[str, Any]], dict[str, Any]]] = {
    "chat": (
        "chat/completions",
        "messages",
        [{"type": "function", "function": {**tool, "parameters": SCHEMA}} for tool in TOOLS],
        {"max_tokens": 64},
    ),
    "messages": ("messages", "messages", [{**tool, "input_schema": SCHEMA} for tool in TOOLS], {"max_tokens": 64}),
    "responses": (
        "responses",
        "input",
        [{"type": "function", **tool, "parameters": SCHEMA} for tool in TOOLS],
        {"max_output_tokens": 64},
    ),
}
"""By dialect: the path, the field of the conversation, the tools, and further parameters."""


async def serve(engine: str | None) -> None:
    """Serve until killed. Prints the URL, and the seconds of a call of the policy alone. `engine`: the URL of one."""
    from etude.gateway import GatewayConfig, ServedModel, create_app, serving
    from etude.inference import Fleet, HttpEngine

    chat, slow = slow_policy()
    policy: Any = slow if engine is None else Fleet({"engine": HttpEngine(engine)})
    config = GatewayConfig(port=0, drain_s=0.0, max_body_bytes=1 << 24)
    app = create_app([ServedModel(policy, chat, name="m", context_tokens=1 << 19, config=config)], config=config)
    async with serving(app, config=config) as url:
        print(url, await direct_time(), flush=True)
        await asyncio.Event().wait()


async def serve_endpoints() -> None:
    """Serve the endpoints of one rollout until killed. Prints their URL, and the seconds of a call of the policy
    alone."""
    from tests.unit.harness.test_tools import TASK

    from etude.harness import Episode, HarnessConfig, RequestOptions, standard_tools
    from etude.rollouts.attribution import Attribution
    from etude.rollouts.endpoints import serve_rollout
    from etude.testing import MemoryMachine

    chat, policy = slow_policy()
    episode = Episode(
        TASK,
        MemoryMachine({}),
        policy=policy,
        chat=chat,
        tools=standard_tools(),
        limits=HarnessConfig(turn_tokens=64, context_tokens=1 << 19, max_turns=10_000, rollout_deadline_s=3600),
        options=RequestOptions(session_id="rollout", seed=1),
    )
    asked = Attribution(episode, log=lambda line: print(line, file=sys.stderr))
    async with serve_rollout(episode, asked, None, log=lambda line: print(line, file=sys.stderr)) as (url, _):
        print(f"{url}/v1", await direct_time(), flush=True)
        await asyncio.Event().wait()


def slow_policy() -> tuple[Any, Any]:
    """A chat format, and a policy that answers after `ANSWER_S`."""
    from etude.records import Completion, CompletionRequest

    chat, complete = fake_engine()

    class Policy:
        async def complete(self, request: CompletionRequest) -> Completion:
            await asyncio.sleep(ANSWER_S)
            return complete(request)

        async def stream(self, request: CompletionRequest) -> AsyncGenerator[list[int] | Completion]:
            done = complete(request)
            apart_s = ANSWER_S / len(done.token_ids) if request.sampling.seed == APART else 0.0
            await asyncio.sleep(ANSWER_S if not apart_s else 0.0)
            for token in done.token_ids.tolist():
                if apart_s:
                    await asyncio.sleep(apart_s)
                yield [token]
            yield done

    return chat, Policy()


async def direct_time() -> float:
    """Return the seconds that the engine takes for a call in this process."""
    waits = []
    for _ in range(20):
        began = time.perf_counter()
        await asyncio.sleep(ANSWER_S)
        waits.append(time.perf_counter() - began)
    return float(np.median(waits))


async def serve_engine() -> None:
    """Serve an engine without a model, in its own protocol and that of chat completions, until killed."""
    from etude.http_server import bind, run_http_server
    from etude.inference.wire import GENERATE, MSGPACK
    from etude.records import CompletionRequest
    from etude.records.wire import pack, unpack

    _, complete = fake_engine()
    message = {"role": "assistant", "content": SAID}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    fixed = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": choices, "usage": usage}
    answer = json.dumps(fixed).encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            part = await receive()
            body, more = body + part["body"], part.get("more_body", False)
        await asyncio.sleep(ANSWER_S)
        own = scope["path"] == GENERATE
        found = pack(complete(unpack(body, CompletionRequest))) if own else answer
        headers = [(b"content-type", MSGPACK.encode() if own else b"application/json")]
        headers.append((b"content-length", str(len(found)).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": found})

    async with run_http_server(app, bind("127.0.0.1", 0), name="the engine") as url:
        print(url, await direct_time(), flush=True)
        await asyncio.Event().wait()


def fake_engine() -> tuple[Any, Any]:
    """A chat format, and a function from a request to its completion, which always says the same."""
    from tests.parity import chats

    from etude.harness import ChatFormat
    from etude.records import Completion, CompletionRequest, VersionSpan
    from etude.records.completion import StopReason
    from etude.testing import make_version

    with tempfile.TemporaryDirectory() as folder:
        chat = ChatFormat.load(chats.make(Path(folder), "qwen"))
    ids = np.array([*chat.encode(SAID).tolist(), chat.stop_token_ids[0]], np.int32)
    logprobs, routes = np.full(len(ids), -0.5, np.float32), np.zeros((0, 2, 2), np.uint8)
    spans = (VersionSpan(make_version(0), len(ids)),)

    def complete(request: CompletionRequest) -> Completion:
        return Completion(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=logprobs,
            routes=routes,
            routes_start=len(request.prompt_ids) + len(ids) - 1,
            spans=spans,
            stop_reason=StopReason.STOP,
            engine="engine",
        )

    return chat, complete


class Server:
    """A server process: its URL, and the times of its threads. `direct_s`: seconds of a call of its engine alone."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, direct_s: float) -> None:
        self._process, self.url, self.direct_s = process, url, direct_s

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, *argv: str, before: str | None = None) -> AsyncIterator[Server]:
        """Run this file as a server while the block runs. `before`: the `src` of another checkout."""
        paths = [str(HOME), *([before] if before else [str(HOME / "src")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths[::-1])}
        command = [sys.executable, "-m", "benchmarks.serving.gateway", *argv]
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=asyncio.subprocess.PIPE, cwd=HOME
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(START_S):
                while not (line := (await process.stdout.readline()).decode()).startswith("http"):
                    assert line, "the server has ended"
            url, direct_s = line.split()
            yield cls(process, url, float(direct_s))
        finally:
            process.kill()
            await process.wait()

    @classmethod
    @contextlib.asynccontextmanager
    async def litellm(cls, command: str, engine: str) -> AsyncIterator[Server]:
        """Run LiteLLM's proxy before an engine: one worker, no database, no callbacks, errors only in the log."""
        with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            parameters = {"model": "openai/m", "api_base": f"{engine}/v1", "api_key": "none"}
            settings = {"set_verbose": False, "telemetry": False, "callbacks": [], "request_timeout": 60}
            config = {"model_list": [{"model_name": "m", "litellm_params": parameters}], "litellm_settings": settings}
            (Path(folder) / "config.yaml").write_text(json.dumps(config))
            quiet = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            quiet["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # it checks no keys, as etude here
            argv = [command, "--config", f"{folder}/config.yaml", "--host", "127.0.0.1", "--port", str(port)]
            log = await asyncio.to_thread(open, f"{folder}/log", "wb")
            process = await asyncio.create_subprocess_exec(
                *argv, "--num_workers", "1", env={**os.environ, **quiet}, stdout=log, stderr=log
            )
            try:
                async with aiohttp.ClientSession() as session, asyncio.timeout(START_S):
                    while not await answers(session, f"http://127.0.0.1:{port}/health/liveliness"):
                        assert process.returncode is None, (Path(folder) / "log").read_text()[-2000:]
                        await asyncio.sleep(0.5)
                yield cls(process, f"http://127.0.0.1:{port}/v1", 0.0)
            finally:
                log.close()
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def times_ms(self) -> np.ndarray[Any, Any]:
        """Return the milliseconds that its threads have run, and those that they have waited for a core."""
        found = np.zeros(2)
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(number) / 1e6 for number in (thread / "schedstat").read_text().split()[:2]]
        return found


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as r:
            return r.status == 200
    except aiohttp.ClientError:
        return False


def bodies(name: str, dialect: str, turns: int, new_chars: int = NEW_CHARS, **options: Any) -> Iterator[bytes]:
    """Yield the requests of one conversation, each of which has a new message of `new_chars` characters."""
    _, field, tools, parameters = SHAPES[dialect]
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"You speak with {name}."}]
    for turn in range(turns):
        text = f"{name} {turn}: " + PIECE * (new_chars // len(PIECE) + 1)
        messages.append({"role": "user", "content": text[:new_chars]})
        yield json.dumps({"model": "m", field: messages, "tools": tools, **parameters, **options}).encode()
        messages.append({"role": "assistant", "content": SAID})


async def talk(
    client: HttpClient, server: Server, dialect: str, requests: Iterable[bytes], *, alone: bool = True
) -> list[tuple[float, float]]:
    """Hold one conversation. Returns of each turn the milliseconds, and the CPU milliseconds of the server meanwhile.

    `alone`: whether no other client is there. With others these CPU times are 0, since reading them takes time."""
    found, path = [], f"/{SHAPES[dialect][0]}"
    for body in requests:
        before, began = server.times_ms() if alone else np.zeros(2), time.perf_counter()
        async with client.request("POST", path, body, silence_s=SILENCE_S) as r:
            answer = await r.read()
        wall_ms = 1e3 * (time.perf_counter() - began)
        found.append((wall_ms, float((server.times_ms() - before)[0]) if alone else 0.0))
        assert r.status == 200, answer
    return found


@contextlib.contextmanager
def client_of(server: Server) -> Iterator[HttpClient]:
    client = HttpClient(server.url, {"content-type": "application/json"})
    try:
        yield client
    finally:
        client.close()


def percentiles(times: np.ndarray[Any, Any], direct_ms: float) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(times, p)) - direct_ms, 3) for p in (50, 90, 99)}


async def talks(
    server: Server, clients: int, num: int, dialect: str = "chat", turns: int = TURNS, **options: Any
) -> dict[str, Any]:
    """Measure the requests of many clients with `num` conversations each."""
    with client_of(server) as http:
        await talk(http, server, dialect, bodies(f"warm {time.time_ns()}", dialect, turns, **options))
        names = [[f"{number}.{i} of {time.time_ns()}" for i in range(num)] for number in range(clients)]
        asked = [[list(bodies(name, dialect, turns, **options)) for name in of] for of in names]  # before any is timed

        async def client(number: int) -> list[tuple[float, float]]:
            await asyncio.sleep(number * ANSWER_S / clients)
            parts = [await talk(http, server, dialect, one, alone=clients == 1) for one in asked[number]]
            return [one for part in parts for one in part]

        before = server.times_ms()
        found = [one for part in await asyncio.gather(*(client(i) for i in range(clients))) for one in part]
        cpu_ms, wait_ms = (server.times_ms() - before) / len(found)
        walls, cpus = np.array(found).T
        added_ms = percentiles(walls, 1e3 * server.direct_s)
        each = {f"cpu_p{p}_ms": round(float(np.percentile(cpus, p)), 3) for p in (20, 50) if clients == 1}
        return {"added_ms": added_ms, "cpu_ms": round(cpu_ms, 3), "core_wait_ms": round(wait_ms, 3), **each}


async def alone(servers: Mapping[str, Server], clients: int, num: int, *, quick: bool) -> dict[str, dict[str, Any]]:
    """Measure gateways with the policy in their processes, in turns. Returns the results by the name of the server.

    `quick`: without the parts of one client."""
    found: dict[str, dict[str, Any]] = {
        name: {"dialects": {}, "one_client": {}, "first_turn": {}, "long": {}} for name in servers
    }
    for dialect in SHAPES:
        for stream in (False, True):
            kind = f"{dialect}, {'streamed' if stream else 'whole'}"
            for part, number in (("dialects", clients), ("one_client", 1))[: 1 if quick else 2]:
                for name, server in servers.items():
                    found[name][part][kind] = await talks(server, number, num, dialect, stream=stream)
        for name, server in servers.items() if not quick else ():
            found[name]["first_turn"][dialect] = await talks(server, 1, TURNS, dialect, turns=1)
    for name, server in servers.items():
        found[name]["tokens_apart"] = await talks(server, clients, num, "chat", stream=True, seed=APART)
    for dialect in SHAPES if not quick else ():
        for name, server in servers.items():
            with client_of(server) as http:
                requests = bodies(f"long {time.time_ns()}", dialect, LONG_TURNS, LONG_CHARS)
                turns = np.array(await talk(http, server, dialect, requests))
                first, last = np.median(turns[:20], 0), np.median(turns[-20:], 0)
                first[0], last[0] = first[0] - 1e3 * server.direct_s, last[0] - 1e3 * server.direct_s
                found[name]["long"][dialect] = {
                    "first_ms": round(float(first[0]), 3),
                    "last_ms": round(float(last[0]), 3),
                    "ratio": round(float(last[0] / first[0]), 2),
                    "first_cpu_ms": round(float(first[1]), 3),
                    "last_cpu_ms": round(float(last[1]), 3),
                    "cpu_ratio": round(float(last[1] / first[1]), 2),
                }
    return found


async def over_http(clients: int, num: int, before: str | None, litellm: str | None) -> dict[str, Any]:
    """Measure the gateway before an engine in another process, and LiteLLM's proxy before the same."""
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Server.of("--engine"))
        servers = {"etude": await stack.enter_async_context(Server.of("--serve", engine.url))}
        if before is not None:
            servers["before"] = await stack.enter_async_context(Server.of("--serve", engine.url, before=before))
        if litellm is not None:
            servers["litellm"] = await stack.enter_async_context(Server.litellm(litellm, engine.url))
        plain = (await talks(plain_http(engine, 0.0), clients, num))["added_ms"]
        found: dict[str, Any] = {"direct_ms": plain, "litellm": "not measured"}
        for name, server in servers.items():
            server.direct_s = plain["p50"] / 1e3
            found[name] = await talks(server, clients, num)
    return found


async def rollout(clients: int, num: int) -> dict[str, Any]:
    """Measure the endpoints of a rollout with the policy in their process."""
    async with Server.of("--rollout") as server:
        return {"one_client": await talks(server, 1, num), "dialects": await talks(server, clients, num)}


async def http_only(clients: int, num: int) -> dict[str, Any]:
    """Measure a server that only reads a request and answers it after the time of the engine."""
    async with Server.of("--engine") as engine:
        server = plain_http(engine, engine.direct_s)
        return {"one_client": await talks(server, 1, num), "dialects": await talks(server, clients, num)}


def plain_http(engine: Server, direct_s: float) -> Server:
    """Return the engine as the server that clients ask for chat completions."""
    return Server(engine._process, f"{engine.url}/v1", direct_s)


async def measure(clients: int, num: int, before: str | None, litellm: str | None, *, quick: bool) -> Mapping[str, Any]:
    plain = await http_only(clients, num)
    async with contextlib.AsyncExitStack() as stack:
        servers = {"etude": await stack.enter_async_context(Server.of("--serve"))}
        if before is not None:
            servers["before"] = await stack.enter_async_context(Server.of("--serve", before=before))
        found = await alone(servers, clients, num, quick=quick)
    http = await over_http(clients, num, before, litellm)
    now = {"http_only": plain, **found.pop("etude"), **found, "rollout": await rollout(clients, num), "over_http": http}
    return {"clients": clients, "turns": TURNS, "cores": len(os.sched_getaffinity(0)), **now}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs="?", const="", metavar="ENGINE", help="be the gateway")
    parser.add_argument("--engine", action="store_true", help="be the engine")
    parser.add_argument("--rollout", action="store_true", help="be the endpoints of a rollout")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--talks", type=int, default=2, help="conversations of each client, one after the other")
    parser.add_argument(
        "--quick", action="store_true", help="only `dialects`, `tokens_apart`, `rollout` and `over_http`"
    )
    parser.add_argument("--before", metavar="SRC", help="the `src` of another checkout")
    parser.add_argument("--litellm", metavar="COMMAND", help="LiteLLM's proxy in a virtual environment of its own")
    args = parser.parse_args()
    if args.serve is not None or args.engine or args.rollout:
        served = serve_engine() if args.engine else serve_endpoints() if args.rollout else serve(args.serve or None)
        event_loop.run(served)
        return
    report("gateway", event_loop.run(measure(args.clients, args.talks, args.before, args.litellm, quick=args.quick)))


if __name__ == "__main__":
    main()

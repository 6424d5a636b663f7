"""An engine's HTTP API, byte for byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import aiohttp
import numpy as np
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.lifespan.off import LifespanOff

from etude.errors import EngineError
from etude.inference import EngineGone, HttpEngine, MalformedRequest, Unauthorised
from etude.inference.app import build_app
from etude.inference.engine import ReferenceEngine
from etude.inference.errors import from_http
from etude.records import Completion, CompletionRequest
from etude.records.wire import from_json, pack, to_json, unpack

from .helpers import ask, engine

Story = Callable[[ReferenceEngine, str, aiohttp.ClientSession], Awaitable[None]]


def serve(story: Story, token: str | None = None) -> None:
    async def run() -> None:
        async with asyncio.timeout(300), engine() as served:
            config = uvicorn.Config(build_app(served, token=token), ws="none", port=0, log_level="critical")
            server = uvicorn.Server(config)
            config.load()
            server.lifespan = LifespanOff(config)
            await server.startup()
            url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            async with aiohttp.ClientSession() as session:
                await story(served, url, session)
            await server.shutdown()

    asyncio.run(run())


def test_json_and_msgpack_say_the_same() -> None:
    async def story(served: ReferenceEngine, url: str, session: aiohttp.ClientSession) -> None:
        request, where = ask("r", 20, 8, keep_session=False), url + "/inference/v1/generate"
        async with session.post(where, data=pack(request), headers={"content-type": "application/msgpack"}) as answer:
            packed = unpack(await answer.read(), Completion)
        async with session.post(where, data=to_json(request), headers={"content-type": "application/json"}) as answer:
            assert answer.content_type == "application/json"
            plain = from_json(await answer.read(), Completion)
        assert np.array_equal(packed.token_ids, plain.token_ids)
        assert np.array_equal(packed.logprobs, plain.logprobs)
        assert np.array_equal(packed.routes, plain.routes)

    serve(story)


def test_malformed_bytes_are_400_with_the_three_parts_of_an_error() -> None:
    async def story(served: ReferenceEngine, url: str, session: aiohttp.ClientSession) -> None:
        bodies = [b"", b"\xc1", b"null", pack({"request_id": "r"}), pack(ask("r"))[:-3], b"\x81" * 5000, b"[" * 5000]
        bodies.append(b"\0" * (1 << 20))
        for path in ("/inference/v1/generate", "/adopt", "/verify"):
            for body in bodies:
                for kind in ("application/json", "application/msgpack"):
                    async with session.post(url + path, data=body, headers={"content-type": kind}) as answer:
                        said = json.loads(await answer.read())
                        assert answer.status == 400
                        assert said["kind"] == "malformed"
                        assert said["what"]
                        assert said["hint"]

    serve(story)


def test_mutated_requests_are_served_or_refused_and_never_break_the_engine() -> None:
    good = pack(ask("r", 20, 4, deadline_s=5.0))

    async def story(served: ReferenceEngine, url: str, session: aiohttp.ClientSession) -> None:
        random = np.random.default_rng(0)
        for _ in range(150):
            body = bytearray(good)
            for place in random.integers(0, len(body), random.integers(1, 4)):
                body[place] = random.integers(0, 256)
            async with session.post(url + "/inference/v1/generate", data=bytes(body)) as answer:
                assert answer.status in (200, 400, 409, 413, 503)
                await answer.read()
        assert served.alive

    serve(story)


@given(st.binary(max_size=300), st.integers(100, 599))
@settings(max_examples=50)
def test_an_answer_of_any_bytes_becomes_an_engine_error(body: bytes, status: int) -> None:
    assert isinstance(from_http(status, body, engine="e"), EngineError)


def test_every_post_needs_the_token_and_no_get_does() -> None:
    async def story(served: ReferenceEngine, url: str, session: aiohttp.ClientSession) -> None:
        async with HttpEngine(url) as stranger, HttpEngine(url, token="right") as known:
            for call in (stranger.pause, stranger.resume, lambda: stranger.verify([1, 2])):
                with pytest.raises(Unauthorised):
                    await call()
            with pytest.raises(Unauthorised):
                await stranger.adopt(0, deadline_s=1.0)
            with pytest.raises(Unauthorised):
                await stranger.generate(ask("r"))
            assert (await stranger.info()).name == "engine"
            assert len((await known.generate(ask("r"))).token_ids) == 8

    serve(story, token="right")


def test_a_caller_that_goes_away_frees_the_slot() -> None:
    async def story(served: ReferenceEngine, url: str, session: aiohttp.ClientSession) -> None:
        await served.pause()
        post = asyncio.ensure_future(session.post(url + "/inference/v1/generate", data=pack(ask("r", 10, 500))))
        while not (await served.info()).num_waiting:  # noqa: ASYNC110 - seen from outside
            await asyncio.sleep(0.001)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
        while (await served.info()).num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert served.counters.failed == 1

    serve(story)


def test_health_is_503_once_the_stepping_thread_is_dead() -> None:
    async def story(served: ReferenceEngine, url: str, session: aiohttp.ClientSession) -> None:
        async with session.get(url + "/health") as answer:
            assert answer.status == 200
        await asyncio.to_thread(served.close)
        async with session.get(url + "/health") as answer:
            assert answer.status == 503
            assert json.loads(await answer.read())["well"] is False

    serve(story)


def test_metrics_are_prometheus_lines() -> None:
    async def story(served: ReferenceEngine, url: str, session: aiohttp.ClientSession) -> None:
        await served.generate(ask("r", 10, 8))
        async with session.get(url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        assert 'etude_engine_tokens_total{engine="engine"} 8' in lines
        assert 'etude_engine_version_step{engine="engine"} 0' in lines
        assert all(line.startswith("# TYPE etude_engine_") or " " in line for line in lines)

    serve(story)


def test_an_unreachable_engine_is_gone_and_another_server_is_an_error() -> None:
    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async def story() -> None:
        server = await asyncio.start_server(stranger, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with HttpEngine(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(EngineError, match="not a EngineInfo"):
                await client.info()
            server.close()
            await server.wait_closed()
            with pytest.raises(EngineGone, match="no engine answers"):
                await client.info()

    asyncio.run(story())


def test_a_request_that_msgpack_can_say_and_no_engine_can_serve_is_malformed_at_the_client_too() -> None:
    async def story(served: ReferenceEngine, url: str, session: aiohttp.ClientSession) -> None:
        async with HttpEngine(url) as client:
            with pytest.raises(MalformedRequest, match="token ids"):
                await client.generate(ask("r", np.array([10**6], np.int32)))

    serve(story)


def test_a_request_survives_the_wire() -> None:
    request = ask("r", 20, 8, pin_step=3, routes_from=4)
    again = unpack(pack(request), CompletionRequest)
    assert np.array_equal(again.prompt_ids, request.prompt_ids)
    assert (again.pin_step, again.routes_from, again.sampling) == (3, 4, request.sampling)

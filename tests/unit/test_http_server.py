"""Limits of the HTTP servers: idle connections are closed, and large requests are refused before the app sees them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from etude.errors import ConfigError
from etude.http_server import bind, run_http_server

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"


class App:
    """What it was asked, and what became of that."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        names = {"/": self.hello, "/much": self.much, "/flood": self.flood}
        self.app = Starlette(routes=[Route(path, handler) for path, handler in names.items()])

    async def hello(self, request: Request) -> Response:
        return PlainTextResponse("hello")

    async def much(self, request: Request) -> Response:
        return Response(os.urandom(8 << 20))

    async def flood(self, request: Request) -> Response:
        async def chunks() -> Any:
            try:
                while True:
                    yield b"x" * 65_536
                    await asyncio.sleep(0)
            finally:
                self.ended.set()

        return StreamingResponse(chunks())


def served(test: Callable[[Callable[[], Awaitable[Streams]], App], Awaitable[None]], *, patience_s: float) -> None:
    async def main() -> None:
        app, sock = App(), bind("127.0.0.1", 0)
        opened: list[asyncio.StreamWriter] = []

        async def connect() -> Streams:
            streams = await asyncio.open_connection(*sock.getsockname()[:2])
            opened.append(streams[1])
            return streams

        async with asyncio.timeout(200), run_http_server(app.app, sock, name="a test", client_timeout_s=patience_s):
            await test(connect, app)
            for writer in opened:
                writer.transport.abort()

    asyncio.run(main())


async def cut(reader: asyncio.StreamReader) -> bool:
    """The connection has ended without an answer."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("begun", [b"", b"G", GET[:-2]])
def test_a_head_that_never_ends_is_not_waited_for(begun):
    async def test(connect: Any, app: App) -> None:
        reader, writer = await connect()
        writer.write(begun)
        assert await cut(reader)

    served(test, patience_s=0.2)


def test_the_second_head_of_a_connection_is_not_waited_for_either_but_what_came_before_is_answered():
    async def test(connect: Any, app: App) -> None:
        reader, writer = await connect()
        writer.write(GET % b"")
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        writer.write(b"G")
        assert await cut(reader)

    served(test, patience_s=0.2)


@pytest.mark.slow
def test_an_idle_connection_stays_open_for_longer_than_clients_keep_theirs():
    async def test(connect: Any, app: App) -> None:
        reader, writer = await connect()
        for pause_s in (6.0, 61.0, 0.0):  # httpx closes its connections after 5 s, load balancers after 60 s
            writer.write(GET % b"")
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(pause_s)

    served(test, patience_s=1.0)


def test_a_head_that_fills_memory_is_cut():
    async def test(connect: Any, app: App) -> None:
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"y" * (1 << 20))
        assert await cut(reader)

    served(test, patience_s=1000.0)


def test_a_response_that_its_client_does_not_read_is_abandoned():
    async def test(connect: Any, app: App) -> None:
        _, writer = await connect()
        writer.transport.pause_reading()
        writer.write(GET % b"flood")
        await app.ended.wait()

    served(test, patience_s=0.2)


def test_an_answer_that_is_read_slowly_comes_whole():
    async def test(connect: Any, app: App) -> None:
        reader, writer = await connect()
        writer.write(GET % b"much")
        head = await reader.readuntil(b"\r\n\r\n")
        for _ in range(8):
            assert len(await reader.readexactly(1 << 20)) == 1 << 20
            await asyncio.sleep(0.1)  # each pause is shorter than a client has, all together are longer
        assert b"content-length: 8388608" in head.lower()

    served(test, patience_s=0.7)


def test_a_client_that_says_that_it_is_done_is_forgotten():
    async def test(connect: Any, app: App) -> None:
        reader, writer = await connect()
        writer.write(GET % b"flood")
        await reader.readuntil(b"\r\n\r\n")
        writer.write_eof()  # and reads on, if there is something
        while await reader.read(1 << 16):
            pass
        await app.ended.wait()

    served(test, patience_s=1000.0)


def test_an_address_that_cannot_be_had_is_refused_with_a_hint():
    with bind("127.0.0.1", 0) as sock, pytest.raises(ConfigError, match="cannot listen"):
        bind("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(ConfigError, match="cannot be resolved"):
        bind("no such host", 0)

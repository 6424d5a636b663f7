"""The proxy against a real server on loopback: what is allowed passes whole, all else is refused and written down."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections.abc import Awaitable, Callable

import pytest

from etude.environments.network import EgressProxy, ProxyLimits

HERE = {"up.example": ["127.0.0.1"], "inner.example": ["10.0.0.1"], "mixed.example": ["127.0.0.1", "169.254.169.254"]}
ONLY_HERE = "127.0.0.1".__eq__


async def by_table(host: str, port: int) -> list[str]:
    if host not in HERE:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")
    return HERE[host]


class Log(io.BytesIO):
    """Lets one wait for its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = asyncio.Semaphore(0)

    def write(self, data: bytes) -> int:
        self.lines.release()
        return super().write(data)


class World:
    """A proxy, and a server that keeps what it was sent and answers "hello"."""

    def __init__(self, allow: list[str], **limits: float) -> None:
        self.log, self.num_asked = Log(), 0
        self.allow, self.limits, self.received = allow, limits, []
        self.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"

    async def __aenter__(self) -> World:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        allow = [rule.replace("PORT", str(self.port)) for rule in self.allow]
        self.proxy = EgressProxy(
            allow, self.log, limits=ProxyLimits(**self.limits), resolve=by_table, reachable=ONLY_HERE
        )
        listener = socket.create_server(("127.0.0.1", 0))
        self.at = listener.getsockname()
        await self.proxy.serve(listener, who="m1")
        return self

    async def __aexit__(self, *_: object) -> None:
        async with asyncio.timeout(100):
            for _ in range(self.num_asked):
                await self.log.lines.acquire()
        await self.proxy.close()
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        while b"\r\n\r\n" not in data and (more := await reader.read(65_536)):
            data += more
        self.received.append(data)
        if not data.startswith((b"GET", b"POST")):
            writer.write(b"you said " + data)
        else:
            if b"content-length: 3" in data.lower() or b"chunked" in data.lower():
                try:
                    async with asyncio.timeout(1):
                        while not self.received[-1].endswith((b"abc", b"0\r\n\r\n")):
                            self.received[-1] += await reader.readexactly(1)
                except (TimeoutError, EOFError):
                    pass
            writer.write(self.answer)
        await writer.drain()
        writer.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.num_asked += 1
        return await asyncio.open_connection(*self.at)

    async def ask(self, data: bytes) -> bytes:
        """All that comes back for these bytes."""
        async with asyncio.timeout(100):
            reader, writer = await self.connect()
            writer.write(data.replace(b"PORT", str(self.port).encode()))
            answer = await reader.read()
            writer.close()
            return answer

    def told(self) -> list[dict]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]


def using(test: Callable[[World], Awaitable[None]], allow: list[str] | None = None, **limits: float) -> World:
    world = World(
        ["up.example:PORT", "inner.example", "mixed.example:PORT", "nowhere.example"] if allow is None else allow,
        **limits,
    )

    async def main() -> None:
        async with world:
            await test(world)

    asyncio.run(main())
    return world


def test_an_allowed_request_goes_through_and_is_written_down():
    async def test(world):
        answer = await world.ask(
            b"POST http://up.example:PORT/p?q=1 HTTP/1.1\r\nHost: other\r\nProxy-Authorization: secret\r\n"
            b"Connection: X-Drop\r\nX-Drop: 1\r\nX-Keep: 2\r\nContent-Length: 3\r\n\r\nabc"
        )
        assert answer.endswith(b"\r\n\r\nhello")
        [received] = world.received
        assert received.startswith(b"POST /p?q=1 HTTP/1.1\r\nhost: up.example:%d\r\n" % world.port)
        assert received.endswith(b"abc")
        assert b"x-keep: 2" in received
        assert b"other" not in received
        assert b"secret" not in received
        assert b"x-drop" not in received.lower()

    world = using(test)
    [told] = world.told()
    expected = {"who": "m1", "method": "POST", "host": "up.example", "port": world.port, "address": "127.0.0.1",
                "path": "/p?q=1", "sent_bytes": 3, "verdict": "allowed"}  # fmt: skip
    assert {key: told[key] for key in expected} == expected
    assert told["got_bytes"] == len(world.answer)


def test_a_connect_carries_bytes_both_ways():
    async def test(world):
        reader, writer = await world.connect()
        writer.write(b"CONNECT up.example:%d HTTP/1.1\r\n\r\n" % world.port)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 Connected\r\n\r\n"
        writer.write(b"\x16\x03\x01 not http\r\n\r\n")
        assert await reader.read() == b"you said \x16\x03\x01 not http\r\n\r\n"
        writer.close()

    [told] = using(test).told()
    assert (told["method"], told["verdict"], told["sent_bytes"]) == ("CONNECT", "allowed", 16)


@pytest.mark.parametrize(
    ("request_", "status", "verdict"),
    [
        (b"GET http://evil.example/ HTTP/1.1\r\n\r\n", b"403", "not on the allow-list"),
        (b"GET http://up.example/ HTTP/1.1\r\n\r\n", b"403", "not on the allow-list"),
        (b"CONNECT up.example:22 HTTP/1.1\r\n\r\n", b"403", "not on the allow-list"),
        (b"CONNECT 127.0.0.1:80 HTTP/1.1\r\n\r\n", b"403", "not on the allow-list"),
        (b"GET http://inner.example/ HTTP/1.1\r\n\r\n", b"403", "its address is not on the public internet"),
        (b"GET http://mixed.example:PORT/ HTTP/1.1\r\n\r\n", b"403", "its address is not on the public internet"),
        (b"GET http://nowhere.example/ HTTP/1.1\r\n\r\n", b"502", "the name has no address"),
        (
            b"GET / HTTP/1.1\r\nHost: up.example\r\n\r\n",
            b"400",
            "a proxy request needs an http:// URL, or CONNECT",
        ),
        (b"\x00" * 100 + b"\r\n\r\n", b"400", "the request line is not plain"),
        (b"A" * 40_000 + b"\r\n\r\n", b"400", "the head is too long"),
    ],
)
def test_a_connection_that_is_not_allowed_is_refused_and_reaches_no_server(request_, status, verdict):
    async def test(world):
        assert (await world.ask(request_)).startswith(b"HTTP/1.1 " + status)

    world = using(test)
    assert world.received == []
    assert [told["verdict"] for told in world.told()] == [verdict]


SMUGGLED = b"GET http://up.example:PORT/second HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"GET http://up.example:PORT/ HTTP/1.1\r\n\r\n",
        b"POST http://up.example:PORT/ HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
        b"POST http://up.example:PORT/ HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"POST http://up.example:PORT/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"POST http://up.example:PORT/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET http://up.example:PORT/ HTTP/1.1\r\nConnection: x, content-length\r\nContent-Length: 3\r\n\r\nabc",
    ],
)
def test_a_second_request_in_the_bytes_of_the_first_is_not_forwarded(head):
    async def test(world):
        answer = await world.ask(head + SMUGGLED)
        assert answer.count(b"HTTP/1.1 200") == 1

    world = using(test)
    assert len(world.received) == 1
    assert b"second" not in world.received[0]
    assert len(world.told()) == 1


@pytest.mark.parametrize(
    "body", [b"x\r\n", b"-1\r\n", b"fffffffff\r\n", b"3;ext\r\nabc\r\n", b"3\nabc\r\n", b"2\r\nabc\r\n"]
)
def test_a_damaged_chunk_ends_the_connection(body):
    async def test(world):
        await world.ask(b"POST http://up.example:PORT/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + body)

    world = using(test, idle_s=1)
    assert "allowed" not in [told["verdict"] for told in world.told()]


@pytest.mark.parametrize(("limits", "verdict"), [
    ({"response_bytes": 1024}, "more than 1024 bytes"),
    ({"head_s": 0.2}, "no request in time"),
    ({"idle_s": 0.2}, "idle for 0.2 s"),
    ({"total_s": 0.3}, "more than 0.3 s"),
])  # fmt: skip
def test_every_bound_ends_a_connection_and_says_which(limits, verdict):
    async def test(world):
        world.answer = b"x" * 100_000
        reader, writer = await world.connect()
        if "head_s" not in limits:
            writer.write(b"%s up.example:%d HTTP/1.1\r\n\r\n" % (b"CONNECT", world.port))
            await reader.readuntil(b"\r\n\r\n")
        if "response_bytes" in limits:
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()
        writer.close()

    assert [told["verdict"] for told in using(test, **limits).told()] == [verdict]


def test_connections_past_the_bound_are_turned_away():
    async def test(world):
        reader, writer = await world.connect()
        writer.write(b"CONNECT up.example:%d HTTP/1.1\r\n\r\n" % world.port)
        await reader.readuntil(b"\r\n\r\n")
        assert (await world.ask(b"GET http://up.example:PORT/ HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 503")
        writer.close()

    using(test, connections=1)


def test_it_serves_on_a_unix_socket_as_well(tmp_path):
    async def test(world):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        await world.proxy.serve(listener, who="m2")
        world.num_asked += 1
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(b"GET http://evil.example/ HTTP/1.1\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 403")
        writer.close()

    assert [told["who"] for told in using(test).told()] == ["m2"]


def test_a_client_that_does_not_read_its_response_is_disconnected():
    async def test(world: World) -> None:
        world.answer = b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1 << 25)
        _, writer = await asyncio.open_connection(*world.at, limit=1)
        writer.write(f"GET http://up.example:{world.port}/ HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        async with asyncio.timeout(100):
            await world.log.lines.acquire()
            await asyncio.gather(*world.proxy._serving)
        writer.transport.abort()

    using(test, total_s=0.3, idle_s=0.2)


def test_what_cannot_be_written_down_leaves_no_connection_open():
    async def test(world: World) -> None:
        def refuse(data: bytes) -> int:
            raise OSError("full")

        world.log.write = refuse  # type: ignore[method-assign]
        reader, writer = await asyncio.open_connection(*world.at)
        writer.write(b"nonsense\r\n\r\n")
        async with asyncio.timeout(100):
            while await reader.read(100):
                pass
        writer.close()

    using(test)

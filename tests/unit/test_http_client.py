"""The HTTP client of engines: kept connections, faults of servers, bounds, and any bytes as a response."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from etude import http_client
from etude.http_client import Broken, HttpClient

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"


class Server:
    """A server on a socket. `answer` gets the streams and the number of the request after the head has arrived."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.num_connections = self.num_requests = self.num_open = 0
        self.heads: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                if b"content-length: " in head:
                    await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r")[0]))
                self.num_requests += 1
                await self.answer(reader, writer, self.num_requests)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_open -= 1
            writer.transport.abort()


def with_server(answer: Answer, story: Callable[[HttpClient, Server], Awaitable[None]]) -> None:
    async def work() -> None:
        served = Server(answer)
        server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base", {"x-a": "b"})
        try:
            async with asyncio.timeout(60), server:
                await story(client, served)
                client.close()
        finally:
            client.close()

    uvloop.run(work())


def says(*answers: bytes) -> Answer:
    """An answer to each request; the last one for all later ones. b"" closes the connection."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        data = answers[min(number, len(answers)) - 1]
        if not data:
            writer.transport.abort()
        writer.write(data)

    return answer


async def ask(client: HttpClient, **options: Any) -> bytes:
    async with client.request("POST", "/x", b"body", **options) as response:
        assert response.status == 200
        return await response.read()


async def until(true: Callable[[], bool], what: str) -> None:
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{what}: not within 10 s")


@pytest.mark.parametrize("data", [WHOLE, CHUNKED, b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + WHOLE])
def test_one_connection_serves_one_request_after_the_other(data: bytes) -> None:
    async def story(client: HttpClient, server: Server) -> None:
        for _ in range(3):
            assert await ask(client) == b"hello"
        assert server.num_connections == 1
        assert server.heads[0].startswith(b"POST /base/x HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\nx-a: b\r\ncontent-length: 4\r\n\r\n" in server.heads[0]
        assert await asyncio.gather(*(ask(client) for _ in range(4))) == [b"hello"] * 4
        assert server.num_connections == 4

    with_server(says(data), story)


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"hello"),
        (WHOLE + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil", b"hello"),  # nobody asked for it
        (WHOLE + b"junk", b"hello"),
    ],
)
def test_a_connection_that_the_server_ends_or_spoils_is_not_used_again(data: bytes, body: bytes) -> None:
    async def story(client: HttpClient, server: Server) -> None:
        assert [await ask(client) for _ in range(3)] == [body] * 3
        assert server.num_connections == 3

    with_server(says(data), story)


def test_a_request_that_crosses_the_end_of_a_kept_connection_is_sent_again_once() -> None:
    async def story(client: HttpClient, server: Server) -> None:
        assert await ask(client) == b"hello"
        assert await ask(client) == b"hello"
        assert (server.num_requests, server.num_connections) == (3, 2)

    with_server(says(WHOLE, b"", WHOLE), story)


def test_a_new_connection_that_ends_is_an_error_at_once() -> None:
    async def story(client: HttpClient, server: Server) -> None:
        with pytest.raises(Broken, match="before the response"):
            await ask(client)
        assert server.num_requests == 1

    with_server(says(b""), story)


def test_an_idle_connection_is_dropped_before_the_server_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(client: HttpClient, server: Server) -> None:
        await ask(client)
        monkeypatch.setattr(http_client, "_KEPT_S", 0.0)
        await ask(client)
        assert server.num_connections == 2
        await until(lambda: server.num_open == 1, "the idle connection is closed")

    with_server(says(WHOLE), story)


@pytest.mark.parametrize("half", [WHOLE[:-1], CHUNKED[:-7], WHOLE[:20]])
def test_half_a_response_is_an_error_and_never_a_body(half: bytes) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(half)
        await writer.drain()
        writer.close()

    async def story(client: HttpClient, server: Server) -> None:
        with pytest.raises(Broken, match="the connection ended"):
            await ask(client)
        assert server.num_requests == 1  # its first bytes had come

    with_server(answer, story)


def test_a_head_without_end_is_refused_and_the_connection_closed() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x-field: " + b"y" * 10_000 + b"\r\n")
            await writer.drain()

    async def story(client: HttpClient, server: Server) -> None:
        with pytest.raises(Broken, match="the head has more than 65536 bytes"):
            await ask(client)
        await until(lambda: server.num_open == 0, "the connection is closed")

    with_server(answer, story)


def test_a_body_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_BODY_BYTES", 100_000)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"2710\r\n" + b"y" * 10_000 + b"\r\n")
            await writer.drain()

    async def story(client: HttpClient, server: Server) -> None:
        with pytest.raises(Broken, match="the body has more than 100000 bytes"):
            await ask(client)

    with_server(answer, story)


def test_slow_bytes_are_waited_for_and_silence_is_not() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        for byte in WHOLE if number == 1 else WHOLE[:-1]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.01)

    async def story(client: HttpClient, server: Server) -> None:
        assert await ask(client, silence_s=0.3) == b"hello"  # of about half a second
        with pytest.raises(TimeoutError):
            await ask(client, silence_s=0.3)
        await until(lambda: server.num_open == 0, "the connection is closed")

    with_server(answer, story)


def test_a_check_during_silence_may_go_on_waiting_or_end_the_request() -> None:
    checks = []

    async def check() -> None:
        checks.append(len(checks))
        if len(checks) == 5:
            raise RuntimeError("it is gone")

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await until(lambda: len(checks) >= 2, "two checks")
        if number == 1:
            writer.write(WHOLE)

    async def story(client: HttpClient, server: Server) -> None:
        assert await ask(client, silence_s=0.02, on_silence=check) == b"hello"
        with pytest.raises(RuntimeError, match="it is gone"):
            await ask(client, silence_s=0.02, on_silence=check)

    with_server(answer, story)


def test_a_body_that_nobody_reads_makes_the_server_wait() -> None:
    sent = 0

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (200 << 20))
        while sent < 200 << 20:
            writer.write(b"y" * (1 << 18))
            await writer.drain()
            sent += 1 << 18

    async def story(client: HttpClient, server: Server) -> None:
        async with client.request("GET", "/x") as response:
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.5)
            assert sent < 100 << 20
            left = 200 << 20
            while left:
                part = await response.readexactly(min(left, 3 << 20))
                assert part.strip(b"y") == b""
                left -= len(part)
            with pytest.raises(asyncio.IncompleteReadError):
                await response.readexactly(1)

    with_server(answer, story)


@pytest.mark.parametrize("begun", [False, True])
def test_who_leaves_early_closes_the_connection(begun: bool) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        if begun:
            writer.write(WHOLE[:-2])
        await _.read()

    async def story(client: HttpClient, server: Server) -> None:
        asking = asyncio.create_task(ask(client))
        await until(lambda: server.num_requests == 1, "the request has arrived")
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: server.num_open == 0, "the connection is closed")

    with_server(answer, story)


def test_an_early_refusal_of_a_large_body_is_read_and_its_connection_dropped() -> None:
    async def work() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")
            await gone.wait()
            writer.transport.abort()

        gone = asyncio.Event()
        async with asyncio.timeout(60), await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
            async with client.request("POST", "/x", b"y" * (64 << 20)) as response:
                assert (response.status, await response.read()) == (413, b"big")
            assert not client._idle
            gone.set()

    uvloop.run(work())


def test_closing_ends_requests_that_wait() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await reader.read()

    async def story(client: HttpClient, server: Server) -> None:
        asking = asyncio.create_task(ask(client))
        await until(lambda: server.num_requests == 1, "the request has arrived")
        client.close()
        with pytest.raises(Broken, match="was closed"):
            await asking

    with_server(answer, story)


def test_closing_ends_requests_that_are_still_connecting() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await reader.read()

    async def story(client: HttpClient, server: Server) -> None:
        asking = asyncio.create_task(ask(client))
        await asyncio.sleep(0)  # it has begun, and has no connection yet
        client.close()
        with pytest.raises(Broken, match="was closed"):
            await asking
        assert server.num_requests == 0

    with_server(answer, story)


def test_nobody_at_the_address_is_named() -> None:
    async def work() -> None:
        for url in ("http://127.0.0.1:1", "http://no-such-host.invalid:80", "http://" + "a" * 70 + ":80"):
            with pytest.raises(Broken):
                await ask(HttpClient(url, {}))

    uvloop.run(work())


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://x", "http://", "http://user:secret@x", "http://x?a=b"])
def test_an_address_that_is_not_of_http_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not http://"):
        HttpClient(url, {})


def test_a_header_cannot_begin_another_one() -> None:
    with pytest.raises(ValueError, match="line break"):
        HttpClient("http://x", {"authorization": "Bearer a\r\nx-evil: b"})


EDITS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 3), st.binary(max_size=6)), max_size=3)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([WHOLE, CHUNKED]), EDITS, st.lists(st.integers(1, 90), max_size=4), st.booleans())
def test_any_bytes_are_a_response_or_one_kind_of_error(
    data: bytes, edits: list[tuple[int, int, bytes]], cuts: list[int], ends: bool
) -> None:
    for at, num, new in edits:
        data = data[:at] + new + data[at + num :]

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        for start, stop in itertools.pairwise(places):
            writer.write(data[start:stop])
            await asyncio.sleep(0)
        if ends:
            writer.close()

    async def story(client: HttpClient, server: Server) -> None:
        with contextlib.suppress(Broken, TimeoutError):
            async with client.request("POST", "/x", b"body", silence_s=0.05) as response:
                body = await response.read()
                assert 200 <= response.status < 1000
                assert edits or body == b"hello"

    with_server(answer, story)

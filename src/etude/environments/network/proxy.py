"""An HTTP proxy that checks an allow-list and logs each request: the only way out of a machine, if there is one.

It serves plain HTTP and CONNECT, one request per connection, so no second request can follow unchecked. A host's
addresses are looked up once, and only a checked address is connected to, so DNS rebinding has no effect. Of a CONNECT
it sees only the number of bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from etude.config import ranged
from etude.environments.network.http import (
    BadRequest,
    ConnectionServer,
    RequestHead,
    Target,
    close_writer,
    parse_head,
    target_of,
)
from etude.environments.network.policy import AllowList, is_public

_CHUNK_BYTES = 65_536
_OVERLOAD = 4  # beyond `connections` times this, connections are dropped without a response
_MAX_ADDRESSES = 4  # addresses of a host that are tried
_HOP = ("connection", "proxy-connection", "keep-alive", "te", "upgrade", "host", "proxy-authorization", "expect")
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True)
class ProxyLimits:
    """Limits of one proxy.

    `connections` counts those open at the same time. `request_bytes` and `response_bytes` limit one request. Seconds:
    `head_s` for the arrival of a request's head, `connect_s` to connect, `idle_s` without a byte, `total_s` in all."""

    connections: int = ranged(64, low=1)  # at once; more are refused
    request_bytes: int = ranged(64 << 20, low=1024)  # sent by the machine, per connection
    response_bytes: int = ranged(1 << 30, low=1024)  # received by the machine, per connection
    head_s: float = ranged(10.0, low=0.1)  # until the request's head has arrived
    connect_s: float = ranged(10.0, low=0.1)
    idle_s: float = ranged(60.0, low=0.1)  # without a byte in either direction
    total_s: float = ranged(600.0, low=0.1)


async def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host, from this host's resolver."""
    loop = asyncio.get_running_loop()
    return [str(info[4][0]) for info in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class EgressProxy(ConnectionServer):
    """An HTTP proxy that serves on the sockets given to `serve`, until `close`.

    `allow` are rules of an `AllowList`; if it is empty, every request is refused, and logged. `log` gets one JSON line
    per request: who, host, port, address, bytes in each direction, verdict, seconds. `reachable` decides which resolved
    addresses may be connected to; change it only on a network of your own."""

    def __init__(
        self,
        allow: Iterable[str],
        log: BinaryIO,
        *,
        limits: ProxyLimits | None = None,
        resolve: Resolve = resolve,
        reachable: Callable[[str], bool] = is_public,
    ) -> None:
        super().__init__()
        self._allow, self._log = AllowList(allow), log
        self._limits = limits if limits is not None else ProxyLimits()
        self._resolve, self._reachable = resolve, reachable

    async def serve(self, listener: socket.socket, *, who: str) -> asyncio.Server:
        """Serve on a listening socket of any address family, until the returned server is closed.

        `who` names the machine behind the socket in the log."""
        return await self._serve(listener, lambda reader, writer: self._connection(reader, writer, who))

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, who: str) -> None:
        entry: dict[str, Any] = {"who": who, "host": "", "port": 0, "address": "", "sent_bytes": 0, "got_bytes": 0}
        started, entry["time"] = time.monotonic(), time.time()
        verdict = "ended by the proxy"
        try:
            async with asyncio.timeout(self._limits.total_s):
                verdict = await self._request(reader, writer, entry)
        except TimeoutError:
            verdict = f"more than {self._limits.total_s:g} s"
        except (OSError, asyncio.IncompleteReadError):
            verdict = "broken off"
        finally:
            entry |= {"verdict": verdict, "wall_s": round(time.monotonic() - started, 3)}
            try:
                self._log.write(json.dumps(entry).encode() + b"\n")
                self._log.flush()
            finally:
                await close_writer(writer, self._limits.idle_s)

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, entry: dict[str, Any]) -> str:
        """Handle one connection's request. Returns the verdict."""
        if len(self._serving) > _OVERLOAD * self._limits.connections:
            return "too many connections"  # dropped without a response
        try:
            async with asyncio.timeout(self._limits.head_s):
                head = parse_head(await reader.readuntil(b"\r\n\r\n"))
            target = target_of(head)
        except BadRequest as error:
            return _refuse(writer, 400, str(error))
        except asyncio.LimitOverrunError:
            return _refuse(writer, 400, "the head is too long")
        except TimeoutError:
            return _refuse(writer, 408, "no request in time")
        if len(self._serving) > self._limits.connections:
            return _refuse(writer, 503, "too many connections")
        entry |= {"method": head.method, "host": target.host, "port": target.port, "path": target.path[:200]}
        if not self._allow.permits(target.host, target.port):
            return _refuse(writer, 403, "not on the allow-list")
        addresses = await self._addresses(target)
        if not addresses:
            return _refuse(writer, 502, "the name has no address")
        entry["address"] = addresses[0]
        for address in addresses:
            if not self._reachable(address):
                entry["address"] = address
                return _refuse(writer, 403, "its address is not on the public internet")
        far = await self._connected(addresses, target.port, entry)
        if far is None:
            return _refuse(writer, 502, "it cannot be connected to")
        try:
            return await self._carry(head, target, (reader, writer), far, entry)
        finally:
            far[1].transport.abort()

    async def _addresses(self, target: Target) -> Sequence[str]:
        try:
            async with asyncio.timeout(self._limits.connect_s):
                return (await self._resolve(target.host, target.port))[:_MAX_ADDRESSES]
        except (OSError, TimeoutError, UnicodeError):
            return ()

    async def _connected(
        self, addresses: Sequence[str], port: int, entry: dict[str, Any]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to the first address that accepts one. Names are not resolved again."""
        for address in addresses:
            entry["address"] = address
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._limits.connect_s):
                    return await asyncio.open_connection(address, port, limit=_CHUNK_BYTES)
        return None

    async def _carry(
        self,
        head: RequestHead,
        target: Target,
        near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        entry: dict[str, Any],
    ) -> str:
        if head.method == "CONNECT":
            near[1].write(b"HTTP/1.1 200 Connected\r\n\r\n")
            there = self._copy(near[0], far[1], entry, "sent_bytes", self._limits.request_bytes)
        else:
            far[1].write(_forwarded(head, target))
            there = self._body(head, near[0], far[1], entry)
        back = self._copy(far[0], near[1], entry, "got_bytes", self._limits.response_bytes)
        tasks = [asyncio.create_task(there), asyncio.create_task(back)]
        try:
            await self._until_done(tasks, entry, answer_is_all=head.method != "CONNECT")
            return "allowed"
        except _ConnectionEnded as ended:
            return str(ended)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_done(self, tasks: list[asyncio.Task[None]], entry: dict[str, Any], *, answer_is_all: bool) -> None:
        """Wait until both directions have ended (only the response if `answer_is_all`), or no byte has moved for
        `idle_s`."""
        pending = set(tasks)
        while pending and not (answer_is_all and tasks[1].done()):
            before = entry["sent_bytes"], entry["got_bytes"]
            done, pending = await asyncio.wait(
                pending, timeout=self._limits.idle_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
            if not done and before == (entry["sent_bytes"], entry["got_bytes"]):
                raise _ConnectionEnded(f"idle for {self._limits.idle_s:g} s")

    async def _copy(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, entry: dict[str, Any], count: str, most: int
    ) -> None:
        while data := await source.read(_CHUNK_BYTES):
            await self._write(to, data, entry, count, most)
        if entry["method"] == "CONNECT" and to.can_write_eof():
            to.write_eof()

    async def _body(
        self, head: RequestHead, source: asyncio.StreamReader, to: asyncio.StreamWriter, entry: dict[str, Any]
    ) -> None:
        """Copy exactly one request's body."""
        most = self._limits.request_bytes
        if head.body is not None:
            left = head.body
            while left and (data := await source.read(min(left, _CHUNK_BYTES))):
                left -= len(data)
                await self._write(to, data, entry, "sent_bytes", most)
            return
        while True:
            line = await _line(source)
            size = _chunk_size(line)
            await self._write(to, b"%x\r\n" % size, entry, "sent_bytes", most)
            left = size
            while left:
                data = await source.read(min(left, _CHUNK_BYTES))
                if not data:
                    raise _ConnectionEnded("the request broke off")
                left -= len(data)
                await self._write(to, data, entry, "sent_bytes", most)
            if size and await _line(source) != b"\r\n":
                raise _ConnectionEnded("a chunk is not as long as it says")
            await self._write(to, b"\r\n", entry, "sent_bytes", most)  # trailers are not passed on
            if not size:
                return

    async def _write(self, to: asyncio.StreamWriter, data: bytes, entry: dict[str, Any], count: str, most: int) -> None:
        entry[count] += len(data)
        if entry[count] > most:
            raise _ConnectionEnded(f"more than {most} bytes")
        to.write(data)
        await to.drain()


class _ConnectionEnded(Exception):
    """The proxy ends a connection; the message is the verdict."""


async def _line(source: asyncio.StreamReader) -> bytes:
    try:
        return await source.readuntil(b"\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise _ConnectionEnded("a chunk is damaged") from None


def _forwarded(head: RequestHead, target: Target) -> bytes:
    """The request head for the server: origin-form path, its own host field, no hop-by-hop fields."""
    named = {part.strip().lower().decode() for name, value in head.fields if name == "connection"
             for part in value.split(b",")}  # fmt: skip
    host = f"[{target.host}]" if ":" in target.host else target.host
    port = "" if target.port == 80 else f":{target.port}"
    kept = (
        name.encode() + b": " + value + b"\r\n"
        for name, value in head.fields
        if name not in _HOP and (name not in named or name in ("content-length", "transfer-encoding"))
    )
    first = f"{head.method} {target.path} HTTP/1.1\r\nhost: {host}{port}\r\nconnection: close\r\n".encode()
    return first + b"".join(kept) + b"\r\n"


def _chunk_size(line: bytes) -> int:
    text = line[:-2]
    if not 0 < len(text) <= 8 or any(c not in b"0123456789abcdefABCDEF" for c in text):
        raise _ConnectionEnded("a chunk is damaged")
    return int(text, 16)


def _refuse(writer: asyncio.StreamWriter, status: int, why: str) -> str:
    body = f"proxy: {why}\n".encode()
    head = f"HTTP/1.1 {status} Refused\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    return why

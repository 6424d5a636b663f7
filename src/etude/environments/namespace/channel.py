"""One request and one reply at a time over a machine's socket, with a deadline and a bound on the reply.

What comes out of the socket is treated as hostile: a reply larger than asked for, bytes that are no frame, bytes
nobody asked for and a hang-up are all `Hangup`, after which the channel is of no use.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from etude.environments.namespace.guest import wire

_CHUNK_BYTES = 65_536


class Hangup(Exception):
    """The other side is gone, late, or not speaking the protocol."""


class Channel:
    """The host's end of a machine's socket. Calls are serialised."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self._lock = connection, asyncio.Lock()

    async def call(self, frame: bytes, *, reply_bytes: int, deadline_s: float) -> wire.Frame:
        """Send a request and wait for its reply. Raises `Hangup`."""
        async with self._lock:
            try:
                async with asyncio.timeout(deadline_s):
                    await asyncio.get_running_loop().sock_sendall(self._socket, frame)
                    return await self._reply(reply_bytes)
            except TimeoutError:
                raise Hangup(f"no answer within {deadline_s:g} s") from None
            except (OSError, wire.FrameError) as error:
                raise Hangup(str(error)) from None

    async def _reply(self, limit: int) -> wire.Frame:
        loop, buffer, size = asyncio.get_running_loop(), bytearray(), -1
        while size < 0 or len(buffer) < size:
            data = await loop.sock_recv(self._socket, max(_CHUNK_BYTES, min(size - len(buffer), 1 << 20)))
            if not data:
                raise Hangup("the machine hung up")
            buffer += data
            if size < 0 and len(buffer) >= wire.HEAD.size:
                (size,) = wire.HEAD.unpack_from(buffer)
                if size > limit:
                    raise Hangup(f"a reply of {size} bytes where {limit} are allowed")
                size += wire.HEAD.size
        if len(buffer) > size:
            raise Hangup("bytes that nobody asked for")
        return wire.unpack(bytes(memoryview(buffer)[wire.HEAD.size :]))

    def hang_up(self) -> None:
        """End the conversation: whoever waits for a reply gets `Hangup`. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent. Hang up first where somebody may be waiting."""
        self._socket.close()

"""What rank 0 of an engine sends to its other ranks, and what they reply.

Each rank has two connections to rank 0, streams over Unix sockets. Over the first come the forward passes, and the
writes of new weights between them, in the order in which rank 0 makes them. Over the second, new weights are prepared
and compared meanwhile; before that a rank says that it has started, and that it has loaded its part. A message is its
length in 8 bytes, then msgpack. A file descriptor may come with it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from etude.errors import EtudeError
from etude.inference.config import EngineConfig
from etude.models import ModelConfig
from etude.numerics.config import NumericsConfig

LENGTH_BYTES, MAX_BYTES = 8, 1 << 30


@dataclass(frozen=True)
class RankJob:
    """What a rank needs to start. Rank 0 sends it pickled, as the first message.

    - `checkpoint`: the directory to load. None: random weights with the sizes of `model`; weights come with `Prepare`.
    - `numerics`, `config`: those of the engine.
    - `threads`: CPU threads of a forward pass.
    - `meeting`: the file through which the ranks connect (`Ranks` makes it).
    - `rank`: from 0."""

    checkpoint: Path | None
    model: ModelConfig | None
    numerics: NumericsConfig
    config: EngineConfig
    threads: int
    meeting: Path = Path()
    rank: int = 0


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One forward pass: what the other ranks need of a `scheduler.Plan`. No reply.

    - `copies`: (source slot, target slot, stop), made in order before the pass; copies positions [0, stop).
    - `slots`, `positions`: of each decoding sequence.
    - `spans`: (slot, start, stop) of each prompt chunk, then of each draft.
    - `token_ids`: one per decoding sequence, then those of the spans."""

    copies: list[tuple[int, int, int]]
    slots: list[int]
    positions: list[int]
    spans: list[tuple[int, int, int]]
    token_ids: list[int]


class Score(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A forward pass of one text, without the KV cache. No reply."""

    token_ids: list[int]


class Apply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write the weights that were prepared. The rank replies."""


class Undo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Restore the weights from before `Apply`. Does nothing if this rank did not write. The rank replies."""


class Prepare(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Prepare a version for writing. Its image in shared memory comes as a file descriptor. The rank replies.

    `table_at`: as `image.read_image` takes it. `complete`: write all weights, in a way that cannot be undone."""

    table_at: int
    complete: bool


class Compare(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compare the live weights with the version that was prepared, bit for bit. The reply has the names that differ."""


class Commit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Free what was kept for `Undo`, and the image. The rank replies."""


Call = Step | Score | Apply | Undo
"""What comes over the first connection."""
WeightsCall = Prepare | Compare | Commit
"""What comes over the second connection."""


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """A rank's reply. `error`: the `what`, `facts` and `hint` of an `EtudeError`. `names`: that of `Compare`."""

    error: tuple[str, str, str] | None = None
    names: list[str] = []


class Link:
    """One end of a connection. Waits at most `deadline_s` seconds for the other end; None: without limit. A ``with``
    block closes it at its end.

    All methods raise `EOFError` or `OSError` (`TimeoutError` among them) if the other end is gone or late."""

    def __init__(self, connection: socket.socket, deadline_s: float | None) -> None:
        self._socket, self.deadline_s = connection, deadline_s
        connection.settimeout(deadline_s)

    def send(self, message: object, *fds: int) -> None:
        """Send a message, and file descriptors with it."""
        self.send_bytes(msgspec.msgpack.encode(message), *fds)

    def send_bytes(self, data: bytes, *fds: int) -> None:
        """Send bytes as a message."""
        head = len(data).to_bytes(LENGTH_BYTES, "little")
        if fds:
            sent = socket.send_fds(self._socket, [head], fds)
            assert sent == len(head), "a few bytes are sent as one"
            self._socket.sendall(data)
        else:
            self._socket.sendall(head + data)

    def receive(self, kind: Any) -> tuple[Any, list[int]]:
        """Receive one message.

        Returns it, decoded as `kind` (a Struct type or a union of them), and the file descriptors (at most one) that
        came with it, which the caller closes. Raises also `msgspec.ValidationError`."""
        data, fds = self.receive_bytes()
        return msgspec.msgpack.decode(data, type=kind), fds

    def receive_bytes(self) -> tuple[bytes, list[int]]:
        """Receive the bytes of a message. Returns them and the file descriptors that came with it."""
        flags = socket.MSG_CMSG_CLOEXEC
        head, fds, _, _ = socket.recv_fds(self._socket, LENGTH_BYTES, 1, flags)
        try:
            head += self._read(LENGTH_BYTES - len(head)) if head else b""
            length = int.from_bytes(head, "little")
            if not head or length > MAX_BYTES:
                raise EOFError
            return self._read(length), fds
        except (OSError, EOFError):
            for fd in fds:
                os.close(fd)
            raise

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        view, at = memoryview(data), 0
        while at < length:
            count = self._socket.recv_into(view[at:])
            if not count:
                raise EOFError
            at += count
        return bytes(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def replied(error: EtudeError | None = None, names: list[str] | None = None) -> Reply:
    """Return a `Reply` with this error, or else with these names (default: none)."""
    return Reply(None if error is None else (error.what, error.facts, error.hint), names or [])

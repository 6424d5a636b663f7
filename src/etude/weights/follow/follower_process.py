"""A `Follower` in a child process, so that decoding does not block the interpreter or the core of the engine.

The child (`follower_child`) follows the channel, decodes, verifies, and passes on each version in sealed shared memory
(`image`), which this process only maps. The child has its parent's priority: with a lower one it would starve on busy
cores. Parent and child exchange one request and one response at a time over a socket pair. A request names the held
version, so the response does not depend on the child's history: if the child is killed, a new one is started and
catches up, and nothing is lost. The child ends when its parent ends, since it sees the socket close. Linux only
(memfd).
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Self

import msgspec

from etude.errors import EtudeError, WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights.follow.follower import Update
from etude.weights.follow.head_tracker import LIMIT_BYTES, FollowedPointer
from etude.weights.follow.image import read_image
from etude.weights.tensors import Tensor

MAX_MESSAGE_BYTES = 1 << 16
DEADLINE_S = 600.0
POLL_S, WAIT_S = 0.05, 0.2
_END_S = 10.0


class FollowerArgs(NamedTuple):
    """The first message to a child process, pickled: the arguments of its follower.

    `branch`: the branch of the channel `name`; "": the channel itself.
    `poll_s`: seconds between two reads of the channel's pointer. `followed`: the pointer that earlier children
    followed. `threads`: number of threads for decoding; 0: one per core.
    """

    store: BlobStore
    name: str
    limit_bytes: int
    poll_s: float
    public_key: bytes | None
    followed: FollowedPointer | None
    threads: int
    branch: str = ""


class Request(msgspec.Struct, frozen=True):
    """The parent's request for a version other than the held one. The child waits up to `wait_s` seconds for one."""

    held: Version | None
    wait_s: float


class Response(msgspec.Struct, frozen=True):
    """The child's response to a request: a version in shared memory, or an error.

    `table_at`: the offset of the image's table; the image's file descriptor is sent along. `followed`: the pointer that
    led to the version. `error`: the `what`, `facts` and `hint` of an `EtudeError`. If `table_at` and `error` are None,
    there is no other version.
    """

    table_at: int | None = None
    followed: FollowedPointer | None = None
    error: tuple[str, str, str] | None = None


class FollowerProcess:
    """Runs a `Follower` in a child process, which is started at once. Not thread-safe, except for `close`.

    A context manager: the block's end kills the child. The held version stays readable.

    - `store`: where the versions are published. It is sent to the child, so it must be picklable.
    - `name`: the channel to follow. `branch`: follow this branch of it instead of its newest version.
    - `limit_bytes`: refuse versions whose tensors need more memory.
    - `public_key` (32 bytes): accept only pointers signed by this key.
    - `poll_s`, `wait_s`: `advance` reads the pointer every `poll_s` seconds until there is a new version, for at most
      `wait_s` seconds.
    - `deadline_s`: kill a child that has not responded this many seconds after `wait_s`.
    - `threads`: number of decoding threads; 0: one per core. For an engine that computes on the CPU, set it to the
      number of cores that the engine does not use.

    This process keeps the last pointer that was followed, so a restarted child, too, refuses a pointer that moved back.
    """

    def __init__(
        self,
        store: BlobStore,
        name: str = "policy",
        *,
        branch: str = "",
        limit_bytes: int = LIMIT_BYTES,
        public_key: bytes | None = None,
        poll_s: float = POLL_S,
        wait_s: float = WAIT_S,
        deadline_s: float = DEADLINE_S,
        threads: int = 0,
    ) -> None:
        self._args = FollowerArgs(store, name, limit_bytes, poll_s, public_key, None, threads, branch)
        self._wait_s, self._deadline_s = wait_s, deadline_s
        self._version: Version | None = None
        self._tensors: dict[str, Tensor] = {}
        self._closed = False
        self._image: tuple[int, int] | None = None
        self._child: _Child | None = self._start_child()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> Version | None:
        """The held version; None before the first update."""
        return self._version

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of the held version by name, in read-only shared memory."""
        return MappingProxyType(self._tensors)

    @property
    def image(self) -> tuple[int, int] | None:
        """The held version's image in shared memory, for other processes of this machine: its file descriptor and the
        offset of its table (`image.read_image`). None before the first update. Valid until the next one, or `close`."""
        return self._image

    @property
    def pid(self) -> int | None:
        """The process id of the child; None if no child is running."""
        return self._child.pid if self._child else None

    def advance(self) -> Update | None:
        """Fetch the newest version. Return the difference from the version before.

        Return None if there was no new version within `wait_s`. If a list of a tensor's changes would be larger than
        the tensor, the complete tensor is in `Update.replaced`. Raises `WeightsError` in the cases of
        `Follower.advance`, and if the child died or did not respond in time. Then the held version is unchanged, and
        the next call starts a new child.
        """
        if self._closed:
            raise WeightsError("the follower is closed", hint="create a new follower")
        child = self._child = self._child or self._start_child()
        try:
            response, fds = child.send(Request(self._version, self._wait_s), self._wait_s + self._deadline_s)
        except (OSError, EOFError) as error:
            raise self._lost(child, error) from None
        try:
            if response.error is not None:
                what, facts, hint = response.error
                raise WeightsError(what, facts, hint=hint)
            if response.table_at is None:
                return None
            image = read_image(fds[0], response.table_at)
            self._close_image()
            self._image = fds.pop(0), response.table_at
        finally:
            for fd in fds:
                os.close(fd)
        self._version, self._tensors = image.update.version, image.tensors
        self._args = self._args._replace(followed=response.followed or self._args.followed)
        return image.update

    def _start_child(self) -> _Child:
        return _Child(pickle.dumps(self._args))

    def close(self) -> None:
        """Kill the child. May be called twice. An `advance` in another thread raises `WeightsError`."""
        self._closed = True
        if self._child is not None:
            self._child.end()
        self._close_image()

    def _close_image(self) -> None:
        if self._image is not None:
            os.close(self._image[0])
        self._image = None

    def _lost(self, child: _Child, error: Exception) -> EtudeError:
        self._child = None
        if isinstance(error, TimeoutError):
            what, facts = f"the follower gave no answer within {self._deadline_s:g} s", "it was killed"
            child.end()
        else:
            what, facts = "the follower's process ended", f"exit code {child.end()}"
        return WeightsError(
            what, facts, hint="it is started again automatically; if this repeats, check its standard error"
        )


class _Child:
    def __init__(self, args: bytes) -> None:
        self._socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            fd = child_end.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "etude.weights.follow.follower_child", str(fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=[fd],
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )
        self._socket.send(args)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, request: Request, deadline_s: float) -> tuple[Response, list[int]]:
        self._socket.settimeout(deadline_s)
        self._socket.send(msgspec.msgpack.encode(request))
        flags = socket.MSG_CMSG_CLOEXEC
        data, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 1, flags)
        if not data:
            raise EOFError
        return msgspec.msgpack.decode(data, type=Response), fds

    def end(self) -> int:
        self._process.kill()
        exit_code = self._process.wait(_END_S)
        self._socket.close()
        return exit_code

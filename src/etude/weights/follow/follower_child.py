"""The child process of a `FollowerProcess`.

It is started as ``python -m etude.weights.follow.follower_child FD``, where FD is its end of the socket. The first
message is the pickled `FollowerArgs`, which only the parent process can send. All further messages are `Request`s.
Imports what the store needs, and no torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from etude.errors import EtudeError
from etude.records.completion import Version
from etude.weights.delta import native
from etude.weights.follow.follower import Follower, Update
from etude.weights.follow.follower_process import MAX_MESSAGE_BYTES, FollowerArgs, Request, Response
from etude.weights.follow.image import read_image, write_image

_MAX_FACTS = 8192
_NO_MEMORY = (errno.ENOMEM, errno.ENOSPC)  # ENOSPC: a memfd does not fit into memory


def main(argv: Sequence[str]) -> None:
    """Answer requests until the parent process ends. `argv[1]`: the file descriptor of the socket."""
    for ending in (signal.SIGINT, signal.SIGTERM):  # the parent handles these signals; this process ends with it
        signal.signal(ending, signal.SIG_IGN)
    connection = socket.socket(fileno=int(argv[1]))
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    args: FollowerArgs = pickle.loads(connection.recv(MAX_MESSAGE_BYTES))
    native.set_threads(args.threads)
    follower = Follower(
        args.store,
        args.name,
        branch=args.branch,
        limit_bytes=args.limit_bytes,
        public_key=args.public_key,
        can_undo=False,
        followed=args.followed,
    )
    with contextlib.suppress(ConnectionError):  # the parent may end without reading everything
        while data := connection.recv(MAX_MESSAGE_BYTES):
            response, fds = reply(follower, msgspec.msgpack.decode(data, type=Request), args.poll_s)
            socket.send_fds(connection, [msgspec.msgpack.encode(response)], fds)
            for fd in fds:
                os.close(fd)


def reply(follower: Follower, request: Request, poll_s: float) -> tuple[Response, list[int]]:
    """Create the response to a request, and the list of file descriptors to send with it.

    The list has the image's descriptor, if there is an image. Reads the channel's pointer every `poll_s` seconds until
    there is a new version or the request's time is over.
    """
    end = time.monotonic() + request.wait_s
    try:
        while (head := follower.head_version()) is None or head == request.held:
            if time.monotonic() >= end:
                return Response(), []
            time.sleep(poll_s)
        fd, table_at = write_image(_news(follower, request.held), follower.tensors)
        follower.rebind(read_image(fd, table_at).tensors)
        return Response(table_at=table_at, followed=follower.followed), [fd]
    except EtudeError as error:
        return Response(error=(error.what, error.facts[:_MAX_FACTS], error.hint)), []
    except (OSError, MemoryError) as error:
        return Response(error=_told(error)), []


def _told(error: OSError | MemoryError) -> tuple[str, str, str]:
    """Return the what, facts and hint that describe an error of the operating system or a lack of memory."""
    if isinstance(error, MemoryError) or error.errno in _NO_MEMORY:
        hint = "free memory on the engine's machine; it will be retried"
        return "not enough memory for new weights", str(error)[:_MAX_FACTS], hint
    hint = "see the cause on the engine's machine, such as its limit of open files; it will be retried"
    facts = f"{type(error).__name__}: {error}"
    return "new weights cannot be fetched or handed to the engine", facts[:_MAX_FACTS], hint


def _news(follower: Follower, held: Version | None) -> Update:
    """Return the update from `held` to the head; one with all tensors if this process held another version."""
    before, started = follower.version, time.perf_counter()
    update = follower.advance()
    if update is not None and before in (held, None):
        return update
    assert follower.version is not None, "advance() has reached the head"
    return Update(
        version=follower.version,
        changed={},
        replaced=dict(follower.tensors),
        removed=(),
        fetch_s=time.perf_counter() - started,
        fetched_bytes=update.fetched_bytes if update else 0,
        healed=update.healed if update else (),
    )


def _end_with(connection: socket.socket) -> None:
    """End this process as soon as the other end of the socket is closed, whatever it is doing."""
    watch = select.poll()
    watch.register(connection, 0)  # hang-ups only, which are always reported
    watch.poll()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv)

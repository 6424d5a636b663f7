"""Images: root filesystems that machines are forked from, identified by their content."""

from __future__ import annotations

import msgspec


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A root filesystem and the defaults for commands in it. An image store creates it and stores the filesystem.

    `digest`: SHA-256 of the filesystem's content, which is also its name in the store. `env`: variables in addition to
    those of every machine. `user`: the user that commands run as; "" is the runtime's first user.

    >>> Image(digest="9f3c", workdir="/testbed", env={"LANG": "C.UTF-8"}).user
    ''
    """

    digest: str
    workdir: str = "/workspace"
    env: dict[str, str] = {}
    user: str = ""

"""Images: root filesystems that machines are forked from, identified by their content."""

from __future__ import annotations

import msgspec


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A root filesystem and the defaults for commands in it. An image store makes it and has the bytes; runtimes read
    it.

    >>> Image(digest="9f3c", workdir="/testbed", env={"LANG": "C.UTF-8"}).user
    ''
    """

    digest: str  # SHA-256 of the filesystem's content; its name in the store
    workdir: str = "/workspace"
    env: dict[str, str] = {}  # in addition to the variables of every machine
    user: str = ""  # user that commands run as; "": the runtime's first user

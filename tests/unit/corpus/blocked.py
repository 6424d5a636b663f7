"""A document source for the tests whose files may be pipes, so that reading one blocks, as on a dead network disk."""

from __future__ import annotations

import signal
from typing import Any

from etude.corpus.sources import Folder


class Blocked(Folder):
    """The modules of a folder, one in each piece. A process that reads a pipe ignores SIGTERM."""

    def pieces(self) -> list[list[Any]]:
        return [[[path.name, 1, 0, "MIT"]] for path in sorted(self.path.glob("*.py"))]

    def read(self, piece: Any) -> Any:
        if any((self.path / name).is_fifo() for name, *_ in piece):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().read(piece)

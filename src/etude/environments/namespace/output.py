"""What a command prints, taken from its pipes as it comes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from etude.environments.output import Capped
from etude.records.command import Printed, Tell

_CHUNK_BYTES = 65_536
_PIPE_CHUNKS = 4  # more than a pipe holds


class Output(Capped):
    """Fills itself from the reading ends of pipes, a chunk each time the event loop comes by, so that a flood from one
    command takes turns with everything else. `tell` gets every byte as well, under its pipe's number: 1, 2."""

    def __init__(self, pipes: Sequence[int], limit: int, tell: Tell | None = None) -> None:
        super().__init__(limit)
        self._loop, self._tell = asyncio.get_running_loop(), tell
        self._open = dict(enumerate(pipes, start=1))
        self._ended = False
        for number, pipe in self._open.items():
            os.set_blocking(pipe, False)
            self._loop.add_reader(pipe, self._more, number)

    def _more(self, number: int) -> bool:
        try:
            data = os.read(self._open[number], _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._let_go(number)
        elif not self._ended:
            self.add(data)
            if self._tell is not None:
                self._tell(Printed(number, data))
        return bool(data)

    def end(self) -> bool:
        """Take what is there now that the command has ended. True when something that it left behind can still write:
        then the pipe is emptied, into nothing, until that ends or `close` is called."""
        for number in list(self._open):
            for _ in range(_PIPE_CHUNKS):
                if not self._more(number):
                    break
        self._ended = True
        return bool(self._open)

    def close(self) -> None:
        """Stop reading. Idempotent."""
        for number in list(self._open):
            self._let_go(number)

    def _let_go(self, number: int) -> None:
        pipe = self._open.pop(number)
        self._loop.remove_reader(pipe)
        os.close(pipe)

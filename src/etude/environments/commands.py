"""What a machine remembers of its commands: each key runs once, whoever repeats it gets the record.

A command is a task of its own: whoever asked may be cancelled, and asks again with the same key. Knows nothing of how
a command is run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from etude.errors import MachineError
from etude.seams import ExecResult

MAX_COMMANDS = 4096  # of one machine: each keeps its result


class Commands:
    """Of one machine, by their keys."""

    def __init__(self) -> None:
        self._known: dict[str, asyncio.Task[ExecResult]] = {}

    def __bool__(self) -> bool:
        """Whether any was ever begun."""
        return bool(self._known)

    async def once(self, key: str, begin: Callable[[], Coroutine[Any, Any, ExecResult]]) -> ExecResult:
        """The result of the command with this key. `begin` is called where there is none yet: what it raises is
        raised here, and the key is free still; what its coroutine raises belongs to the key. `MachineError` past
        `MAX_COMMANDS`."""
        running = self._known.get(key)
        if running is None:
            if len(self._known) >= MAX_COMMANDS:
                raise MachineError(f"a machine runs at most {MAX_COMMANDS} commands", hint="fork another one")
            running = self._known[key] = asyncio.create_task(begin())
            running.add_done_callback(retrieve)
        return await asyncio.shield(running)


def retrieve(task: asyncio.Task[Any]) -> None:
    """Look at a task's failure: nobody may be waiting for it any more."""
    if not task.cancelled():
        task.exception()

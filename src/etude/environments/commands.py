"""What a machine remembers of its commands: each key runs once, whoever repeats it gets the record.

A command is a task of its own: whoever asked may be cancelled, and asks again with the same key. Knows nothing of how
a command is run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Unpack

from etude.errors import MachineError
from etude.records.command import Command, ExecOptions, ExecResult

Begin = Callable[[Command], Coroutine[Any, Any, ExecResult]]
MAX_COMMANDS = 4096  # of one machine: each keeps its result


class Commands:
    """Of one machine, by their keys."""

    def __init__(self) -> None:
        self._known: dict[str, asyncio.Task[ExecResult]] = {}

    def __bool__(self) -> bool:
        """Whether any was ever begun."""
        return bool(self._known)

    async def once(
        self, begin: Begin, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """The result of the command with this key. Where there is none yet, `begin` makes one: what it raises is
        raised here, and the key is free still; what its coroutine raises belongs to the key. `ValueError` for what
        cannot be a command, `MachineError` past `MAX_COMMANDS`."""
        running = self._known.get(key)
        if running is None:
            if len(self._known) >= MAX_COMMANDS:
                raise MachineError(f"a machine runs at most {MAX_COMMANDS} commands", hint="fork another one")
            command = Command.of(argv, key=key, deadline_s=deadline_s, **options)
            running = self._known[key] = asyncio.create_task(begin(command))
            running.add_done_callback(retrieve)
        return await asyncio.shield(running)


def retrieve(task: asyncio.Task[Any]) -> None:
    """Look at a task's failure: nobody may be waiting for it any more."""
    if not task.cancelled():
        task.exception()

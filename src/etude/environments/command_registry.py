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


class CommandRegistry:
    """Of one machine, by their keys."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[ExecResult]] = {}

    def __bool__(self) -> bool:
        """Whether any was ever begun."""
        return bool(self._tasks)

    async def run_once(
        self, begin: Begin, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """The result of the command with this key. Where there is none yet, `begin` makes one: what it raises is
        raised here, and the key is free still; what its coroutine raises belongs to the key. `ValueError` for what
        cannot be a command, `MachineError` past `MAX_COMMANDS`."""
        running = self._tasks.get(key)
        if running is None:
            if len(self._tasks) >= MAX_COMMANDS:
                raise MachineError(f"a machine runs at most {MAX_COMMANDS} commands", hint="fork another one")
            command = Command.of(argv, key=key, deadline_s=deadline_s, **options)
            running = self._tasks[key] = asyncio.create_task(begin(command))
            running.add_done_callback(consume_exception)
        return await asyncio.shield(running)


def consume_exception(future: asyncio.Future[Any]) -> None:
    """Retrieve a future's exception, so that asyncio does not log it when nothing awaits the future any more."""
    if not future.cancelled():
        future.exception()


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended. Its exception is dropped."""
    task.cancel()
    await asyncio.wait([task])
    consume_exception(task)

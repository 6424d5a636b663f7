"""Idempotent commands: a machine runs each command key once, and repeats of the key get the stored result.

Each command runs as a task of its own. A caller that is cancelled can ask again with the same key. How a command is
executed is up to the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Unpack

from etude.errors import MachineError
from etude.records.command import Command, ExecOptions, ExecResult

Begin = Callable[[Command], Coroutine[Any, Any, ExecResult]]
MAX_COMMANDS = 4096  # per machine; each result is kept


class CommandRegistry:
    """The commands of one machine, by their keys."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[ExecResult]] = {}

    def __bool__(self) -> bool:
        """Whether any command was ever started."""
        return bool(self._tasks)

    async def run_once(
        self, begin: Begin, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """Return the result of the command with this key; start it if the key is new.

        `begin(command)` returns the coroutine that runs the command. If `begin` itself raises, the key stays unused; an
        error of the coroutine is stored as the key's result. Raises `ValueError` for an invalid command, `MachineError`
        beyond `MAX_COMMANDS` commands.
        """
        running = self._tasks.get(key)
        if running is None:
            if len(self._tasks) >= MAX_COMMANDS:
                raise MachineError(f"a machine runs at most {MAX_COMMANDS} commands", hint="fork another machine")
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

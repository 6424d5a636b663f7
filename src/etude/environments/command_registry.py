"""Idempotent commands: a machine runs the command of each key once; a repeated call gets the stored result.

Each command runs in an asyncio task of its own, so it continues when its caller is cancelled. The caller can ask again
with the same key.
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
    """The commands of one machine by their idempotency keys. Each machine object makes one."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[ExecResult]] = {}

    def __bool__(self) -> bool:
        """Return whether any command was ever started."""
        return bool(self._tasks)

    async def run_once(
        self, begin: Begin, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """Return the result of the command with this key; start it if the key is new.

        `begin` is called with the validated command and returns the coroutine that runs it. The other arguments are
        those of `Machine.exec`. If `begin` itself raises, the key stays unused. An error of the coroutine is stored and
        raised for every call with this key.

        Raises `ValueError` for an invalid command, and `MachineError` for a new key after `MAX_COMMANDS` commands.
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
    """Cancel a task and wait until it has ended. Its result or exception is dropped."""
    task.cancel()
    await asyncio.wait([task])
    consume_exception(task)

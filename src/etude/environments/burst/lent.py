"""What stands before others: a machine that tells when it is closed and can be lost, and what is asked of a runtime."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Unpack

from etude.errors import MachineError
from etude.records.command import ExecOptions, ExecResult
from etude.seams import Machine, Portable, Runtime


class Lent:
    """`Machine` by another one, `inner`. `returned` is called once, when it has been closed."""

    def __init__(self, machine: Machine, returned: Callable[[], None]) -> None:
        self.inner, self._returned, self._is_returned, self._lost = machine, returned, False, ""

    async def exec(
        self, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """See `Machine.exec`."""
        return await self._there().exec(argv, key=key, deadline_s=deadline_s, **options)

    async def read(self, path: str, *, max_bytes: int = 1_048_576) -> bytes:
        """See `Machine.read`."""
        return await self._there().read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """See `Machine.write`."""
        await self._there().write(path, data)

    async def freeze(self) -> None:
        """See `Machine.freeze`."""
        await self._there().freeze()

    async def snapshot(self) -> str:
        """See `Machine.snapshot`."""
        return await self._there().snapshot()

    async def close(self) -> None:
        """See `Machine.close`."""
        try:
            if not self._lost:
                await self.inner.close()
        finally:
            if not self._is_returned:
                self._is_returned = True
                self._returned()

    def lose(self, host: str) -> None:
        """Nothing reaches it any more, even if its host comes back."""
        self._lost = host

    def _there(self) -> Machine:
        if self._lost:
            facts = f"host {self._lost} was silent past its lease"
            raise MachineError("the machine is lost with its host", facts, hint="fork another one, as a new attempt")
        return self.inner


def portable(runtime: Runtime) -> Portable:
    """A runtime as one whose snapshots can leave it. `MachineError` for one that keeps them."""
    if not isinstance(runtime, Portable):
        facts = f"{runtime.info.name} machines stay where they are"
        raise MachineError("states cannot leave this runtime", facts, hint="use a runtime that is `Portable`")
    return runtime


async def closed(machine: Machine) -> None:
    """Close it, or find it gone."""
    with contextlib.suppress(MachineError):
        await machine.close()


async def answers(machine: Machine) -> bool:
    """Whether a machine that nothing has run in is still there."""
    try:
        await machine.read(".")
    except (IsADirectoryError, ValueError):
        return True
    except (MachineError, OSError):
        return False
    return True

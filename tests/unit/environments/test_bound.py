"""A process that cannot outlive this one, and what is left where it cannot be had."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from etude.environments.bound import BoundProcess
from etude.errors import MachineError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bound processes need Linux")


def said() -> int:
    return os.memfd_create("said", os.MFD_CLOEXEC)


def test_a_process_ends_when_it_is_closed_and_what_it_said_is_kept():
    async def main() -> None:
        process = BoundProcess(["sh", "-c", "echo here >&2; exec sleep 1000"], said=said(), fds=())
        async with asyncio.timeout(20):
            while process.said() != "here":  # noqa: ASYNC110 - the kernel tells nobody
                await asyncio.sleep(0.01)
        assert process.is_alive
        await process.close()
        await process.close()
        assert not process.is_alive
        assert not Path(f"/proc/{process.pid}").exists()

    asyncio.run(main())


def test_a_process_that_cannot_be_watched_is_not_left(monkeypatch):
    started: list[int] = []

    def refuse(pid: int, flags: int = 0) -> int:
        started.append(pid)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(MachineError, match="sleep could not be started"):
        BoundProcess(["sleep", "1000"], said=said(), fds=())
    assert not Path(f"/proc/{started[0]}").exists()

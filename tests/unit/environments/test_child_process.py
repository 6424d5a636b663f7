"""A process that cannot outlive this one, and what is left where it cannot be had."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from etude.environments.child_process import ChildProcess, end_killed
from etude.environments.namespace.launcher import LauncherProcess
from etude.errors import MachineError
from etude.rollouts import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bound processes need Linux")


def said() -> int:
    return os.memfd_create("said", os.MFD_CLOEXEC)


def test_a_process_ends_when_it_is_closed_and_what_it_said_is_kept():
    async def main() -> None:
        process = ChildProcess(["sh", "-c", "echo here >&2; exec sleep 1000"], log_fd=said(), fds=())
        async with asyncio.timeout(100):
            while process.log_tail() != "here":  # noqa: ASYNC110 - the kernel tells nobody
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
        ChildProcess(["sleep", "1000"], log_fd=said(), fds=())
    assert not Path(f"/proc/{started[0]}").exists()


def test_a_process_ends_with_a_parent_that_is_killed():
    code = (
        "import os, time\n"
        "from etude.environments.child_process import ChildProcess\n"
        "process = ChildProcess(['sh', '-c', 'exec sleep 1000'], log_fd=os.memfd_create('said'), fds=())\n"
        "while 'sleep' not in open(f'/proc/{process.pid}/comm').read():\n"
        "    time.sleep(0.01)\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        assert select.select([pidfd], [], [], 100.0)[0], "it was ended by the kernel"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


_TRACE = """
import ctypes, sys
result = ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), None, None)  # PTRACE_SEIZE
print(result, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def that_does_not_end():
    """Yield a process that no wait of its parent sees end, since a tracer that does not wait for it has seized it."""
    process = subprocess.Popen(["sleep", "1000"])
    command = [sys.executable, "-c", _TRACE, str(process.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
        assert tracer.stdin is not None
        assert tracer.stdout is not None
        try:
            if tracer.stdout.readline().strip() != b"0":
                pytest.skip("this host allows no process to be traced")
            yield process
        finally:
            process.kill()
            tracer.stdin.close()
    process.wait(100)


def test_a_killed_process_that_does_not_end_is_an_error_that_names_it():
    with that_does_not_end() as process, pytest.raises(MachineError, match="a killed process does not end") as error:
        end_killed(process, deadline_s=0.1)
    assert f"process {process.pid}, 0.1 s after SIGKILL" in error.value.facts


def test_a_launcher_of_machines_that_does_not_end_is_waited_for_no_longer_than_its_deadline():
    launcher = LauncherProcess.__new__(LauncherProcess)
    launcher._lifeline = -1  # it is shut down
    with that_does_not_end() as process:
        launcher._process = process
        with pytest.raises(MachineError, match="a killed process does not end"):
            launcher.wait(deadline_s=0.1)


def test_a_launcher_of_programs_that_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr(processes, "END_S", 0.1)
    launcher, (ours, theirs) = processes.Launcher(sys.executable, (), {}), socket.socketpair()
    with theirs, that_does_not_end() as process:
        launcher._sock, launcher._process = ours, process
        with pytest.raises(MachineError, match="a killed process does not end"):
            launcher._end()
        launcher._end()  # it is not waited for again

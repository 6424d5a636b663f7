"""Child processes that the kernel kills when their parent ends, however it ends.

`setpriv --pdeathsig` sets the parent-death signal in the child, before the program starts. So nothing runs between fork
and exec in this process, where other threads may hold locks. The kernel sends the signal when the *thread* that started
the child ends: start children from the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

from etude.errors import MachineError

_CHECK_PARENT = 'test "$PPID" = "$0" && exec "$@"'  # the parent may have died between fork and setpriv


def require_programs(programs: dict[str, str], what: str) -> None:
    """Check that this is Linux and that all `programs` and `setpriv` are installed. Raises `MachineError` otherwise.

    `programs` maps the name of each program to the package that contains it. `what` is a plural noun for the error
    message: the things that need these programs, such as "virtual machines".
    """
    if sys.platform != "linux":
        hint = "run etude in a container (examples/containers), or use a remote backend"
        raise MachineError(f"{what} need Linux", f"this is {sys.platform}", hint=hint)
    for program, package in {**programs, "setpriv": "util-linux"}.items():
        if shutil.which(program) is None:
            raise MachineError(f"the program {program} was not found", f"{what} need it", hint=f"install: {package}")


def die_with_parent(command: Sequence[str], *, signal_name: str = "KILL") -> list[str]:
    """Return the command line that runs `command` and lets the kernel signal it when its parent thread ends.

    The signal is `signal_name` ("KILL", "TERM", ...). The parent is the thread that starts the returned command line.
    If this process has already ended, `command` does not start.
    """
    return ["setpriv", f"--pdeathsig={signal_name}", "--", "sh", "-c", _CHECK_PARENT, str(os.getpid()), *command]


class ChildProcess:
    """A started child process, which the kernel kills when the thread that created this object ends.

    `log_fd`: descriptor of the file that gets its standard error, and its standard output unless `stdout` is given.
    `stdin`, `stdout`: descriptors for these streams; without `stdin` it reads /dev/null. `fds`: further descriptors
    that it inherits under the same numbers.

    The constructor raises `MachineError` if the process cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_fd: int,
        stdin: int | None = None,
        stdout: int | None = None,
        fds: Sequence[int],
    ) -> None:
        self._log_fd, self._closed = log_fd, False
        try:
            self._process = subprocess.Popen(
                die_with_parent(command),
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=log_fd if stdout is None else stdout,
                stderr=log_fd,
                pass_fds=fds,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise _start_error(command[0], error) from None
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            end_killed(self._process)
            raise _start_error(command[0], error) from None

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return not self._closed and self._process.poll() is None

    def log_tail(self) -> str:
        """Return the last 2,000 bytes of its log, as text."""
        size = os.fstat(self._log_fd).st_size
        return os.pread(self._log_fd, 2000, max(0, size - 2000)).decode(errors="replace").strip()

    async def wait(self) -> None:
        """Wait until the process has ended."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pidfd, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._pidfd)

    def kill(self) -> None:
        """Send SIGKILL and return without waiting. Does nothing if the process has ended."""
        if not self._closed:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def close(self, *, deadline_s: float = 20.0) -> None:
        """Kill the process and wait until it has ended. Idempotent.

        Raises `MachineError` if it does not end within `deadline_s` seconds because it hangs in the kernel.
        """
        if self._closed:
            return
        self.kill()
        self._closed = True
        try:
            async with asyncio.timeout(deadline_s):
                await self.wait()
        except TimeoutError:
            raise _not_ended(self.pid, deadline_s) from None
        finally:
            self._process.poll()
            os.close(self._pidfd)


def end_killed(process: subprocess.Popen[bytes], *, deadline_s: float = 20.0) -> None:
    """Kill a process and block until it has ended.

    Raises `MachineError` if it does not end within `deadline_s` seconds because it hangs in the kernel.
    """
    process.kill()
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        raise _not_ended(process.pid, deadline_s) from None


def _not_ended(pid: int, deadline_s: float) -> MachineError:
    facts = f"process {pid}, {deadline_s:g} s after SIGKILL"
    return MachineError(
        "a killed process does not end",
        facts,
        hint="see the kernel log (dmesg): the process probably hangs in the kernel",
    )


def _start_error(program: str, error: OSError) -> MachineError:
    return MachineError(
        f"{program} could not be started", str(error), hint="check ulimit -u, ulimit -n and free memory"
    )

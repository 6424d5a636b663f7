"""The host's side of the launcher process: start it, ask it for machines, have them killed, notice its death."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

from etude.environments.config import MachineLimits
from etude.environments.namespace.guest.main import FAILED, GONE, HEAD, KILL, MACHINE, SPAWN, STARTED
from etude.errors import MachineError

PRELOAD = ("collections", "functools", "itertools", "json", "math", "operator", "re", "string", "typing")
_FOLDER = str(Path(__file__).parent)
_BOOT = "import sys; sys.path.insert(0, {folder!r}); from guest.main import main; main({config!r})"
_START_DEADLINE_S = 20.0
_HINT = (
    "machines need user namespaces: allow them (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces>0), run as root with CAP_SYS_ADMIN "
    "(a container: --privileged, or --cap-add SYS_ADMIN with seccomp and apparmor unconfined), or use a remote backend"
)


def _retrieve(blank: Blank) -> None:
    if not blank.cancelled():
        blank.exception()


def abandon_blank(blank: Blank) -> None:
    """Close the socket of a machine that nobody will use; its launcher is gone or going."""
    if blank.done() and not blank.cancelled() and blank.exception() is None:
        blank.result()[1].close()


def default_python() -> str:
    """The interpreter behind this one, outside any virtual environment."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = os.path.join(sys.base_prefix, "bin", version)
    return os.path.realpath(installed if os.path.exists(installed) else sys.executable)


Blank = asyncio.Future[tuple[int, socket.socket]]  # a machine to be: its number and the host's end of its socket


class LauncherProcess:
    """A started launcher. Raises `MachineError` when machines cannot be made here.

    It lives as long as this process, or any fork of it that never execs, holds the other end of its sockets.
    """

    def __init__(self, limits: MachineLimits, *, max_machines: int, python: str, prefix: str) -> None:
        if sys.platform != "linux":
            raise MachineError("machines need Linux", sys.platform, hint="use the container recipe or a remote backend")
        self.failure: str | None = None
        self._waiting: deque[Blank] = deque()
        self._dying: dict[int, asyncio.Future[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life, self._life = os.pipe()
        try:
            config = _config(limits, max_machines, python, prefix, theirs.fileno(), life)
            self._process = _start(python, config, (theirs.fileno(), life))
        except BaseException:
            self.hang_up()
            raise
        finally:
            theirs.close()
            os.close(life)
        try:
            self.pid, self.facts = self._wait_until_started()
        except BaseException:
            self.wait()
            raise
        self._control.setblocking(False)

    def _wait_until_started(self) -> tuple[int, dict[str, Any]]:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        packet = self._control.recv(4096) if poller.poll(_START_DEADLINE_S * 1000) else b""
        if not packet:
            facts = f"it said nothing within {_START_DEADLINE_S:g} s or ended; its standard error may say why"
            raise MachineError("the machine launcher did not start", facts, hint=_HINT)
        kind, _ = HEAD.unpack_from(packet)
        text = packet[HEAD.size :].decode(errors="replace")
        if kind != STARTED:
            raise MachineError("machines cannot be made here", text, hint=_HINT)
        return _child_of(self._process.pid), json.loads(text)

    def spawn(self, count: int) -> list[Blank]:
        """Ask for machines. Each future raises `MachineError` when its machine cannot be made."""
        loop = self._listen()
        blanks: list[Blank] = [loop.create_future() for _ in range(count)]
        for blank in blanks:
            blank.add_done_callback(_retrieve)
        self._send(SPAWN, count)
        self._waiting.extend(blanks)
        return blanks

    def discard(self, number: int) -> None:
        """Have a machine killed without waiting for its end."""
        with contextlib.suppress(MachineError):
            self._send(KILL, number)

    async def kill(self, number: int, *, deadline_s: float = 10.0) -> None:
        """Have a machine killed and wait until every process in it is gone. Raises `MachineError`."""
        if self.failure is not None:
            return
        loop = self._listen()
        gone = self._dying.get(number)
        if gone is None:
            gone = self._dying[number] = loop.create_future()
            self._send(KILL, number)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(gone)
        except TimeoutError:
            facts = f"{deadline_s:g} s after it was killed"
            hint = "a process in it hangs in the kernel"
            raise MachineError(f"machine {number} is still there", facts, hint=hint) from None

    def _send(self, kind: bytes, number: int) -> None:
        if self.failure is None:
            try:
                self._control.send(HEAD.pack(kind, number))
            except OSError as error:
                self._fail(f"its control socket: {error}")
        if self.failure is not None:
            raise MachineError("the machine launcher is gone", self.failure, hint="fork again: a new one is started")

    def _listen(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._control)
            self._loop = loop
            loop.add_reader(self._control, self._hear)
        return loop

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.failure is None:
                try:
                    packet, fds, _, _ = socket.recv_fds(self._control, 4096, 1)
                except ConnectionError as error:
                    self._fail(str(error))
                    return
                if not packet:
                    self._fail(f"it ended{_exit_status(self._process)}")
                    return
                kind, number = HEAD.unpack_from(packet)
                self._heard(kind, number, packet[HEAD.size :], fds)

    def _heard(self, kind: bytes, number: int, text: bytes, fds: list[int]) -> None:
        if kind == GONE:
            gone = self._dying.setdefault(number, asyncio.get_running_loop().create_future())
            if not gone.done():
                gone.set_result(None)
            return
        connection = socket.socket(fileno=fds[0]) if fds else None
        future = self._waiting.popleft()
        if kind == MACHINE and connection is not None and not future.done():
            future.set_result((number, connection))
        elif kind == FAILED and not future.done():
            reason = text.decode(errors="replace")
            future.set_exception(MachineError("a machine could not be made", reason, hint="see the host's limits"))
        elif connection is not None:
            connection.close()

    def _fail(self, why: str) -> None:
        self.failure = why
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._control)
        error = MachineError("the machine launcher is gone", why, hint="fork again: a new one is started")
        for future in self._waiting:
            if not future.done():
                future.set_exception(error)
        for gone in self._dying.values():
            if not gone.done():
                gone.set_result(None)
        self._waiting.clear()

    def hang_up(self) -> None:
        """End every machine. Idempotent."""
        if self._life >= 0:
            if self.failure is None:
                self._fail("closed")
            self._control.close()
            os.close(self._life)
            self._life = -1

    def wait(self, *, deadline_s: float = 20.0) -> None:
        """Hang up and block until no process and no control group is left. Idempotent."""
        self.hang_up()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def cpu_s(self) -> float:
        """CPU seconds of the launcher and of every machine that has ended, so far."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return sum(map(int, fields[11:15])) / float(os.sysconf("SC_CLK_TCK"))


def _config(limits: MachineLimits, max_machines: int, python: str, prefix: str, control: int, life: int) -> str:
    order = ("memory_bytes", "processes", "cpus", "work_bytes", "tmp_bytes", "inodes", "open_files", "address_bytes")
    return json.dumps(
        {
            "control": control,
            "life": life,
            "name": f"{os.getpid()}-{secrets.token_hex(4)}",
            "folder": _FOLDER,
            "python": python,
            "prefix": prefix,
            "preload": PRELOAD,
            "max_machines": max_machines,
            "limits": [getattr(limits, name) for name in order],
        }
    )


def _start(python: str, config: str, pass_fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    boot = _BOOT.format(folder=_FOLDER, config=config)
    try:
        process = subprocess.Popen(
            [python, "-s", "-S", "-P", "-B", "-"],  # the program comes over stdin: machines can see this command line
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # never read: it is there so that tools' own standard streams are set up for pipes
            env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "LD_BIND_NOW": "1"},  # bound once, not in each fork
            cwd="/",
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except OSError as error:
        raise MachineError(f"no interpreter at {python}", str(error), hint="name one that machines can use") from None
    with contextlib.suppress(BrokenPipeError):  # it died at once: the control socket tells
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        process.stdin.write(boot.encode())
        process.stdin.close()
    return process


def _child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    listed = children.read_text().split() if children.exists() else []
    return int(listed[0]) if listed else pid


def _exit_status(process: subprocess.Popen[bytes]) -> str:
    try:
        return f" with status {process.wait(1.0)}"
    except subprocess.TimeoutExpired:
        return ""

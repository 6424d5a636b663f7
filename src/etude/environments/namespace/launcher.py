"""The host's side of the launcher and runner processes.

It starts them, has them create and kill machines and run commands, and notices when they end.
"""

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from etude.environments.child_process import end_killed
from etude.environments.command_registry import consume_exception
from etude.environments.config import MachineLimits
from etude.environments.namespace.guest.packets import (
    BEGUN,
    BEGUN_FACTS,
    END_ONE,
    ENDED,
    ENDED_FACTS,
    FAILED,
    GONE,
    HEAD,
    KILL,
    MADE,
    MADE_FACTS,
    REPORT_PID,
    RUN,
    RUN_FACTS,
    SIGNALLED,
    SPAWN,
    STARTED,
)
from etude.errors import MachineError
from etude.records.command import OutputCallback, ProcessStarted

T = TypeVar("T")
_START_DEADLINE_S = 20.0
_HINT = (
    "machines need user namespaces: allow them (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces>0), run as root with CAP_SYS_ADMIN "
    "(a container: --privileged, or --cap-add SYS_ADMIN with seccomp and apparmor unconfined), or use a remote backend"
)


class MachineHandle(NamedTuple):
    """A new machine, as the launcher created it. The receiver must `close` it.

    - `number`: the number that the launcher gave it; `slot`: a number that is unique among the machines that are alive
    - `init_pid`: PID of its first process, as the launcher sees it

    The other fields are open descriptors:

    - `work`: its work folder; `init`: a pidfd of its first process
    - `agent`: the channel to its agent, closed by the `Channel` on it; -1 without an agent
    - `upper`, `root`: for a machine of an image, the folder with its changes and its root; else -1
    """

    number: int
    slot: int
    init_pid: int
    work: int
    init: int
    agent: int = -1
    upper: int = -1
    root: int = -1

    def close(self) -> None:
        """Close the descriptors, except the agent's channel."""
        for fd in (self.work, self.init, self.upper, self.root):
            if fd >= 0:
                os.close(fd)


class CommandEnd(NamedTuple):
    """How a command ended.

    `exit_code`: 128 + signal for a killed command. `timed_out`: whether it was killed at its deadline. `lost`: whether
    its machine has died.
    """

    exit_code: int
    timed_out: bool
    lost: bool


PendingMachine = asyncio.Future[MachineHandle]  # a machine that is being created


def discard_pending(pending: PendingMachine) -> None:
    """Close the descriptors of a machine that will not be used. Its launcher must have ended or be ending."""
    if pending.done() and not pending.cancelled() and pending.exception() is None:
        handle = pending.result()
        handle.close()
        if handle.agent >= 0:
            os.close(handle.agent)


class LauncherProcess:
    """A started launcher process, which creates machines of one kind.

    - `limits`: the limits of each machine; `max_machines`: the most machines that are alive at once
    - `python`, `prefix`: path of the interpreter inside the machines, and the folder where it is installed
    - `agent`: path of the agent's program; "": machines have no agent
    - `image`: the result of `images.image_settings`; None: machines have no image

    The launcher ends when the other end of its sockets is closed, in this process and in all forks of it that have not
    called exec. The constructor raises `MachineError` if machines cannot be created on this host.
    """

    def __init__(
        self,
        limits: MachineLimits,
        *,
        max_machines: int,
        python: str,
        prefix: str,
        agent: str = "",
        image: Mapping[str, Any] | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise MachineError(
                "machines need Linux",
                sys.platform,
                hint="run etude in a container (examples/containers), or use a remote backend",
            )
        self.failure: str | None = None
        self.image = image  # settings of `namespace.images.image_settings`
        self._pending: deque[PendingMachine] = deque()
        self._alive: set[int] = set()  # numbers of the machines that have not ended
        self._ending: dict[int, asyncio.Future[None]] = {}  # of those that `kill` waits for
        self._running: dict[int, asyncio.Future[CommandEnd]] = {}  # by the command's number, like `_on_started`
        self._on_started: dict[int, OutputCallback] = {}
        self._last_number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._commands, commands = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life, self._lifeline = os.pipe()
        try:
            fds = {"control": control.fileno(), "commands": commands.fileno(), "life": life}
            settings = {
                "max_machines": max_machines,
                "python": python,
                "prefix": prefix,
                "agent": agent,
                "image": image,
            }
            self._process = _start(python, _config(limits, settings | fds), tuple(fds.values()))
        except BaseException:
            self.shut_down()
            raise
        finally:
            control.close()
            commands.close()
            os.close(life)
        try:
            self.pid, self.info = self._wait_until_started()
            self.runner_pid = _child_of(self.pid)
        except BaseException:
            self.wait()
            raise
        self._control.setblocking(False)
        self._commands.setblocking(False)

    def _wait_until_started(self) -> tuple[int, dict[str, Any]]:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        packet = self._control.recv(4096) if poller.poll(_START_DEADLINE_S * 1000) else b""
        if not packet:
            facts = f"no message within {_START_DEADLINE_S:g} s, or it ended; see its standard error"
            raise MachineError("the machine launcher did not start", facts, hint=_HINT)
        kind, _ = HEAD.unpack_from(packet)
        text = packet[HEAD.size :].decode(errors="replace")
        if kind != STARTED:
            raise MachineError("machines cannot be created here", text, hint=_HINT)
        return _child_of(self._process.pid), json.loads(text)

    def spawn(self, count: int) -> list[PendingMachine]:
        """Request `count` machines and return a future for each; it raises `MachineError` if the machine cannot be
        created."""
        loop = self._start_receiving()
        pending: list[PendingMachine] = [loop.create_future() for _ in range(count)]
        for future in pending:
            future.add_done_callback(consume_exception)
        self._send(SPAWN, count)
        self._pending.extend(pending)
        return pending

    def discard(self, number: int) -> None:
        """Kill the machine `number` without waiting for its end."""
        with contextlib.suppress(MachineError):
            self._send(KILL, number)

    async def kill(self, number: int, *, deadline_s: float) -> bool:
        """Kill the machine `number` and wait until all its processes are gone, for at most `deadline_s` seconds.

        Returns whether they are gone. May be called again.
        """
        self.discard(number)
        if self.is_gone(number):
            return True
        gone = self._ending.setdefault(number, self._start_receiving().create_future())
        done, _ = await asyncio.wait({gone}, timeout=deadline_s)
        return bool(done)

    def run(
        self,
        handle: MachineHandle,
        streams: list[int],
        deadline_s: float,
        *,
        flags: int = 0,
        tell: OutputCallback | None = None,
    ) -> asyncio.Future[CommandEnd]:
        """Start a command in a machine and return a future for its end.

        `streams`: descriptors of its request and its output, then, depending on `flags` (constants of `guest.packets`),
        of its standard error and input. `tell` is called with `ProcessStarted` once the command runs. The future raises
        `MachineError` if the launcher or the runner dies.
        """
        if tell is not None:
            flags |= REPORT_PID
            self._on_started[self._last_number + 1] = tell
        return self._send_command(RUN, handle, streams, deadline_s, flags)

    @property
    def last_number(self) -> int:
        """Number of the last command that `run` or `signal_all` has sent."""
        return self._last_number

    def end_one(self, number: int) -> None:
        """Kill the command `number`, whose deadline has passed; its result then has `timed_out`. Does nothing if it has
        ended."""
        if number in self._running and self.failure is None:
            self._send_packet(self._commands, HEAD.pack(END_ONE, number), [])

    def signal_all(self, handle: MachineHandle, kind: bytes) -> asyncio.Future[CommandEnd]:
        """Kill, stop or continue all processes in a machine, and return a future that is done when all are killed,
        stopped or continued.

        `kind`: END_ALL, STOP_ALL or CONTINUE_ALL.
        """
        return self._send_command(kind, handle, [], 0.0, 0)

    def _send_command(
        self, kind: bytes, handle: MachineHandle, streams: list[int], deadline_s: float, flags: int
    ) -> asyncio.Future[CommandEnd]:
        self._last_number += 1
        done: asyncio.Future[CommandEnd] = self._start_receiving().create_future()
        done.add_done_callback(consume_exception)
        self._running[self._last_number] = done
        packet = HEAD.pack(kind, self._last_number) + RUN_FACTS.pack(deadline_s, handle.slot, handle.init_pid, flags)
        self._send_packet(self._commands, packet, [handle.init, *streams])
        return done

    def _send(self, kind: bytes, number: int) -> None:
        self._send_packet(self._control, HEAD.pack(kind, number), [])

    def _send_packet(self, to: socket.socket, packet: bytes, fds: list[int]) -> None:
        if self.failure is None:
            try:
                socket.send_fds(to, [packet], fds)
            except OSError as error:
                self._set_failed(f"its socket: {error}")
        if self.failure is not None:
            raise _gone_error(self.failure)

    def _start_receiving(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._stop_receiving()
            self._loop = loop
            for end in (self._control, self._commands):
                loop.add_reader(end, self._receive, end)
        return loop

    def _stop_receiving(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            for end in (self._control, self._commands):
                self._loop.remove_reader(end)

    def _receive(self, end: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.failure is None:
                try:
                    packet, fds, _, _ = socket.recv_fds(end, 4096, 5)
                except ConnectionError as error:
                    self._set_failed(str(error))
                    return
                if not packet:
                    self._set_failed(f"it ended{_exit_status(self._process)}")
                    return
                kind, number = HEAD.unpack_from(packet)
                self._handle_packet(kind, number, packet[HEAD.size :], fds)

    def _handle_packet(self, kind: bytes, number: int, facts: bytes, fds: list[int]) -> None:
        if kind in (ENDED, SIGNALLED):
            self._on_started.pop(number, None)
            _set_result(self._running.pop(number), CommandEnd(*ENDED_FACTS.unpack(facts)))
        elif kind == BEGUN:
            self._on_started.pop(number)(ProcessStarted(*BEGUN_FACTS.unpack(facts)))
        elif kind == GONE:
            self._alive.discard(number)
            if (gone := self._ending.pop(number, None)) is not None:
                _set_result(gone, None)
        elif kind == MADE:
            self._handle_made(number, facts, fds)
        elif kind == FAILED:
            future = self._pending.popleft()
            if not future.done():
                reason = facts.decode(errors="replace")
                future.set_exception(
                    MachineError(
                        "a machine could not be created", reason, hint="etude machines probe shows what this host lacks"
                    )
                )

    def _handle_made(self, number: int, facts: bytes, fds: list[int]) -> None:
        future = self._pending.popleft()
        self._alive.add(number)
        num_folders = 1 if self.image is None else 3
        if len(fds) == 1 + num_folders + self.info["agent"]:
            slot, init_pid = MADE_FACTS.unpack(facts)
            work, init, *more = fds
            agent = more.pop() if self.info["agent"] else -1
            handle = MachineHandle(number, slot, init_pid, work, init, agent, *more)
            if _set_result(future, handle):
                return
        for fd in fds:
            os.close(fd)
        self.discard(number)
        if not future.done():
            hint = "raise the limit of open files (ulimit -n): a machine needs three, one of an image five"
            future.set_exception(MachineError("a new machine could not be used", "too many open files", hint=hint))

    def is_gone(self, number: int) -> bool:
        """Return whether all processes of the machine `number` are gone."""
        return number not in self._alive

    def _set_failed(self, why: str) -> None:
        self.failure = why
        self._stop_receiving()
        futures: list[asyncio.Future[Any]] = [*self._pending, *self._running.values()]
        for future in futures:
            if not future.done():
                future.set_exception(_gone_error(why))
        for gone in self._ending.values():
            _set_result(gone, None)
        self._ending.clear()
        self._alive.clear()
        self._pending.clear()
        self._running.clear()
        self._on_started.clear()

    def shut_down(self) -> None:
        """Start to end all machines, without waiting until they have ended. Idempotent."""
        if self._lifeline >= 0:
            if self.failure is None:
                self._set_failed("closed")
            self._control.close()
            self._commands.close()
            os.close(self._lifeline)
            self._lifeline = -1

    def wait(self, *, deadline_s: float = 20.0) -> None:
        """Shut down and block until no process and no control group is left. Idempotent.

        After `deadline_s` seconds the launcher is killed. Raises `MachineError` if it does not end within as many
        seconds after that.
        """
        self.shut_down()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            end_killed(self._process, deadline_s=deadline_s)

    def cpu_s(self) -> float:
        """Return the CPU seconds so far of the launcher, the runner, and everything in machines that has ended."""
        try:
            stats = [Path(f"/proc/{pid}/stat").read_text() for pid in (self.pid, self.runner_pid)]
        except OSError:
            return 0.0
        ticks = sum(sum(map(int, stat.rpartition(")")[2].split()[11:15])) for stat in stats)
        return ticks / float(os.sysconf("SC_CLK_TCK"))


def _gone_error(why: str) -> MachineError:
    return MachineError("the machine launcher is gone", why, hint="fork again: a new one is started")


def _set_result(future: asyncio.Future[T], result: T) -> bool:
    """Set a future's result. False if it is done already."""
    if future.done():
        return False
    future.set_result(result)
    return True


# ------------------------------------------------------------------------------------------------ the process


PRELOAD = ("collections", "functools", "itertools", "json", "math", "operator", "re", "string", "typing")
_FOLDER = str(Path(__file__).parent)
_BOOT = "import sys; sys.path.insert(0, {folder!r}); from guest.main import main; main({config!r})"


def default_python() -> str:
    """Return the path of the interpreter behind this one, outside any virtual environment."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = os.path.join(sys.base_prefix, "bin", version)
    return os.path.realpath(installed if os.path.exists(installed) else sys.executable)


def _config(limits: MachineLimits, settings: Mapping[str, Any]) -> str:
    order = ("memory_bytes", "processes", "cpus", "work_bytes", "tmp_bytes", "inodes", "open_files", "address_bytes")
    return json.dumps(
        {
            **settings,
            "name": f"{os.getpid()}-{secrets.token_hex(4)}",
            "folder": _FOLDER,
            "preload": PRELOAD,
            "limits": [getattr(limits, name) for name in order],
        }
    )


def _start(python: str, config: str, pass_fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start a launcher. Raises `MachineError` if there is no such interpreter."""
    boot = _BOOT.format(folder=_FOLDER, config=config)
    try:
        process = subprocess.Popen(
            [python, "-s", "-S", "-P", "-B", "-"],  # the program comes over stdin: machines can see this command line
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # never read; with it, commands' standard streams are set up for pipes
            env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "LD_BIND_NOW": "1"},  # bound once, not in each fork
            cwd="/",
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except OSError as error:
        raise MachineError(
            f"no interpreter at {python}", str(error), hint="set an interpreter that machines can read"
        ) from None
    with contextlib.suppress(BrokenPipeError):  # it died at once: the control socket reports that
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        process.stdin.write(boot.encode())
        process.stdin.close()
    return process


def _child_of(pid: int) -> int:
    """A process's first child, or the process itself if it has none."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    listed = children.read_text().split() if children.exists() else []
    return int(listed[0]) if listed else pid


def _exit_status(process: subprocess.Popen[bytes]) -> str:
    """ " with status N" if the process ends within a second, else ""."""
    try:
        return f" with status {process.wait(1.0)}"
    except subprocess.TimeoutExpired:
        return ""

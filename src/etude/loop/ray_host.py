"""The actor that runs one program on a node of a Ray cluster.

The program is a child process of the actor, started in the same way as on one machine (`Program`); the kernel kills it
when the actor dies. RPC calls do not pass through Ray: the actor opens a port once, the conductor connects and sends
the run's secret, and the program inherits that connection as its socket. A program without RPC keeps the connection,
too: when the connection ends, the program ends, even if Ray has not noticed the loss yet."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import signal
import socket
import subprocess
from typing import Any

from etude.errors import DeadlineExceeded
from etude.loop import usage
from etude.loop.placement import Program, signal_group
from etude.loop.rpc import LINK_S, enable_keepalive


class RayHost:
    """The Ray actor that hosts one program. Call `offer`, then `start`, then any of the other methods.

    `token` becomes ETUDE_TOKEN in the program's environment."""

    def __init__(self, token: str) -> None:
        import ray

        os.environ["ETUDE_TOKEN"] = token
        self._node = ray.get_runtime_context().get_node_id()
        self._address = str(ray.util.get_node_ip_address())
        self._listener: socket.socket | None = None
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def offer(self, *folders: str) -> tuple[str, str, int, str]:
        """Open a port for the conductor, the run's main process. Returns (id of the node, address, port, problem).

        `folders` must exist on this node; the last becomes the program's working directory. If one does not exist, no
        port is opened and `problem` names it; otherwise it is ""."""
        for path in folders:
            if not os.path.isdir(path):
                return self._node, self._address, 0, f"it does not see {path}"
        os.chdir(folders[-1])
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        self._listener = socket.create_server((self._address, 0), family=family, backlog=4)
        self._listener.setblocking(False)
        return self._node, self._address, self._listener.getsockname()[1], ""

    async def start(self, program: Program, secret: bytes) -> int:
        """Wait for a connection that sends `secret`, start the program, and return its pid. Raises
        `DeadlineExceeded`."""
        link = await self._accept_conductor(program.name, secret)
        with contextlib.suppress(PermissionError):  # Ray gives its workers a nice value of 15
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
        argv, options = program.popen(self._address, link if program.with_socket else None)
        program.log.parent.mkdir(parents=True, exist_ok=True)
        with program.log.open("ab") as log:
            # in the event loop's thread, which lives as long as the actor
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, **options)  # noqa: ASYNC220
        if program.with_socket:
            link.close()  # only the child has it: the conductor sees end-of-file when the child ends
        else:
            self._link = link
            asyncio.get_running_loop().add_reader(link, self._on_disconnect)
        return self._process.pid

    async def _accept_conductor(self, name: str, secret: bytes) -> socket.socket:
        assert self._listener is not None, "call offer first"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(LINK_S):
                while True:
                    sock, _ = await loop.sock_accept(self._listener)
                    if await _sends_secret(sock, secret):
                        return enable_keepalive(sock)
                    sock.close()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the conductor of {name} did not connect to {self._address}",
                f"waited {LINK_S:g} s",
                hint="the machine that runs `etude run` must reach the nodes by TCP: check firewalls",
            ) from None
        finally:
            self._listener.close()

    def _on_disconnect(self) -> None:
        """Kill the program: the conductor is gone."""
        assert self._link is not None, "registered as its reader"
        asyncio.get_running_loop().remove_reader(self._link)
        self._link.close()
        self._signal(signal.SIGKILL)

    async def exited(self) -> int:
        """Wait for the program to end, and return its exit code (negative: the signal)."""
        assert self._process is not None, "start comes first"
        return await asyncio.to_thread(self._process.wait)

    async def signal(self, signum: int) -> None:
        """Send a signal to the program and its process group."""
        self._signal(signum)

    def _signal(self, signum: int) -> None:
        if self._process is not None and self._process.poll() is None:
            signal_group(self._process.pid, signum)

    async def usage(self, with_memory: bool) -> dict[str, Any]:
        """Return `cpu_s`, the CPU seconds of the program and its descendants, and with `with_memory` their
        `pss_bytes`."""
        return await asyncio.to_thread(self._measure_usage, with_memory)

    async def queued_s(self) -> dict[int, float]:
        """Return for each thread of the program how many seconds it has waited for a core, by thread id."""
        assert self._process is not None, "start comes first"
        return usage.queued_s(self._process.pid)

    def _measure_usage(self, with_memory: bool) -> dict[str, Any]:
        assert self._process is not None, "start comes first"
        processes, pid = usage.Processes(), self._process.pid
        memory = {"pss_bytes": usage.pss_bytes(processes.tree(pid))} if with_memory else {}
        return {"cpu_s": round(processes.cpu_s(pid), 3), **memory}


async def _sends_secret(sock: socket.socket, secret: bytes) -> bool:
    loop, given = asyncio.get_running_loop(), b""
    sock.setblocking(False)
    try:
        async with asyncio.timeout(5.0):
            while len(given) < len(secret) and (part := await loop.sock_recv(sock, len(secret) - len(given))):
                given += part
    except (TimeoutError, OSError):
        return False
    return hmac.compare_digest(given, secret)

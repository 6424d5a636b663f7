"""The actor that runs one component on a node of a Ray cluster.

The component is a child process of the actor, started as on one machine (`Program`), and dies with it by the kernel.
Calls do not pass through Ray: the actor offers a port once, the conductor connects and shows the run's secret, and the
component inherits that connection as its socket. What is not called keeps the connection, too: when it ends, so does
the component, whatever Ray knows of it yet. Knows nothing of what the component does.
"""

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
    """Hosts one program. Its methods are called in this order: `offer`, `start`; then any of the others."""

    def __init__(self, token: str) -> None:
        import ray

        os.environ["ETUDE_TOKEN"] = token
        self._node = ray.get_runtime_context().get_node_id()
        self._address = str(ray.util.get_node_ip_address())
        self._listener: socket.socket | None = None
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def offer(self, *folders: str) -> tuple[str, str, int, str]:
        """(node, address, port, what is missing): where the conductor is awaited. `folders`: what must be there; the
        last is where the program will run."""
        for path in folders:
            if not os.path.isdir(path):
                return self._node, self._address, 0, f"it does not see {path}"
        os.chdir(folders[-1])
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        self._listener = socket.create_server((self._address, 0), family=family, backlog=4)
        self._listener.setblocking(False)
        return self._node, self._address, self._listener.getsockname()[1], ""

    async def start(self, program: Program, secret: bytes) -> int:
        """Start the program once the conductor is connected; its pid. Raises `DeadlineExceeded`."""
        link = await self._linked(program.name, secret)
        with contextlib.suppress(PermissionError):  # Ray makes its workers 15 nicer than what else runs on the node
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
        argv, options = program.popen(self._address, link if program.with_socket else None)
        program.log.parent.mkdir(parents=True, exist_ok=True)
        with program.log.open("ab") as log:
            # in the loop's thread, which lives as long as the actor; uvloop's own way takes no process group
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, **options)  # noqa: ASYNC220
        if program.with_socket:
            link.close()  # the child's alone: its end is the conductor's end-of-file
        else:
            self._link = link
            asyncio.get_running_loop().add_reader(link, self._unlinked)
        return self._process.pid

    async def _linked(self, name: str, secret: bytes) -> socket.socket:
        assert self._listener is not None, "offer comes first"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(LINK_S):
                while True:
                    sock, _ = await loop.sock_accept(self._listener)
                    if await _shows(sock, secret):
                        return enable_keepalive(sock)
                    sock.close()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the conductor of {name} did not connect to {self._address}",
                f"within {LINK_S:g} s",
                hint="the machine that runs `etude run` must reach the nodes by TCP: see firewalls",
            ) from None
        finally:
            self._listener.close()

    def _unlinked(self) -> None:
        """The conductor is gone: nothing goes on without it."""
        assert self._link is not None, "called while it is watched"
        asyncio.get_running_loop().remove_reader(self._link)
        self._link.close()
        self._signal(signal.SIGKILL)

    async def exited(self) -> int:
        """Wait for the program to end; its exit code (negative: the signal)."""
        assert self._process is not None, "start comes first"
        return await asyncio.to_thread(self._process.wait)

    async def signal(self, signum: int) -> None:
        """Send a signal to the program and its process group."""
        self._signal(signum)

    def _signal(self, signum: int) -> None:
        if self._process is not None and self._process.poll() is None:
            signal_group(self._process.pid, signum)

    async def usage(self, with_memory: bool) -> dict[str, Any]:
        """`cpu_s` of the program and its descendants, and `pss_bytes` with memory."""
        return await asyncio.to_thread(self._used, with_memory)

    def _used(self, with_memory: bool) -> dict[str, Any]:
        assert self._process is not None, "start comes first"
        processes, pid = usage.Processes(), self._process.pid
        memory = {"pss_bytes": usage.pss_bytes(processes.tree(pid))} if with_memory else {}
        return {"cpu_s": round(processes.cpu_s(pid), 3), **memory}


async def _shows(sock: socket.socket, secret: bytes) -> bool:
    """Whether who connected begins with the secret."""
    loop, given = asyncio.get_running_loop(), b""
    sock.setblocking(False)
    try:
        async with asyncio.timeout(5.0):
            while len(given) < len(secret) and (part := await loop.sock_recv(sock, len(secret) - len(given))):
                given += part
    except (TimeoutError, OSError):
        return False
    return hmac.compare_digest(given, secret)

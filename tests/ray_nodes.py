"""A Ray cluster of processes on this machine, as `ray start` makes one: nodes offer roles, and can be lost."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

START_S = 90.0


class Node:
    """One `ray start`, in a session of its own."""

    def __init__(self, argv: list[str], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(env), start_new_session=True
            )

    def raylet(self) -> psutil.Process | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                if child.name() == "raylet":
                    return child
        return None

    def lose(self) -> None:
        """SIGKILL its raylet: what it hosts ends with it."""
        raylet = self.raylet()
        assert raylet is not None, self.log.read_text()
        raylet.kill()

    def end(self) -> None:
        """Kill everything of it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self.process.kill()
        self.process.wait()


class Nodes:
    """A head that offers nothing, and the nodes that join it. `env`: what reaches it needs. `before`: a program that
    starts the head in its own way; `address`: its own, where Ray is not to look for it."""

    def __init__(self, folder: Path, *before: str, address: str = "") -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            port, client = one.getsockname()[1], other.getsockname()[1]
        self.env = os.environ | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_register_timeout_seconds": "300",  # Ray's 60 s are too few for a busy host
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self.nodes: list[Node] = []
        head = self._start(
            "head",
            [
                "--head",
                f"--port={port}",
                f"--ray-client-server-port={client}",
                "--include-dashboard=false",
                *_at(address),
            ],
            {},
            *before,
        )
        _said(head, "Ray runtime started")
        host = _said(head, "Local node IP: ")[1]
        self.address, self.client = f"{host}:{port}", f"ray://{host}:{client}"

    def add(self, name: str, *before: str, address: str = "", **roles: int) -> Node:
        """A node that takes so many of each role. `before`: a program that starts it in its own way; `address` as for
        the head."""
        for _ in range(3):
            node = self._start(name, [f"--address={self.address}", *_at(address)], roles, *before)
            if _said(node, "Ray runtime started", "timed out during startup")[0]:
                return node
            node.end()  # a node has 30 s of Ray's to come up, which a busy host may not give it
        raise AssertionError(node.log.read_text())

    def _start(self, name: str, place: list[str], roles: Mapping[str, int], *before: str) -> Node:
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *place, "--block", "--num-cpus=0"]
        sizes = ["--object-store-memory=80000000", f"--temp-dir={self.folder}", f"--resources={json.dumps(roles)}"]
        node = Node([*before, *ray, *sizes], self.folder / f"{name}.out", self.env)
        self.nodes.append(node)
        return node


def _at(address: str) -> list[str]:
    return [f"--node-ip-address={address}"] if address else []


def _said(node: Node, what: str, instead: str = "\0") -> tuple[bool, str]:
    """Whether a node said something, rather than something else, and the rest of that line."""
    end = time.monotonic() + START_S
    while True:
        for line in node.log.read_text().splitlines():
            if what in line or instead in line:
                return what in line, line.partition(what)[2].strip()
        assert node.process.poll() is None, node.log.read_text()
        assert time.monotonic() < end, f"waited {START_S:g} s for {what!r}:\n{node.log.read_text()}"
        time.sleep(0.05)


@contextlib.contextmanager
def ray_nodes(*before: str, address: str = "") -> Iterator[Nodes]:
    """A cluster that is gone when the block ends, with its folder. `before`, `address`: of its head, as for `Nodes`."""
    # Ray's sockets lie in it, and their names must be short
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        nodes = None
        try:
            nodes = Nodes(Path(folder), *before, address=address)
            yield nodes
        finally:
            for node in reversed(nodes.nodes if nodes else []):
                node.end()

"""A home and regions in network namespaces, joined by limited links; nothing of it outlives the process that made it.

Namespaces have no names: each is held by a process that the kernel kills with its parent, and goes with its last
process, links and all. `tbf` limits the rate of a link both ways, and setting it down partitions it. Delay and cut
connections come from `wan`, a user-space relay at the home's end of a link, for many kernels have no `netem`; it ends
TCP, so that setting up a connection costs no round trip of the simulated distance. Needs root, `ip`, `tc`, `nsenter`,
`unshare`.

    python -m benchmarks.weights.regions_network LISTEN_PORT TARGET_HOST:PORT ONE_WAY_S CUT_MB (the relay)
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_CHUNK, _WAITING_BYTES = 1 << 15, 4 << 20


def spawn(command: Sequence[str], **kwargs: Any) -> subprocess.Popen[str]:
    """A process that dies with this one, however that ends, and before all others where memory runs out."""
    return subprocess.Popen([str(part) for part in command], text=True, preexec_fn=_go_first, **kwargs)


def _go_first() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900")


@dataclass(frozen=True)
class Link:
    """What joins a region to the home."""

    mbit: float
    rtt_s: float
    cut_mb: float = 0.0  # a connection is cut after about so many megabytes; 0: never

    @property
    def bytes_per_s(self) -> float:
        return self.mbit * 1e6 / 8


class Namespace:
    """A network namespace and the processes in it."""

    def __init__(self) -> None:
        self._holder = spawn(["unshare", "--net", "sleep", "infinity"])
        own, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + 10
        while os.readlink(f"/proc/{self._holder.pid}/ns/net") == own:
            if time.monotonic() > deadline or self._holder.poll() is not None:
                raise SystemExit("no network namespace can be made: run as root")
            time.sleep(0.005)
        self.run("ip", "link", "set", "lo", "up")

    @property
    def pid(self) -> int:
        return self._holder.pid

    def run(self, *command: str) -> str:
        """A command's output. Raises `CalledProcessError`."""
        return subprocess.run(
            ["nsenter", "-t", str(self.pid), "-n", *command], check=True, capture_output=True, text=True, timeout=30
        ).stdout

    def spawn(self, command: Sequence[str], env: Mapping[str, str], **kwargs: Any) -> subprocess.Popen[str]:
        return spawn(["nsenter", "-t", str(self.pid), "-n", *command], env=dict(env), **kwargs)

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


@dataclass
class Network:
    """A home, and a link to each region. `relay_port`: where in the home the store is served."""

    links: Mapping[str, Link]
    relay_port: int
    env: Mapping[str, str]
    home: Namespace = field(default_factory=Namespace)
    regions: dict[str, Namespace] = field(default_factory=dict)
    _wans: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number, (name, link) in enumerate(self.links.items()):
            region = self.regions[name] = Namespace()
            near, far = f"to-{name}"[:15], "home"
            self.home.run(*f"ip link add {near} type veth peer name {far} netns {region.pid}".split())
            for space, device, host in ((self.home, near, 1), (region, far, 2)):
                space.run(*f"ip addr add 10.77.{number}.{host}/24 dev {device}".split())
                space.run(*f"ip link set {device} up".split())
                rate = f"rate {int(link.mbit * 1000)}kbit burst 64kb latency 200ms"
                space.run(*f"tc qdisc add dev {device} root tbf {rate}".split())
            self.carry(name, 8800 + number, f"127.0.0.1:{self.relay_port}")

    def carry(self, name: str, port: int, target: str) -> None:
        """Connections to this port of the home go to a HOST:PORT of the home's or the region's, by the region's way."""
        wan, link = [sys.executable, "-m", "benchmarks.weights.regions_network", str(port), target], self.links[name]
        self._wans.append(self.home.spawn([*wan, str(link.rtt_s / 2), str(link.cut_mb)], self.env))

    def address(self, name: str, *, of_region: bool) -> str:
        """An end of a region's link."""
        return f"10.77.{list(self.links).index(name)}.{2 if of_region else 1}"

    def url(self, name: str) -> str:
        """Of the home's store, as a region sees it."""
        return f"http://{self.address(name, of_region=False)}:{8800 + list(self.links).index(name)}"

    def partition(self, name: str, *, whole: bool) -> None:
        """Take a region's link down, or bring it up again."""
        self.regions[name].run("ip", "link", "set", "home", "up" if whole else "down")

    def received_bytes(self, name: str) -> int:
        """What came to a region over its link."""
        said = self.regions[name].run("cat", "/proc/net/dev")  # of the process's own namespace
        row = next(line for line in said.splitlines() if line.strip().startswith("home:"))
        return int(row.partition(":")[2].split()[0])

    def close(self) -> None:
        for process in self._wans:
            process.kill()
            process.wait()
        for space in (self.home, *self.regions.values()):
            space.close()


async def wan(listen_port: int, target: str, one_way_s: float, cut_mb: float) -> None:
    """Carry connections to a target, every byte later; cut some."""
    host, _, port = target.rpartition(":")
    draw = random.Random(listen_port)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        most = draw.expovariate(1 / (cut_mb * 1e6)) if cut_mb else float("inf")
        there = asyncio.ensure_future(_carry(reader, far_writer, one_way_s, float("inf")))
        back = asyncio.ensure_future(_carry(far_reader, writer, one_way_s, most))
        await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
        there.cancel()
        back.cancel()
        await asyncio.gather(there, back, return_exceptions=True)
        writer.transport.abort()
        far_writer.transport.abort()

    server = await asyncio.start_server(serve, "0.0.0.0", listen_port)
    await server.serve_forever()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float, most: float) -> None:
    """Bytes of one direction, each `delay_s` after it came, until `most` went or a side ends."""
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WAITING_BYTES // _CHUNK)

    async def read() -> None:
        data = b"."
        while data:
            data = await reader.read(_CHUNK)
            await waiting.put((time.monotonic() + delay_s, data))

    reading = asyncio.ensure_future(read())
    try:
        while most > 0:
            due, data = await waiting.get()
            await asyncio.sleep(due - time.monotonic())
            if not data:
                return
            writer.write(data)
            await writer.drain()
            most -= len(data)
    except OSError:
        return
    finally:
        reading.cancel()


def module_env() -> dict[str, str]:
    """An environment in which children find `benchmarks`."""
    root = Path(__file__).parents[2]
    return os.environ | {"PYTHONPATH": f"{root}:{root / 'src'}", "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    asyncio.run(wan(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))

"""Two hosts on this machine: network namespaces joined by a link, with one file system."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.weights.regions_network import Namespace

HOME, AWAY = "10.88.0.1", "10.88.0.2"


@dataclass
class Hosts:
    """One at `HOME` and one at `AWAY`."""

    home: Namespace
    away: Namespace

    def within(self, host: Namespace) -> tuple[str, ...]:
        """What starts a program on a host."""
        return ("nsenter", "-t", str(host.pid), "-n")

    def cut(self, *, whole: bool = False) -> None:
        """Take the link down, or bring it up again."""
        self.away.run("ip", "link", "set", "net0", "up" if whole else "down")


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Hosts that are gone when the block ends. Needs root."""
    with contextlib.ExitStack() as stack:
        home, away = Namespace(), Namespace()
        stack.callback(home.close)
        stack.callback(away.close)
        home.run(*f"ip link add net0 type veth peer name net0 netns {away.pid}".split())
        for host, address in ((home, HOME), (away, AWAY)):
            host.run(*f"ip addr add {address}/24 dev net0".split())
            host.run("ip", "link", "set", "net0", "up")
        yield Hosts(home, away)

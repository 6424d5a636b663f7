"""What commands of a machine can reach while an image is built in it: a mirror of packages, and hosts by allow-list.

Nothing is routed: both answer on the machine's own loopback, and environment variables tell pip, npm and everything
that honours a proxy where. They are gone with the command, so no image remembers them. For what has no variable (apt)
`ETUDE_MIRROR` is the mirror's address.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from etude.environments.network.mirror import Mirror
from etude.environments.network.packages import Packages
from etude.environments.network.policy import AllowList
from etude.environments.network.proxy import EgressProxy
from etude.errors import MachineError

PACKAGES, EGRESS_LOG = "packages", "egress.jsonl"
"""What a store of images has for its builds: a folder of `Packages`, and the log of what left machines."""


@runtime_checkable
class ListensOnLoopback(Protocol):
    """A machine on whose loopback something can be served from outside."""

    async def listen(self, port: int = 0) -> socket.socket: ...


class BuildNetwork:
    """What builds may reach. `key` stands for it in their caches.

    `packages`: a folder of fetched packages; None: no mirror. `allow`: hosts that may be reached through a proxy, which
    writes every request to `log`. `InputError` for a rule that allows nothing, `StoreError` for damaged packages.
    """

    def __init__(self, packages: Path | None, allow: Iterable[str] = (), *, log: Path = Path(os.devnull)) -> None:
        self._packages = None if packages is None else Packages(packages)
        self._allow, self._log = tuple(allow), log
        AllowList(self._allow)
        known = [] if self._packages is None else sorted(package.sha256 for package in self._packages.known)
        self.key = hashlib.sha256(msgspec.json.encode([known, self._allow])).hexdigest()

    @contextlib.asynccontextmanager
    async def open_in(self, machine: object, who: str) -> AsyncIterator[dict[str, str]]:
        """Serve a machine; what is yielded are the variables that its commands need. `MachineError` for a machine that
        cannot be served."""
        async with contextlib.AsyncExitStack() as stack:
            variables: dict[str, str] = {}
            if self._packages is not None:
                mirror = Mirror(self._packages)
                listener = await _listener(machine)
                stack.push_async_callback(mirror.close)
                await mirror.serve(listener)
                variables |= _mirror_variables(listener)
            if self._allow:
                proxy = EgressProxy(self._allow, stack.enter_context(self._log.open("ab")))
                listener = await _listener(machine)
                stack.push_async_callback(proxy.close)
                await proxy.serve(listener, who=who)
                names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
                variables |= dict.fromkeys(names, _url(listener))
                variables |= dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost")
            yield variables


def build_network_of(store: Path, allow: Iterable[str] = ()) -> BuildNetwork:
    """The outlets of builds in a store's folder: its packages, if it has some, and these hosts."""
    folder = store / PACKAGES
    return BuildNetwork(folder if folder.is_dir() else None, allow, log=store / EGRESS_LOG)


async def _listener(machine: object) -> socket.socket:
    if not isinstance(machine, ListensOnLoopback):
        facts = "its machines have no loopback that is served from outside"
        raise MachineError("a build cannot reach packages here", facts, hint="build with --backend namespace")
    return await machine.listen()


def _url(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def _mirror_variables(listener: socket.socket) -> dict[str, str]:
    url = _url(listener)
    pip = {"PIP_INDEX_URL": f"{url}/pip/simple", "PIP_TRUSTED_HOST": "127.0.0.1", "PIP_NO_INPUT": "1"}
    return {**pip, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "npm_config_registry": f"{url}/npm", "ETUDE_MIRROR": url}

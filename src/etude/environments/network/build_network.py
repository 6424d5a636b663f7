"""Network access for the commands of an image build: a package mirror, and hosts on an allow-list.

Nothing is routed. Mirror and proxy listen on the machine's own loopback, and environment variables make pip, npm and
all programs that honour proxy variables use them. The variables exist only for the command, so no image contains them.
For programs without such a variable (apt), `ETUDE_MIRROR` is the mirror's address.
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
"""Names in an image store: the folder of `Packages` for builds, and the log of the egress proxy."""


@runtime_checkable
class ListensOnLoopback(Protocol):
    """A machine on whose loopback interface this process can listen and serve."""

    async def listen(self, port: int = 0) -> socket.socket: ...


class BuildNetwork:
    """The network that the commands of an image build can reach.

    `packages` is a folder of downloaded packages, which a mirror serves; None means no mirror. `allow` lists the hosts
    that the proxy may connect to; it appends a line about each request to `log`. The attribute `key` identifies these
    settings in build caches. Raises `InputError` for an invalid entry of `allow`, `StoreError` for damaged packages."""

    def __init__(self, packages: Path | None, allow: Iterable[str] = (), *, log: Path = Path(os.devnull)) -> None:
        self._packages = None if packages is None else Packages(packages)
        self._allow, self._log = tuple(allow), log
        AllowList(self._allow)
        known = [] if self._packages is None else sorted(package.sha256 for package in self._packages.known)
        self.key = hashlib.sha256(msgspec.json.encode([known, self._allow])).hexdigest()

    @contextlib.asynccontextmanager
    async def open_in(self, machine: object, who: str) -> AsyncIterator[dict[str, str]]:
        """Serve a machine during the `with` block, and yield the environment variables for its commands.

        `who` names the machine in the log. Raises `MachineError` if this host cannot serve on its loopback."""
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
    """Return the network of an image store: the packages in its folder, if there are any, and the hosts of `allow`."""
    folder = store / PACKAGES
    return BuildNetwork(folder if folder.is_dir() else None, allow, log=store / EGRESS_LOG)


async def _listener(machine: object) -> socket.socket:
    if not isinstance(machine, ListensOnLoopback):
        facts = "the host cannot serve on its machines' loopback"
        raise MachineError("a build cannot reach packages here", facts, hint="build with --backend namespace")
    return await machine.listen()


def _url(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def _mirror_variables(listener: socket.socket) -> dict[str, str]:
    url = _url(listener)
    pip = {"PIP_INDEX_URL": f"{url}/pip/simple", "PIP_TRUSTED_HOST": "127.0.0.1", "PIP_NO_INPUT": "1"}
    return {**pip, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "npm_config_registry": f"{url}/npm", "ETUDE_MIRROR": url}

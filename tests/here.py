"""Which backends can be had on this host: by what they are made of, and not by whether they open. One that could be had
and does not open is a failure; else tests would skip what broke."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable
from typing import TypeVar

import pytest
from tests.virtual import trouble_with_image

from etude.environments.agent import program
from etude.environments.gvisor.sandbox import probe_platform, require_runsc
from etude.environments.microvm.qemu import require_qemu
from etude.errors import MachineError

T = TypeVar("T")
_NAMESPACES = ("--user", "--map-root-user", "--mount", "--pid", "--fork", "--net", "--ipc", "--uts")


def needs(backend: str) -> None:
    """Skip where machines of this backend are not to be had here."""
    if why := why_not(backend):
        pytest.skip(f"no {backend}: {why}")


def opened(backend: str, make: Callable[[], T]) -> T:
    """What `make` makes of machines of this backend. Skips where they are not to be had here."""
    needs(backend)
    return make()


@functools.cache
def why_not(backend: str) -> str:
    """What is missing here for machines of a backend, or "" ("memory": nothing ever is)."""
    try:
        _PROBES.get(backend, lambda: None)()
    except MachineError as error:
        return str(error)
    return ""


def _namespaces() -> None:
    if shutil.which("unshare") is None:
        raise MachineError("unshare not found", hint="install: util-linux")
    command = ["unshare", *_NAMESPACES, "mount", "-t", "tmpfs", "none", "/tmp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise MachineError("no user namespaces", done.stderr.strip(), hint="allow them")


def _gvisor() -> None:
    require_runsc()
    program()
    probe_platform()


def _microvm() -> None:
    require_qemu()
    program()
    if trouble := trouble_with_image():
        raise MachineError("no guest image for virtual machines", trouble, hint="etude machines image microvm")


_PROBES: dict[str, Callable[[], object]] = {
    "namespace": _namespaces,
    "agent": program,
    "gvisor": _gvisor,
    "microvm": _microvm,
}

"""Virtual machines in tests; `tests.here` tells whether they are available."""

from __future__ import annotations

import functools

from etude.environments.microvm import MicroVMRuntime, build, find
from etude.errors import MachineError


@functools.cache
def trouble_with_image() -> str:
    """Return why there is no guest image; build it if possible, once on a host."""
    try:
        find()
    except MachineError:
        try:
            build(log=lambda line: None)
        except MachineError as error:
            return str(error)
    return ""


def microvm() -> MicroVMRuntime:
    """Open a runtime with few machines."""
    return MicroVMRuntime(max_machines=8, spare=1)

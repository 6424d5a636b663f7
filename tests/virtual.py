"""Virtual machines in tests; `tests.here` says whether they are to be had."""

from __future__ import annotations

import functools

from etude.environments.microvm import MicroVMRuntime, build, find
from etude.errors import MachineError


@functools.cache
def trouble_with_image() -> str:
    """Why there is no image; it is built, once on a host, where it can be."""
    try:
        find()
    except MachineError:
        try:
            build(log=lambda line: None)
        except MachineError as error:
            return str(error)
    return ""


def microvm() -> MicroVMRuntime:
    """A runtime of few machines."""
    return MicroVMRuntime(max_machines=8, spare=1)

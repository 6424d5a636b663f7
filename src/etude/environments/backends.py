"""Open the runtime of a machine backend by its name, as configs and command lines give it.

A backend's package is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from etude.environments.config import MachineLimits, MachinesConfig
from etude.environments.images.store import ImageStore
from etude.errors import InputError, nearest
from etude.seams import Runtime

BACKENDS = {
    "namespace": ("etude.environments.namespace", "NamespaceRuntime"),
    "microvm": ("etude.environments.microvm", "MicroVMRuntime"),
    "gvisor": ("etude.environments.gvisor", "GVisorRuntime"),
    "remote": ("etude.environments.remote.runtime", "open_remote"),
}
_IMAGE_ARGUMENTS: dict[str, Callable[[ImageStore], dict[str, Any]]] = {
    "namespace": lambda store: {"images": store},
    "microvm": lambda store: {"roots": store.root},
    "gvisor": lambda store: {"roots": store.root},
}


def open_runtime(name: str, limits: MachineLimits | None = None, *, images: ImageStore | None = None) -> Runtime:
    """Create the runtime of a backend.

    `name`: "namespace", "microvm", "gvisor" or "remote". `limits`: resource limits of each machine; None for the
    defaults. `images`: the store of root filesystems that machines may start from; None: machines have only the
    runtime's own root filesystem.

    Raises `InputError` for an unknown backend, or for one that cannot use images; `MachineError` if the backend does
    not work on this host.

    >>> open_runtime("namespaces")
    Traceback (most recent call last):
    etude.errors.InputError: no backend 'namespaces': there are namespace, microvm, gvisor, remote
      hint: did you mean 'namespace'?
    """
    if name not in BACKENDS:
        raise InputError(f"no backend {name!r}", f"there are {', '.join(BACKENDS)}", hint=nearest(name, BACKENDS))
    module, attribute = BACKENDS[name]
    if images is not None and name not in _IMAGE_ARGUMENTS:
        hint = f"use one of {', '.join(_IMAGE_ARGUMENTS)}"
        raise InputError(f"machines of backend {name!r} cannot be made from images", hint=hint)
    store = {} if images is None else _IMAGE_ARGUMENTS[name](images)
    return cast(Runtime, getattr(import_module(module), attribute)(limits, **store))


def open_memory_bounded(name: str, *, accepts_unbounded: bool = False, images: ImageStore | None = None) -> Runtime:
    """Create a runtime as `open_runtime` does, but refuse a host that cannot limit the memory of a machine.

    Use it for all untrusted code. `accepts_unbounded`: open the runtime on such a host too. Raises `MachineError` for
    such a host, and the errors of `open_runtime`. The remote backend is not checked, since its server sets the limits.
    """
    limits = None if name == "remote" or accepts_unbounded else MachineLimits(require_memory_bound=True)
    return open_runtime(name, limits, images=images)


def runtime_from_config(config: MachinesConfig) -> Runtime:
    """Create the runtime of the `[machines]` section of a run's config.

    Raises the errors of `open_runtime`, and `InputError` if limits are set for the remote backend: its server sets
    them.
    """
    images = ImageStore(Path(config.images)) if config.images else None
    if config.backend != "remote":
        return open_runtime(config.backend, config, images=images)
    if config != replace(MachinesConfig(), backend=config.backend, images=config.images):
        raise InputError(
            "[machines] sets limits for a remote backend", "its server sets them", hint="set only `backend`"
        )
    return open_runtime(config.backend, images=images)

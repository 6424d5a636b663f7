"""Runtimes by name, so that a config or a command line can say which. Each is imported when it is asked for."""

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
    """A runtime whose machines have these limits, and can be made from the images of a store. `InputError` for a name
    that is none, `MachineError` where its machines cannot be made here.

    >>> open_runtime("namespaces")
    Traceback (most recent call last):
    etude.errors.InputError: no backend 'namespaces': there are namespace, microvm, gvisor, remote
      hint: did you mean 'namespace'?
    """
    if name not in BACKENDS:
        raise InputError(f"no backend {name!r}", f"there are {', '.join(BACKENDS)}", hint=nearest(name, BACKENDS))
    module, attribute = BACKENDS[name]
    if images is not None and name not in _IMAGE_ARGUMENTS:
        hint = f"choose among {', '.join(_IMAGE_ARGUMENTS)}"
        raise InputError(f"machines of backend {name!r} cannot be made from images", hint=hint)
    store = {} if images is None else _IMAGE_ARGUMENTS[name](images)
    return cast(Runtime, getattr(import_module(module), attribute)(limits, **store))


def open_memory_bounded(name: str, *, accepts_unbounded: bool = False, images: ImageStore | None = None) -> Runtime:
    """`open_runtime` for code that is not etude's own: where nothing bounds the memory of a machine it is refused, as a
    run is, unless the user `accepts_unbounded`. Raises `InputError`, `MachineError`."""
    limits = None if name == "remote" or accepts_unbounded else MachineLimits(require_memory_bound=True)
    return open_runtime(name, limits, images=images)


def runtime_from_config(config: MachinesConfig) -> Runtime:
    """The runtime of a config. Raises what `open_runtime` does; `InputError` for limits that nobody would keep."""
    images = ImageStore(Path(config.images)) if config.images else None
    if config.backend != "remote":
        return open_runtime(config.backend, config, images=images)
    if config != replace(MachinesConfig(), backend=config.backend, images=config.images):
        raise InputError("[machines] of a remote service", "it has limits of its own", hint="set `backend` alone")
    return open_runtime(config.backend, images=images)

"""Checks that the devices of a config exist, before anything starts. Imports no torch: a child process does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from etude.errors import ConfigError
from etude.inference.config import EngineKind
from etude.inference.external.environment import SERVER_KINDS, environment
from etude.loop.config import RunConfig

COUNT_S = 120.0
"""Deadline for importing torch and looking for GPUs; an unused driver may take a minute."""
_COUNT = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def count_gpus() -> int:
    """Count the GPUs that torch sees on this machine. Raises `ConfigError` when torch does not answer."""
    try:
        done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=COUNT_S)
        return int(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        facts = str(error) if isinstance(error, subprocess.TimeoutExpired) else done.stderr.strip()[-300:]
        hint = "check that `import torch` works here; device = 'cpu' needs no GPU"
        raise ConfigError("torch did not report this machine's GPUs", facts, hint=hint) from None


def gpus_of(device: str) -> int:
    """Return how many GPUs a machine must have so that a process can use this device.

    >>> [gpus_of(name) for name in ("auto", "cpu", "cuda", "cuda:3")]
    [0, 0, 1, 4]
    """
    kind, _, index = device.partition(":")
    return int(index or 0) + 1 if kind == "cuda" else 0


def check_devices(config: RunConfig, *, count: Callable[[], int] = count_gpus) -> None:
    """Check that the GPUs exist that `engine.device` and `learner.device` name. Raises `ConfigError`.

    `count` returns the number of GPUs; it is called only when a GPU is named."""
    here, engine_ranks = config.learner.ranks - config.fleet.ranks_away, config.engine.tensor_parallel
    first = gpus_of(config.engine.device) if EngineKind.REFERENCE in config.fleet.engines else 0
    wanted = {
        "engine": first + engine_ranks - 1 if first else 0,
        "learner": max(gpus_of(config.learner.device), here if gpus_of(config.learner.device) else 0),
    }
    seen = count() if any(wanted.values()) else 0
    for section, gpus in wanted.items():
        if gpus > seen:
            device, size = config.learner.device, here
            if section == "engine":
                device, size = config.engine.device, engine_ranks
            ranks, fewer = (f" with {size} ranks", ", or use fewer ranks") if size > 1 else ("", "")
            raise ConfigError(
                f"{section}.device = {device!r}{ranks} is not possible",
                f"it needs {gpus} {'GPU' if gpus == 1 else 'GPUs'}, and torch sees {seen} here",
                hint=f"set {section}.device = 'auto', or install a torch that is built for this machine's GPUs{fewer}",
            )


def check_foreign_device(config: RunConfig, kind: EngineKind) -> None:
    """Check that `engine.device` is the device for which this kind of engine was installed. Raises `ConfigError`.

    Raises `EngineError` when it is not installed."""
    device, name = config.engine.device, SERVER_KINDS[kind].name
    installed = environment(config.foreign(kind).environment, SERVER_KINDS[kind]).require().device
    if device.partition(":")[0] not in ("auto", installed):
        raise ConfigError(
            f"engine.device = {device!r} is not possible",
            f"{name} was installed for {installed} and runs there",
            hint=f"set engine.device = 'auto', or etude engines install {kind} --device {device.partition(':')[0]}",
        )
    if gpus_of(device) > 1:
        raise ConfigError(
            f"engine.device = {device!r} is not possible",
            f"{name} chooses its own GPUs",
            hint="set engine.device = 'cuda', and choose with the environment variable CUDA_VISIBLE_DEVICES",
        )

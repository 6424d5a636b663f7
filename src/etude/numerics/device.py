"""Devices: from a name in the config to torch's device."""

from __future__ import annotations

import contextlib

import torch

from etude.errors import ConfigError
from etude.numerics.config import check_device


def device_for(name: str) -> torch.device:
    """Return torch's device for "auto" (a GPU where torch sees one, else the CPU), "cpu", "cuda" or "cuda:N".

    Raises `ConfigError` where torch does not see it.

    >>> device_for("cpu")
    device(type='cpu')
    """
    check_device(name)
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if seen else "cpu"
    device = torch.device(name)
    if device.type == "cpu":
        return device
    index = device.index or 0
    if index >= seen:
        raise ConfigError(
            f'device = "{name}" is not possible',
            f"torch {torch.__version__} sees {seen} GPUs here",
            hint='set device = "cpu", or install a torch that is built for this machine\'s GPUs',
        )
    return torch.device("cuda", index)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context manager in which kernels are launched on this device.

    Triton uses the thread's current device, not that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

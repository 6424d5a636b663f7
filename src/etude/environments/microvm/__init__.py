"""Virtual machines: QEMU guests with their own kernel, forked from snapshots that include their memory.

`runtime` makes machines, `image` builds the guest image, `probe` chooses the accelerator. A fork restores a snapshot
into a waiting QEMU process (`snapshots`, `memory`, `overlay`). `base` is the booted memory that all machines of an
image share. Commands are run by the guest agent (`etude.environments.agent`).
"""

from etude.environments.microvm.image import BaseImage, build, cache_folder, find
from etude.environments.microvm.probe import Accelerator, probe
from etude.environments.microvm.runtime import MicroVMRuntime

__all__ = ["Accelerator", "BaseImage", "MicroVMRuntime", "build", "cache_folder", "find", "probe"]

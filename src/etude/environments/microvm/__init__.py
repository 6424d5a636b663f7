"""Virtual machines: QEMU guests with their own kernel, forked from snapshots that include their memory.

An image boots once. Its booted memory, which all machines of the image share, is called its base (`base`). A fork
restores a snapshot, the difference to the base, into a waiting QEMU process (`snapshots`, `memory`, `overlay`).
`runtime` makes machines, `image` builds the guest image, `probe` chooses the accelerator. The guest agent runs the
commands (`etude.environments.agent`).
"""

from etude.environments.microvm.image import BaseImage, build, cache_folder, find
from etude.environments.microvm.probe import Accelerator, probe
from etude.environments.microvm.runtime import MicroVMRuntime

__all__ = ["Accelerator", "BaseImage", "MicroVMRuntime", "build", "cache_folder", "find", "probe"]

"""Which accelerator works here: KVM where a guest really boots under it, else TCG, QEMU's own translation.

That /dev/kvm opens says little: a nested one may run no kernel that can be had. So a guest of a few files boots with a
deadline, and the answer is kept beside the image, for this kernel, QEMU and processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import secrets
from pathlib import Path
from typing import NamedTuple

from etude.environments.microvm import boot
from etude.environments.microvm.image import DISK_BYTES, BaseImage
from etude.environments.microvm.qemu import MEMORY_NAME, Boot, Hardware, Qemu, require_qemu
from etude.errors import MachineError

_DEADLINE_S = 10.0
_MEMORY_BYTES = 128 << 20


class Accelerator(NamedTuple):
    """What guests run with, and why not with something faster."""

    name: str  # "kvm" or "tcg"
    why: str  # "" for KVM


async def probe(image: BaseImage) -> Accelerator:
    """The accelerator for this image here. `MachineError` where there is no QEMU. At most ten seconds, the first time;
    afterwards the answer is known."""
    qemu = require_qemu()
    asked = {"kernel": platform.release(), "qemu": qemu, "processor": _processor()}
    known = image.disk.parent / "probe.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(known.read_text())
        if kept["for"] == asked and kept["accelerator"] in ("kvm", "tcg"):
            return Accelerator(kept["accelerator"], str(kept["why"]))
    why = await _trouble_with_kvm(image)
    found = Accelerator("tcg" if why else "kvm", why)
    _keep(known, {"for": asked, "accelerator": found.name, "why": found.why})
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _keep(path: Path, facts: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # an image folder that only others can write
        new = path.with_name(f".probe-{secrets.token_hex(4)}")
        new.write_text(json.dumps(facts) + "\n")
        os.replace(new, path)


async def _trouble_with_kvm(image: BaseImage) -> str:
    """Why a guest does not boot under KVM; "" when it does."""
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/kvm: {error.strerror}"
    ram = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
    initial = os.memfd_create("etude-initial", os.MFD_CLOEXEC)
    try:
        os.ftruncate(ram, _MEMORY_BYTES)
        os.pwrite(initial, boot.probing_filesystem(image), 0)
        hardware = Hardware("kvm", _MEMORY_BYTES, image.disk, DISK_BYTES)
        guest = Qemu(hardware, ram, boot=Boot(image.kernel, initial))
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await guest.process.wait()
        except TimeoutError:
            return f"/dev/kvm opens, but a guest did not boot under it within {_DEADLINE_S:g} s"
        finally:
            said = guest.process.log_tail()
            await guest.close()
    except MachineError as error:
        return f"{error.what}: {error.facts}".splitlines()[0]
    finally:
        os.close(ram)
        os.close(initial)
    return (
        ""
        if boot.CONSOLE_MARK.decode() in said
        else f"a guest did not boot under KVM: {(said.splitlines() or ['it said nothing'])[0][:200]}"
    )

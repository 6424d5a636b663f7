"""Choose the accelerator: KVM if a guest boots with it, else TCG, QEMU's emulation.

It is not enough that /dev/kvm can be opened: nested KVM may not run the kernel. So a minimal guest is booted with a
deadline. The result is cached beside the image, for this kernel, QEMU and processor.
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
    """The accelerator of guests: `name` is "kvm" or "tcg". `why`: for "tcg", why KVM cannot be used; else ""."""

    name: str
    why: str


async def probe(image: BaseImage) -> Accelerator:
    """Choose the accelerator for an image on this host.

    The first call takes at most ten seconds; then the result is cached. Raises `MachineError` if QEMU is missing.
    """
    qemu = require_qemu()
    conditions = {"kernel": platform.release(), "qemu": qemu, "processor": _processor()}
    known = image.disk.parent / "probe.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(known.read_text())
        if kept["for"] == conditions and kept["accelerator"] in ("kvm", "tcg"):
            return Accelerator(kept["accelerator"], str(kept["why"]))
    why = await _kvm_problem(image)
    found = Accelerator("tcg" if why else "kvm", why)
    _cache(known, {"for": conditions, "accelerator": found.name, "why": found.why})
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _cache(path: Path, facts: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the image folder is not writable
        new = path.with_name(f".probe-{secrets.token_hex(4)}")
        new.write_text(json.dumps(facts) + "\n")
        os.replace(new, path)


async def _kvm_problem(image: BaseImage) -> str:
    """Return why a guest does not boot with KVM; "" if it does."""
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
            return f"/dev/kvm can be opened, but a guest did not boot with it within {_DEADLINE_S:g} s"
        finally:
            output = guest.process.log_tail()
            await guest.close()
    except MachineError as error:
        return f"{error.what}: {error.facts}".splitlines()[0]
    finally:
        os.close(ram)
        os.close(initial)
    return (
        ""
        if boot.CONSOLE_MARK.decode() in output
        else f"a guest did not boot with KVM: {(output.splitlines() or ['no output'])[0][:200]}"
    )

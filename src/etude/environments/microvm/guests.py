"""How to boot a guest: from the guest image, or from an image of a store with the kernel of the guest image."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from etude.environments.config import MachineLimits
from etude.environments.microvm import boot
from etude.environments.microvm.base import BootConfig, remove_unfinished
from etude.environments.microvm.disk import make_disk
from etude.environments.microvm.image import DISK_BYTES, BaseImage
from etude.environments.microvm.qemu import Hardware
from etude.environments.microvm.rootfs import EPOCH, WORK
from etude.errors import MachineError
from etude.records.image import Image

_MIB = 1 << 20
_USERS = ("user", "root")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_USER_LINES = {
    "passwd": ("root:x:0:0:root:/root:/bin/sh", "user:x:1000:1000:user:{work}:/bin/sh"),
    "group": ("root:x:0:", "user:x:1000:"),
}
_WARM = """
python3 -c 'import json, os, re, subprocess, sys, tempfile, unittest' ; git --version ; ls -la / ; cat /dev/null
sh -c 'grep x /etc/passwd | sed s/x/y/ | sort | head -1' ; sync
"""


class GuestImage(NamedTuple):
    """A root filesystem that a guest can boot from.

    `name`: a name that identifies it. `record`, `root`: the image of a store and the folder of its files; both None for
    the guest image itself, which `etude machines image microvm` built.
    """

    name: str
    record: Image | None
    root: Path | None

    @classmethod
    def of(cls, image: Image | None, own: BaseImage, roots: Callable[[str], Path] | None) -> GuestImage:
        """Find the root filesystem that is booted for `image`; for None, the guest image `own`.

        `roots`: returns the folder of an image's root filesystem by its digest; None: there is no store. Raises
        `MachineError` if the image does not exist.
        """
        if image is None:
            return cls(own.digest, None, None)
        if roots is None:
            hint = "set the store: --images STORE, or `images` in [machines]"
            raise MachineError(f"no image {image.digest[:12]}", "this runtime has no image store", hint=hint)
        root = roots(image.digest)
        if not root.is_dir():
            raise MachineError(f"no image {image.digest[:12]}", f"{root} is not a folder", hint="build the image first")
        facts = (image.digest, image.workdir, image.user, *sorted(f"{k}={v}" for k, v in image.env.items()))
        return cls(f"{own.digest[:16]}-{'-'.join(facts)}", image, root)


def users_of(image: Image | None) -> tuple[str, ...]:
    """Return the names of the users that commands can run as in an image, the default first."""
    user = image.user if image is not None else ""
    return (user, *(name for name in _USERS if name != user)) if user else _USERS


async def boot_config_of(
    image: GuestImage, own: BaseImage, agent: Path, limits: MachineLimits, kind: str
) -> BootConfig:
    """Return how to boot an image.

    `own`: the guest image, whose kernel is used. `agent`: path of the agent's program. `kind`: the accelerator, "kvm"
    or "tcg". Raises `MachineError` if the image's disk cannot be made.
    """
    disk = own.disk if image.root is None else await asyncio.to_thread(_disk_of, image, own)
    hardware = Hardware(
        accelerator=kind,
        memory_bytes=max(128, math.ceil(limits.memory_bytes / _MIB)) * _MIB,
        disk=disk,
        disk_bytes=DISK_BYTES,
        cpus=max(1, math.ceil(limits.cpus)),
    )
    work = image.record.workdir if image.record is not None else WORK
    user = users_of(image.record)[0]
    arguments = ["--work", work, "--user", user, "--path", _PATH, "--limit", f"nproc={limits.processes}"]
    arguments += ["--limit", f"nofile={limits.open_files}"]
    initial = boot.initial_filesystem(own, agent, arguments, prepare=_prepare(image, work, user))
    return BootConfig(hardware, own.kernel, initial, warm=_WARM, user=user)


def _prepare(image: GuestImage, work: str, user: str) -> str:
    """Return the boot script that adds what an image lacks: the working directory, its owner, and the users."""
    lines = [f"$b mkdir -p {shlex.quote('/new' + work)}"]
    for name, known in _USER_LINES.items():
        for line in known:
            has = f"$b grep -q ^{line.partition(':')[0]}: /new/etc/{name} 2>/dev/null"
            lines.append(f"{has} || echo {shlex.quote(line.format(work=work))} >>/new/etc/{name}")
    if user == "user":
        everything = "" if image.record is None else "-R "
        lines.append(f"$b chown {everything}1000:1000 {shlex.quote('/new' + work)}")
    return "\n".join(lines)


def _disk_of(image: GuestImage, own: BaseImage) -> Path:
    """Return the disk of an image from a store; make it on the first call."""
    assert image.root is not None
    assert image.record is not None
    path = own.disk.parent.parent / "disks" / f"{image.record.digest}.ext4"
    if not path.exists():
        new = path.with_name(f".{image.record.digest}-{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(exist_ok=True)
            remove_unfinished(path.parent)
            make_disk(image.root, new, num_bytes=DISK_BYTES, epoch=EPOCH)
            os.replace(new, path)
        except OSError as error:
            facts, hint = f"{path.parent}: {error.strerror}", "free space in the folder of the images"
            raise MachineError(
                f"the disk of image {image.record.digest[:12]} could not be made", facts, hint=hint
            ) from None
        finally:
            with contextlib.suppress(OSError):
                new.unlink()
    return path

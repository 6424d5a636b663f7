"""Build the guest image: a Debian kernel, its virtio modules, and a minimal root filesystem with Python and git.

The digest is computed from the inputs: this recipe and the SHA-256 of each package. Equal packages give equal bytes on
every host, since no package scripts run, and times and filesystem seeds are fixed. The guest agent is not part of the
image but of the initramfs (`boot`), so a new agent needs no new image.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from etude.environments.microvm import rootfs
from etude.environments.microvm.disk import make_disk
from etude.environments.microvm.packages import MIRRORS, Apt, Log, Package
from etude.errors import MachineError

PACKAGES = (
    "base-files", "bash", "bsdextrautils", "bzip2", "coreutils", "dash", "diffutils", "file", "findutils", "gawk",
    "git", "grep", "gzip", "hostname", "less", "libc-bin", "make", "mawk", "ncurses-base", "patch", "procps",
    "python3", "python3-pytest", "sed", "tar", "tzdata", "util-linux", "xz-utils",
)  # fmt: skip
KERNEL = "linux-image-cloud-amd64"
BUSYBOX = "busybox-static"
MODULES = ("virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci", "virtio_blk",
           "virtio_console", "virtio-rng")  # fmt: skip
"""Kernel modules, in the order in which they are loaded."""
DISK_BYTES = 2 << 30  # disk size of a machine; the file is sparse
_RECIPE = 1  # increase it if the same packages give another image
_HINT = "build it: etude machines image microvm"


class BaseImage(NamedTuple):
    """The files of a built guest image, in the folder `digest` of the image cache.

    `kernel_release`: version of the kernel, as `uname -r` prints it. `modules`: kernel modules in the order in which
    they are loaded. `disk`: the ext4 image of its root filesystem.
    """

    digest: str
    kernel: Path
    kernel_release: str
    modules: tuple[Path, ...]
    busybox: Path
    disk: Path


def cache_folder() -> Path:
    """Return the folder of guest images: ``$XDG_CACHE_HOME/etude/images`` or ``~/.cache/etude/images``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "etude" / "images"


def find(folder: Path | None = None) -> BaseImage:
    """Return the guest image that was built last. `folder`: the image cache; None: the default one.

    Raises `MachineError` if none was built.
    """
    home = (folder or cache_folder()) / "microvm"
    try:
        digest = (home / "current").read_text().strip()
        return _open(home / digest)
    except (OSError, ValueError, KeyError) as error:
        raise MachineError("there is no guest image for virtual machines", str(error), hint=_HINT) from None


def _open(path: Path) -> BaseImage:
    facts = json.loads((path / "manifest.json").read_text())
    image = BaseImage(
        digest=str(facts["digest"]),
        kernel=path / "vmlinuz",
        kernel_release=str(facts["kernel_release"]),
        modules=tuple(path / "modules" / f"{name}.ko" for name in MODULES),
        busybox=path / "busybox",
        disk=path / "root.ext4",
    )
    missing = [str(file) for file in (image.kernel, image.busybox, image.disk, *image.modules) if not file.exists()]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    return image


def build(folder: Path | None = None, *, mirrors: Sequence[str] = MIRRORS, log: Log = print) -> BaseImage:
    """Build the guest image from the current packages of the mirror, unless it exists. Takes about a minute.

    `folder`: the image cache; None: the default one. `mirrors`: "URL SUITE" of each Debian archive. `log` is called
    with lines about the progress. An interrupted build continues with the packages that were downloaded. Raises
    `MachineError` if a tool, the mirror or disk space is missing.
    """
    home = (folder or cache_folder()) / "microvm"
    home.mkdir(parents=True, exist_ok=True)
    apt = Apt(home / "packages", mirrors)
    log(f"resolving {len(PACKAGES)} packages and a kernel at {mirrors[0].split()[0]}")
    apt.update()
    wanted, boot = apt.closure(PACKAGES), _boot_files(apt)
    digest = _digest({**wanted, **boot})
    target = home / digest
    if not (target / "manifest.json").exists():
        for old in home.glob(".building-*"):
            shutil.rmtree(old, ignore_errors=True)
        packages = apt.fetch(PACKAGES, wanted, log)
        extra = apt.fetch((KERNEL, BUSYBOX), boot, log)
        building = home / f".building-{secrets.token_hex(4)}"
        try:
            _build(building, digest, packages, extra, log)
            os.replace(building, target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    pointer = home / f".current-{secrets.token_hex(4)}"
    pointer.write_text(f"{digest}\n")
    os.replace(pointer, home / "current")
    log(f"image {digest[:12]} is at {target}")
    return _open(target)


def _boot_files(apt: Apt) -> dict[str, str]:
    closure = apt.closure((KERNEL, BUSYBOX))
    found = {name: sha for name, sha in closure.items() if name.startswith(("linux-image-6", "busybox-static_"))}
    if len(found) != 2:
        raise MachineError(
            "the mirror lacks a kernel or busybox",
            f"found: {', '.join(found) or 'nothing'}",
            hint="use another --mirror",
        )
    return found


def _digest(files: dict[str, str]) -> str:
    parts = [str(_RECIPE), str(DISK_BYTES), *MODULES, *(f"{name} {files[name]}" for name in sorted(files))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _build(folder: Path, digest: str, packages: list[Package], boot: list[Package], log: Log) -> None:
    folder.mkdir()
    log(f"unpacking {len(packages)} packages")
    root = folder / "root"
    rootfs.unpack(packages, root)
    log("compiling Python's modules")
    rootfs.finish(root)
    rootfs.unpack(boot, folder / "boot")
    release = _keep_kernel(folder / "boot", folder)
    shutil.rmtree(folder / "boot")
    log("making the filesystem")
    make_disk(root, folder / "root.ext4", num_bytes=DISK_BYTES, epoch=rootfs.EPOCH)
    shutil.rmtree(root)
    manifest = {
        "digest": digest,
        "kernel_release": release,
        "packages": {package.name: package.version for package in [*packages, *boot]},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def _keep_kernel(boot: Path, folder: Path) -> str:
    [kernel] = (boot / "boot").glob("vmlinuz-*")
    release = kernel.name.removeprefix("vmlinuz-")
    shutil.copyfile(kernel, folder / "vmlinuz")
    (folder / "modules").mkdir()
    for name in MODULES:
        [found] = (boot / "usr/lib/modules" / release).rglob(f"{name}.ko")
        shutil.copyfile(found, folder / "modules" / found.name)
    shutil.copyfile(boot / "usr/bin/busybox", folder / "busybox")
    return release

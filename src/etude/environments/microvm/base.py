"""The base of an image: its booted memory, which all machines of the image share.

An image boots once, runs some programs so that they are in memory, and is stopped. Its memory is saved to a file that
all machines map privately (copy-on-write). The file is cached beside the images, for one combination of kernel, QEMU,
agent and hardware, so that the next process starts from it in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import secrets
import shutil
import time
import weakref
from pathlib import Path

from etude.environments.agent import Channel, commands
from etude.environments.agent.channel import ChannelLost
from etude.environments.microvm import memory, overlay
from etude.environments.microvm.qemu import MEMORY_NAME, NUDGE_S, Boot, Hardware, Qemu
from etude.environments.microvm.snapshots import Snapshot
from etude.errors import MachineError
from etude.records.command import Command

BOOT_DEADLINE_S = 120.0
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_FORMAT = 2  # version of the files in the cache
_MAKING_S = 3600.0
_MAX_CACHED = 8  # boots in the cache; each takes 100 MiB or more


class Base:
    """A booted image, from which machines start. `boot` returns it.

    - `name`: equal for all boots with the same memory on the same host
    - `hardware`: the hardware that it was booted on
    - `ram`: descriptor of the memory file, closed when this object is garbage-collected
    - `start`: the snapshot of the booted guest
    - `boot`: an id of this boot, different for other boots with the same name
    """

    def __init__(self, name: str, hardware: Hardware, ram: int, start: Snapshot) -> None:
        self.name, self.hardware, self.ram, self.start = name, hardware, ram, start
        self.boot = hashlib.sha256(start.devices).hexdigest()  # differs for each boot, since it has the clocks
        weakref.finalize(self, os.close, ram)


class BootConfig:
    """How to boot an image.

    `kernel`: path of the kernel. `initial`: content of the initramfs. `warm`: a shell script that is run as `user`
    after the boot, to load programs into memory.
    """

    def __init__(self, hardware: Hardware, kernel: Path, initial: bytes, *, warm: str, user: str) -> None:
        self.hardware, self.kernel, self.initial, self.warm, self.user = hardware, kernel, initial, warm, user

    def name(self, qemu: str) -> str:
        """Return a name that is equal for boots with the same memory on the same host. `qemu`: QEMU's version."""
        facts = [_FORMAT, qemu, platform.release(), str(self.kernel), [str(fact) for fact in self.hardware]]
        facts += [hashlib.sha256(self.initial).hexdigest(), self.warm, self.user]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


async def boot(booting: BootConfig, *, qemu: str, kept: Path) -> Base:
    """Return the base of an image from the cache folder `kept`, or boot the image and cache its base there.

    `qemu`: QEMU's version. Raises `MachineError`, with the last console output if the guest does not boot.
    """
    name = booting.name(qemu)
    with contextlib.suppress(OSError, ValueError):
        return _open(kept / name, name, booting.hardware)
    ram = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(ram, booting.hardware.memory_bytes)
        start = await _boot_once(name, booting, ram)
        fcntl.fcntl(ram, fcntl.F_ADD_SEALS, _SEALS)
        with contextlib.suppress(OSError):  # the cache is not writable or full: use it without the cache
            await asyncio.to_thread(_cache, kept, name, ram, start)
            kept_base = _open(kept / name, name, booting.hardware)
            os.close(ram)
            return kept_base
    except BaseException as error:
        os.close(ram)
        if isinstance(error, OSError):
            raise MachineError("no disk space to boot a guest", str(error), hint=overlay.SPACE_HINT) from None
        raise
    return Base(name, booting.hardware, ram, start)


async def _boot_once(name: str, booting: BootConfig, ram: int) -> Snapshot:
    archive = os.memfd_create("etude-initial", os.MFD_CLOEXEC)
    try:
        os.pwrite(archive, booting.initial, 0)
        guest = Qemu(booting.hardware, ram, boot=Boot(booting.kernel, archive))
    finally:
        os.close(archive)
    try:
        monitor = await guest.connect()
        await _until_ready(guest, booting)
        await monitor.execute("stop")
        devices = await guest.save()
        start = Snapshot(name, devices, memory.NONE, overlay.anonymous())
        overlay.copy(guest.disk, start.disk)
        return start
    finally:
        await guest.close()


async def _until_ready(guest: Qemu, booting: BootConfig) -> None:
    channel = Channel(os.dup(guest.channel.fileno()), nudge_s=NUDGE_S)
    try:
        await channel.ready(BOOT_DEADLINE_S)
        warm, env = ["sh", "-c", booting.warm], {"LANG": "C.UTF-8"}
        command = Command.of(warm, key="warm", deadline_s=BOOT_DEADLINE_S, env=env, user=booting.user)
        await commands.run(channel, command)
    except ChannelLost as lost:
        raise MachineError(
            "a guest did not boot", f"{lost}; {guest.process.log_tail()}", hint="build the image again"
        ) from None
    except ValueError as error:
        facts = f"{booting.user!r}: {error}"
        raise MachineError(
            "the user of the image does not exist", facts, hint="add it to the /etc/passwd of the image"
        ) from None
    finally:
        channel.close()


def _cache(folder: Path, name: str, ram: int, start: Snapshot) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_unfinished(folder)
    new = folder / f".{name[:16]}-{secrets.token_hex(4)}"
    new.mkdir(mode=0o700)
    try:
        for file, source in (("memory", ram), ("disk", start.disk)):
            with (new / file).open("wb") as target:
                overlay.copy(source, target.fileno())
        (new / "devices").write_bytes(start.devices)
        os.rename(new, folder / name)
        _remove_old(folder)
    except OSError:
        if not (folder / name).exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _remove_old(folder: Path) -> None:
    """Delete the oldest boots in the cache. Processes that have one open can still use it."""
    kept = sorted(folder.glob("[0-9a-f]*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in kept[_MAX_CACHED:]:
        shutil.rmtree(old, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Delete what killed processes left unfinished in a folder: names with a leading dot, older than `_MAKING_S`
    seconds."""
    for path in folder.glob(".*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < _MAKING_S:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _open(folder: Path, name: str, hardware: Hardware) -> Base:
    devices = (folder / "devices").read_bytes()
    with contextlib.suppress(OSError):
        os.utime(folder)  # mark it as used
    disk = overlay.anonymous()
    try:
        with (folder / "disk").open("rb") as source:
            overlay.copy(source.fileno(), disk)
        ram = os.open(folder / "memory", os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(disk)
        raise
    start = Snapshot(name, devices, memory.NONE, disk)
    if os.fstat(ram).st_size != hardware.memory_bytes:
        os.close(ram)
        raise ValueError(f"{folder} is damaged")
    return Base(name, hardware, ram, start)

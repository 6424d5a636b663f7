"""Virtual machines that boot normally, without snapshots, for comparison with those of `MicroVMRuntime`.

They have the same guest image, kernel and agent, run the same commands after the boot, and get an identity from the
agent. So a difference that the parity probe finds between the two comes from forking. Each takes seconds to boot; use
them only for measurements.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from etude.environments.agent import AgentMachine, Channel, program
from etude.environments.agent.channel import ChannelLost
from etude.environments.config import MachineLimits
from etude.environments.microvm.base import BOOT_DEADLINE_S
from etude.environments.microvm.guests import GuestImage, boot_config_of, users_of
from etude.environments.microvm.image import find
from etude.environments.microvm.probe import probe
from etude.environments.microvm.qemu import MEMORY_NAME, Boot, Qemu, require_qemu
from etude.environments.namespace.snapshots import tree
from etude.errors import MachineError
from etude.records.image import Image
from etude.seams import Machine, RuntimeInfo

_ENVIRONMENT = {"LANG": "C.UTF-8"}


class BootedRuntime:
    """A `Runtime` whose virtual machines boot from the guest image in `folder` (None: the default one).

    Raises `MachineError` if QEMU or the guest image is missing."""

    info = RuntimeInfo(name="booted", isolation="own kernel", users=users_of(None), notes=("boots for every machine",))

    def __init__(self, folder: Path | None = None) -> None:
        require_qemu()
        self._agent, self._image = program(), find(folder)
        self._trees: dict[str, bytes] = {}
        self._machines: list[Machine] = []

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        """Keep the files for `fork`, and return the id of the snapshot. Nothing boots yet.

        Raises `MachineError` if an image is given."""
        if image is not None:
            raise MachineError("booted machines have only the guest image", hint="use a runtime with images")
        packed = tree(files)
        self._trees[name := str(len(self._trees))] = packed
        return name

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = BOOT_DEADLINE_S) -> list[Machine]:
        """Boot `n` machines one after another, each within `deadline_s` seconds, and load their files."""
        return [await self._booted(self._trees[snapshot], deadline_s) for _ in range(n)]

    async def _booted(self, packed: bytes, deadline_s: float) -> Machine:
        accelerator = await probe(self._image)
        own = GuestImage.of(None, self._image, None)
        booting = await boot_config_of(own, self._image, self._agent, MachineLimits(), accelerator.name)
        ram = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
        archive = os.memfd_create("etude-initial", os.MFD_CLOEXEC)
        try:
            os.ftruncate(ram, booting.hardware.memory_bytes)
            os.pwrite(archive, booting.initial, 0)
            qemu = Qemu(booting.hardware, ram, boot=Boot(booting.kernel, archive))
        finally:
            os.close(archive)
            os.close(ram)
        channel = Channel(os.dup(qemu.channel.fileno()))
        machine = AgentMachine(
            channel,
            env=_ENVIRONMENT,
            users=users_of(None),
            snapshot=_never,
            end=qemu.close,
            blame=qemu.process.log_tail,
        )
        self._machines.append(machine)
        try:
            await channel.ready(deadline_s)
        except ChannelLost as lost:
            raise MachineError("a guest did not boot", str(lost), hint="build the image again") from None
        await machine.exec(["sh", "-c", booting.warm], key="warm", deadline_s=deadline_s)
        await machine.renew(seed=secrets.token_bytes(32), clock_ns=time.time_ns(), host_name=secrets.token_hex(6))
        await machine.load(packed)
        return machine

    async def close(self) -> None:
        for machine in self._machines:
            await machine.close()


async def _never(machine: object) -> str:
    raise MachineError("booted machines have no snapshots", hint="use MicroVMRuntime")

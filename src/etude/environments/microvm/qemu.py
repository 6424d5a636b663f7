"""One QEMU process: started, spoken to, and never outliving this process.

Everything it is given is an inherited descriptor (monitor and agent as socket pairs, memory and disk as files without
names), so a killed host leaves nothing behind: the kernel kills QEMU with its parent (`bound`) and frees what only it
had open. It has no network card, and may neither start programs nor gain rights (`-sandbox`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from etude.environments.child_process import ChildProcess, require_programs
from etude.environments.microvm import memory, overlay
from etude.environments.microvm.qmp import Monitor
from etude.errors import MachineError

PROGRAM = "qemu-system-x86_64"
MEMORY_NAME = "etude-guest"
NUDGE_S = 0.02  # an emulated guest that is idle sleeps through one message in a thousand (7.2): its agent is nudged
_KERNEL_LINE = (
    "console=ttyS0 quiet panic=-1 reboot=t tsc=reliable no_timer_check random.trust_cpu=on mitigations=off"
    " rcupdate.rcu_expedited=1 cryptomgr.notests nowatchdog"
)
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


class Hardware(NamedTuple):
    """What a guest is made of. A snapshot can only be loaded into the same."""

    accelerator: str  # "kvm" or "tcg"
    memory_bytes: int
    disk: Path  # the image's filesystem, read-only
    disk_bytes: int
    cpus: int = 1
    translation_mib: int = 32  # TCG's cache of translated code


class Boot(NamedTuple):
    """A guest that starts from its kernel, and not from a snapshot."""

    kernel: Path
    initial: int  # descriptor of the initial filesystem


def require_qemu() -> str:
    """The version of QEMU that is here. `MachineError` where there is none, or not enough beside it."""
    require_programs({PROGRAM: "qemu-system-x86"}, "virtual machines")
    done = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, timeout=20.0)
    words = done.stdout.split()
    if done.returncode or "version" not in words:
        raise MachineError(f"{PROGRAM} does not run", done.stderr.strip()[:300], hint="install qemu-system-x86 again")
    return words[words.index("version") + 1]


class Qemu:
    """A running QEMU with a guest that boots, or that waits for a snapshot."""

    def __init__(self, hardware: Hardware, ram: int, *, boot: Boot | None = None) -> None:
        """`ram` is the descriptor of the guest's memory: its own to write where it boots, else never written."""
        self.hardware, self._ram = hardware, ram
        self._qmp, qmp = socket.socketpair()
        self.channel, agent = socket.socketpair()
        self.state = os.memfd_create("etude-state", os.MFD_CLOEXEC)
        self.disk = overlay.anonymous()
        self._said = os.memfd_create("etude-said", os.MFD_CLOEXEC)
        self._loads, loaded = socket.socketpair()
        inherited = [qmp.fileno(), agent.fileno(), self.state, loaded.fileno(), self.disk, ram]
        inherited += [boot.initial] if boot else []
        self.monitor: Monitor | None = None
        self._closed = False
        command = _command(hardware, qmp.fileno(), agent.fileno(), self.disk, ram, boot or loaded.fileno())
        try:
            overlay.write_empty(self.disk, hardware.disk_bytes)
            self.process = ChildProcess(command, log_fd=self._said, fds=inherited)
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):
                raise MachineError("no disk for a virtual machine", str(error), hint=overlay.ROOM) from None
            raise
        finally:
            for end in (qmp, agent, loaded):
                end.close()

    async def connect(self, *, deadline_s: float = 30.0) -> Monitor:
        """The monitor, once QEMU is ready for commands."""
        if self.monitor is None:
            try:
                self.monitor = await Monitor.open(self._qmp, deadline_s=deadline_s)
            except MachineError as error:
                raise MachineError(
                    "QEMU did not start", self.process.log_tail() or str(error), hint=error.hint
                ) from None
        return self.monitor

    def mapping(self) -> memory.Mapping:
        """Where the guest's memory is in QEMU."""
        return memory.find(self.process.pid, self._ram, self.hardware.memory_bytes)

    async def load(self, state: bytes, *, deadline_s: float) -> None:
        """Let the guest be what these devices' state says, and run. Memory and disk are already what they must be."""
        monitor = await self.connect()
        try:
            self._loads.setblocking(False)
            async with asyncio.timeout(deadline_s):
                await asyncio.get_running_loop().sock_sendall(self._loads, state)
            await monitor.event("RESUME", deadline_s=deadline_s)
        except (MachineError, OSError) as error:  # TimeoutError among them
            facts = self.process.log_tail() or str(error) or f"QEMU did not take it within {deadline_s:g} s"
            raise MachineError("a snapshot cannot be loaded", facts, hint="fork another machine") from None

    async def save(self) -> bytes:
        """The state of all devices. The guest must stand still."""
        monitor = await self.connect()
        return await self.saved(self.begin_saving(monitor))

    def begin_saving(self, monitor: Monitor) -> int:
        """Ask for it, behind what was asked before; the number is for `saved`."""
        os.ftruncate(self.state, 0)
        return monitor.begin("xen-save-devices-state", filename=f"/proc/self/fd/{self.state}", live=False)

    async def saved(self, saving: int) -> bytes:
        """The state that was asked for."""
        await (await self.connect()).answer(saving)
        return os.pread(self.state, os.fstat(self.state).st_size, 0)

    async def close(self) -> None:
        """Kill it, wait until it is gone, and free what it held. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.process.close()
        finally:
            self._release()

    def _release(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
        for end in (self._qmp, self.channel, self._loads):
            end.close()
        for fd in (self.state, self.disk, self._said):
            os.close(fd)


def _command(hardware: Hardware, qmp: int, agent: int, disk: int, ram: int, start: Boot | int) -> Sequence[str]:
    """`start`: how it boots, or the descriptor that its state will come from."""
    kvm = hardware.accelerator == "kvm"
    accelerator = "kvm" if kvm else f"tcg,thread=multi,tb-size={hardware.translation_mib}"
    size, shared = hardware.memory_bytes, "on" if isinstance(start, Boot) else "off"
    command = [
        PROGRAM, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-sandbox", _SANDBOX,
        "-accel", accelerator, "-cpu", "host" if kvm else "max", "-smp", str(hardware.cpus),
        "-m", f"{size >> 20}M",
        "-M", "q35,hpet=off,vmport=off,smbus=off,sata=off,memory-backend=ram,suppress-vmdesc=on",
        "-global", "migration.send-configuration=off",
        "-object", f"memory-backend-file,id=ram,size={size},mem-path=/proc/self/fd/{ram},share={shared}",
        "-blockdev", f"driver=file,node-name=root-file,filename={hardware.disk},read-only=on,locking=off",
        "-blockdev", "driver=raw,node-name=root,file=root-file,read-only=on",
        "-blockdev", f"driver=file,node-name=top-file,filename=/proc/self/fd/{disk},locking=off,discard=unmap,"
        "aio=threads,cache.no-flush=on",
        "-blockdev", "driver=qcow2,node-name=top,file=top-file,backing=root,discard=unmap,cache.no-flush=on",
        "-device", "virtio-blk-pci,drive=top,werror=enospc,rerror=report,disable-legacy=on",
        "-device", "virtio-rng-pci,disable-legacy=on",
        "-device", "virtio-serial-pci,disable-legacy=on,max_ports=2",
        "-chardev", f"socket,id=agent,fd={agent}", "-device", "virtserialport,chardev=agent,name=agent",
        "-chardev", f"socket,id=qmp,fd={qmp}", "-mon", "chardev=qmp,mode=control",
    ]  # fmt: skip
    if not isinstance(start, Boot):
        return [*command, "-serial", "null", "-incoming", f"fd:{start}"]
    booting = ["-kernel", str(start.kernel), "-initrd", f"/proc/self/fd/{start.initial}", "-append", _KERNEL_LINE]
    return [*command, "-serial", "stdio", *booting]

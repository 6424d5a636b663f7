"""Start and control one QEMU process, which never outlives this process.

All its resources are inherited descriptors: socket pairs for monitor and agent, unnamed files for memory and disk. So
nothing is left if this process is killed: the kernel kills QEMU with its parent (`child_process`) and frees the files.
QEMU has no network card, and cannot start programs or gain privileges (`-sandbox`).
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
NUDGE_S = 0.02  # an idle emulated guest misses one message in a thousand (QEMU 7.2), so its agent is woken again
_KERNEL_LINE = (
    "console=ttyS0 quiet panic=-1 reboot=t tsc=reliable no_timer_check random.trust_cpu=on mitigations=off"
    " rcupdate.rcu_expedited=1 cryptomgr.notests nowatchdog"
)
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


class Hardware(NamedTuple):
    """The hardware of a guest. A snapshot can only be restored on the same hardware.

    `accelerator`: "kvm" (the CPU's virtualization), or "tcg" (QEMU's slower emulation). `disk`: the image's filesystem,
    which is read-only; `disk_bytes`: size of the disk as the guest sees it. `translation_mib`: MiB of TCG's cache of
    translated code.
    """

    accelerator: str
    memory_bytes: int
    disk: Path
    disk_bytes: int
    cpus: int = 1
    translation_mib: int = 32


class Boot(NamedTuple):
    """The files from which a guest boots: the path of a kernel, and `initial`, a descriptor of the initramfs."""

    kernel: Path
    initial: int


def require_qemu() -> str:
    """Return the version of the installed QEMU. Raises `MachineError` if QEMU or a tool that starts it is missing."""
    require_programs({PROGRAM: "qemu-system-x86"}, "virtual machines")
    done = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, timeout=20.0)
    words = done.stdout.split()
    if done.returncode or "version" not in words:
        raise MachineError(f"{PROGRAM} does not run", done.stderr.strip()[:300], hint="install qemu-system-x86 again")
    return words[words.index("version") + 1]


class Qemu:
    """A running QEMU process, whose guest boots or waits for a snapshot to be loaded.

    `ram`: descriptor of the memory file; a booting guest writes to it, others map it privately. `boot`: what to boot;
    None: wait for a snapshot. The attribute `channel` is this end of the socket to the guest's agent, and `disk` is the
    descriptor of the file with the guest's disk writes. The constructor raises `MachineError` if QEMU cannot be
    started.
    """

    def __init__(self, hardware: Hardware, ram: int, *, boot: Boot | None = None) -> None:
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
                raise MachineError("no disk space for a virtual machine", str(error), hint=overlay.SPACE_HINT) from None
            raise
        finally:
            for end in (qmp, agent, loaded):
                end.close()

    async def connect(self, *, deadline_s: float = 30.0) -> Monitor:
        """Wait until QEMU is ready for commands, and return its monitor. Raises `MachineError` after `deadline_s`
        seconds."""
        if self.monitor is None:
            try:
                self.monitor = await Monitor.open(self._qmp, deadline_s=deadline_s)
            except MachineError as error:
                raise MachineError(
                    "QEMU did not start", self.process.log_tail() or str(error), hint=error.hint
                ) from None
        return self.monitor

    def mapping(self) -> memory.Mapping:
        """Return the location of the guest's memory in the QEMU process. Raises `MachineError`."""
        return memory.find(self.process.pid, self._ram, self.hardware.memory_bytes)

    async def load(self, state: bytes, *, deadline_s: float) -> None:
        """Load a device state and start the guest. Its memory and disk must be restored already.

        Raises `MachineError` if QEMU does not load it within `deadline_s` seconds.
        """
        monitor = await self.connect()
        try:
            self._loads.setblocking(False)
            async with asyncio.timeout(deadline_s):
                await asyncio.get_running_loop().sock_sendall(self._loads, state)
            await monitor.event("RESUME", deadline_s=deadline_s)
        except (MachineError, OSError) as error:  # TimeoutError among them
            facts = self.process.log_tail() or str(error) or f"QEMU did not load it within {deadline_s:g} s"
            raise MachineError("a snapshot cannot be loaded", facts, hint="fork another machine") from None

    async def save(self) -> bytes:
        """Return the state of all devices. The guest must be stopped. Raises `MachineError`."""
        monitor = await self.connect()
        return await self.saved(self.begin_saving(monitor))

    def begin_saving(self, monitor: Monitor) -> int:
        """Start to save the device state, after all earlier commands. Returns a number, which `saved` needs."""
        os.ftruncate(self.state, 0)
        return monitor.begin("xen-save-devices-state", filename=f"/proc/self/fd/{self.state}", live=False)

    async def saved(self, saving: int) -> bytes:
        """Wait for a device state and return it. `saving`: the number that `begin_saving` returned. Raises
        `MachineError`."""
        await (await self.connect()).answer(saving)
        return os.pread(self.state, os.fstat(self.state).st_size, 0)

    async def close(self) -> None:
        """Kill the process, wait for its end, and free its resources. Idempotent."""
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
    """The command line. `start`: how to boot, or the descriptor from which the device state is read."""
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

"""`Runtime` of gVisor: a machine's programs run on a user-space kernel, which makes only few system calls to the host.

A snapshot contains the working directory's files only. Its id is the digest of these files.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.environments.agent import AgentMachine, Channel, program
from etude.environments.agent.channel import ChannelLost
from etude.environments.config import MachineLimits, check_memory_bound
from etude.environments.gvisor.bundle import WORK, config, make_image_root, make_root
from etude.environments.gvisor.cgroups import SandboxCgroups
from etude.environments.gvisor.sandbox import Sandbox, memory_overlay, probe_platform, require_runsc
from etude.environments.namespace.images import ImageState, unpack_state
from etude.environments.namespace.snapshots import Snapshots, tree
from etude.errors import MachineError
from etude.records.command import check_count
from etude.records.image import Image
from etude.scratch import ScratchDirectory
from etude.seams import Machine, RuntimeInfo

_SNAPSHOT_BYTES = 256 << 20
_MAKE_WORKDIR = 'mkdir -p "$0" && { [ -n "$1" ] || chown -R 1000:1000 "$0"; }'
_USERS = ("user", "root")
_ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


class GVisorRuntime:
    """A `Runtime` whose machines are gVisor sandboxes.

    `limits`: the limits of each machine; None for the defaults. `max_machines`: the most machines that are alive at
    once. `roots`: returns the folder of an image's root filesystem by the image's digest (`ImageStore.root`); None:
    machines have the host's toolchain, read-only, and no images.

    The constructor raises `MachineError` without `runsc` or the machine agent, or if gVisor cannot run here.
    """

    def __init__(
        self, limits: MachineLimits | None = None, *, max_machines: int = 64, roots: Callable[[str], Path] | None = None
    ) -> None:
        self._version, self._agent, self._platform = require_runsc(), program(), probe_platform()
        self._overlay = memory_overlay()
        self._limits = limits if limits is not None else MachineLimits()
        self._max_machines, self._roots = max_machines, roots
        self._snapshots = Snapshots(max_bytes=_SNAPSHOT_BYTES)
        self._machines: dict[Sandbox, AgentMachine] = {}
        self._num_starting = 0
        self._closed = False
        self._image_roots: dict[str, tuple[Path, list[dict[str, Any]]]] = {}
        self._groups = SandboxCgroups(self._limits, max_machines)
        try:
            check_memory_bound(self._limits, self._groups.controllers)
            with disk_errors():
                self._scratch = ScratchDirectory("gvisor")
        except MachineError:
            self._groups.close()
            raise
        try:
            with disk_errors():
                self._mounts = make_root(self._scratch.path / "root")
        except MachineError:
            self._scratch.close()
            self._groups.close()
            raise

    @property
    def info(self) -> RuntimeInfo:
        unbound = [name for name in ("memory", "cpu") if name not in self._groups.controllers]
        notes = (
            f"gVisor {self._version} with {self._platform}",
            "a snapshot is the working directory's files, in an image as well",
            *(f"{name}: no limit on a machine in total, as no control group is available" for name in unbound),
        )
        return RuntimeInfo(
            name="gvisor",
            isolation="kernel in user space",
            users=_USERS,
            images=self._roots is not None,
            whole_snapshots=False,
            notes=notes,
        )

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        self._require_open()
        return self._keep(tree(files), image)

    def _keep(self, packed: bytes, image: Image | None) -> str:
        """Cache a tree, or one for an image. Raises `MachineError` if the image is missing."""
        if image is None:
            return self._snapshots.keep(packed)
        if self._roots is None or not self._roots(image.digest).is_dir():
            hint = "build it, and name its store: --images STORE, or `images` in [machines]"
            raise MachineError(f"no image {image.digest[:12]}", "its files are not there", hint=hint)
        return self._snapshots.keep(ImageState(image, packed, b"").pack())

    async def pack(self, snapshot: str, *, max_bytes: int) -> bytes:
        """Serialise a snapshot as its file tree, as `Portable.pack` does.

        Raises `MachineError` also for a machine of an image: its snapshot lacks changes outside of the working
        directory, so the machine cannot be graded by its state.
        """
        packed = self._snapshots.require(snapshot)
        if unpack_state(packed) is not None:
            facts = "snapshots of gVisor lack changes outside of the working directory"
            raise MachineError(
                "this machine cannot be graded by its state", facts, hint="use backend microvm or namespace"
            )
        if len(packed) > max_bytes:
            raise ValueError(f"the snapshot has {len(packed)} bytes, at most {max_bytes}")
        return packed

    async def unpack(self, packed: bytes) -> str:
        self._require_open()
        return self._snapshots.adopt(packed)

    def hold(self, snapshot: str) -> int:
        return self._snapshots.hold(snapshot)

    def release(self, snapshot: str) -> None:
        self._snapshots.release(snapshot)

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        check_count(n)
        self._require_open()
        packed = self._snapshots.require(snapshot)
        state = unpack_state(packed)
        image = None if state is None else state.image
        num_alive = len(self._machines) + self._num_starting
        if num_alive + n > self._max_machines:
            facts = f"{num_alive} machines are alive, {n} more were requested"
            raise MachineError(
                f"more than {self._max_machines} machines were requested",
                facts,
                hint="close some, or raise max_machines",
            )
        self._num_starting += n
        forking = [asyncio.create_task(self._fork(packed if state is None else state.tree, image)) for _ in range(n)]
        try:
            async with asyncio.timeout(deadline_s):
                return list(await asyncio.gather(*forking))
        except TimeoutError:
            await _close_all(forking)
            facts = f"{n} machines were not ready after {deadline_s:g} s"
            raise MachineError(
                "machines could not be forked in time", facts, hint="fork fewer at once, or raise the deadline"
            ) from None
        except BaseException:
            await _close_all(forking)
            raise
        finally:
            self._num_starting -= n

    async def _fork(self, packed: bytes, image: Image | None) -> AgentMachine:
        sandbox, channel = self._start(image)
        user = image.user if image is not None and image.user else _USERS[0]
        machine = AgentMachine(
            channel,
            env=_ENVIRONMENT if image is None else {**_ENVIRONMENT, **image.env},
            users=(user, *(name for name in _USERS if name != user)),
            snapshot=lambda machine: self._snapshot(machine, image),
            end=sandbox.close,
            blame=lambda: _kill_unresponsive(sandbox),
        )
        self._machines[sandbox] = machine
        try:
            await channel.ready(60.0)
            if image is not None:
                await _make_workdir(machine, image)
            await machine.load(packed)
            self._require_open()
        except (ChannelLost, FileNotFoundError) as lost:
            log = sandbox.process.log_tail()
            await machine.close()
            raise MachineError(
                "a sandbox did not start", f"{lost}; {log}", hint="test gVisor alone: runsc do true"
            ) from None
        except (OSError, ValueError) as error:
            await machine.close()
            raise MachineError(
                "the task's files do not fit into a machine",
                str(error),
                hint="raise the size limits in [machines] (MachineLimits)",
            ) from None
        except BaseException:
            await machine.close()
            raise
        return machine

    def _start(self, image: Image | None) -> tuple[Sandbox, Channel]:
        folder = self._scratch.path / secrets.token_hex(6)
        root, mounts, work, user = self._scratch.path / "root", self._mounts, WORK, _USERS[0]
        if image is not None:
            work, user = image.workdir, image.user or _USERS[0]
            root, mounts = self._image_root(image.digest)
        config_json = config(
            root,
            mounts,
            self._agent,
            self._limits,
            host_name=secrets.token_hex(6),
            work=work,
            user=user,
            own_root=image is None,
        )
        with disk_errors(folder):
            folder.mkdir(mode=0o700)
            (folder / "config.json").write_bytes(config_json)
            overlay = "" if image is None else self._overlay
            sandbox = Sandbox(folder, self._platform, overlay=overlay, on_close=self._forget, groups=self._groups)
        return sandbox, Channel(sandbox.read_fd, sandbox.write_fd)

    def _image_root(self, digest: str) -> tuple[Path, list[dict[str, Any]]]:
        """The root folder of an image's sandboxes, made once. It stays unchanged: machines write to their memory."""
        assert self._roots is not None
        if digest not in self._image_roots:
            root = self._scratch.path / f"root-{digest[:16]}"
            with disk_errors(root):
                root.mkdir()
                self._image_roots[digest] = root, make_image_root(self._roots(digest), root)
        return self._image_roots[digest]

    def _forget(self, sandbox: Sandbox) -> None:
        self._machines.pop(sandbox, None)

    async def _snapshot(self, machine: AgentMachine, image: Image | None) -> str:
        return self._keep(await machine.save(4 * self._limits.work_bytes), image)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(machine.close() for machine in list(self._machines.values())))
        await asyncio.to_thread(self._scratch.close)
        await asyncio.to_thread(self._groups.close)

    def _require_open(self) -> None:
        if self._closed:
            raise MachineError("the runtime is closed", hint="make a new runtime")


async def _make_workdir(machine: AgentMachine, image: Image) -> None:
    """Create the working directory and give it to its user, with the image's own tools, as etude does not trust its
    root."""
    argv = ["sh", "-c", _MAKE_WORKDIR, image.workdir, image.user]
    made = await machine.exec(argv, key=secrets.token_hex(8), deadline_s=60.0, user="root", cwd="/")
    if made.exit_code:
        facts = f"exit code {made.exit_code}: {made.output[-200:].decode(errors='replace').strip()}"
        hint = "images for gVisor machines need sh, mkdir and chown"
        raise MachineError(f"the working directory {image.workdir} could not be made", facts, hint=hint)


def _kill_unresponsive(sandbox: Sandbox) -> str:
    """Kill a sandbox that does not answer. Its programs can cause that, so the host is never blamed."""
    sandbox.process.kill()
    return ""


async def _close_all(forking: list[asyncio.Task[AgentMachine]]) -> None:
    for task in forking:
        task.cancel()
    for result in await asyncio.gather(*forking, return_exceptions=True):
        if isinstance(result, AgentMachine):
            with contextlib.suppress(MachineError):
                await result.close()


# ------------------------------------------------------------------------------------------------- errors of the disk


@contextlib.contextmanager
def disk_errors(*made: Path) -> Iterator[None]:
    """Convert an `OSError` in the `with` block to `MachineError`. After any error, remove the folders `made`."""
    try:
        yield
    except BaseException as error:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        hint = "free space in the temporary folder, or set TMPDIR to another one"
        raise MachineError("no disk space for a sandbox", str(error), hint=hint) from None

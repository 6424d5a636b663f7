"""`EtudeEnvironment` for Harbor: run agents and verifiers in etude's machines (harbor 0.25; needs Python 3.12).

::

    harbor run ... --environment-import-path etude.environments.adapters.harbor:EtudeEnvironment \\
        --ek offline=true --ek backend=namespace --ek images=STORE

The machine is a fork of the image that is built from the task's Dockerfile; the base image after FROM must be in the
store. Machines have no network: a task that needs one is refused, unless `offline` is set.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import shlex
import tarfile
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkMode

from etude.environments.backends import open_runtime
from etude.environments.images import ImageStore
from etude.environments.images.dockerfile_build import build_from_dockerfile
from etude.environments.images.store import default_store
from etude.errors import MachineError
from etude.records.command import OutputChunk, ProcessStarted
from etude.records.image import Image
from etude.seams import Machine, Runtime

DAY_S = 86_400.0
MAX_TRANSFER_BYTES = 2 << 30


class EtudeEnvironment(BaseEnvironment):
    """A Harbor environment: one etude machine for one trial. Harbor makes it and calls its methods.

    `images`: path of the image store; None: the default one. `backend`: name of the machine backend. `offline`: True
    runs tasks that need a network without one; else they are refused. `runtime`: an open runtime to use instead of
    `backend`; it is not closed here. The other arguments are those of Harbor's `BaseEnvironment`.
    """

    def __init__(
        self,
        *args: Any,
        images: str | Path | None = None,
        backend: str = "namespace",
        offline: bool = False,
        runtime: Runtime | None = None,
        **kwargs: Any,
    ) -> None:
        self._images = Path(images).expanduser() if images is not None else default_store()
        self._backend, self._offline = backend, offline
        self._given_runtime = runtime
        self._runtime: Runtime | None = None
        self._machine: Machine | None = None
        self._keys = itertools.count()
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """Return the name of this kind of environment."""
        return "etude"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """The capabilities that tasks can request of this environment: machines have no network."""
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        if not (self.environment_dir / "Dockerfile").is_file():
            raise FileNotFoundError(f"{self.environment_dir} has no Dockerfile; etude builds images from one")
        if self._network_policy.network_mode is not NetworkMode.NO_NETWORK and not self._offline:
            raise ValueError("machines of etude have no network: set network_mode = 'no-network', or --ek offline=true")

    async def start(self, force_build: bool) -> None:
        """Build the image from the task's Dockerfile, unless the store has it, and fork a machine from it.

        `force_build` is ignored: an image is rebuilt when its inputs change.
        """
        await self.stop(delete=True)
        store = ImageStore(self._images)
        self._runtime = self._given_runtime or open_runtime(self._backend, images=store)
        deadline_s = self.task_env_config.build_timeout_sec
        image = (
            await build_from_dockerfile(store, self.environment_dir, runtime=self._runtime, run_deadline_s=deadline_s)
        ).image
        workdir = self.task_env_config.workdir or image.workdir
        env = {**image.env, **self._startup_env()}
        settings = Image(digest=image.digest, workdir=workdir, env=env, user=image.user or "root")
        [self._machine] = await self._runtime.fork(await self._runtime.prepare({}, image=settings), 1)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """End the machine. Its state is always lost, also if `delete` is False."""
        machine, self._machine = self._machine, None
        if machine is not None:
            await machine.close()
        runtime, self._runtime = self._runtime, None
        if runtime is not None and runtime is not self._given_runtime:
            await runtime.close()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command with `sh -c` in the machine and return its exit code, stdout and stderr.

        `cwd`: None for the image's directory. `env`: further variables. `timeout_sec`: None for a day. `user`: None for
        Harbor's default user; if there is none, root if the machine has it. Raises `TimeoutError` at the deadline,
        `RuntimeError` for more than `MAX_TRANSFER_BYTES` of output, `MachineError` if the machine is not started or is
        lost.
        """
        code, stdout, stderr = await self._run(
            ["sh", "-c", command],
            cwd=cwd or "",
            env=self._merge_env(env),
            deadline_s=timeout_sec,
            user=user,
            stream_output=True,
        )
        return ExecResult(
            stdout=stdout.decode(errors="replace"), stderr=stderr.decode(errors="replace"), return_code=code
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy the file `source_path` of this host to `target_path` in the machine. Raises `RuntimeError` if that fails
        there."""
        data = await asyncio.to_thread(Path(source_path).read_bytes)
        folder = shlex.quote(str(Path(target_path).parent))
        await self._run_or_raise(f"mkdir -p {folder} && cat > {shlex.quote(target_path)}", stdin=data)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy the content of the folder `source_dir` of this host to `target_dir` in the machine.

        Raises `RuntimeError` if that fails there."""
        packed = await asyncio.to_thread(_pack, Path(source_dir))
        target = shlex.quote(target_dir)
        await self._run_or_raise(f"mkdir -p {target} && tar -xf - -C {target} --no-same-owner", stdin=packed)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy the file `source_path` of the machine to `target_path` on this host. Raises `RuntimeError` if that fails
        there."""
        data = await self._run_or_raise(f"cat {shlex.quote(source_path)}")
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(Path(target_path).write_bytes, data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy the content of the folder `source_dir` of the machine to `target_dir` on this host.

        Raises `RuntimeError` if that fails there."""
        data = await self._run_or_raise(f"tar -cf - -C {shlex.quote(source_dir)} .")
        await asyncio.to_thread(_unpack, data, Path(target_dir))

    async def _run_or_raise(self, command: str, stdin: bytes = b"") -> bytes:
        """Run a command, as root if the runtime has it. Returns its output; raises `RuntimeError` if it fails."""
        user = "root" if self._runtime is not None and "root" in self._runtime.info.users else ""
        code, stdout, stderr = await self._run(["sh", "-c", command], stdin=stdin, user=user)
        if code:
            raise RuntimeError(f"{command[:200]!r} ended with {code}: {stderr[-400:].decode(errors='replace')}")
        return stdout

    async def _run(
        self,
        argv: list[str],
        *,
        cwd: str = "",
        env: dict[str, str] | None = None,
        deadline_s: float | None = None,
        stdin: bytes = b"",
        user: str | int | None = None,
        stream_output: bool = False,
    ) -> tuple[int, bytes, bytes]:
        machine, emit = self._machine, self._output_callback() if stream_output else None
        if machine is None:
            raise MachineError("the environment is not started", hint="await start() first")
        streams: dict[int, list[bytes]] = {1: [], 2: []}
        size, calls = 0, list[asyncio.Task[None]]()

        def on_output(event: ProcessStarted | OutputChunk) -> None:
            nonlocal size
            if isinstance(event, OutputChunk):
                size += len(event.data)
                if size <= MAX_TRANSFER_BYTES:
                    streams[event.stream].append(event.data)
                if emit is not None:
                    name = "stdout" if event.stream == 1 else "stderr"
                    calls.append(asyncio.ensure_future(emit(event.data.decode(errors="replace"), name)))

        result = await machine.exec(
            argv,
            key=f"harbor-{next(self._keys)}",
            deadline_s=deadline_s or DAY_S,
            stdin=stdin,
            cwd=cwd,
            env=env or {},
            user=self._user(user),
            on_output=on_output,
        )
        await asyncio.gather(*calls)
        if size > MAX_TRANSFER_BYTES:
            raise RuntimeError(f"{argv[-1][:80]!r} printed {size} bytes, at most {MAX_TRANSFER_BYTES}")
        if result.timed_out:
            raise TimeoutError(f"{argv[-1][:80]!r} did not end within {deadline_s} s")
        return result.exit_code, b"".join(streams[1]), b"".join(streams[2])

    def _user(self, user: str | int | None) -> str:
        """The user to run as. Harbor's default is that of the container, mostly root; so it is root here, if
        available."""
        resolved = self._resolve_user(user)
        users = self._runtime.info.users if self._runtime is not None else ()
        if resolved in (None, ""):
            return "root" if "root" in users else ""
        return "root" if str(resolved) in ("root", "0") else str(resolved)


def _pack(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, arcname=".")
    return packed.getvalue()


def _unpack(data: bytes, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(target, filter=transfer_tar_filter)

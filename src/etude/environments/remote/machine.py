"""A `Machine` that is a sandbox of a remote service."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Protocol, Unpack

from etude.environments.command_registry import CommandRegistry
from etude.environments.paths import encode_path
from etude.environments.remote.commands import run_on_etude, run_on_external
from etude.environments.remote.connect import RpcError, error_of_response
from etude.environments.remote.external_service import check_links, kill_all
from etude.environments.remote.machine_client import MachineClient
from etude.errors import MachineError
from etude.records.command import Command, ExecOptions, ExecResult, check_max_bytes

_UPLOAD = 8 << 20  # of files, in one call


class MachineOwner(Protocol):
    """The methods of `RemoteRuntime` that its machines call; `machine_id` names the machine at the service."""

    async def take_snapshot(self, machine_id: str, name: str | None) -> str | None: ...
    async def freeze(self, machine_id: str) -> None: ...
    async def end(self, machine_id: str) -> None: ...


class RemoteMachine:
    """One sandbox of a remote service, with the methods of `Machine`. `RemoteRuntime.fork` makes it."""

    def __init__(self, client: MachineClient, owner: MachineOwner) -> None:
        self.id = client.id
        self._client, self._owner = client, owner
        self._commands = CommandRegistry()
        self._closing: asyncio.Task[None] | None = None
        self._frozen = False

    async def exec(
        self, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """Run a command once and return its result, as `Machine.exec` does.

        Cancelling this call does not stop the command. Another call with the same `key` returns the same result."""
        return await self._commands.run_once(self._begin, argv, key=key, deadline_s=deadline_s, **options)

    def _begin(self, command: Command) -> Coroutine[Any, Any, ExecResult]:
        self._require_open()
        if self._frozen:
            facts = "its processes were stopped, so no command can run"
            raise MachineError(f"machine {self.id} is frozen", facts, hint="run the command in a fork of its snapshot")
        run = run_on_etude if self._client.is_etude else run_on_external
        return run(self._client, command)

    # files

    async def read(self, path: str, *, max_bytes: int = 1_048_576) -> bytes:
        self._require_open()
        check_max_bytes(max_bytes)
        name = name_of(path)
        try:
            if self._client.is_etude:
                headers = {"etude-exactly": str(max_bytes)}
                reply = await self._client.download(name, headers=headers, max_bytes=max_bytes + 65_536)
            else:
                absolute = await check_links(self._client, name, max_bytes)
                reply = await self._client.download(absolute, headers={}, max_bytes=max_bytes)
        except RpcError as error:
            raise self._read_error(path, error.code.status, error.message, error.hint) from None
        if reply.status == 200:
            return reply.body
        refusal = error_of_response(reply.status, reply.body)
        raise self._read_error(path, reply.status, refusal.message, refusal.hint)

    def _read_error(self, path: str, status: int, message: str, hint: str) -> Exception:
        if status == 404:
            return FileNotFoundError(f"{path}: {message}")
        if status == 403 and hint == "file":
            return PermissionError(message)
        if status == 400:
            return IsADirectoryError(path) if hint == "folder" else ValueError(message)
        if status == 413:
            return ValueError(f"{path} is larger than the limit")
        return MachineError(
            f"{path} of machine {self.id} cannot be read", f"HTTP {status}: {message}", hint=hint or _GONE
        )

    async def write(self, path: str, data: bytes) -> None:
        await self.write_all({path: data})

    async def write_all(self, files: Mapping[str, bytes]) -> None:
        """Write files, given by path, with as few requests as possible. Raises the errors of `write`."""
        self._require_open()
        batch: dict[str, bytes] = {}
        for path, data in files.items():
            batch[name_of(path)] = bytes(data)
            if sum(map(len, batch.values())) > _UPLOAD or len(batch) >= 1000:
                await self._upload(batch)
                batch = {}
        if batch:
            await self._upload(batch)

    async def _upload(self, files: Mapping[str, bytes]) -> None:
        headers = {"etude-exactly": "0"} if self._client.is_etude else {}
        if not self._client.is_etude:
            here = PurePosixPath(self._client.config.workdir)
            files = {str(here / name): data for name, data in files.items()}
        reply = await self._client.upload(files, headers=headers)
        if reply.status < 300:
            return
        message = error_of_response(reply.status, reply.body).message
        if reply.status == 507:
            raise OSError(message)
        if reply.status == 400:
            raise ValueError(message)
        raise MachineError(
            f"files cannot be written to machine {self.id}", f"HTTP {reply.status}: {message}", hint=_GONE
        )

    # states

    async def freeze(self) -> None:
        """Stop all processes for good, so that files do not change any more.

        On services other than etude's, this kills the processes of the default user only."""
        self._require_open()
        if not self._frozen:
            await (self._owner.freeze(self.id) if self._client.is_etude else kill_all(self))
            self._frozen = True

    async def snapshot(self) -> str:
        self._require_open()
        snapshot_id = await self._owner.take_snapshot(self.id, None)
        if snapshot_id is None:
            raise MachineError("the service has no snapshots", hint="use another service, such as etude machines serve")
        return snapshot_id

    async def take_snapshot(self, name: str) -> str | None:
        """Take a snapshot named `name` and return its id, or None if the service has no snapshots."""
        return await self._owner.take_snapshot(self.id, name)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._owner.end(self.id))
        await asyncio.shield(self._closing)

    def _require_open(self) -> None:
        if self._closing is not None:
            raise MachineError("the machine is closed", hint="a machine is used once: fork another one")


_GONE = "the machine or its server has ended: fork another one"


def name_of(path: str) -> str:
    """Return `path` in its normal form, relative to the working directory.

    Raises `ValueError` if it leaves the working directory or is not UTF-8."""
    return encode_path(path).decode()

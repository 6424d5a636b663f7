"""`Machine` of a service: its commands by their keys, its files, its states. How a command is heard is `commands`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Protocol, Unpack

from etude.environments.command_registry import CommandRegistry
from etude.environments.paths import encode_path
from etude.environments.remote.commands import run_abroad, run_exactly
from etude.environments.remote.connect import RpcError, of_answer
from etude.environments.remote.foreign import check_links, kill_all
from etude.environments.remote.service import Service
from etude.errors import MachineError
from etude.records.command import Command, ExecOptions, ExecResult, check_max_bytes

_UPLOAD = 8 << 20  # of files, in one call


class Owner(Protocol):
    """What a machine needs of its runtime."""

    async def keep(self, machine_id: str, name: str | None) -> str | None: ...
    async def freeze(self, machine_id: str) -> None: ...
    async def end(self, machine_id: str) -> None: ...


class RemoteMachine:
    """One machine, by its service and its runtime."""

    def __init__(self, service: Service, owner: Owner) -> None:
        self.id = service.id
        self._service, self._owner = service, owner
        self._commands = CommandRegistry()
        self._closing: asyncio.Task[None] | None = None
        self._frozen = False

    async def exec(
        self, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """See `Machine.exec`. Cancelling the caller does not stop the command: ask again with the same key."""
        return await self._commands.run_once(self._begin, argv, key=key, deadline_s=deadline_s, **options)

    def _begin(self, command: Command) -> Coroutine[Any, Any, ExecResult]:
        self._must_be_open()
        if self._frozen:
            raise MachineError(f"machine {self.id} is frozen", hint="fork its snapshot")
        run = run_exactly if self._service.is_etude else run_abroad
        return run(self._service, command)

    # files

    async def read(self, path: str, *, max_bytes: int = 1_048_576) -> bytes:
        """See `Machine.read`."""
        self._must_be_open()
        check_max_bytes(max_bytes)
        name = name_of(path)
        try:
            if self._service.is_etude:
                headers = {"etude-exactly": str(max_bytes)}
                answer = await self._service.download(name, headers=headers, max_bytes=max_bytes + 65_536)
            else:
                place = await check_links(self._service, name, max_bytes)
                answer = await self._service.download(place, headers={}, max_bytes=max_bytes)
        except RpcError as error:
            raise self._unread(path, error.code.status, error.message, error.hint) from None
        if answer.status == 200:
            return answer.body
        said = of_answer(answer.status, answer.body)
        raise self._unread(path, answer.status, said.message, said.hint)

    def _unread(self, path: str, status: int, message: str, hint: str) -> Exception:
        if status == 404:
            return FileNotFoundError(f"{path}: {message}")
        if status == 403 and hint == "file":
            return PermissionError(message)
        if status == 400:
            return IsADirectoryError(path) if hint == "folder" else ValueError(message)
        if status == 413:
            return ValueError(f"{path} is larger than may be read")
        return MachineError(
            f"{path} of machine {self.id} cannot be read", f"HTTP {status}: {message}", hint=hint or _GONE
        )

    async def write(self, path: str, data: bytes) -> None:
        """See `Machine.write`."""
        await self.write_all({path: data})

    async def write_all(self, files: Mapping[str, bytes]) -> None:
        """Many files in a few calls."""
        self._must_be_open()
        batch: dict[str, bytes] = {}
        for path, data in files.items():
            batch[name_of(path)] = bytes(data)
            if sum(map(len, batch.values())) > _UPLOAD or len(batch) >= 1000:
                await self._upload(batch)
                batch = {}
        if batch:
            await self._upload(batch)

    async def _upload(self, files: Mapping[str, bytes]) -> None:
        headers = {"etude-exactly": "0"} if self._service.is_etude else {}
        if not self._service.is_etude:
            here = PurePosixPath(self._service.config.workdir)
            files = {str(here / name): data for name, data in files.items()}
        answer = await self._service.upload(files, headers=headers)
        if answer.status < 300:
            return
        message = of_answer(answer.status, answer.body).message
        if answer.status == 507:
            raise OSError(message)
        if answer.status == 400:
            raise ValueError(message)
        raise MachineError(f"machine {self.id} takes no files", f"HTTP {answer.status}: {message}", hint=_GONE)

    # states

    async def freeze(self) -> None:
        """See `Machine.freeze`; `RuntimeInfo.notes` says what another service's is."""
        self._must_be_open()
        if not self._frozen:
            await (self._owner.freeze(self.id) if self._service.is_etude else kill_all(self))
            self._frozen = True

    async def snapshot(self) -> str:
        """See `Machine.snapshot`."""
        self._must_be_open()
        kept = await self._owner.keep(self.id, None)
        if kept is None:
            raise MachineError("the service keeps no snapshots", hint="use one that does, or etude machines serve")
        return kept

    async def keep(self, name: str) -> str | None:
        """A snapshot by a name; None where the service has none."""
        return await self._owner.keep(self.id, name)

    async def close(self) -> None:
        """See `Machine.close`."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._owner.end(self.id))
        await asyncio.shield(self._closing)

    def _must_be_open(self) -> None:
        if self._closing is not None:
            raise MachineError("the machine is closed", hint="a machine is used once: fork another one")


_GONE = "it has ended, or its server has: fork another one"


def name_of(path: str) -> str:
    """A path in its plain form. `ValueError` for one that leaves the working directory, or is no text."""
    return encode_path(path).decode()

"""A runtime of agents on this machine, each in a folder of its own: no isolation, so only for what tests make."""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.environments.agent import AgentMachine, Channel, program
from etude.environments.namespace.guest import wire
from etude.environments.namespace.snapshots import Snapshots
from etude.errors import MachineError
from etude.records.command import check_count
from etude.records.image import Image
from etude.seams import Machine, RuntimeInfo

ENV = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


def me() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


class LocalAgent:
    """A started agent and a `Machine` over it."""

    machine: AgentMachine

    def __init__(
        self,
        snapshots: Snapshots,
        *,
        arguments: Sequence[str] = (),
        users: Sequence[str] = (),
    ) -> None:
        self.snapshots = snapshots
        self._folder = tempfile.TemporaryDirectory()
        self.folder = self._folder.name
        if "--user" in arguments:
            owner = pwd.getpwnam(arguments[arguments.index("--user") + 1])
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
        ours, theirs = socket.socketpair()
        command = [str(program()), "--fd", str(theirs.fileno()), "--work", self.folder, *arguments]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.channel = Channel(ours.detach())
        self.blamed = ""
        self.machine = AgentMachine(
            self.channel,
            env=ENV,
            users=users or (me(),),
            snapshot=self._snapshot,
            end=self.end,
            blame=lambda: self.blamed,
        )

    async def _snapshot(self, machine: AgentMachine) -> str:
        return self.snapshots.keep(await machine.save(64 << 20))

    async def end(self) -> None:
        """Its channel is closed: it kills everything and ends."""
        await asyncio.to_thread(self.process.wait, 120)
        self._folder.cleanup()


class LocalAgents:
    """The `Runtime`. Raises `MachineError` where no agent was built."""

    def __init__(self, *arguments: str, users: Sequence[str] = ()) -> None:
        program()
        self._arguments, self._users = arguments, tuple(users) or (me(),)
        self.snapshots = Snapshots(max_bytes=1 << 30)
        self.agents: list[LocalAgent] = []
        self.info = RuntimeInfo(name="local", isolation="none", users=self._users)

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        return self.snapshots.prepare(files)

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        check_count(n)
        tree = self.snapshots.get(snapshot)
        if tree is None:
            raise MachineError(f"no snapshot {snapshot!r}", hint="prepare it first")
        return [await self._fork(tree, deadline_s) for _ in range(n)]

    async def _fork(self, tree: bytes, deadline_s: float) -> Machine:
        agent = LocalAgent(self.snapshots, arguments=self._arguments, users=self._users)
        self.agents.append(agent)
        await agent.channel.ready(deadline_s)
        await agent.machine.load(tree)
        return agent.machine

    async def close(self) -> None:
        for agent in self.agents:
            await agent.machine.close()


def entries(tree: bytes) -> dict[bytes, tuple[bytes, bytes]]:
    """A TREE frame's entries by path."""
    fields: list[Any] = wire.unpack(tree).fields
    return {fields[i]: (fields[i + 1], fields[i + 2]) for i in range(0, len(fields), 3)}

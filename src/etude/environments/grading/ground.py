"""Makes the machines in which one task is graded: forked from its pristine state with the agent's exports and the
hidden files written over it; or, where the machine's state counts, from the state that the agent left.

On the host the agent's files are only data. Files whose names decide how tests run (`exports.CONFIGURATION`) are never
taken from the agent, nor files that shadow a hidden one. What fails is tried once more, and then without the agent's
files: only if it fails then too is the agent not to blame.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from etude.environments.commands import retrieve
from etude.environments.grading.exports import exports_of, must_keep, prepare
from etude.environments.grading.python import NAMES, Pythons
from etude.environments.grading.reports import NotStarted, new_nonce, told
from etude.environments.grading.verdicts import REASON_CHARS, Broken, Refused
from etude.errors import MachineError
from etude.records.exports import STATE, covering
from etude.records.rollout import Boundary
from etude.records.task import Task
from etude.seams import Machine, Portable, Runtime

ATTEMPTS = 2
ROOT = "root"
OUTPUT_BYTES = 4 << 20
LIBRARY = sys.stdlib_module_names - {"test", "this"}
"""Modules that a verifier may import. A file of the agent with such a name beside it would be imported instead."""
_ABSOLUTE = 'mkdir -p "$(dirname "$1")" && rm -rf "$1" && cat > "$1"'

Work = Mapping[str, bytes]
"""The result of the agent's machine: validated exports (path to content), and its state where that counts."""


class NotLaid(Exception):
    """A hidden file could not be written into a machine."""


class Ground:
    """Makes fresh machines to grade one task's work in. These files of the agent are left out: those at the paths
    `kept`; those whose name is in `never`; and new modules named as one in `library`, where hidden files or commands
    would import them. A file of the last two kinds is taken where the task declares it by its whole path."""

    def __init__(
        self,
        runtime: Runtime,
        task: Task,
        *,
        never: Collection[str] = (),
        kept: Collection[str] = (),
        library: Collection[str] = (),
        pythons: Pythons | None = None,
    ) -> None:
        self.runtime, self.task, self._never, self._kept, self._library = runtime, task, never, kept, library
        self._pythons = pythons or Pythons(runtime)
        self._room = f"/etude-{secrets.token_hex(8)}" if task.running else ""  # root's, beside running processes
        self._bases: dict[tuple[int, int], tuple[asyncio.Task[str], Work, Mapping[str, str]]] = {}  # by their id()

    async def snapshot(self, work: Work, hidden: Mapping[str, str]) -> str:
        """Prepare the snapshot that machines with this work and these hidden files are forked from, once for all
        concurrent calls. Raises `Refused` where the agent's files do not fit into one tree with them, `Broken` where
        the task's own do not."""
        key = (id(work), id(hidden))
        if key not in self._bases:
            preparing = asyncio.create_task(self._base(work, hidden))
            preparing.add_done_callback(retrieve)
            self._bases[key] = (preparing, work, hidden)
        preparing = self._bases[key][0]
        try:
            return await asyncio.shield(preparing)
        except Exception:
            if key in self._bases and self._bases[key][0] is preparing:
                del self._bases[key]
            raise

    async def _base(self, work: Work, hidden: Mapping[str, str]) -> str:
        if STATE in work:
            return await self._unpacked(work[STATE])
        task = self.task
        is_declared = covering(task.exports)
        pristine = {path: text.encode() for path, text in task.files.items() if not is_declared(path)}
        laid = {path: text.encode() for path, text in hidden.items() if not path.startswith("/")}
        try:
            base = await self.runtime.prepare({**pristine, **self._taken(work, laid), **laid}, image=task.image)
        except ValueError as error:
            try:
                await self.runtime.prepare({**pristine, **laid}, image=task.image)
            except ValueError as own:
                raise Broken(Boundary.TASK, "the task's files are no tree", str(own)) from None
            raise Refused(f"the exports do not fit into the task's files: {error}") from None
        gone = [path for path in task.exports if not path.endswith("/") and path not in work and path not in laid]
        return await self._without(base, gone) if task.image is not None and gone else base

    def _taken(self, work: Work, hidden: Mapping[str, bytes]) -> dict[str, bytes]:
        """The agent's files that may be written beside the hidden ones."""
        folders = {".", *(str(parent) for path in hidden for parent in PurePosixPath(path).parents)}
        beneath = tuple(f"{path.removesuffix(suffix)}/" for path in hidden for suffix in ("", ".py"))

        declared = frozenset(self.task.exports)

        def shadows(path: str) -> bool:
            named = [one for one in (PurePosixPath(path), *PurePosixPath(path).parents) if str(one.parent) in folders]
            return path not in self.task.files and any(one.name.partition(".")[0] in self._library for one in named)

        def may(path: str) -> bool:
            parts = PurePosixPath(path).parts
            compiled = "__pycache__" in parts or path.endswith((".pyc", ".pth"))
            if path not in declared and (compiled or parts[-1] in self._never or shadows(path)):
                return False
            return not (path in hidden or path in self._kept or path in folders or path.startswith(beneath))

        return {path: data for path, data in work.items() if path != STATE and may(path)}

    async def _unpacked(self, packed: bytes) -> str:
        if not isinstance(self.runtime, Portable):
            facts = f"{self.runtime.info.name} machines cannot start from another machine's state"
            raise Broken(Boundary.GRADER, "the machine's state cannot be judged here", facts)
        try:
            must_keep(self.runtime, self.task)
            return await self.runtime.unpack(packed)
        except ValueError as error:
            raise Refused(f"the machine's state cannot be taken over: {error}") from None
        except MachineError as error:  # no program of the agent has run yet
            raise Broken(Boundary.MACHINE, "the machine's state cannot be taken over", str(error)) from None

    async def _without(self, base: str, paths: Sequence[str]) -> str:
        """Remove the image's own files at declared paths that the agent's machine no longer had."""
        [machine] = await self.runtime.fork(base, 1)
        try:
            removed = await machine.exec(["rm", "-rf", "--", *paths], key="rm", deadline_s=30.0)
            if removed.exit_code != 0:
                facts = f"exit code {removed.exit_code}: {removed.output[:REASON_CHARS].decode(errors='replace')}"
                raise Broken(Boundary.TASK, "declared files of the image cannot be removed", facts)
            return await machine.snapshot()
        finally:
            await machine.close()

    @contextlib.asynccontextmanager
    async def machine(self, work: Work, hidden: Mapping[str, str] | None = None) -> AsyncIterator[Machine]:
        """A fresh machine for a `with` block, closed at its end. A failed fork is retried up to `ATTEMPTS` times.

        If every fork fails, raises `Refused` where a machine without the agent's files works, and else `Broken`. Raises
        `NotLaid` where the hidden files cannot be written.
        """
        machine = await self._forked(work, hidden or {})
        try:
            await self._lay(machine, work, hidden or {})
            yield machine
        finally:
            await machine.close()

    async def _forked(self, work: Work, hidden: Mapping[str, str]) -> Machine:
        for attempt in range(ATTEMPTS + 1):
            try:
                [machine] = await self.runtime.fork(await self.snapshot(work, hidden), 1)
                return machine
            except MachineError as error:
                failure = error
                self._bases.clear()  # the runtime may have dropped the snapshot
            if attempt + 1 == ATTEMPTS:
                await self.host_works()
        raise Refused(f"no machine can be made with the agent's files: {failure}")

    async def host_works(self) -> None:
        """Check that a machine without the agent's files can be made and used now. Raises `Broken` otherwise: the host
        is to blame."""
        try:
            [machine] = await self.runtime.fork(await prepare(self.runtime, self.task), 1)
            try:
                await machine.exec(["true"], key="control", deadline_s=60.0)
            finally:
                await machine.close()
        except MachineError as error:
            raise Broken(Boundary.MACHINE, "no machine to grade in", str(error)) from None
        except ValueError as error:
            raise Broken(Boundary.TASK, "the task's files are no tree", str(error)) from None

    async def python(self) -> str:
        """The name of the Python program in the task's machine."""
        return await self._pythons.of(self.task.image)

    async def python_starts(self) -> None:
        """Check that Python starts in the task's machine without the agent's files. Raises `Broken` otherwise: the task
        is to blame."""
        program = await self.python()
        async with self.machine(await self.untouched()) as machine:
            result = await machine.exec([program, "-c", ""], key="starts", deadline_s=60.0)
        if result.exit_code != 0:
            said = f"exit code {result.exit_code}: {result.output[:REASON_CHARS].decode(errors='replace')}"
            facts = f"looked for {' and '.join(NAMES)}; {program}: {said}"
            raise Broken(Boundary.TASK, "there is no python that works in the task's machine", facts)

    async def untouched(self) -> Work:
        """The work of an agent that did nothing."""
        return await exports_of(self.runtime, self.task)

    @property
    def user(self) -> str:
        """The user that a verifier runs as: root in a machine with the agent's state, where the runtime has it; else ""
        (the machine's default)."""
        return ROOT if self.task.state and ROOT in self.runtime.info.users else ""

    def place(self, path: str) -> str:
        """The path of a verifier's file in the machine. Where processes of the agent run, it lies in a folder that only
        root can enter."""
        return f"{self._room}/{path}" if self._room and not path.startswith("/") else path

    async def _lay(self, machine: Machine, work: Work, hidden: Mapping[str, str]) -> None:
        """Write the hidden files that the snapshot lacks: all of them on the agent's state, else those outside the
        working folder."""
        if self._room:
            await self._place(machine, self._room, ["mkdir", "-m", "700", self._room])
        for path, text in hidden.items():
            at = self.place(path)
            if at.startswith("/"):
                await self._place(machine, at, ["sh", "-c", _ABSOLUTE, "sh", at], text)
            elif STATE in work:
                try:
                    await machine.write(path, text.encode())
                except (OSError, ValueError) as error:
                    raise NotLaid(f"{path}: {error}") from None

    async def _place(self, machine: Machine, path: str, argv: Sequence[str], text: str = "") -> None:
        user = ROOT if self._room else ""
        placed = await machine.exec(argv, key=f"lay {path}", deadline_s=30.0, stdin=text.encode(), user=user)
        if placed.exit_code != 0:
            raise NotLaid(f"{path}: {placed.output[:REASON_CHARS].decode(errors='replace')}")

    async def report(
        self,
        work: Work,
        hidden: Mapping[str, str],
        argv: Sequence[str],
        request: Mapping[str, Any],
        *,
        deadline_s: float,
        nonce: str | None = None,
    ) -> Any:
        """Run one of etude's test runners in a fresh machine and return its report. A machine that the host lost is
        replaced once. Raises `Refused` where there is no report and the agent's files are to blame, `Broken` where the
        task or the host is."""
        nonce = nonce or new_nonce()
        stdin = json.dumps({**request, "nonce": nonce}).encode()
        for attempt in range(ATTEMPTS + 1):
            try:
                async with self.machine(work, hidden) as machine:
                    result = await machine.exec(
                        argv, key="grade", deadline_s=deadline_s, stdin=stdin, output_bytes=OUTPUT_BYTES
                    )
                return told(result, nonce)
            except NotStarted:
                await self.python_starts()
                raise
            except NotLaid as error:
                raise Refused(f"the hidden files cannot be written over the agent's: {error}") from None
            except MachineError as error:
                failure = error
            if attempt + 1 == ATTEMPTS:
                await self.host_works()
        raise Refused(f"the machine was lost repeatedly: {failure}")

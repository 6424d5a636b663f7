"""Make fresh machines to grade one task's submissions in.

A grading machine is forked from the task's initial files, with the agent's exports and then the hidden files written
over them. If the task is graded by the machine's state, it is forked from the state that the agent left. On the host
the agent's files are only data. Files whose names configure test runs (`exports.CONFIGURATION`), and files that shadow
a hidden file, are never taken from the agent.

A failed run is retried, and then tried without the agent's files. If that fails too, the agent is not to blame.

The runner programs (`environments/runners`) report on one line of output that begins with a nonce, a random string. The
nonce arrives on standard input and is in no file, argument or environment variable, so only code in the runner's own
process can find it. Canaries, changed tests that must fail, detect forgeries by such code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from importlib import resources
from pathlib import PurePosixPath
from typing import Any

from etude.environments.command_registry import consume_exception
from etude.environments.grading.exports import prepare, require_complete_snapshots, simulate_exports
from etude.environments.grading.verdicts import REASON_CHARS, GradingFault, Rejected
from etude.errors import MachineError
from etude.records.command import ExecResult
from etude.records.exports import STATE, covering
from etude.records.image import Image
from etude.records.rollout import Boundary
from etude.records.task import Task
from etude.seams import Machine, Portable, Runtime

ATTEMPTS = 2
PYTHON_NAMES = ("python", "python3")
ROOT = "root"
OUTPUT_BYTES = 4 << 20
STDLIB_MODULES = sys.stdlib_module_names - {"test", "this"}
"""Modules that a verifier may import. A file of the agent with such a name in its folder would shadow them."""
_WRITE_SCRIPT = 'mkdir -p "$(dirname "$1")" && rm -rf "$1" && cat > "$1"'

Submission = Mapping[str, bytes]
"""An agent's validated exports (path to content), with its machine's state if the task is graded by that."""


class HiddenFilesNotWritten(Exception):
    """Raised when a hidden file could not be written into a machine."""


class GradingMachines:
    """Makes fresh machines to grade one task's submissions in.

    `submission` is an agent's exports as path to content, and `hidden` maps paths to the texts of hidden files, which
    are written over them. Some of the agent's files are left out:

    - those at `protected_paths`
    - those whose file name is in `excluded_names`, unless the task declares their full path as an export
    - new modules whose name is in `reserved_modules`, in folders from which hidden files or commands import, unless the
      task declares their full path as an export

    `python_finder` finds the name of the Python program in the task's image. Pass the same `PythonFinder` for several
    tasks, so that each image is tested once; None creates a new one.
    """

    def __init__(
        self,
        runtime: Runtime,
        task: Task,
        *,
        excluded_names: Collection[str] = (),
        protected_paths: Collection[str] = (),
        reserved_modules: Collection[str] = (),
        python_finder: PythonFinder | None = None,
    ) -> None:
        self.runtime, self.task = runtime, task
        self._excluded_names, self._protected_paths = excluded_names, protected_paths
        self._reserved_modules = reserved_modules
        self._python_finder = python_finder or PythonFinder(runtime)
        # Only root can enter it; for machines with running processes.
        self._private_folder = f"/etude-{secrets.token_hex(8)}" if task.running else ""
        # By the id() of submission and hidden files, which the values keep alive.
        self._snapshots: dict[tuple[int, int], tuple[asyncio.Task[str], Submission, Mapping[str, str]]] = {}

    async def snapshot(self, submission: Submission, hidden: Mapping[str, str]) -> str:
        """Prepare a snapshot of the task's files with a submission and hidden files, and return its id.

        `submission`: an agent's exports. `hidden`: path to text. Concurrent calls share one preparation. Raises
        `Rejected` if the agent's files cannot be combined with the task's, `GradingFault` if the task's own files are
        invalid.
        """
        key = (id(submission), id(hidden))
        if key not in self._snapshots:
            preparing = asyncio.create_task(self._prepare_snapshot(submission, hidden))
            preparing.add_done_callback(consume_exception)
            self._snapshots[key] = (preparing, submission, hidden)
        preparing = self._snapshots[key][0]
        try:
            return await asyncio.shield(preparing)
        except Exception:
            if key in self._snapshots and self._snapshots[key][0] is preparing:
                del self._snapshots[key]
            raise

    async def _prepare_snapshot(self, submission: Submission, hidden: Mapping[str, str]) -> str:
        if STATE in submission:
            return await self._unpack_state(submission[STATE])
        task = self.task
        is_declared = covering(task.exports)
        pristine = {path: text.encode() for path, text in task.files.items() if not is_declared(path)}
        hidden_files = {path: text.encode() for path, text in hidden.items() if not path.startswith("/")}
        try:
            snapshot = await self.runtime.prepare(
                {**pristine, **self._accepted_files(submission, hidden_files), **hidden_files}, image=task.image
            )
        except ValueError as error:
            try:
                await self.runtime.prepare({**pristine, **hidden_files}, image=task.image)
            except ValueError as own:
                raise GradingFault(Boundary.TASK, "the task's files are not a valid tree", str(own)) from None
            raise Rejected(f"the exports do not fit into the task's files: {error}") from None
        deleted = [
            path
            for path in task.exports
            if not path.endswith("/") and path not in submission and path not in hidden_files
        ]
        return await self._remove_files(snapshot, deleted) if task.image is not None and deleted else snapshot

    def _accepted_files(self, submission: Submission, hidden: Mapping[str, bytes]) -> dict[str, bytes]:
        """The agent's files that may be written beside the hidden ones."""
        folders = {".", *(str(parent) for path in hidden for parent in PurePosixPath(path).parents)}
        beneath = tuple(f"{path.removesuffix(suffix)}/" for path in hidden for suffix in ("", ".py"))

        declared = frozenset(self.task.exports)

        def shadows(path: str) -> bool:
            chain = (PurePosixPath(path), *PurePosixPath(path).parents)
            parents = [each for each in chain if str(each.parent) in folders]
            return path not in self.task.files and any(
                each.name.partition(".")[0] in self._reserved_modules for each in parents
            )

        def is_accepted(path: str) -> bool:
            parts = PurePosixPath(path).parts
            compiled = "__pycache__" in parts or path.endswith((".pyc", ".pth"))
            if path not in declared and (compiled or parts[-1] in self._excluded_names or shadows(path)):
                return False
            return not (path in hidden or path in self._protected_paths or path in folders or path.startswith(beneath))

        return {path: data for path, data in submission.items() if path != STATE and is_accepted(path)}

    async def _unpack_state(self, packed: bytes) -> str:
        if not isinstance(self.runtime, Portable):
            facts = f"{self.runtime.info.name} machines cannot start from another machine's state"
            raise GradingFault(Boundary.GRADER, "the machine's state cannot be graded here", facts)
        try:
            require_complete_snapshots(self.runtime, self.task)
            return await self.runtime.unpack(packed)
        except ValueError as error:
            raise Rejected(f"the machine's state cannot be restored: {error}") from None
        except MachineError as error:  # no program of the agent has run yet
            raise GradingFault(Boundary.MACHINE, "the machine's state cannot be restored", str(error)) from None

    async def _remove_files(self, snapshot: str, paths: Sequence[str]) -> str:
        """Remove the image's own files at declared paths that the agent has deleted."""
        [machine] = await self.runtime.fork(snapshot, 1)
        try:
            removed = await machine.exec(["rm", "-rf", "--", *paths], key="rm", deadline_s=30.0)
            if removed.exit_code != 0:
                facts = f"exit code {removed.exit_code}: {removed.output[:REASON_CHARS].decode(errors='replace')}"
                raise GradingFault(Boundary.TASK, "declared files of the image cannot be removed", facts)
            return await machine.snapshot()
        finally:
            await machine.close()

    @contextlib.asynccontextmanager
    async def open(self, submission: Submission, hidden: Mapping[str, str] | None = None) -> AsyncIterator[Machine]:
        """Yield a fresh machine with a submission and hidden files; close it at the end of the `with` block.

        `submission`: an agent's exports. `hidden`: path to text. A failed fork is retried up to `ATTEMPTS` times.

        Raises `Rejected` if every fork fails although machines without the agent's files work, `GradingFault` if those
        fail too, and `HiddenFilesNotWritten` if the hidden files cannot be written.
        """
        machine = await self._fork(submission, hidden or {})
        try:
            await self._write_hidden_files(machine, submission, hidden or {})
            yield machine
        finally:
            await machine.close()

    async def _fork(self, submission: Submission, hidden: Mapping[str, str]) -> Machine:
        for attempt in range(ATTEMPTS + 1):
            try:
                [machine] = await self.runtime.fork(await self.snapshot(submission, hidden), 1)
                return machine
            except MachineError as error:
                failure = error
                self._snapshots.clear()  # the runtime may have dropped the snapshot
            if attempt + 1 == ATTEMPTS:
                await self.check_host()
        raise Rejected(f"no machine can be made with the agent's files: {failure}")

    async def check_host(self) -> None:
        """Check that a machine without the agent's files can be created and used now.

        Raises `GradingFault` otherwise.
        """
        try:
            [machine] = await self.runtime.fork(await prepare(self.runtime, self.task), 1)
            try:
                await machine.exec(["true"], key="control", deadline_s=60.0)
            finally:
                await machine.close()
        except MachineError as error:
            raise GradingFault(Boundary.MACHINE, "no machine for grading", str(error)) from None
        except ValueError as error:
            raise GradingFault(Boundary.TASK, "the task's files are not a valid tree", str(error)) from None

    async def python(self) -> str:
        """Return the name of the Python program in the task's machine: "python" or "python3"."""
        return await self._python_finder.find(self.task.image)

    async def check_python(self) -> None:
        """Check that Python starts in the task's machine without the agent's files. Raises `GradingFault` otherwise."""
        program = await self.python()
        async with self.open(await self.untouched_submission()) as machine:
            result = await machine.exec([program, "-c", ""], key="starts", deadline_s=60.0)
        if result.exit_code != 0:
            output = f"exit code {result.exit_code}: {result.output[:REASON_CHARS].decode(errors='replace')}"
            facts = f"looked for {' and '.join(PYTHON_NAMES)}; {program}: {output}"
            raise GradingFault(Boundary.TASK, "there is no python that works in the task's machine", facts)

    async def untouched_submission(self) -> Submission:
        """Return the exports of an agent that did nothing."""
        return await simulate_exports(self.runtime, self.task)

    @property
    def user(self) -> str:
        """The user that verifiers run as; "" for the machine's default user.

        It is "root" if the task is graded by the agent's machine state and the runtime has this user.
        """
        return ROOT if self.task.state and ROOT in self.runtime.info.users else ""

    def path_of(self, path: str) -> str:
        """Return the path of a verifier's file in the machine.

        If the agent's processes still run there, it is in a folder that only root can enter.
        """
        return f"{self._private_folder}/{path}" if self._private_folder and not path.startswith("/") else path

    async def _write_hidden_files(self, machine: Machine, submission: Submission, hidden: Mapping[str, str]) -> None:
        """Write the hidden files that the snapshot lacks: all of them on the agent's state, else those outside the
        working directory."""
        if self._private_folder:
            await self._run_setup(machine, self._private_folder, ["mkdir", "-m", "700", self._private_folder])
        for path, text in hidden.items():
            at = self.path_of(path)
            if at.startswith("/"):
                await self._run_setup(machine, at, ["sh", "-c", _WRITE_SCRIPT, "sh", at], text)
            elif STATE in submission:
                try:
                    await machine.write(path, text.encode())
                except (OSError, ValueError) as error:
                    raise HiddenFilesNotWritten(f"{path}: {error}") from None

    async def _run_setup(self, machine: Machine, path: str, argv: Sequence[str], text: str = "") -> None:
        user = ROOT if self._private_folder else ""
        done = await machine.exec(argv, key=f"lay {path}", deadline_s=30.0, stdin=text.encode(), user=user)
        if done.exit_code != 0:
            raise HiddenFilesNotWritten(f"{path}: {done.output[:REASON_CHARS].decode(errors='replace')}")

    async def run_runner(
        self,
        submission: Submission,
        hidden: Mapping[str, str],
        argv: Sequence[str],
        request: Mapping[str, Any],
        *,
        deadline_s: float,
        nonce: str | None = None,
    ) -> Any:
        """Run one of the runner programs in a fresh machine and return its report, as plain data.

        `submission`: an agent's exports. `hidden`: path to text. `argv`: the command that starts the program.
        `request`: the data that it gets as JSON on standard input, with the nonce added. `nonce`: marks the report;
        None: a new one. A machine that the host lost is replaced once.

        Raises `Rejected` (or its subclass `NoReport`) if there is no report because of the agent's files,
        `GradingFault` if the task or the host is to blame.
        """
        nonce = nonce or new_nonce()
        stdin = json.dumps({**request, "nonce": nonce}).encode()
        for attempt in range(ATTEMPTS + 1):
            try:
                async with self.open(submission, hidden) as machine:
                    result = await machine.exec(
                        argv, key="grade", deadline_s=deadline_s, stdin=stdin, output_bytes=OUTPUT_BYTES
                    )
                return parse_report(result, nonce)
            except RunnerNotStarted:
                await self.check_python()
                raise
            except HiddenFilesNotWritten as error:
                raise Rejected(f"the hidden files cannot be written over the agent's: {error}") from None
            except MachineError as error:
                failure = error
            if attempt + 1 == ATTEMPTS:
                await self.check_host()
        raise Rejected(f"the machine was lost repeatedly: {failure}")


# --------------------------------------------------------------------------------- runner programs and their reports


def runner_source(name: str) -> str:
    """Return the source code of a program in `environments/runners`. `name`: "check", "data" or "tests"."""
    return (resources.files("etude.environments") / "runners" / f"{name}.py").read_text()


def new_nonce() -> str:
    """Return a random string of 32 hexadecimal digits. It marks the report of one run."""
    return secrets.token_hex(16)


class NoReport(Rejected):
    """Raised when a runner program ended without a report. The submission earns nothing."""


class RunnerNotStarted(NoReport):
    """Raised when a runner program could not be started."""


def parse_report(result: ExecResult, nonce: str) -> Any:
    """Return the plain data that follows the nonce in a runner program's output. Raises `NoReport` if there is none."""
    marker = f"{nonce} ".encode()
    for line in result.output.split(b"\n"):
        if line.startswith(marker):
            try:
                return json.loads(line[len(marker) :])
            except (ValueError, RecursionError):
                raise NoReport("the report is not plain data") from None
    if result.timed_out:
        raise NoReport("the hidden tests did not end before their deadline")
    if result.truncated:
        raise NoReport("the results are too large")
    reason = f"the process ended with exit code {result.exit_code} before it reported"
    raise (RunnerNotStarted if result.exit_code in (126, 127) else NoReport)(reason)


class PythonFinder:
    """Finds the name of the Python program in images. Each image is tested once, in a machine without the agent's
    files.

    Debian images have ``python3`` and no ``python``, others only ``python``.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[str, str] = {}  # by the image's digest

    async def find(self, image: Image | None) -> str:
        """Return the first of `PYTHON_NAMES` that works in machines of this image.

        If no name works or the test fails, return the first name; the caller's own run then reports the problem.
        `image` None stands for the runtime's own root filesystem, which has "python".
        """
        if image is None:
            return PYTHON_NAMES[0]
        if image.digest not in self._known:
            try:
                found = await self._probe(image)
            except MachineError:
                found = ""
            if not found:
                return PYTHON_NAMES[0]
            self._known[image.digest] = found
        return self._known[image.digest]

    async def _probe(self, image: Image) -> str:
        [machine] = await self._runtime.fork(await self._runtime.prepare({}, image=image), 1)
        try:
            for name in PYTHON_NAMES:
                if (await machine.exec([name, "-c", ""], key=name, deadline_s=60.0)).exit_code == 0:
                    return name
            return ""
        finally:
            await machine.close()

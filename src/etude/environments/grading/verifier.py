"""Grade with a verifier: any command of the task, run in a fresh machine with the exports.

If the task is graded by the machine's state, the verifier runs in a fork of the frozen machine. The reward is its exit
code (0: reward 1), or a number that it writes into a file.

A verifier that runs the agent's code has to trust it: that code can end the verifier's process, or write the reward
itself. There are two guards: a reward above 0 must repeat, and canaries. A canary is the verifier with one compared
literal changed in its Python files. It is known to give the reference solution less. A submission that gets no less
from a canary is a forgery.

If a verifier hangs, does not start or writes no number from 0 to 1, it is run on the untouched machine. If it works
there, the agent caused the failure; else the task is at fault. In a fork of the agent's machine, processes of the agent
may still run; so there the verifier runs as root if possible, with its files in a folder that only root can enter. It
uses that machine's programs, unless the task brings its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

import msgspec

from etude.environments.grading.canaries import variants_of_program
from etude.environments.grading.machines import (
    STDLIB_MODULES,
    GradingMachines,
    HiddenFilesNotWritten,
    PythonFinder,
    Submission,
    new_nonce,
)
from etude.environments.grading.verdicts import GradingFault, Rejected, graded, one_line
from etude.errors import MachineError
from etude.records.command import ExecResult
from etude.records.exports import CONFIGURATION
from etude.records.image import Image
from etude.records.rollout import Boundary, Graded
from etude.records.task import Task, Trust, Verifier
from etude.seams import Machine, Runtime

_REWARD_BYTES = 4_096
_OUTPUT_BYTES = 65_536
_MAX_VARIANTS = 6


@dataclass(frozen=True)
class VerifierResult:
    """The result of one run of a verifier.

    `reward`: from 0 to 1, or None if the run gave no verdict. `reason`: one line. `evidence`: the end of its output.
    """

    reward: float | None
    reason: str
    evidence: str = ""


class VerifierCanary(NamedTuple):
    """A changed verifier, and the reward that it gives the reference solution: less than the original verifier
    gives."""

    verifier: Verifier
    reward: float


class VerifierGrader:
    """Grades submissions with verifiers, in machines of `runtime`.

    `canaries`: the most changed verifiers that test one submission for forgery. The grader remembers which verifiers
    work in a machine without the agent's changes, so each is tested there once.
    """

    def __init__(self, runtime: Runtime, *, canaries: int) -> None:
        self._runtime, self._canaries = runtime, canaries
        self._working: set[str] = set()
        self._python_finder = PythonFinder(runtime)
        self._installed_modules: dict[tuple[str, frozenset[str]], frozenset[str]] = {}  # by image and folders

    def variants(self, task: Task, verifier: Verifier) -> list[tuple[str, str]]:
        """Return changed files of a verifier as (path, text), at most `_MAX_VARIANTS`, from which `plan` chooses
        canaries.

        Returns [] if the verifier does not run the agent's code.
        """
        if task.trust is not Trust.CODE or not self._canaries:
            return []
        rng = random.Random(new_nonce())
        files = [path for path in verifier.files if path.endswith(".py")]
        changed = [(path, text) for path in files for text in variants_of_program(verifier.files[path], rng)]
        return rng.sample(changed, min(len(changed), _MAX_VARIANTS))

    async def plan(self, task: Task, verifier: Verifier, reference: Submission) -> list[VerifierCanary]:
        """Find canaries: variants of a verifier that give the reference solution less than the verifier does.

        `reference`: the exports of the reference solution. Returns [] if the verifier gives it 0. Raises `GradingFault`
        if the verifier gives no verdict.
        """
        machines = await self._machines(task, verifier)
        right = await self._run(machines, verifier, reference)
        if right.reward is None:
            await self._check_verifier(machines, verifier)
        found: list[VerifierCanary] = []
        for path, text in self.variants(task, verifier):
            if len(found) == self._canaries or not right.reward:
                break
            changed = msgspec.structs.replace(verifier, files={**verifier.files, path: text})
            result = await self._run(machines, changed, reference)
            if result.reward is not None and result.reward < right.reward:
                found.append(VerifierCanary(changed, result.reward))
        return found

    async def grade(
        self, task: Task, verifier: Verifier, canaries: Sequence[VerifierCanary], submission: Submission
    ) -> Graded:
        """Grade a submission (what the agent exported) with a verifier. `canaries` come from `plan`.

        A reward above 0 from a verifier that ran the agent's code must repeat; the lower of two counts. Raises
        `Rejected` if the submission prevents a verdict or forges one, `GradingFault` if the task or the host is at
        fault.
        """
        machines = await self._machines(task, verifier)
        result = await self._run(machines, verifier, submission)
        if result.reward is None:
            await self._check_verifier(machines, verifier)
            raise Rejected(result.reason)
        if result.reward > 0 and task.trust is Trust.CODE:
            result = await self._verify_reward(machines, verifier, canaries, submission, result)
        assert result.reward is not None
        return graded(result.reward, result.reward, task.trust, result.reason)

    async def _machines(self, task: Task, verifier: Verifier) -> GradingMachines:
        protected_paths, reserved_modules = (verifier.reward_path,), await self._reserved_modules(task, verifier)
        return GradingMachines(
            self._runtime,
            task,
            excluded_names=CONFIGURATION,
            protected_paths=protected_paths,
            reserved_modules=reserved_modules,
        )

    async def _reserved_modules(self, task: Task, verifier: Verifier) -> frozenset[str]:
        """Module names that new files of the agent may not have. Names in the task's own folders are allowed."""
        if not any(path.endswith("/") for path in task.exports):
            return STDLIB_MODULES  # exports declared by file cannot add files
        own = {part.partition(".")[0] for path in task.files for part in PurePosixPath(path).parts}
        paths = [PurePosixPath(path) for path in verifier.files if not path.startswith("/")]
        folders = frozenset({".", *(str(parent) for path in paths for parent in path.parents)})
        key = ("" if task.image is None else task.image.digest, folders)
        if key not in self._installed_modules:
            try:
                self._installed_modules[key] = await installed_modules(
                    self._runtime, task.image, folders, await self._python_finder.find(task.image)
                )
            except MachineError as error:
                raise GradingFault(Boundary.MACHINE, "no machine for grading", str(error)) from None
        return STDLIB_MODULES | self._installed_modules[key] - own

    async def _verify_reward(
        self,
        machines: GradingMachines,
        verifier: Verifier,
        canaries: Sequence[VerifierCanary],
        submission: Submission,
        first: VerifierResult,
    ) -> VerifierResult:
        """Run the verifier again, and the canaries. Returns the lower of both results.

        Raises `Rejected` if a canary gives the submission as much as the verifier first did, and more than it gives the
        reference solution. A submission with a lower first reward is not rejected: it may match the canary by chance.
        """
        had, counts = first.reward or 0.0, first
        for canary in random.Random(new_nonce()).sample([None, *canaries], 1 + len(canaries)):
            result = await self._run(machines, verifier if canary is None else canary.verifier, submission)
            got = result.reward or 0.0
            if canary is not None and got >= had > canary.reward:
                raise Rejected("canary: a verifier that must reject this submission accepts it", forged=True)
            if canary is None and got < had:
                counts = VerifierResult(got, f"not repeated: {result.reason}")
        return counts

    async def _check_verifier(self, machines: GradingMachines, verifier: Verifier) -> None:
        """Check that the verifier gives a verdict on the untouched machine. Raises `GradingFault` otherwise."""
        key = hashlib.sha256(machines.task.task_id.encode() + msgspec.json.encode(verifier)).hexdigest()
        if key in self._working:
            return
        control = await self._run(machines, verifier, await machines.untouched_submission())
        if control.reward is None:
            facts = f"on the untouched machine, {control.reason}; its output ends with {control.evidence!r}"
            raise GradingFault(Boundary.TASK, f"the verifier gives no verdict: {control.reason}", facts)
        self._working.add(key)

    async def _run(self, machines: GradingMachines, verifier: Verifier, submission: Submission) -> VerifierResult:
        for is_retry in (False, True):
            try:
                async with machines.open(submission, verifier.files) as machine:
                    return await _run_verifier(machine, verifier, machines.user, path_of=machines.path_of)
            except HiddenFilesNotWritten as error:
                return VerifierResult(None, f"the verifier's files cannot be written over the agent's: {error}")
            except MachineError as error:
                if is_retry:
                    await machines.check_host()
                    return VerifierResult(None, f"the machine was lost twice: {one_line(str(error))}")
        raise AssertionError("the loop returns or raises")


async def _run_verifier(
    machine: Machine, verifier: Verifier, user: str, *, path_of: Callable[[str], str] = str
) -> VerifierResult:
    path = path_of(verifier.reward_path) if verifier.reward_path else ""
    if path == verifier.reward_path != "":  # else the reward file is in a new folder
        try:
            await _remove_reward(machine, path, user)
        except (OSError, ValueError) as error:
            return VerifierResult(None, f"{path} cannot be removed: {error}")
    result = await machine.exec(
        verifier.argv,
        key="verify",
        deadline_s=verifier.deadline_s,
        output_bytes=_OUTPUT_BYTES,
        user=user,
        cwd=path_of(""),
    )
    output = result.output[-400:].decode(errors="replace")
    if result.timed_out:
        return VerifierResult(None, f"the verifier did not end within {verifier.deadline_s:g} s", output)
    if not path:
        return _result_from_exit_code(result, output)
    text = await _read_reward(machine, path, user)
    reward = _parse_reward(text)
    if reward is None:
        what = "nothing" if not text.strip() else one_line(repr(text[:40]))
        return VerifierResult(
            None, f"the verifier ended with exit code {result.exit_code} and wrote {what} as the reward", output
        )
    return VerifierResult(reward, f"the verifier gives {reward:g}", output)


def _result_from_exit_code(result: ExecResult, output: str) -> VerifierResult:
    if result.exit_code in (126, 127):
        return VerifierResult(None, f"the verifier cannot be run: {one_line(output)}", output)
    if result.exit_code == 0:
        return VerifierResult(1.0, "the verifier accepts", output)
    lines = output.strip().splitlines()
    why = f": {lines[-1]}" if lines else ""
    return VerifierResult(0.0, f"the verifier ends with exit code {result.exit_code}{why}", output)


async def _remove_reward(machine: Machine, path: str, user: str) -> None:
    """Remove whatever is at the reward's path before the verifier runs. Raises `OSError`, `ValueError`."""
    if path.startswith("/"):
        script = 'rm -rf "$1" && mkdir -p "$(dirname "$1")"'
        done = await machine.exec(["sh", "-c", script, "sh", path], key="clear", deadline_s=30.0, user=user)
        if done.exit_code != 0:
            raise OSError(one_line(done.output.decode(errors="replace")))
    else:
        await machine.write(path, b"")


async def _read_reward(machine: Machine, path: str, user: str) -> bytes:
    """The start of the reward file; empty if there is none. A path in the working directory is read after the
    machine is frozen, so that nothing rewrites it."""
    if path.startswith("/"):
        result = await machine.exec(["cat", path], key="read", deadline_s=30.0, output_bytes=_REWARD_BYTES, user=user)
        return result.output if result.exit_code == 0 else b""
    try:
        await machine.freeze()
        return await machine.read(path, max_bytes=_REWARD_BYTES)
    except (OSError, ValueError):
        return b""


def _parse_reward(text: bytes) -> float | None:
    """Parse a number from 0 to 1; None for anything else.

    >>> _parse_reward(b" 0.5\\n"), _parse_reward(b"1.01"), _parse_reward(b"nan"), _parse_reward(b"")
    (0.5, None, None, None)
    """
    try:
        number = float(text.decode("ascii"))
    except (ValueError, UnicodeDecodeError):
        return None
    return number if math.isfinite(number) and 0.0 <= number <= 1.0 else None


# ------------------------------------------------------------------------------------------ modules that the image has
# A new file with the name of a module that the verifier imports would shadow it. So the image's modules are listed.
# Modules in the working directory are the task's own.


_LIST_BYTES = 4 << 20
_LIST_MODULES = """import json, os, pkgutil, sys
here = os.path.realpath(os.getcwd())
away = [p for p in sys.path if p and not (os.path.realpath(p) + os.sep).startswith(here + os.sep)]
there, own = ({m[1] for m in pkgutil.iter_modules(paths)} for paths in (away, sys.argv[1:]))
print(json.dumps(sorted(there - own)))"""
_ALWAYS_ALLOWED = sys.stdlib_module_names | {"test", "tests"}  # known without listing; common names of a task's own


async def installed_modules(
    runtime: Runtime, image: Image | None, folders: Collection[str], python: str
) -> frozenset[str]:
    """Return the names of the modules installed in an image that a new file in one of `folders` could shadow.

    `image`: the image; None: the runtime's own root filesystem. `folders`: paths relative to the working directory.
    `python`: name of the Python program there. Returns an empty set if Python does not work there. Raises
    `MachineError` if the host is to blame.
    """
    [machine] = await runtime.fork(await runtime.prepare({}, image=image), 1)
    try:
        argv = [python, "-c", _LIST_MODULES, *sorted(folders)]
        listed = await machine.exec(argv, key="installed", deadline_s=60.0, output_bytes=_LIST_BYTES)
    finally:
        await machine.close()
    if listed.timed_out:
        raise MachineError(
            "the modules of a task's machine could not be listed",
            "it took more than 60 s",
            hint="grade the rollout again",
        )
    try:
        return frozenset(json.loads(listed.output)) - _ALWAYS_ALLOWED if listed.exit_code == 0 else frozenset()
    except (ValueError, TypeError):
        return frozenset()  # unexpected output

"""Grades work with a verifier: any command, run in a fresh machine with the exports in it, or in a fork of the frozen
machine where the machine's state counts. The verdict is its exit code, or a number in a file that is read from outside.

A verifier that runs the agent's code must trust that code, which can end the verifier's process or write the reward
itself. Two things guard against this: a verdict above 0 must repeat, and canaries. A canary is the verifier with one
literal that it compares with changed in its Python files; it is proven to give the reference solution less. Work that a
canary does not give less is a forgery.

Where a verifier hangs, cannot be started or writes no number from 0 to 1, it is run on the untouched machine: if it
gives a verdict there, the agent caused the failure; if not, the task is at fault. In a fork of the agent's machine the
verifier runs as root where the runtime allows it, since processes of the agent may still run. It trusts the programs
that it uses of that machine: a task can bring its own. Its files lie in a folder of root's that the agent's processes
cannot reach.
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

from etude.environments.grading.canaries import anywhere
from etude.environments.grading.ground import LIBRARY, Ground, NotLaid, Work
from etude.environments.grading.python import Pythons
from etude.environments.grading.reports import new_nonce
from etude.environments.grading.verdicts import Broken, Refused, earned, one_line
from etude.errors import MachineError
from etude.records.command import ExecResult
from etude.records.exports import CONFIGURATION
from etude.records.image import Image
from etude.records.rollout import Boundary, Graded
from etude.records.task import Task, Trust, Verifier
from etude.seams import Machine, Runtime

_REWARD_BYTES = 4_096
_SAID_BYTES = 65_536
_MOST_TRIED = 6


@dataclass(frozen=True)
class Said:
    """Result of one run of a verifier. `reward` is in [0, 1], or None where it gave no verdict; `evidence` is the end
    of its output."""

    reward: float | None
    reason: str
    evidence: str = ""


class Canary(NamedTuple):
    """A changed verifier, and the reward that it gives the reference solution: less than the verifier gives."""

    verifier: Verifier
    reward: float


class VerifierBench:
    """Runs verifiers. Remembers which gave a verdict on the untouched machine, so that this is tried once for each."""

    def __init__(self, runtime: Runtime, *, canaries: int) -> None:
        self._runtime, self._canaries = runtime, canaries
        self._works: set[str] = set()
        self._pythons = Pythons(runtime)
        self._installed: dict[tuple[str, frozenset[str]], frozenset[str]] = {}  # by image and folders

    def variants(self, task: Task, verifier: Verifier) -> list[tuple[str, str]]:
        """Changed files, as (path, text), that may make canaries. Empty where the verdict does not rest on the agent's
        code."""
        if task.trust is not Trust.CODE or not self._canaries:
            return []
        rng = random.Random(new_nonce())
        files = [path for path in verifier.files if path.endswith(".py")]
        changed = [(path, text) for path in files for text in anywhere(verifier.files[path], rng)]
        return rng.sample(changed, min(len(changed), _MOST_TRIED))

    async def plan(self, task: Task, verifier: Verifier, reference: Work) -> list[Canary]:
        """Find canaries: variants that give the reference solution less than the verifier does. Empty where the
        verifier gives it 0. Raises `Broken` where the verifier gives no verdict."""
        ground = await self._ground(task, verifier)
        right = await self._run(ground, verifier, reference)
        if right.reward is None:
            await self._blame(ground, verifier)
        found: list[Canary] = []
        for path, text in self.variants(task, verifier):
            if len(found) == self._canaries or not right.reward:
                break
            changed = msgspec.structs.replace(verifier, files={**verifier.files, path: text})
            said = await self._run(ground, changed, reference)
            if said.reward is not None and said.reward < right.reward:
                found.append(Canary(changed, said.reward))
        return found

    async def grade(self, task: Task, verifier: Verifier, canaries: Sequence[Canary], work: Work) -> Graded:
        """Grade work with a verifier. A verdict above 0 that ran the agent's code must repeat: the lesser of two
        counts. Raises `Refused` where the work prevented a verdict or forged one, `Broken` where the task or the host
        is at fault."""
        ground = await self._ground(task, verifier)
        said = await self._run(ground, verifier, work)
        if said.reward is None:
            await self._blame(ground, verifier)
            raise Refused(said.reason)
        if said.reward > 0 and task.trust is Trust.CODE:
            said = await self._guarded(ground, verifier, canaries, work, said)
        assert said.reward is not None
        return earned(said.reward, said.reward, task.trust, said.reason)

    async def _ground(self, task: Task, verifier: Verifier) -> Ground:
        kept, library = (verifier.reward_path,), await self._library(task, verifier)
        return Ground(self._runtime, task, never=CONFIGURATION, kept=kept, library=library)

    async def _library(self, task: Task, verifier: Verifier) -> frozenset[str]:
        """Module names that new files of the agent may not have; names in the task's own folders are allowed."""
        if not any(path.endswith("/") for path in task.exports):
            return LIBRARY  # exports that are named one by one cannot add files
        own = {part.partition(".")[0] for path in task.files for part in PurePosixPath(path).parts}
        paths = [PurePosixPath(path) for path in verifier.files if not path.startswith("/")]
        folders = frozenset({".", *(str(parent) for path in paths for parent in path.parents)})
        key = ("" if task.image is None else task.image.digest, folders)
        if key not in self._installed:
            try:
                self._installed[key] = await installed(
                    self._runtime, task.image, folders, await self._pythons.of(task.image)
                )
            except MachineError as error:
                raise Broken(Boundary.MACHINE, "no machine to grade in", str(error)) from None
        return LIBRARY | self._installed[key] - own

    async def _guarded(
        self, ground: Ground, verifier: Verifier, canaries: Sequence[Canary], work: Work, first: Said
    ) -> Said:
        """Run the verifier again, and the canaries; return the lesser of both verdicts. `Refused` where a canary gives
        the work as much as the verifier first did, and that is more than it gives the reference solution. Work with a
        lower first verdict is not refused: it may give by chance what the canary wants."""
        had, counts = first.reward or 0.0, first
        for canary in random.Random(new_nonce()).sample([None, *canaries], 1 + len(canaries)):
            said = await self._run(ground, verifier if canary is None else canary.verifier, work)
            got = said.reward or 0.0
            if canary is not None and got >= had > canary.reward:
                raise Refused("canary: a verifier that must reject this work accepts it", forged=True)
            if canary is None and got < had:
                counts = Said(got, f"not repeated: {said.reason}")
        return counts

    async def _blame(self, ground: Ground, verifier: Verifier) -> None:
        """Check that the verifier gives a verdict on the untouched machine. Raises `Broken` where it does not."""
        key = hashlib.sha256(ground.task.task_id.encode() + msgspec.json.encode(verifier)).hexdigest()
        if key in self._works:
            return
        control = await self._run(ground, verifier, await ground.untouched())
        if control.reward is None:
            facts = f"on the untouched machine, {control.reason}; its output ends with {control.evidence!r}"
            raise Broken(Boundary.TASK, f"the verifier gives no verdict: {control.reason}", facts)
        self._works.add(key)

    async def _run(self, ground: Ground, verifier: Verifier, work: Work) -> Said:
        for lost in (False, True):
            try:
                async with ground.machine(work, verifier.files) as machine:
                    return await _judged(machine, verifier, ground.user, at=ground.place)
            except NotLaid as error:
                return Said(None, f"the verifier's files cannot be written over the agent's: {error}")
            except MachineError as error:
                if lost:
                    await ground.host_works()
                    return Said(None, f"the machine was lost twice: {one_line(str(error))}")
        raise AssertionError("the loop returns or raises")


async def _judged(machine: Machine, verifier: Verifier, user: str, *, at: Callable[[str], str] = str) -> Said:
    path = at(verifier.reward_path) if verifier.reward_path else ""
    if path == verifier.reward_path != "":  # else the reward's file lies in a new folder
        try:
            await _clear(machine, path, user)
        except (OSError, ValueError) as error:
            return Said(None, f"what lies at {path} cannot be removed: {error}")
    result = await machine.exec(
        verifier.argv,
        key="verify",
        deadline_s=verifier.deadline_s,
        output_bytes=_SAID_BYTES,
        user=user,
        cwd=at(""),
    )
    said = result.output[-400:].decode(errors="replace")
    if result.timed_out:
        return Said(None, f"the verifier did not end within {verifier.deadline_s:g} s", said)
    if not path:
        return _by_exit(result, said)
    text = await _read(machine, path, user)
    reward = _number(text)
    if reward is None:
        what = "nothing" if not text.strip() else one_line(repr(text[:40]))
        return Said(None, f"the verifier ended with exit code {result.exit_code} and wrote {what} for a reward", said)
    return Said(reward, f"the verifier says {reward:g}", said)


def _by_exit(result: ExecResult, said: str) -> Said:
    if result.exit_code in (126, 127):
        return Said(None, f"the verifier cannot be run: {one_line(said)}", said)
    if result.exit_code == 0:
        return Said(1.0, "the verifier accepts", said)
    lines = said.strip().splitlines()
    why = f": {lines[-1]}" if lines else ""
    return Said(0.0, f"the verifier ends with exit code {result.exit_code}{why}", said)


async def _clear(machine: Machine, path: str, user: str) -> None:
    """Remove what lies at the reward's path before the verifier runs. `OSError`, `ValueError` where that fails."""
    if path.startswith("/"):
        script = 'rm -rf "$1" && mkdir -p "$(dirname "$1")"'
        done = await machine.exec(["sh", "-c", script, "sh", path], key="clear", deadline_s=30.0, user=user)
        if done.exit_code != 0:
            raise OSError(one_line(done.output.decode(errors="replace")))
    else:
        await machine.write(path, b"")


async def _read(machine: Machine, path: str, user: str) -> bytes:
    """The beginning of the reward's file; empty where there is no such file. A path in the work folder is read once the
    machine is frozen, so that nothing rewrites it."""
    if path.startswith("/"):
        result = await machine.exec(["cat", path], key="read", deadline_s=30.0, output_bytes=_REWARD_BYTES, user=user)
        return result.output if result.exit_code == 0 else b""
    try:
        await machine.freeze()
        return await machine.read(path, max_bytes=_REWARD_BYTES)
    except (OSError, ValueError):
        return b""


def _number(text: bytes) -> float | None:
    """Parse a number from 0 to 1; None for anything else.

    >>> _number(b" 0.5\\n"), _number(b"1.01"), _number(b"nan"), _number(b"")
    (0.5, None, None, None)
    """
    try:
        number = float(text.decode("ascii"))
    except (ValueError, UnicodeDecodeError):
        return None
    return number if math.isfinite(number) and 0.0 <= number <= 1.0 else None


# ------------------------------------------------------------------------------------------ modules that the image has
# A new file named as a module that the verifier imports would be found in its place. So a machine of the image is asked
# which modules there are. What the image has under such a name in the working folder is the task's own.


_BYTES = 4 << 20
_LIST = """import json, os, pkgutil, sys
here = os.path.realpath(os.getcwd())
away = [p for p in sys.path if p and not (os.path.realpath(p) + os.sep).startswith(here + os.sep)]
there, own = ({m[1] for m in pkgutil.iter_modules(paths)} for paths in (away, sys.argv[1:]))
print(json.dumps(sorted(there - own)))"""
_LEFT_OUT = sys.stdlib_module_names | {"test", "tests"}  # known without asking; anybody's own


async def installed(runtime: Runtime, image: Image | None, folders: Collection[str], python: str) -> frozenset[str]:
    """Names of modules that new files in these folders could hide. None where there is no Python to import any.
    Raises `MachineError`."""
    [machine] = await runtime.fork(await runtime.prepare({}, image=image), 1)
    try:
        argv = [python, "-c", _LIST, *sorted(folders)]
        listed = await machine.exec(argv, key="installed", deadline_s=60.0, output_bytes=_BYTES)
    finally:
        await machine.close()
    if listed.timed_out:
        raise MachineError("the modules of a task's machine were not listed", "not within 60 s", hint="grade again")
    try:
        return frozenset(json.loads(listed.output)) - _LEFT_OUT if listed.exit_code == 0 else frozenset()
    except (ValueError, TypeError):
        return frozenset()  # a Python that says something else beside

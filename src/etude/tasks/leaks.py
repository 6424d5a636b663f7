"""Find leaked answers: reference solutions that an agent can read in the task's files, in a library or in git objects.

The scan compares hashes, so the answer never enters a machine. It hashes every run of three lines of the reference that
is not in the task's files, ignoring spaces. Since short idioms recur, a place counts as a leak if it has at least half
of these hashes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from etude.errors import TaskError
from etude.records.image import Image
from etude.records.task import Answer, Task
from etude.seams import Runtime
from etude.tasks.guest import program
from etude.tasks.guest.scan import pieces
from etude.tasks.verdicts import unmodified

LINES, CHARS = 3, 60
MIN_SHARE = 0.5
SCAN_DEADLINE_S = 300.0
_OUTPUT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Leak:
    """A place that contains at least half of a reference solution.

    `place` is a path, "the instruction" or "git object ID"; `share` is the fraction of the reference found there."""

    place: str  # "pkg/old.py", "the instruction", "/usr/lib/python3/x.py", "git object 3f.."
    share: float  # of the hashed pieces


def answer_pieces(task: Task, answer: Answer) -> frozenset[str]:
    """Return the hashed pieces of a reference solution, without those in the task's version of the same file.

    A piece is a run of `LINES` lines with at least `CHARS` characters. It is returned as "length hash": its number of
    characters, and 16 hex digits of its SHA-256."""
    before = unmodified(task)
    own: set[str] = set()
    for path, text in answer.reference.items():
        own |= set(pieces(text, LINES, CHARS)) - set(pieces(before.get(path, ""), LINES, CHARS))
    return frozenset(own)


def leaks_in_task(task: Task, answer: Answer) -> list[Leak]:
    """Return the places in a task's files and instruction that contain its solution, largest share first."""
    places = {**task.files, "the instruction": task.instruction}
    wanted = answer_pieces(task, answer)
    return _leaks(wanted, {place: set(pieces(text, LINES, CHARS)) for place, text in places.items()}) if wanted else []


async def leaks_in_machines(runtime: Runtime, pairs: Iterable[tuple[Task, Answer]]) -> dict[str, list[Leak]]:
    """Find reference solutions in the images of the tasks' machines, scanning each image once.

    Returns the leaks by task id, only for tasks that have some. Raises `TaskError` if a scan fails."""
    by_image: dict[str, tuple[Image | None, dict[str, frozenset[str]]]] = {}
    for task, answer in pairs:
        _, wanted = by_image.setdefault(task.image.digest if task.image else "", (task.image, {}))
        wanted[task.task_id] = answer_pieces(task, answer)
    found: dict[str, list[Leak]] = {}
    for image, wanted in by_image.values():
        every = frozenset().union(*wanted.values())
        places = await _scan(runtime, image, every) if every else {}
        for task_id, own in wanted.items():
            leaks = _leaks(own, places) if own else []
            if leaks:
                found[task_id] = leaks
    return found


def _leaks(wanted: frozenset[str], places: Mapping[str, set[str]]) -> list[Leak]:
    shares = ((place, len(wanted & found) / len(wanted)) for place, found in places.items())
    leaks = [Leak(place, round(share, 3)) for place, share in shares if share >= MIN_SHARE]
    return sorted(leaks, key=lambda leak: (-leak.share, leak.place))


async def _scan(runtime: Runtime, image: Image | None, wanted: frozenset[str]) -> dict[str, set[str]]:
    nonce = secrets.token_hex(16)
    request = {"nonce": nonce, "pieces": sorted(wanted), "lines": LINES, "chars": CHARS}
    snapshot = await (runtime.prepare({}) if image is None else runtime.prepare({}, image=image))
    [machine] = await runtime.fork(snapshot, 1)
    try:
        result = await machine.exec(
            ["python3", "-c", program("scan")],
            key="scan",
            deadline_s=SCAN_DEADLINE_S,
            stdin=json.dumps(request).encode(),
            output_bytes=_OUTPUT_BYTES,
        )
    finally:
        await machine.close()
    for line in result.output.split(b"\n"):
        if line.startswith(f"{nonce} ".encode()) and (places := _places(line.partition(b" ")[2])) is not None:
            return places
    output = result.output[-200:].decode(errors="replace").strip()
    raise TaskError(
        "the scan for leaked answers failed",
        f"exit code {result.exit_code}{', deadline reached' if result.timed_out else ''}: {output}",
        hint="the image needs python3; without --leaks there is no scan",
    )


def _places(line: bytes) -> dict[str, set[str]] | None:
    """Parse the result of a scan; None if it is invalid. The python3 of an image is untrusted."""
    try:
        found = json.loads(line)
        if isinstance(found, dict) and all(
            isinstance(pieces, list) and all(isinstance(piece, str) for piece in pieces) for pieces in found.values()
        ):
            return {place.encode(errors="replace").decode(): set(pieces) for place, pieces in found.items()}
    except (ValueError, RecursionError):
        pass
    return None

"""Does the answer lie where the agent can read it: in the task's other files, in a library, among Git's objects?

A hash scan: the reference's own lines are cut into runs of three, spaces apart, and looked for by their hashes, so the
answer itself never enters a machine. Idioms of three lines recur; a place counts from half of a solution's runs on.
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
from etude.tasks.verdicts import untouched

LINES, CHARS = 3, 60
MIN_SHARE = 0.5
SCAN_DEADLINE_S = 300.0
_OUTPUT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Leak:
    """A place in which at least half of a reference solution can be read."""

    place: str  # "pkg/old.py", "the instruction", "/usr/lib/python3/x.py", "git object 3f.."
    share: float  # of the solution's pieces


def answer_pieces(task: Task, answer: Answer) -> frozenset[str]:
    """Pieces, by length and hash, of what the reference has and the same file of the untouched task has not."""
    before = untouched(task)
    own: set[str] = set()
    for path, text in answer.reference.items():
        own |= set(pieces(text, LINES, CHARS)) - set(pieces(before.get(path, ""), LINES, CHARS))
    return frozenset(own)


def leaks_in_task(task: Task, answer: Answer) -> list[Leak]:
    """Leaks among what every agent is given: the task's files and its instruction."""
    places = {**task.files, "the instruction": task.instruction}
    wanted = answer_pieces(task, answer)
    return _leaks(wanted, {place: set(pieces(text, LINES, CHARS)) for place, text in places.items()}) if wanted else []


async def leaks_in_machines(runtime: Runtime, pairs: Iterable[tuple[Task, Answer]]) -> dict[str, list[Leak]]:
    """Leaks in what machines come with, by task id: one scan for each image. `TaskError` where a scan fails."""
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
    said = result.output[-200:].decode(errors="replace").strip()
    raise TaskError(
        "the scan for leaked answers did not report",
        f"exit code {result.exit_code}{', past its deadline' if result.timed_out else ''}: {said}",
        hint="the image needs python3; leave the scan out with --no-leaks",
    )


def _places(said: bytes) -> dict[str, set[str]] | None:
    """What a scan found; None where it is no such thing: an image's python3 may say anything."""
    try:
        found = json.loads(said)
        if isinstance(found, dict) and all(
            isinstance(pieces, list) and all(isinstance(piece, str) for piece in pieces) for pieces in found.values()
        ):
            return {place.encode(errors="replace").decode(): set(pieces) for place, pieces in found.items()}
    except (ValueError, RecursionError):
        pass
    return None

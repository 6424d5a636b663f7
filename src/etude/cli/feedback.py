"""The commands ``etude feedback import``, ``show`` and ``erase``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from etude.cli.locations import console
from etude.errors import Exit, InputError, SignalRefused
from etude.privacy import PrivacyFolder, Subject
from etude.signals import FeedbackFile
from etude.signals.file import Sent
from etude.signals.messages import ImportedSignal, parse_line

_MAX_LINE_BYTES = 65_536
_BATCH = 1000
_TOLD = 20  # refused lines that are printed


def import_signals(args: argparse.Namespace) -> int:
    """Store the signals in a file of JSON lines. Lines that are refused are told, and the others are stored.

    Importing a file again changes nothing. Returns 0, or 1 if a line was refused."""
    done, refused = Counter[str](), 0
    with opened_feedback(args.file, args.capture, keep_days=args.days, cap=args.cap) as file:
        for batch in _batches(args.signals):
            parsed = list[tuple[int, ImportedSignal]]()
            errors = dict[int, SignalRefused]()
            for number, line in batch:
                try:
                    parsed.append((number, parse_line(line)))
                except SignalRefused as error:
                    errors[number] = error
            results = file.add([Sent(one.organisation, one.user, [one]) for _, one in parsed])
            for (number, one), result in zip(parsed, results, strict=True):
                if isinstance(result, SignalRefused):
                    errors[number] = _of_line(result, one)
                else:
                    done.update(receipt.status.value for receipt in result)
            for number, refusal in sorted(errors.items()):
                if refused < _TOLD:
                    print(f"line {number} of {args.signals} is refused: {refusal}", file=sys.stderr)
                refused += 1
    counts = ", ".join(f"{number} {name}" for name, number in sorted(done.items()))
    print(f"{done.total()} signals: {counts or 'none'}; {refused} lines refused")
    return Exit.FAILED if refused else Exit.DONE


def _of_line(refusal: SignalRefused, signal: ImportedSignal) -> SignalRefused:
    """Return a refusal as one about a line of a file, which has fields in place of the key and header of a request."""
    if refusal.reason != "unknown":
        return refusal
    what = f"no answer {signal.response_id[:100]!r} was given to this organisation and user"
    facts = f"the line's organisation is {signal.organisation[:100]!r} and its user {signal.user[:100]!r}"
    hint = 'set the fields organisation (name of the API key; by default "local") and user (by default "") of the line'
    hint += " to those of the answer's request, and response_id to its unchanged id"
    return SignalRefused(what, facts, hint=hint, reason=refusal.reason, param=refusal.param)


def _batches(path: Path) -> Iterator[Sequence[tuple[int, bytes]]]:
    """Yield the lines of a file with their numbers, in batches; empty lines are left out.

    A line that is too long is cut, so that it is refused. Raises `InputError` for a file that cannot be read."""
    batch, number, in_long = list[tuple[int, bytes]](), 0, False
    try:
        with path.open("rb") as file:
            while line := file.readline(_MAX_LINE_BYTES):
                begins, in_long = not in_long, not line.endswith(b"\n")
                number += begins
                if begins and line.strip():
                    batch.append((number, line))
                if len(batch) >= _BATCH:
                    yield batch
                    batch = []
    except OSError as error:
        raise InputError(f"{path} cannot be read", str(error.strerror), hint="give a file of JSON lines") from None
    if batch:
        yield batch


def show(args: argparse.Namespace) -> int:
    """Print the numbers of signals by name and version of the weights. Returns 0."""
    with opened_feedback(args.file, args.capture) as file:
        found = file.summaries()
    if args.json:
        print(json.dumps([one._asdict() for one in found]))
        return Exit.DONE
    table = Table("signal", "version", "signals", "answers", "subjects", "mean over subjects")
    for one in found:
        numbers = (str(one.signals), str(one.answers), str(one.subjects), f"{one.mean:.3f}")
        table.add_row(one.name, one.version or "unknown", *numbers)
    console().print(table)
    return Exit.DONE


def erase(args: argparse.Namespace) -> int:
    """Delete the signals of a subject, and print how many they were. Returns 0."""
    subject = Subject.parse(args.subject)
    with opened_feedback(args.file, args.capture) as file:
        print(f"erased {subject}: {file.erase(subject)} signals deleted")
    return Exit.DONE


@contextlib.contextmanager
def opened_feedback(
    path: Path, capture: Path | None, *, keep_days: float = 90.0, cap: int = 1000, create: bool = False
) -> Iterator[FeedbackFile]:
    """Open a file of signals (feedback), and the privacy folder that has the answers which the signals are about.

    - `capture`: the privacy folder; None: the one with which the file was last used.
    - `create`: whether to create a file that does not exist; this needs `capture`.

    Raises `InputError`, `PrivacyError`."""
    folder = capture or FeedbackFile.privacy_of(path)
    if folder is not None and not (folder / "consent.sqlite").is_file():
        hint = "give the folder of etude serve --capture: --capture DIR"
        raise InputError(f"{folder} is not a folder of consent", hint=hint)
    with contextlib.ExitStack() as stack:
        privacy = None if folder is None else stack.enter_context(PrivacyFolder(folder))
        yield stack.enter_context(FeedbackFile(path, privacy=privacy, keep_days=keep_days, cap=cap, create=create))

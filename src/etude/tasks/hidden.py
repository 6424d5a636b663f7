"""Read and write the hidden answer of a task folder: ``answer/`` (docs/formats/tasks.md).

One file in it determines how the task is graded, and so how trustworthy its reward is. The answer is read only when a
grader needs it, never together with the task.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from etude.errors import TaskError, nearest
from etude.records.exports import is_plain
from etude.records.task import Answer, Case, HiddenTests, Trust, Verifier
from etude.tasks.text_files import read_text, read_tree, refuse_link, write_tree

MAX_NAMES = 10_000

R = TypeVar("R", HiddenTests, Verifier)


class Kind(enum.StrEnum):
    """How a task is graded. The value is the name of the file in ``answer/`` that defines the grading."""

    CASES = "cases.json"
    CHECK = "check.py"
    TESTS = "tests.json"
    VERIFIER = "verifier.json"

    @property
    def trust(self) -> Trust:
        """How far a grade can be trusted: DATA if the host compares plain data, CODE if test code that runs with the
        agent's code computes it."""
        return Trust.DATA if self is Kind.CASES else Trust.CODE


_FOLDERS = {Kind.TESTS: "hidden", Kind.VERIFIER: "verifier"}
"""The folder with the `files` of a JSON record."""


def kind_of(folder: Path) -> Kind:
    """Return how the task in a folder is graded. Raises `TaskError` if it has no hidden answer or several."""
    refuse_link(folder / "answer")
    found = [kind for kind in Kind if (folder / "answer" / kind).is_file()]
    if len(found) != 1:
        facts = f"it has {' and '.join(found)}" if found else "it has none of them"
        names = f"{', '.join(f'answer/{kind}' for kind in list(Kind)[:-1])} and answer/{list(Kind)[-1]}"
        raise TaskError(
            f"{folder} needs exactly one of {names}", facts, hint="write one of them, or delete all but one"
        )
    return found[0]


def read_answer(folder: Path, entry_point: str) -> Answer:
    """Read the hidden answer of a task folder. Raises `TaskError` if it is invalid.

    `entry_point` is the function to grade, "module:function"; only answers of the kind `CHECK` use it."""
    hidden, kind = folder / "answer", kind_of(folder)
    command = hidden / "reference.json"
    argv = tuple(_decoded(command, _Command).argv) if command.is_file() else ()
    by_command_alone = argv and not (hidden / "reference").exists()
    reference = {} if by_command_alone else read_tree(hidden / "reference", hidden)
    match kind:
        case Kind.CASES:
            return Answer(reference=reference, reference_argv=argv, cases=_cases(hidden / kind))
        case Kind.CHECK:
            text = read_text(hidden / kind)
            return Answer(reference=reference, reference_argv=argv, test_code=text, entry_point=entry_point)
        case Kind.TESTS:
            return Answer(reference=reference, reference_argv=argv, tests=_tests(hidden))
        case Kind.VERIFIER:
            return Answer(reference=reference, reference_argv=argv, verifier=_verifier(hidden))


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    argv: list[str]


def _tests(hidden: Path) -> HiddenTests:
    tests = _record(hidden, Kind.TESTS, HiddenTests)
    if not tests.names or len(tests.names) > MAX_NAMES or len(set(tests.names)) != len(tests.names):
        facts = f"{len(tests.names)} names, {len(set(tests.names))} of them different"
        raise TaskError(f"{hidden / Kind.TESTS} has missing or repeated test names", facts, hint="list each test once")
    if strange := [root for root in tests.roots if not is_plain(root)]:
        raise TaskError(
            f"{hidden / Kind.TESTS}: root {strange[0]!r} is invalid",
            hint='roots are folders of the task, such as "src"',
        )
    return tests


def _verifier(hidden: Path) -> Verifier:
    verifier = _record(hidden, Kind.VERIFIER, Verifier)
    if not verifier.argv:
        raise TaskError(
            f"{hidden / Kind.VERIFIER}: argv is empty",
            hint="give the command that grades a solution, as a list of words",
        )
    return verifier


def _record(hidden: Path, kind: Kind, of: type[R]) -> R:
    path, folder = hidden / kind, _FOLDERS[kind]
    files = read_tree(hidden / folder, hidden, may_be_empty=True) if (hidden / folder).exists() else {}
    try:
        plain = msgspec.json.decode(read_text(path), type=dict[str, Any])
    except ValueError as error:
        raise TaskError(f"{path} is not a JSON object", str(error), hint="see docs/formats/tasks.md") from None
    known = [name for name in of.__struct_fields__ if name != "files"]
    for key in plain:
        if key not in known:
            raise TaskError(f"{path}: unknown key {key!r}", hint=nearest(key, known))
    try:
        record = msgspec.convert({**plain, "files": files}, of)
    except ValueError as error:
        raise TaskError(f"{path} is invalid", str(error), hint="see docs/formats/tasks.md") from None
    if not 0 < record.deadline_s <= 86_400:
        raise TaskError(
            f"{path}: deadline_s = {record.deadline_s} is invalid", hint="give more than 0 and at most 86400 seconds"
        )
    return record


def _decoded(path: Path, kind: type[_Command]) -> _Command:
    try:
        return msgspec.json.decode(read_text(path), type=kind)
    except ValueError as error:
        raise TaskError(f"{path} is not a command", str(error), hint='write {"argv": ["sh", "solve.sh"]}') from None


def _cases(path: Path) -> tuple[Case, ...]:
    try:
        cases = msgspec.json.decode(read_text(path), type=tuple[dict[str, msgspec.Raw], ...])
        made = tuple(
            Case(
                module=msgspec.json.decode(c["module"], type=str),
                function=msgspec.json.decode(c["function"], type=str),
                args=msgspec.json.decode(c["args"], type=list),
                expected=msgspec.json.decode(c["expected"]),
            )
            for c in cases
        )
    except (ValueError, KeyError) as error:
        facts = f"a case has no key {error}" if isinstance(error, KeyError) else str(error)
        hint = 'write a list of {"module": ..., "function": ..., "args": [...], "expected": ...}'
        raise TaskError(f"{path} is not a list of cases", facts, hint=hint) from None
    if not made:
        raise TaskError(f"{path} has no case", hint="add at least one hidden case")
    return made


def write_answer(folder: Path, answer: Answer) -> None:
    """Write an answer to ``answer/`` of a task folder, in the format of `read_answer`.

    Raises `ValueError` unless the answer has hidden tests or a verifier."""
    hidden = folder / "answer"
    kind, record = (Kind.TESTS, answer.tests) if answer.tests is not None else (Kind.VERIFIER, answer.verifier)
    if record is None:
        raise ValueError("only answers with hidden tests or a verifier can be written")
    plain: Mapping[str, Any] = msgspec.to_builtins(record)
    folder.mkdir(parents=True, exist_ok=True)
    refuse_link(hidden)
    if answer.reference:
        write_tree(hidden / "reference", answer.reference)
    if answer.reference_argv:
        write_tree(hidden, {"reference.json": msgspec.json.encode({"argv": answer.reference_argv}).decode()})
    if record.files:
        write_tree(hidden / _FOLDERS[kind], record.files)
    fields = {name: value for name, value in plain.items() if name != "files"}
    write_tree(hidden, {kind: msgspec.json.format(msgspec.json.encode(fields)).decode() + "\n"})

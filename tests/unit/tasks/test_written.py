"""Generated tasks of text files: references pass, near misses fail, and splits share nothing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from etude.errors import TaskError
from etude.records.interruption import interruption_of
from etude.records.task import Answer, Split
from etude.tasks import open_source
from etude.tasks.written import FollowingSource, InterruptionSource

SOURCES = (FollowingSource(0), InterruptionSource(0))


def passes(answer: Answer, files: dict[str, str], folder: Path) -> bool:
    """Run the verifier of an answer over files, as graders do in a fresh machine."""
    assert answer.verifier is not None
    folder.mkdir(exist_ok=True)
    for name in os.listdir(folder):
        (folder / name).unlink()
    for name, text in {**files, **answer.verifier.files}.items():
        (folder / name).write_text(text)
    with contextlib.chdir(folder):
        try:
            exec(answer.verifier.files["verify.py"], {})  # as in a process of its own, which would take a second
        except SystemExit:
            return False
    return True


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_the_reference_passes_and_nothing_does_not(
    source: FollowingSource | InterruptionSource, tmp_path: Path
) -> None:
    for index in range(5):
        task = source.task(Split.HELDOUT, index)
        answer = source.answer(task)
        assert passes(answer, answer.reference, tmp_path / "m")
        assert not passes(answer, {}, tmp_path / "m")
        assert task == source.task(Split.HELDOUT, index)


def test_a_text_that_breaks_one_rule_fails(tmp_path: Path) -> None:
    source = FollowingSource(1)
    for index in range(4):
        answer = source.answer(source.task(Split.VALIDATION, index))
        text = answer.reference["text.txt"]
        lines = text.splitlines()
        assert not passes(answer, {"text.txt": "\n".join([*lines, lines[-1]])}, tmp_path / "m")
        assert not passes(answer, {"text.txt": text.replace(lines[0], lines[0] + " zzz", 1)}, tmp_path / "m")


def test_who_ignores_the_interruption_fails(tmp_path: Path) -> None:
    source = InterruptionSource(0)
    for index in range(12):
        task = source.task(Split.TRAIN, index)
        first, after, later = interruption_of(task.instruction)
        assert after == 1
        assert first
        assert later
        asked = {"a.txt": task.files["one.txt"], "b.txt": task.files["two.txt"]}
        assert not passes(source.answer(task), asked, tmp_path / "m")


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_no_two_splits_share_a_problem(source: FollowingSource | InterruptionSource) -> None:
    keys = [{source.task(split, i).problem for i in range(60)} for split in (Split.TRAIN, Split.HELDOUT)]
    assert not keys[0] & keys[1]
    assert source.size(Split.TRANSFER) == 0
    with pytest.raises(TaskError, match="no task 0 in transfer"):
        source.task(Split.TRANSFER, 0)
    with pytest.raises(TaskError, match="is not from"):
        source.answer(type(source)(5).task(Split.TRAIN, 0))
    assert open_source(source.name, seed=0).task(Split.TRAIN, 3) == source.task(Split.TRAIN, 3)

"""Sessions of users become tasks: proven in machines, encrypted, and gone with their subject."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.here import opened
from tests.served_answers import served_answer
from tests.unit.tasks.repositories import CALC, DISCOUNT, TEST_BOTH

from etude import cli
from etude.environments import MachineGrader, NamespaceRuntime, simulate_exports
from etude.errors import ConfigError, NoSource, TaskError, TaskWithdrawn
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.records.task import Split, Task
from etude.seams import WithdrawingSource
from etude.tasks import check, open_source
from etude.tasks.canaries import WithCanaries
from etude.tasks.sessions import ImportedSession, SessionSource, SessionStore, import_sessions, read_session
from etude.tasks.sessions.making import instruction_of

ACME, BOB, EVE = Subject.of("acme"), Subject.of("acme", "bob"), Subject.of("acme", "eve")
ASKED = "Prices must be reducible by percent."
BEFORE = {"shop/__init__.py": "", "shop/calc.py": CALC, "tests/__init__.py": ""}
AFTER = {**BEFORE, "shop/calc.py": CALC + DISCOUNT, "tests/test_calc.py": TEST_BOTH}
CHECK = 'check = ["sh", "check.sh"]\n'
SHELL = {"check.sh": 'test "$(cat note.txt)" = "paid"\n'}


def capture(privacy: Path, answers: Mapping[str, str]) -> None:
    """Capture an answer for each user, by the id of the response. Each asks for something else."""
    with PrivacyFolder(privacy) as folder:
        folder.consent.set(ACME, Level.TRAIN)
    writer = CaptureWriter(privacy)
    for response, user in answers.items():
        words = f"{ASKED} ({user})"
        messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": words}]
        writer.offer(served_answer(user, response_id=response, messages=messages, at=time.time()))
    assert writer.close(60)


def session(
    path: Path,
    response: str,
    before: Mapping[str, str] = BEFORE,
    after: Mapping[str, str] = AFTER,
    hidden: Mapping[str, str] | None = None,
    toml: str = "",
) -> Path:
    """Write a session as a product does. Returns its folder."""
    trees = {"before": before, "after": after} | ({} if hidden is None else {"check": hidden})
    for tree, files in trees.items():
        (path / tree).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / tree / name).parent.mkdir(parents=True, exist_ok=True)
            (path / tree / name).write_text(text)
    (path / "session.toml").write_text(f'response = "{response}"\n{toml}')
    return path


def note(path: Path, response: str, kept: str) -> Path:
    """A session about a note, which the product checks with a shell command."""
    return session(path, response, {"note.txt": "open"}, {"note.txt": kept}, SHELL, CHECK)


def imported(privacy: Path, *folders: Path) -> list[ImportedSession]:
    async def main() -> list[ImportedSession]:
        runtime = opened("namespace", lambda: NamespaceRuntime(spare=0))
        try:
            with SessionStore(privacy) as store:
                grader = MachineGrader(runtime, repeats=1, canaries=1)
                return await import_sessions(folders, store, runtime, grader, partial(simulate_exports, runtime))
        finally:
            await runtime.close()

    return asyncio.run(main())


def tasks_of(source: SessionSource) -> list[Task]:
    return [source.task(split, index) for split in Split for index in range(source.size(split) or 0)]


def outcomes(results: Sequence[ImportedSession]) -> list[str]:
    return [one.outcome for one in results]


def test_a_session_with_tests_and_one_with_a_check_are_tasks_that_machines_prove(tmp_path: Path) -> None:
    privacy = tmp_path / "privacy"
    capture(privacy, {"a" * 32: "bob", "b" * 32: "eve"})
    chat = f"chatcmpl-{'b' * 32}"  # as a client gets it
    results = imported(privacy, session(tmp_path / "discount", "a" * 32), note(tmp_path / "note", chat, "paid"))
    assert outcomes(results) == ["task", "task"]
    source = open_source(f"sessions:{privacy}", 0)
    assert isinstance(source, SessionSource)
    assert isinstance(source, WithdrawingSource)
    found = {task.task_id: task for task in tasks_of(source)}
    discount, paid = (found[one.task_id] for one in results)
    assert (discount.instruction, paid.instruction) == (f"{ASKED} (bob)", f"{ASKED} (eve)")
    assert "tests/test_calc.py" not in discount.files
    assert source.answer(discount).reference == {"shop/calc.py": CALC + DISCOUNT}
    assert source.answer(paid).verifier is not None
    assert discount.problem != paid.problem  # sessions of one subject are one problem, in one split

    async def proven() -> int:
        runtime = opened("namespace", lambda: NamespaceRuntime(spare=0))
        try:
            grader = MachineGrader(runtime, repeats=1, canaries=1)
            splits = [split for split in Split if source.size(split)]
            export = partial(simulate_exports, runtime)
            return sum([(await check(source, grader, split, export=export)).num_proven for split in splits])
        finally:
            await runtime.close()

    assert asyncio.run(proven()) == 2


def test_a_session_that_does_not_prove_itself_is_quarantined_with_its_reason(tmp_path: Path) -> None:
    privacy = tmp_path / "privacy"
    capture(privacy, {f"{n:032x}": "bob" for n in range(6)})
    results = imported(
        privacy,
        note(tmp_path / "wrong", f"{0:032x}", "unpaid"),
        session(tmp_path / "same", f"{1:032x}", BEFORE, BEFORE),
        session(tmp_path / "untested", f"{2:032x}", {"a.py": "x = 1\n"}, {"a.py": "x = 2\n"}),
        session(tmp_path / "passes", f"{3:032x}", {"note.txt": "paid"}, {"note.txt": "paid", "b": "c"}, SHELL, CHECK),
        session(tmp_path / "text", f"{4:032x}", {**AFTER, "a.md": "x"}, {**AFTER, "a.md": "y"}),
        session(tmp_path / "loose", f"{5:032x}", {**AFTER, "tests/test_calc.py": ""}, {**AFTER, "x.py": "y = 1\n"}),
    )
    assert outcomes(results) == ["quarantined"] * 6
    reasons = [one.reason for one in results]
    assert reasons[0].startswith("not valid: reference solution scores 0")
    assert reasons[1] == "the user kept nothing: before/ and after/ are equal"
    assert reasons[2] == "nothing checks it: after/ has no test files, and session.toml no check"
    assert reasons[3].startswith("not valid: unmodified task scores 1")
    assert reasons[4].startswith("it changes no Python outside tests")
    assert reasons[5] == "its tests pass without it"
    with pytest.raises(NoSource, match="has no session task that may be trained on"):
        SessionSource(privacy)
    with SessionStore(privacy) as store:
        stored = [store.read(record) for record in store.records()]
    assert {one.reason for one in stored if one is not None} == set(reasons)  # encrypted, and not proven again


def test_only_sessions_of_captured_answers_whose_subjects_allow_training_are_stored(tmp_path: Path) -> None:
    privacy = tmp_path / "privacy"
    capture(privacy, {"a" * 32: "bob", "b" * 32: "eve"})
    with PrivacyFolder(privacy) as folder:
        folder.consent.set(EVE, Level.CAPTURE)
    results = imported(
        privacy,
        note(tmp_path / "unknown", "f" * 32, "paid"),
        note(tmp_path / "withdrawn", "b" * 32, "paid"),
        tmp_path / "nothing",
    )
    assert outcomes(results) == ["refused"] * 3
    assert "is not captured" in results[0].reason
    assert "does not allow training" in results[1].reason
    assert "no session at" in results[2].reason
    with SessionStore(privacy) as store:
        assert store.records() == []


def test_consent_counts_at_every_call_and_an_erasure_leaves_no_readable_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    privacy = tmp_path / "privacy"
    capture(privacy, {"a" * 32: "bob", "b" * 32: "eve"})
    bob, eve = imported(privacy, note(tmp_path / "bob", "a" * 32, "paid"), note(tmp_path / "eve", "b" * 32, "paid"))
    source = SessionSource(privacy)
    of = {task.task_id: task for task in tasks_of(source)}
    assert source.withdrawn([bob.task_id, eve.task_id, "unknown"]) == {"unknown"}
    with PrivacyFolder(privacy) as folder:
        folder.consent.set(EVE, Level.CAPTURE)
    assert source.withdrawn([bob.task_id, eve.task_id]) == {eve.task_id}
    with pytest.raises(TaskWithdrawn, match="has no answer any more"):
        source.answer(of[eve.task_id])
    assert {task.task_id for task in tasks_of(SessionSource(privacy))} == {bob.task_id}
    assert cli.main(["privacy", "erase", "acme/bob", "--folder", str(privacy)]) == 0
    told = capsys.readouterr().out
    assert "sessions.sqlite: 1 sessions deleted" in told
    assert f"tasks that were made from its sessions: {bob.task_id}" in told
    left = b"".join(path.read_bytes() for path in privacy.rglob("*") if path.is_file())
    assert ASKED.encode() not in left
    assert b"note.txt" not in left
    with pytest.raises(TaskWithdrawn, match="may be trained on any more"):
        source.task(of[bob.task_id].split, 0)


def test_in_the_place_of_a_withdrawn_task_comes_the_next_one_of_its_split(tmp_path: Path) -> None:
    privacy = tmp_path / "privacy"
    users = [f"user{n}" for n in range(8)]
    capture(privacy, {f"{n:032x}": user for n, user in enumerate(users)})
    imported(privacy, *(note(tmp_path / user, f"{n:032x}", "paid") for n, user in enumerate(users)))
    source = SessionSource(privacy)
    size = source.size(Split.TRAIN) or 0
    assert size >= 2, "8 subjects have at least two in training"
    first, second = source.task(Split.TRAIN, 0), source.task(Split.TRAIN, 1)
    with PrivacyFolder(privacy) as folder:
        [gone] = [u for u in users if folder.keys.names(Subject.of("acme", u)).subject == first.problem]
        folder.consent.set(Subject.of("acme", gone), Level.OFF)
    assert source.task(Split.TRAIN, 0) == msgspec.structs.replace(second, index=0)
    assert source.size(Split.TRAIN) == size
    with pytest.raises(TaskError, match=f"no task {size} in train"):
        source.task(Split.TRAIN, size)


def test_a_session_that_comes_again_is_not_proven_again_and_one_that_has_changed_takes_its_place(
    tmp_path: Path,
) -> None:
    privacy = tmp_path / "privacy"
    capture(privacy, {"a" * 32: "bob"})
    [first] = imported(privacy, note(tmp_path / "note", "a" * 32, "paid"))

    async def again(*folders: Path) -> list[ImportedSession]:
        with SessionStore(privacy) as store:
            return await import_sessions(folders, store, None, None, None)  # type: ignore[arg-type]

    assert asyncio.run(again(tmp_path / "note")) == [first]
    shutil.rmtree(tmp_path / "note")
    [second] = imported(privacy, note(tmp_path / "note", "a" * 32, "unpaid"))
    assert second.outcome == "quarantined"
    with SessionStore(privacy) as store:
        assert len(store.records()) == 1


def test_folders_that_are_no_session_are_refused_by_what_is_wrong(tmp_path: Path) -> None:
    good = note(tmp_path / "note", "a" * 32, "paid")
    assert read_session(good).changed == ("note.txt",)
    (good / "session.toml").write_text('respnse = "a"\n')
    with pytest.raises(TaskError, match=r"session\.toml is invalid[\s\S]*did you mean 'response'"):
        read_session(good)
    (good / "session.toml").write_text('response = ""\n')
    with pytest.raises(TaskError, match="response is missing"):
        read_session(good)
    (good / "session.toml").write_text('response = "a"\n')
    with pytest.raises(TaskError, match="has check/ but no command"):
        read_session(good)
    (good / "session.toml").write_text('response = "a"\ncheck = ["sh"]\n')
    (good / "after" / "link").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="is a link"):
        read_session(good)
    shutil.rmtree(good / "after")
    with pytest.raises(TaskError, match="has no after/"):
        read_session(good)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ("a prompt \n", "a prompt"),
        ([1, 2, 3], ""),
        (None, ""),
        ([{"role": "user", "content": [{"type": "text"}]}, {"role": "user", "content": "b"}, 7], "b"),
    ],
)
def test_the_instruction_is_what_the_user_wrote(messages: object, text: str) -> None:
    assert instruction_of(messages) == text


def test_session_tasks_cannot_be_canaries(tmp_path: Path) -> None:
    capture(tmp_path, {"a" * 32: "bob"})
    imported(tmp_path, note(tmp_path / "note", "a" * 32, "paid"))
    with pytest.raises(ConfigError, match=r"tasks of sessions cannot be canaries[\s\S]*hint: set tasks.canaries = 0"):
        WithCanaries(SessionSource(tmp_path), 0.1, 0)


def test_the_command_imports_lists_and_names_what_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    privacy = tmp_path / "privacy"
    capture(privacy, {"a" * 32: "bob"})
    assert imported(privacy) == []  # skips the test where there are no machines
    good, bad = note(tmp_path / "good", "a" * 32, "paid"), note(tmp_path / "bad", "f" * 32, "paid")
    assert cli.main(["tasks", "sessions", str(good), str(bad), "--privacy", str(privacy)]) == 1
    told = capsys.readouterr().out
    assert "good: task " in told
    assert "bad: refused the response" in told
    assert "1 task, 0 quarantined, 1 refused" in told
    assert cli.main(["tasks", "sessions", "--privacy", str(privacy)]) == 0
    assert " task " in capsys.readouterr().out
    assert cli.main(["tasks", "sessions", "--privacy", str(tmp_path / "none")]) == 2
    assert "is not a folder of consent" in capsys.readouterr().err

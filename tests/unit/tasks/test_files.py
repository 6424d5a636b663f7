"""Tasks from folders: what is read, what is refused and how it is said."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.errors import TaskError
from etude.records.image import Image
from etude.records.task import Answer, HiddenTests, Runner, Split, Task, Trust, Verifier
from etude.tasks import DirectorySource, check
from etude.tasks.files import write_task
from etude.tasks.splits import split_of
from etude.testing import FakeGrader

TOML = 'instruction = "write double"\nexports = ["own.py"]\n'
CASES = [{"module": "own", "function": "double", "args": [3], "expected": 6}]


def _task(root: Path, name: str = "double", toml: str = TOML) -> Path:
    folder = root / name
    (folder / "files" / "docs").mkdir(parents=True)
    (folder / "answer" / "reference").mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "files" / "own.py").write_text("def double(n):\n    pass\n")
    (folder / "files" / "docs" / "note.txt").write_text(f"{name}\n")
    (folder / "answer" / "reference" / "own.py").write_text("def double(n):\n    return 2 * n\n")
    (folder / "answer" / "cases.json").write_text(json.dumps(CASES))
    return folder


def test_a_folder_becomes_a_task_whose_split_follows_from_its_content(tmp_path: Path) -> None:
    for n in range(30):
        _task(tmp_path, f"t{n:02}")
    source = DirectorySource(tmp_path)
    sizes = {split: source.size(split) or 0 for split in Split}
    assert sum(sizes.values()) == 30
    assert sizes[Split.TRAIN] > 15
    first = source.task(Split.TRAIN, 0)
    assert set(first.files) == {"own.py", "docs/note.txt"}
    assert first.trust is Trust.DATA
    again = DirectorySource(tmp_path)
    assert [again.task(Split.TRAIN, i) for i in range(sizes[Split.TRAIN])] == [
        source.task(Split.TRAIN, i) for i in range(sizes[Split.TRAIN])
    ]


def test_a_check_makes_a_code_graded_task(tmp_path: Path) -> None:
    folder = _task(tmp_path, toml=TOML + 'split = "heldout"\nentry_point = "own:double"\ntrust = "code-graded"\n')
    (folder / "answer" / "cases.json").unlink()
    (folder / "answer" / "check.py").write_text("def check(candidate):\n    assert candidate(4) == 8\n")
    source = DirectorySource(tmp_path)
    assert source.task(Split.HELDOUT, 0).trust is Trust.CODE
    asyncio.run(check(source, FakeGrader(), Split.HELDOUT)).require()


def _edit(path: str, text: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / path).write_bytes(text if isinstance(text, bytes) else text.encode())


def _link(folder: Path) -> None:
    (folder / "files" / "link").symlink_to("/etc/passwd")


def _link_of(path: str) -> Callable[[Path], object]:
    """Move a part of the task out of its folder, and leave a link to it."""

    def damage(folder: Path) -> None:
        elsewhere = folder.parent.parent / f"{folder.parent.name}-elsewhere"
        (folder / path).rename(elsewhere)
        (folder / path).symlink_to(elsewhere)

    return damage


def _pipe(folder: Path) -> None:
    (folder / "files" / "own.py").unlink()
    os.mkfifo(folder / "files" / "own.py")


def _no_files(folder: Path) -> None:
    (folder / "files").rename(folder / "moved")


BAD_FOLDERS: list[tuple[Callable[[Path], object], str]] = [
    (_edit("task.toml", "instruction ="), "is not valid TOML"),
    (_edit("task.toml", b"\xff"), "is not valid TOML"),
    (_edit("task.toml", f"a = {'[' * 5000}"), "is not valid TOML"),
    (_edit("task.toml", f"a = {'9' * 5000}"), "is not valid TOML"),
    (_edit("task.toml", TOML + "familly = 'x'"), "unknown key 'familly'(.|\n)*family"),
    (_edit("task.toml", "exports = ['own.py']"), "'instruction' is missing"),
    (_edit("task.toml", "instruction = 'x'\nexports = []"), "must not be empty"),
    (_edit("task.toml", "instruction = 'x'\nexports = ['../own.py']"), "not a plain path"),
    (_edit("task.toml", "instruction = 'x'\nexports = ['/own.py']"), "not a plain path"),
    (_edit("task.toml", TOML + "split = 'held'"), "'held' is unknown(.|\n)*heldout"),
    (_edit("task.toml", TOML + "trust = 'code-graded'"), "with its answer files it is data-graded"),
    (_edit("answer/check.py", "def check(candidate): pass"), "it has cases.json and check.py"),
    (lambda folder: (folder / "answer" / "cases.json").unlink(), "it has none of them"),
    (lambda folder: (folder / "answer" / "cases.json").rename(folder / "answer" / "check.py"), "entry_point = ''"),
    (_edit("files/own.py", b"\xff\xfe"), "cannot read .*own.py"),
    (_edit("files/own.py", b"x" * (1 << 20 | 1)), "larger than"),
    (_link, "is a link"),
    (_link_of("task.toml"), "is a link"),
    (_link_of("files"), "has no files/"),
    (_link_of("answer"), "is a link"),
    (_pipe, "is not a file"),
    (_no_files, "has no files/"),
]


@pytest.mark.parametrize(("damage", "said"), BAD_FOLDERS)
def test_a_bad_folder_is_named_with_what_is_wrong(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(_task(tmp_path))
    with pytest.raises(TaskError, match=said) as caught:
        DirectorySource(tmp_path)
    assert "double" in str(caught.value)
    assert caught.value.hint


def test_the_folder_of_shared_trees_is_no_way_out(tmp_path: Path) -> None:
    tasks, elsewhere = tmp_path / "tasks", tmp_path / "elsewhere"
    (elsewhere / "keys").mkdir(parents=True)
    (elsewhere / "keys" / "secret.txt").write_text("nobody's\n")
    _task(tasks, toml=TOML + 'base = "keys"\n')
    (tasks / ".bases").symlink_to(elsewhere)
    with pytest.raises(TaskError, match="is a link") as caught:
        DirectorySource(tasks)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "{}", "[]", "[{}]", '[{"module": 1}]', "[1]"])
def test_bad_cases_are_refused_when_the_grader_asks(tmp_path: Path, text: str) -> None:
    folder = _task(tmp_path, toml=TOML + 'split = "train"')
    (folder / "answer" / "cases.json").write_text(text)
    source = DirectorySource(tmp_path)
    with pytest.raises(TaskError, match=r"cases\.json"):
        source.answer(source.task(Split.TRAIN, 0))


def test_a_key_that_a_case_lacks_is_named_in_words(tmp_path: Path) -> None:
    folder = _task(tmp_path, toml=TOML + 'split = "train"')
    (folder / "answer" / "cases.json").write_text('[{"module": "own", "function": "f", "args": [], "expcted": 1}]')
    source = DirectorySource(tmp_path)
    with pytest.raises(TaskError, match=r"cases\.json is not a list of cases: a case has no key 'expected'"):
        source.answer(source.task(Split.TRAIN, 0))


def test_a_directory_without_tasks_or_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="has no task"):
        DirectorySource(tmp_path)
    with pytest.raises(TaskError, match="cannot list"):
        DirectorySource(tmp_path / "none")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["task.toml", "answer/cases.json"]),
    place=st.integers(0, 80),
    put=st.binary(max_size=4),
    cut=st.integers(0, 6),
)
def test_mutated_files_are_read_or_refused_and_nothing_else(
    tmp_path: Path, name: str, place: int, put: bytes, cut: int
) -> None:
    folder = tmp_path / "double"
    if not folder.exists():
        _task(tmp_path)
    original = (folder / name).read_bytes()
    (folder / name).write_bytes(original[:place] + put + original[place + cut :])
    try:
        with suppress(TaskError):
            source = DirectorySource(tmp_path)
            for split in Split:
                for index in range(source.size(split) or 0):
                    assert source.answer(source.task(split, index)).cases
    finally:
        (folder / name).write_bytes(original)


def test_the_split_rule_is_about_one_tenth_each() -> None:
    found = [split_of(str(i)) for i in range(5_000)]
    assert 0.08 < found.count(Split.HELDOUT) / 5_000 < 0.12
    assert 0.08 < found.count(Split.VALIDATION) / 5_000 < 0.12


def test_an_entry_point_that_names_no_function_is_refused_where_it_is_written(tmp_path: Path) -> None:
    folder = _task(tmp_path, toml=TOML + 'entry_point = "nocolon"\n')
    (folder / "answer" / "cases.json").rename(folder / "answer" / "check.py")
    with pytest.raises(TaskError) as caught:
        DirectorySource(tmp_path)
    assert caught.value.what == f"{folder / 'task.toml'}: entry_point = 'nocolon' is invalid"
    assert "module:function" in caught.value.hint


HIDDEN = Task(
    source="mine",
    split=Split.TRAIN,
    index=0,
    family="commit",
    instruction='mend it: "quoted"\nand on two lines',
    files={"pkg/a.py": "A = 1\n", "pkg/b.py": "B = 1\r\n", "README.md": "é\n"},
    exports=("pkg/", "README.md"),
    test_command=("python3", "-m", "unittest"),
    trust=Trust.CODE,
)
BY_TESTS = Answer(
    reference={"pkg/a.py": "A = 2\n"},
    tests=HiddenTests(runner=Runner.UNITTEST, files={"tests/test_a.py": "x\n"}, names=("tests.test_a.T.test_x",)),
)
BY_COMMAND = Answer(
    reference={},
    reference_argv=("sh", "-c", "echo 2 > pkg/a.py"),
    verifier=Verifier(
        files={"v/check.sh": "exit 0\n"}, argv=("sh", "v/check.sh"), reward_path="reward", deadline_s=9.5
    ),
)


@pytest.mark.parametrize("answer", [BY_TESTS, BY_COMMAND], ids=["hidden tests", "verifier"])
@pytest.mark.parametrize("base", [None, {"pkg/b.py": "B = 1\r\n", "README.md": "é\n"}], ids=["whole", "over a base"])
def test_a_task_that_is_written_is_read_as_it_was(tmp_path: Path, answer: Answer, base: dict[str, str] | None) -> None:
    image = Image(digest="ab12", workdir="/testbed", env={"A": "b=c"}, user="root")
    task = msgspec.structs.replace(HIDDEN, image=image, state=True, running=answer is BY_COMMAND)
    root = tmp_path / "mine"
    root.mkdir()
    write_task(root, "one", task, answer, base=base)
    source = DirectorySource(root)
    assert source.task(Split.TRAIN, 0) == task
    assert source.answer(task) == answer
    own = sorted(p.name for p in (root / "one" / "files").rglob("*") if p.is_file())
    assert own == (["a.py"] if base else ["README.md", "a.py", "b.py"])


def test_running_processes_are_of_a_state_and_judged_by_a_verifier(tmp_path: Path) -> None:
    plain = msgspec.structs.replace(HIDDEN, state=True)
    task = msgspec.structs.replace(plain, running=True)
    assert msgspec.json.decode(msgspec.json.encode(task), type=Task) == task
    assert task.task_id != plain.task_id
    for wrong in ({"state": False}, {"trust": Trust.DATA}):
        with pytest.raises(ValueError, match="running"):
            msgspec.structs.replace(task, **wrong)
    (tmp_path / "a").mkdir()
    write_task(tmp_path / "a", "one", task, BY_TESTS)
    with pytest.raises(TaskError, match=r"tests\.json"):
        DirectorySource(tmp_path / "a")
    said = tmp_path / "a/one/task.toml"
    said.write_text(said.read_text().replace("state = true", "state = false"))
    with pytest.raises(TaskError, match="needs state"):
        DirectorySource(tmp_path / "a")


def test_tasks_over_the_same_base_share_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_task(tmp_path, name, HIDDEN, BY_TESTS, base={"README.md": "é\n"})
    assert len(list((tmp_path / ".bases").iterdir())) == 1
    assert DirectorySource(tmp_path).size(Split.TRAIN) == 2


BAD_TESTS = {
    '{"runner": "unittest", "names": []}': "missing or repeated",
    '{"runner": "unittest", "names": ["a", "a"]}': "missing or repeated",
    '{"runner": "nose", "names": ["a"]}': "is invalid",
    '{"runner": "unittest", "names": ["a"], "files": {}}': "unknown key 'files'",
    '{"runner": "unittest", "names": ["a"], "deadline_s": 0}': "deadline_s = 0",
    "[]": "not a JSON object",
}


@pytest.mark.parametrize("text", BAD_TESTS)
def test_bad_hidden_tests_are_named(tmp_path: Path, text: str) -> None:
    folder = write_task(tmp_path, "one", HIDDEN, BY_TESTS)
    (folder / "answer" / "tests.json").write_text(text)
    source = DirectorySource(tmp_path)
    with pytest.raises(TaskError, match=BAD_TESTS[text]):
        source.answer(source.task(Split.TRAIN, 0))


@pytest.mark.parametrize("base", ["../x", "a/b", "/etc"])
def test_a_base_outside_the_tasks_is_refused(tmp_path: Path, base: str) -> None:
    folder = write_task(tmp_path, "one", HIDDEN, BY_TESTS)
    toml = folder / "task.toml"
    toml.write_text(toml.read_text().replace('base = ""', f'base = "{base}"'))
    with pytest.raises(TaskError, match="not the name of a folder"):
        DirectorySource(tmp_path)


def test_a_task_of_a_state_may_leave_exports_out_and_another_may_not(tmp_path: Path) -> None:
    folder = write_task(tmp_path, "one", msgspec.structs.replace(HIDDEN, state=True), BY_COMMAND)
    said = folder / "task.toml"
    said.write_text("instruction = 'x'\nstate = true\n")
    source = DirectorySource(tmp_path)
    assert [source.task(split, 0).exports for split in Split if source.size(split)] == [()]
    said.write_text("instruction = 'x'\n")
    with pytest.raises(TaskError, match="unless state = true") as failure:
        DirectorySource(tmp_path)
    assert "--set" not in str(failure.value)


@pytest.mark.parametrize("path", ["answer/cases.json", "answer/reference/own.py", "answer/reference"])
def test_a_link_in_the_hidden_side_is_refused_when_the_grader_asks(tmp_path: Path, path: str) -> None:
    folder = _task(tmp_path / "tasks", toml=TOML + 'split = "train"')
    source = DirectorySource(tmp_path / "tasks")
    _link_of(path)(folder)
    with pytest.raises(TaskError, match=r"is a link|has no reference"):
        source.answer(source.task(Split.TRAIN, 0))


@pytest.mark.parametrize(
    "link", ["one/task.toml", "one/answer", "one/files", "one/files/a.py", "one/answer/tests.json"]
)
def test_a_task_is_written_through_no_link(tmp_path: Path, link: str) -> None:
    victim = tmp_path / "victim"
    if link.endswith((".toml", ".py", ".json")):
        victim.write_text("kept")
    else:
        victim.mkdir()
    (tmp_path / "tasks" / link).parent.mkdir(parents=True)
    (tmp_path / "tasks" / link).symlink_to(victim)
    task = msgspec.structs.replace(HIDDEN, files={"a.py": "1"})
    with pytest.raises(TaskError, match=r"cannot write|is a link"):
        write_task(tmp_path / "tasks", "one", task, BY_TESTS)
    assert [*victim.iterdir()] == [] if victim.is_dir() else victim.read_text() == "kept"

"""`DirectorySource`: bring your own tasks, one folder each.

::

    my-tasks/
      add-discount/
        task.toml            instruction, exports; test_command, family, split, trust, entry_point where wanted
        files/               the prepared tree of the machine
        answer/reference/    the exported files of a solution
        answer/cases.json    hidden cases [{"module", "function", "args", "expected"}]: data-graded, or
        answer/check.py      hidden code that defines check(candidate): code-graded, with entry_point "module:function"

A task without `split` is put where the hash of its content falls. The answer's folder is read when a grader asks,
never with the task. Links are refused: a task holds what its folder holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from etude import config
from etude.errors import ConfigError, TaskError
from etude.records.task import Answer, Case, Split, Task, Trust
from etude.tasks.splits import split_of

MAX_FILES = 1_000
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class TaskFile:
    """What ``task.toml`` says. `trust` may be stated, and then has to be what the answer's kind gives."""

    instruction: str
    exports: tuple[str, ...]
    test_command: tuple[str, ...] = ()
    family: str = "own"
    split: Split | None = None
    trust: Trust | None = None
    entry_point: str = ""

    def __post_init__(self) -> None:
        if not self.instruction.strip() or not self.exports:
            raise ValueError("instruction and exports must not be empty")
        for path in self.exports:
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == ".":
                raise ValueError(
                    f"exports names {path!r}, which is no plain path inside the machine's working directory"
                )


def _range(size: int) -> str:
    return f"give an index from 0 to {size - 1}" if size else "name another --split: validation, heldout or train"


class DirectorySource:
    """A `TaskSource` over the folders of a directory, in the order of their names. Raises `TaskError` for bad ones."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.name = self.path.resolve().name
        self._tasks: dict[Split, list[Task]] = {split: [] for split in Split}
        self._folders: dict[tuple[Split, int], Path] = {}
        for folder in sorted(self._listed()):
            task = self._read_task(folder)
            self._folders[task.split, task.index] = folder
            self._tasks[task.split].append(task)

    def size(self, split: Split) -> int | None:
        return len(self._tasks[split])

    def task(self, split: Split, index: int) -> Task:
        tasks = self._tasks[split]
        if not 0 <= index < len(tasks):
            raise TaskError(
                f"no task {index} in {split}", f"{self.path} has {len(tasks)} of that split", hint=_range(len(tasks))
            )
        return tasks[index]

    def answer(self, task: Task) -> Answer:
        folder = self._folders.get((task.split, task.index))
        if folder is None or self.task(task.split, task.index) != task:
            raise TaskError(f"task {task.task_id} is not of {self.path}", hint="open the directory that made the task")
        hidden = folder / "answer"
        reference = _read_tree(hidden / "reference", hidden)
        if task.trust is Trust.DATA:
            return Answer(reference=reference, cases=_read_cases(hidden / "cases.json"))
        return Answer(
            reference=reference,
            test_code=_read_text(hidden / "check.py"),
            entry_point=_read_toml(folder).entry_point,
        )

    def _listed(self) -> list[Path]:
        try:
            folders = [p for p in self.path.iterdir() if (p / "task.toml").is_file()]
        except OSError as error:
            raise TaskError(f"cannot list {self.path}", str(error), hint="give a directory of task folders") from None
        if not folders:
            raise TaskError(
                f"{self.path} holds no task", hint="a task is a folder with a task.toml, files/ and answer/"
            )
        return folders

    def _read_task(self, folder: Path) -> Task:
        said, trust = _read_toml(folder), _trust_of(folder)
        if said.trust not in (None, trust):
            raise TaskError(f"{folder} says it is {said.trust}", f"its answer is {trust}", hint="leave `trust` away")
        module, _, function = said.entry_point.partition(":")
        if trust is Trust.CODE and not (module and function):
            raise TaskError(
                f"{folder / 'task.toml'}: entry_point = {said.entry_point!r}",
                "answer/check.py is called with a function, and this names none",
                hint='write entry_point = "module:function", the function that is judged',
            )
        files = _read_tree(folder / "files", folder)
        split = said.split or split_of(
            "\0".join([said.instruction, *(x for item in sorted(files.items()) for x in item)])
        )
        return Task(
            source=self.name,
            split=split,
            index=len(self._tasks[split]),
            family=said.family,
            instruction=said.instruction,
            files=files,
            exports=said.exports,
            test_command=said.test_command,
            trust=trust,
        )


def _read_toml(folder: Path) -> TaskFile:
    try:
        return config.load(folder / "task.toml", TaskFile)
    except ConfigError as error:
        facts = f"{error.what}: {error.facts}" if error.facts else error.what
        raise TaskError(f"task {folder}", facts, hint=error.hint) from None


def _trust_of(folder: Path) -> Trust:
    kinds = {Trust.DATA: folder / "answer" / "cases.json", Trust.CODE: folder / "answer" / "check.py"}
    found = [trust for trust, path in kinds.items() if path.is_file()]
    if len(found) != 1:
        facts = "it has both" if found else "it has neither"
        raise TaskError(f"{folder} needs one of answer/cases.json and answer/check.py", facts, hint="keep exactly one")
    return found[0]


def _read_cases(path: Path) -> tuple[Case, ...]:
    try:
        cases = msgspec.json.decode(_read_text(path), type=tuple[dict[str, msgspec.Raw], ...])
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
        hint = 'it is a list of {"module": ..., "function": ..., "args": [...], "expected": ...}'
        raise TaskError(f"{path} is no list of cases", str(error), hint=hint) from None
    if not made:
        raise TaskError(f"{path} holds no case", hint="a task without hidden cases cannot be lost")
    return made


def _read_tree(root: Path, folder: Path) -> dict[str, str]:
    """All files under a root: relative posix path -> text."""
    if not root.is_dir() or root.is_symlink():
        raise TaskError(f"{folder} has no {root.name}/", hint=f"put at least one file into {root}")
    texts: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            raise TaskError(f"{path} is a link", hint="copy the file into the task")
        if path.is_dir():
            continue
        if len(texts) >= MAX_FILES:
            raise TaskError(f"{root} holds more than {MAX_FILES} files", hint="give the task a smaller tree")
        texts[path.relative_to(root).as_posix()] = _read_text(path)
    if not texts:
        raise TaskError(f"{root} is empty", hint="put at least one file into it")
    return texts


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise TaskError(f"{path} is larger than {MAX_FILE_BYTES} bytes", hint="give the task smaller files")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read {path}", str(error), hint="a task's files are UTF-8 text") from None

"""`DirectorySource`: user-written tasks, one folder each. Mined tasks are written in the same format.

::

    my-tasks/
      add-discount/
        task.toml            instruction, exports; optional: test_command, family, split, trust, entry_point
        files/               the files in the machine
        answer/reference/    the exported files of a correct solution
        answer/cases.json    hidden cases [{"module", "function", "args", "expected"}]: data-graded, or
        answer/check.py      hidden code that defines check(candidate): code-graded, with entry_point "module:function"
        answer/tests.json    or the exact names of hidden tests, their files in answer/hidden/
        answer/verifier.json or a command that grades, its files in answer/verifier/

All keys are in docs/formats/tasks.md. Without `split`, the hash of `problem` (or of the content, if there is no
`problem`) decides the split, so variants of one problem are never in two splits. The answer is read only when a grader
needs it, never together with the task. Symbolic links are refused.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etude import config
from etude.errors import ConfigError, NoSource, TaskError
from etude.records.exports import is_declarable, is_plain
from etude.records.image import Image
from etude.records.task import Answer, Split, Task, Trust
from etude.tasks.hidden import Kind, kind_of, read_answer, write_answer
from etude.tasks.splits import split_of
from etude.tasks.text_files import read_tree, refuse_link, write_tree

BASES = ".bases"
"""The folder with sets of files that several tasks share."""


@dataclass(frozen=True)
class ImageFile:
    """The section ``[image]`` of ``task.toml``: the fields of `etude.records.image.Image`.

    `digest` names the image, and each item of `env` is "NAME=value"."""

    digest: str
    workdir: str = "/workspace"
    env: tuple[str, ...] = ()
    user: str = ""


@dataclass(frozen=True)
class TaskFile:
    """The content of ``task.toml``. Fields with the same name as a field of `etude.records.Task` have the same meaning.

    `trust` is optional and must match the kind of the answer. `entry_point` is the function to grade,
    "module:function". `base` names a set of files in ``.bases/``, to which ``files/`` adds or replaces files. Raises
    `ValueError` for fields that contradict each other."""

    instruction: str
    exports: tuple[str, ...] = ()
    test_command: tuple[str, ...] = ()
    family: str = "own"
    problem: str = ""
    split: Split | None = None
    trust: Trust | None = None
    entry_point: str = ""
    base: str = ""
    state: bool = False
    running: bool = False
    image: ImageFile | None = None

    def __post_init__(self) -> None:
        if not self.instruction.strip():
            raise ValueError("instruction must not be empty")
        if not (self.exports or self.state):
            raise ValueError("exports must not be empty or left out, unless state = true")
        if self.running and not self.state:
            raise ValueError("running = true keeps processes as part of the machine's state: it needs state = true")
        for path in self.exports:
            if not is_declarable(path):
                raise ValueError(
                    f"exports has {path!r}, which is not a plain path inside the machine's working directory"
                )
        if self.base and (not is_plain(self.base) or "/" in self.base):
            raise ValueError(f"base = {self.base!r} is not the name of a folder in {BASES}/")


def _range(size: int) -> str:
    return f"give an index from 0 to {size - 1}" if size else "give another --split: validation, heldout or train"


class DirectorySource:
    """A `TaskSource` over the task folders of a directory, in the order of their names.

    Raises `NoSource` if there are none, and `TaskError` for a folder that is not a valid task."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.name = self.path.resolve().name
        self._tasks: dict[Split, list[Task]] = {split: [] for split in Split}
        self._folders: dict[tuple[Split, int], Path] = {}
        self._bases: dict[str, dict[str, str]] = {}
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
            place = f"{task.split} task {task.index}"
            raise TaskError(
                f"task {task.task_id} is not from {self.path}",
                f"this directory has no {place}" if folder is None else f"it differs from {place} of this directory",
                hint="use the directory from which the task was made, unchanged",
            )
        return read_answer(folder, _read_toml(folder).entry_point)

    def folder(self, split: Split, index: int) -> Path:
        """Return the folder that a task was read from. Raises `KeyError` if there is no such task."""
        return self._folders[split, index]

    def _listed(self) -> list[Path]:
        try:
            folders = [p for p in self.path.iterdir() if (p / "task.toml").is_file()]
        except OSError as error:
            raise NoSource(f"cannot list {self.path}", str(error), hint="give a directory of task folders") from None
        if not folders:
            raise NoSource(f"{self.path} has no task", hint="a task is a folder with a task.toml, files/ and answer/")
        return folders

    def _read_task(self, folder: Path) -> Task:
        toml, kind = _read_toml(folder), kind_of(folder)
        trust = kind.trust
        if toml.trust not in (None, trust):
            raise TaskError(
                f"{folder}: trust = {toml.trust} is wrong",
                f"with its answer files it is {trust}",
                hint="remove `trust`",
            )
        if toml.running and kind is not Kind.VERIFIER:
            raise TaskError(
                f"{folder}: running = true is not possible",
                f"its answer is {kind}",
                hint="write answer/verifier.json: only a verifier can check running processes",
            )
        module, _, function = toml.entry_point.partition(":")
        if kind is Kind.CHECK and not (module and function):
            raise TaskError(
                f"{folder / 'task.toml'}: entry_point = {toml.entry_point!r} is invalid",
                "answer/check.py needs the name of the function that it checks",
                hint='write entry_point = "module:function", the function to grade',
            )
        files = self._read_files(folder, toml.base)
        content = "\0".join([toml.instruction, *(x for item in sorted(files.items()) for x in item)])
        split = toml.split or split_of(toml.problem or content)
        return Task(
            source=self.name,
            split=split,
            index=len(self._tasks[split]),
            family=toml.family,
            problem=toml.problem,
            instruction=toml.instruction,
            files=files,
            exports=toml.exports,
            test_command=toml.test_command,
            trust=trust,
            image=_image(toml.image),
            state=toml.state,
            running=toml.running,
        )

    def _read_files(self, folder: Path, base: str) -> dict[str, str]:
        if not base:
            return read_tree(folder / "files", folder)
        if base not in self._bases:
            refuse_link(self.path / BASES)
            self._bases[base] = read_tree(self.path / BASES / base, self.path / BASES)
        own = folder / "files"
        return {**self._bases[base], **(read_tree(own, folder, may_be_empty=True) if own.exists() else {})}


def _read_toml(folder: Path) -> TaskFile:
    refuse_link(folder / "task.toml")
    try:
        return config.load(folder / "task.toml", TaskFile)
    except ConfigError as error:
        facts = f"{error.what}: {error.facts}" if error.facts else error.what
        raise TaskError(f"{folder}/task.toml is invalid", facts, hint=error.hint) from None


def _image(image: ImageFile | None) -> Image | None:
    if image is None:
        return None
    env = dict(item.partition("=")[::2] for item in image.env)
    return Image(digest=image.digest, workdir=image.workdir, env=env, user=image.user)


def write_task(root: Path, name: str, task: Task, answer: Answer, base: Mapping[str, str] | None = None) -> Path:
    """Write a task to the folder ``root/name/`` and return that folder.

    `answer` must have hidden tests or a verifier. `base` are files (path -> content) that several tasks share, and
    `task.files` must have all of these paths; they are written once, under the hash of their content, and the task's
    folder gets only the files that differ. ``task.toml`` is written last: a folder that has it is complete."""
    folder = root / name
    base_name = _write_base(root, base) if base else ""
    own = {path: text for path, text in task.files.items() if (base or {}).get(path) != text}
    write_tree(folder / "files", own)
    write_answer(folder, answer)
    image = task.image
    task_file = TaskFile(
        instruction=task.instruction,
        exports=task.exports,
        test_command=task.test_command,
        family=task.family,
        problem=task.problem,
        split=task.split,
        trust=task.trust,
        base=base_name,
        state=task.state,
        running=task.running,
        image=None
        if image is None
        else ImageFile(image.digest, image.workdir, tuple(f"{k}={v}" for k, v in image.env.items()), image.user),
    )
    write_tree(folder, {"task.toml": config.to_toml(task_file)})
    return folder


def _write_base(root: Path, base: Mapping[str, str]) -> str:
    digest = hashlib.sha256(repr(sorted(base.items())).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    refuse_link(root / BASES)
    target = root / BASES / digest
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=root) as folder:
            write_tree(Path(folder) / digest, base)
            target.parent.mkdir(exist_ok=True)
            (Path(folder) / digest).rename(target)
    return digest

"""Tasks for `integrity`: a part of a source, and tasks mined from a repository that is made here.

The repository is a small library of modules of Python's own, with their tests, as CPython keeps them; written commit
by commit, with what real histories have: a merge, a rename, a binary file, a submodule, a name that is no UTF-8.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from etude.environments import MachineGrader
from etude.errors import TaskError
from etude.records.task import Answer, Split, Task
from etude.seams import Runtime, TaskSource
from etude.tasks import DirectorySource
from etude.tasks.mining import Repository, functions_to_delete, mine_commits, mine_deletions
from etude.tasks.mining.deletions import functions_in

MODULES = ("colorsys", "fnmatch", "shlex")
DELETIONS = 12
"""How many functions are tried: those of all modules in turn."""
PYTESTS = """import pytest

from lib import shlex


@pytest.fixture
def words():
    return ["a b", "c"]


def test_join(words):
    assert shlex.join(words) == "'a b' c"


@pytest.mark.parametrize("text", ["a b", "'x y' z", ""])
def test_split_joins_back(text):
    assert shlex.split(shlex.join(shlex.split(text))) == shlex.split(text)
"""
"""Tests that only pytest can run, beside CPython's own."""


class EveryNth:
    """A `TaskSource`: every nth task of another; of an endless one as many as `sizes` says, and none of other splits.

    >>> from etude.tasks import RepairSource
    >>> source = EveryNth(RepairSource(seed=0), {Split.TRAIN: 9}, 4)
    >>> source.size(Split.TRAIN), source.size(Split.HELDOUT), source.task(Split.TRAIN, 2).index
    (3, 0, 8)
    """

    def __init__(self, source: TaskSource, sizes: Mapping[Split, int] | None, n: int) -> None:
        self.name, self._source, self._sizes, self._n = source.name, source, sizes, n

    def size(self, split: Split) -> int:
        whole = self._source.size(split) if self._sizes is None else self._sizes.get(split, 0)
        assert whole is not None, "an endless source needs sizes"
        return -(-whole // self._n)

    def task(self, split: Split, index: int) -> Task:
        return self._source.task(split, index * self._n)

    def answer(self, task: Task) -> Answer:
        return self._source.answer(task)


async def mined(runtime: Runtime, folder: Path, *, at_once: int) -> TaskSource:
    """Tasks from a repository's history and by deletions, both below `folder`. `TaskError` where this Python has no
    tests of its own."""
    repository(folder / "library")
    grader, out = MachineGrader(runtime), folder / "tasks"
    read = Repository(folder / "library")
    await mine_commits(read, runtime, grader, out, limit=100, concurrency=at_once)
    tree = read.texts(read.tree("HEAD"))
    functions = functions_to_delete(tree)
    by_module = [[f for f in functions if f.path == f"lib/{module}.py"] for module in MODULES]
    longest = max(map(len, by_module))
    in_turn = [row[depth] for depth in range(longest) for row in by_module if depth < len(row)]
    await mine_deletions(tree, in_turn[:DELETIONS], runtime, grader, out, concurrency=at_once)
    return DirectorySource(out)


def repository(at: Path) -> None:
    """Make the repository. Its commits have fixed dates, so it is the same every time."""
    texts = dict(_sources(MODULES))
    at.mkdir(parents=True)
    _git(at, "init", "-q", "-b", "main")
    stubbed = {path: _stubbed(path, text) for path, text in texts.items() if path.startswith("lib/")}
    _commit(at, "Say what there will be", {**stubbed, "lib/__init__.py": "", "tests/__init__.py": ""})
    _commit(at, "A picture of it", {"docs/picture.bin": bytes(range(256)), b"docs/\xff\xfe.txt": b"no UTF-8\n"})
    submodule = f"160000,{'1' * 40},vendored"
    _git(at, "update-index", "--add", "--cacheinfo", submodule)
    _git(at, "commit", "-q", "-m", "Somebody else's library is a submodule")
    for module in MODULES[:-1]:
        _commit(at, f"The module {module} does what its names say", _of(module, texts))
    _git(at, "checkout", "-q", "-b", "aside")
    _commit(at, "Write shlex: texts are split as shells do it", _of("shlex", texts))
    _git(at, "checkout", "-q", "main")
    _git(at, "mv", "docs/picture.bin", "docs/image.bin")
    _git(at, "commit", "-q", "-m", "A better name for the picture")
    _git(at, "merge", "-q", "--no-ff", "-m", "Merge what was done aside", "aside")
    joined = texts["lib/shlex.py"]
    broken = joined.replace("return ' '.join(quote(arg) for arg in split_command)", "raise NotImplementedError")
    _commit(at, "Joining will be written again", {"lib/shlex.py": broken})
    _commit(at, "Join words to a command", {"lib/shlex.py": joined, "tests/test_joining.py": PYTESTS})


def _of(module: str, texts: Mapping[str, str]) -> dict[str, str]:
    return {path: texts[path] for path in (f"lib/{module}.py", f"tests/test_{module}.py")}


def _sources(modules: Iterable[str]) -> Iterable[tuple[str, str]]:
    """(path in the repository, text) of modules and their tests, which import each other as parts of it."""
    folder = Path(os.__file__).parent
    for module in modules:
        for path, source in (
            (f"lib/{module}.py", f"{module}.py"),
            (f"tests/test_{module}.py", f"test/test_{module}.py"),
        ):
            try:
                text = (folder / source).read_text()
            except OSError as error:
                raise TaskError(
                    f"no {source} of Python's own", str(error), hint="install its test suite, or use another Python"
                ) from None
            if path.startswith("tests/"):
                text = re.sub(rf"^(\s*)import {module}$", rf"\1from lib import {module}", text, flags=re.MULTILINE)
                text = re.sub(rf"^(\s*)from {module} import", rf"\1from lib.{module} import", text, flags=re.MULTILINE)
            yield path, text


def _stubbed(path: str, text: str) -> str:
    """A module whose functions are all still to be written."""
    for name in [function.name for function in functions_in(path, text)]:
        text = next((f.without for f in functions_in(path, text) if f.name == name), text)
    ast.parse(text)
    return text


def _commit(at: Path, message: str, files: Mapping[Any, str | bytes]) -> None:
    for path, data in files.items():
        place = os.path.join(os.fsencode(at), os.fsencode(path))
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "wb") as file:
            file.write(data if isinstance(data, bytes) else data.encode())
    _git(at, "add", "--", *files)
    _git(at, "commit", "-q", "-m", message)


def _git(at: Path, *words: str | bytes) -> None:
    who = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER")
           for what, value in (("NAME", "a"), ("EMAIL", "a@b.c"), ("DATE", "2020-01-01T00:00:00Z"))}  # fmt: skip
    mine = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", "-C", str(at), *words], check=True, timeout=60, env={**os.environ, **who, **mine})

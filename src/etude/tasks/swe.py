"""`SweSource`: tasks from JSON lines in the format of SWE-bench (Jimenez et al. 2024), plain or gzipped.

A row has a repository and a commit, two patches (the solution and its tests), the text of the issue, and the names of
tests that fail before the solution and of tests that always pass. The agent gets the files of the base commit, without
history. Hidden are the patched test files and the test names.

`repo_path` in a row is the path of the repository relative to the file: a working directory, a bare repository or a
bundle. Without it, the repository is expected at ``repos/owner__name`` next to the file, optionally with ``.git`` or
``.bundle``. With ``image`` the files are in the image, and the task has no files. Unknown fields are ignored.
"""

from __future__ import annotations

import json
import re
import subprocess
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from etude.errors import TaskError
from etude.records.exports import CONFIGURATION, is_plain
from etude.records.image import Image
from etude.records.task import Answer, HiddenTests, Runner, Split, Task
from etude.scratch import ScratchDirectory
from etude.tasks.mining.commits import whole_tree_task
from etude.tasks.mining.git import Repository
from etude.tasks.mining.testing import data_named_by_tests, helpers_of_tests, imports_in, is_test, source_roots
from etude.tasks.patches import patched
from etude.tasks.splits import row_at, split_of
from etude.tasks.text_files import read_lines

MAX_BYTES = 1 << 30
MAX_FILES, MAX_TREE_BYTES = 20_000, 48 << 20
KEPT_TREES = 4
CLONE_S = 300.0
_DJANGO = re.compile(r"^(\w+) \(([\w.]+)\)$")


class _Row(msgspec.Struct, frozen=True):
    instance_id: str
    repo: str
    base_commit: str
    patch: str
    test_patch: str
    problem_statement: str
    FAIL_TO_PASS: list[str] | str
    PASS_TO_PASS: list[str] | str = []
    repo_path: str = ""
    image: Image | None = None
    test_deadline_s: float = 300.0


class SweSource:
    """A `TaskSource` over the rows of a JSON-lines file in the format of SWE-bench.

    A hash of the problem decides the split; the order in a split is that of the file. Rows are validated when the
    source is opened, repositories when one of their tasks is requested. Raises `TaskError` for an invalid row."""

    name = "swe"

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._rows: dict[Split, list[_Row]] = {split: [] for split in Split}
        self._repositories: dict[Path, Repository] = {}
        self._trees: OrderedDict[str, dict[str, str]] = OrderedDict()
        self._imports: dict[str, dict[str, set[str]]] = {}
        seen: set[str] = set()
        for place, raw in read_lines(self.path, "SWE-bench-style rows", max_bytes=MAX_BYTES):
            row = _parsed(raw, place)
            if row.instance_id in seen:
                raise TaskError(place, f"another row has the id {row.instance_id}", hint="remove one")
            seen.add(row.instance_id)
            self._rows[split_of(f"{row.instance_id}\0{row.problem_statement}")].append(row)
        if not seen:
            raise TaskError(f"{self.path} has no task", hint="give a JSON-lines file with one row per task")

    def size(self, split: Split) -> int | None:
        return len(self._rows[split])

    def task(self, split: Split, index: int) -> Task:
        row = self._row(split, index)
        answer = self._answer(row)
        tree = self._tree(row)
        made = whole_tree_task(
            tree,
            answer,
            kept=self._test_inputs(row, answer.tests.files if answer.tests is not None else {}, tree),
            source=self.name,
            family=row.repo,
            instruction=row.problem_statement,
            image=row.image,
        )
        fields = {name: getattr(made, name) for name in made.__struct_fields__}
        return Task(**{**fields, "split": split, "index": index, "files": {} if row.image is not None else tree})

    def answer(self, task: Task) -> Answer:
        row = self._row(task.split, task.index)
        if task != self.task(task.split, task.index):
            raise TaskError(
                f"task {task.task_id} is not from {self.path}",
                f"it differs from {task.split} task {task.index} of this file",
                hint="use the file from which the task was made, unchanged",
            )
        return self._answer(row)

    def _answer(self, row: _Row) -> Answer:
        tree = self._tree(row)
        hidden = {path: text for path, text in patched(tree, row.test_patch).items() if text is not None}
        changed = {path: text for path, text in patched(tree, row.patch).items() if text is not None}
        given = self._test_inputs(row, hidden, {**tree, **changed})
        fixed = {path: text for path, text in changed.items() if path.endswith(".py") or path not in given}
        lost = [path for path in fixed if is_test(path) and path in hidden]
        if not fixed or lost:
            facts = f"patch and test_patch both change {lost[0]}" if lost else "its patch leaves no file"
            raise TaskError(f"{row.instance_id} has no solution outside its tests", facts, hint="remove the row")
        hidden |= {path: text for path, text in changed.items() if path not in fixed and path not in hidden}
        names = [*_names(row.FAIL_TO_PASS), *_names(row.PASS_TO_PASS)]
        runner, exact = exact_names(names, hidden, row.instance_id)
        roots = source_roots(tree)
        tests = HiddenTests(runner=runner, files=hidden, names=exact, roots=roots, deadline_s=row.test_deadline_s)
        return Answer(reference=fixed, tests=tests)

    def _test_inputs(self, row: _Row, hidden: Mapping[str, str], paths: Collection[str]) -> set[str]:
        """The paths that hidden tests depend on: data that they read, helpers that they import, and their
        configuration."""
        tree, imports = self._tree(row), self._imports[_key(row)]
        helpers = helpers_of_tests(imports | imports_in(hidden))
        folders = {parent for path in hidden for parent in PurePosixPath(path).parents}
        loading = [*helpers, *(path for path in tree if path.endswith("conftest.py"))]
        beside = [path for path in loading if PurePosixPath(path).parent in folders]
        sources = {**{path: tree[path] for path in beside if path in tree}, **hidden}
        data = data_named_by_tests((text for path, text in sources.items() if path.endswith(".py")), paths)
        settings = (path for path in paths if PurePosixPath(path).name in CONFIGURATION)
        return {*data, *helpers, *settings, *(path for path in paths if is_test(path))}

    def _tree(self, row: _Row) -> dict[str, str]:
        key = _key(row)
        if key not in self._trees:
            repository = self._repository(row)
            tree = repository.tree(row.base_commit)
            texts = repository.texts(tree) if len(tree) <= MAX_FILES else {}
            if len(tree) > MAX_FILES or sum(map(len, texts.values())) > MAX_TREE_BYTES:
                facts = f"{len(tree)} files; at most {MAX_FILES} and {MAX_TREE_BYTES >> 20} MiB of text"
                hint = "build an image with `etude machines image build`, and set image in the row"
                raise TaskError(f"{row.instance_id}: {row.repo} is too large for the files of a task", facts, hint=hint)
            self._trees[key], self._imports[key] = texts, imports_in(texts)
            while len(self._trees) > KEPT_TREES:
                del self._imports[self._trees.popitem(last=False)[0]]
        self._trees.move_to_end(key)
        return self._trees[key]

    def _repository(self, row: _Row) -> Repository:
        folder, name = self.path.parent, row.repo.replace("/", "__")
        beside = [folder / "repos" / f"{name}{end}" for end in ("", ".git", ".bundle")]
        candidates = [folder / row.repo_path] if row.repo_path else beside
        found = next((path for path in candidates if path.exists()), None)
        if found is None:
            hint = f"clone it to {beside[1]} (`git clone --mirror`), or set repo_path in the row"
            raise TaskError(f"{row.instance_id}: {row.repo} does not exist", f"expected {candidates[0]}", hint=hint)
        if found not in self._repositories:
            self._repositories[found] = Repository(found if found.is_dir() else self._clone_of_bundle(found))
        return self._repositories[found]

    def _clone_of_bundle(self, bundle: Path) -> Path:
        folder = ScratchDirectory("swe")
        weakref.finalize(self, folder.close)
        target = folder.path / "repository.git"
        command = ["git", "clone", "--bare", "--quiet", "--no-hardlinks", str(bundle.resolve()), str(target)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=CLONE_S, check=False)
            facts = done.stderr.decode(errors="replace").strip()[-200:] if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            facts = str(error)
        if facts:
            raise TaskError(f"{bundle} is not a Git bundle", facts, hint="create one with `git bundle create`")
        return target

    def _row(self, split: Split, index: int) -> _Row:
        return row_at(self._rows[split], split, index, self.path)


def _key(row: _Row) -> str:
    return f"{row.repo_path}\0{row.repo}\0{row.base_commit}"


def exact_names(names: Sequence[str], files: Mapping[str, str], of: str) -> tuple[Runner, tuple[str, ...]]:
    """Return the test runner for the test names of a row, and the names in the format of `HiddenTests`.

    Supported are ``path.py::test`` (pytest), ``test (module.Class)`` and ``module.Class.test`` (unittest), and a bare
    ``test``, which must be in exactly one of the patched `files` (path -> text). `of` is the row's id, for errors.
    Raises `TaskError` for other forms and for a mixture.

    >>> exact_names(["test_a (pkg.tests.T)"], {}, "row")
    (<Runner.UNITTEST: 'unittest'>, ('pkg.tests.T.test_a',))
    """
    made: dict[str, Runner] = {}
    for name in names:
        django = _DJANGO.match(name)
        if "::" in name:
            made[name] = Runner.PYTEST
        elif django:
            test, place = django.groups()
            made[place if place.endswith(f".{test}") else f"{place}.{test}"] = Runner.UNITTEST
        elif re.fullmatch(r"\w+(\.\w+)+", name):
            made[name] = Runner.UNITTEST
        else:
            bare = re.match(r"\w+", name)
            word = re.compile(rf"^(async )?def {re.escape(bare.group() if bare else name)}\b", re.MULTILINE)
            places = [path for path, text in files.items() if path.endswith(".py") and word.search(text)]
            if len(places) != 1:
                facts = f"{len(places)} of the patched test files define it"
                raise TaskError(f"{of}: test {name[:80]!r} cannot be found", facts, hint="write path.py::test")
            made[f"{places[0]}::{name}"] = Runner.PYTEST
    runners = set(made.values())
    if len(runners) != 1:
        facts = "it has no test names" if not runners else "some are for pytest, some for unittest"
        raise TaskError(
            f"{of}: its tests need exactly one runner",
            facts,
            hint="write all names in the form of pytest, or all in that of unittest",
        )
    return runners.pop(), tuple(made)


def _names(field: list[str] | str) -> list[str]:
    if isinstance(field, list):
        return field
    try:
        return msgspec.json.decode(field, type=list[str])
    except ValueError:
        raise TaskError(
            "the test names of a row are not a list", field[:80], hint="write a JSON list of strings"
        ) from None


def _parsed(raw: bytes, place: str) -> _Row:
    try:
        plain: dict[str, Any] = json.loads(raw)
        row = msgspec.convert(plain, _Row)
        if not _names(row.FAIL_TO_PASS):
            raise ValueError("FAIL_TO_PASS is empty")
        if not re.fullmatch(r"[0-9a-fA-F]{7,64}", row.base_commit):
            raise ValueError(f"base_commit {row.base_commit[:80]!r} is not a commit id")
        if row.repo_path and not is_plain(row.repo_path):
            raise ValueError(f"repo_path {row.repo_path[:80]!r} is not a plain path relative to the folder of the file")
        texts = (row.instance_id, row.repo, row.patch, row.test_patch, row.problem_statement, *_names(row.FAIL_TO_PASS))
        "".join((*texts, *_names(row.PASS_TO_PASS))).encode()  # JSON allows lone surrogates, which cannot be encoded
        if not 0 < row.test_deadline_s <= 86_400:
            raise ValueError(f"test_deadline_s = {row.test_deadline_s}")
    except (ValueError, RecursionError, TypeError) as error:
        hint = "a row has instance_id, repo, base_commit, patch, test_patch, problem_statement, FAIL_TO_PASS"
        raise TaskError(f"{place} is not a SWE-style row", str(error)[:300], hint=hint) from None
    return row

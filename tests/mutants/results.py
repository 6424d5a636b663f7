"""Results per mutant, kept in `results.json`: an interrupted run resumes, and partial runs make one table.

A mutant that was killed is believed as long as its entry, the code of the files that it changes and that of its test's
file are the same (`inputs_of`). Everything else is run again.
"""

from __future__ import annotations

import ast
import hashlib
import json
import threading
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tests.mutants.table import FOLDER, ROOT, Mutant, promises

from etude.syntax import parse

PAGE = ROOT / "docs" / "lab" / "mutants.md"
FILE = FOLDER / "results.json"
KILLED, SURVIVED, BROKEN, NOT_RUN, UNKNOWN = "killed", "SURVIVED", "BROKEN", "not run here", "not known"


@dataclass(frozen=True)
class Result:
    """What one run found. `why`: the reason where the mutant was not run. `inputs`: see `inputs_of`."""

    test: str
    found: str
    why: str
    inputs: str


def key_of(mutant: Mutant) -> str:
    """Names an entry of the table by its content."""
    return _digest(mutant.test, *(part for change in mutant.changes for part in asdict(change).values()))


def inputs_of(mutant: Mutant, root: Path) -> str:
    """The digest of what a result is believed for: the entry, the code of the files that it changes, and that of its
    test's file."""
    files = sorted({mutant.test.partition("::")[0], *(change.file for change in mutant.changes)})
    return _digest(key_of(mutant), *(text for name in files for text in (name, _code((root / name).read_text(), name))))


@cache
def _code(text: str, name: str) -> str:
    """A file without what computes nothing: of Python comments, docstrings and layout are left out."""
    if not name.endswith(".py"):
        return text
    tree = parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not _is_text(each)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _digest(*words: str) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


class Results:
    """The results of earlier runs, and those of this one. Safe between threads."""

    def __init__(self, path: Path = FILE) -> None:
        self._path, self._lock = path, threading.Lock()
        raw = json.loads(path.read_text()) if path.exists() else {}
        self._of = {key: Result(**fields) for key, fields in raw.items()}

    def of(self, mutant: Mutant, root: Path = ROOT) -> Result:
        """What is known; `UNKNOWN` for a mutant that never ran, or was changed since with its files."""
        inputs, known = inputs_of(mutant, root), self._of.get(key_of(mutant))
        return known if known and known.inputs == inputs else Result(mutant.test, UNKNOWN, "", inputs)

    def put(self, mutant: Mutant, result: Result) -> None:
        """Keep a result, on the disk when this returns."""
        with self._lock:
            self._of[key_of(mutant)] = result
            self._save()

    def keep(self, mutants: list[Mutant]) -> None:
        """Drop the results of entries that are no longer in the table."""
        with self._lock:
            wanted = set(map(key_of, mutants))
            self._of = {key: result for key, result in self._of.items() if key in wanted}
            self._save()

    def _save(self) -> None:
        rows = sorted(self._of.items(), key=lambda row: (row[1].test, row[0]))
        scratch = self._path.with_suffix(".tmp")
        scratch.write_text(json.dumps({key: asdict(result) for key, result in rows}, indent=1) + "\n")
        scratch.replace(self._path)


def page(mutants: list[Mutant], results: Results) -> str:
    """The table as a page."""
    of_test: dict[str, list[int]] = {}
    for number, names in promises().items():
        for name in names:
            of_test.setdefault(name, []).append(number)
    rows = [(of_test.get(mutant.promised, [0]), mutant, results.of(mutant)) for mutant in mutants]
    counts = [f"{sum(row[2].found == kind for row in rows)} {kind}" for kind in (KILLED, SURVIVED, BROKEN, NOT_RUN)]
    lines = [
        "# Mutants",
        "",
        "Each promise broken on purpose, and whether the test that it names fails then. Made by `make mutants`; the",
        "changes are in `tests/mutants/*.toml`. A result is believed until the code of those files, or of",
        "the test's file, changes (decision 53).",
        "",
        f"{len(rows)} mutants: {', '.join(counts)}, {sum(row[2].found == UNKNOWN for row in rows)} {UNKNOWN}.",
        "",
        "| promise | test | changed | found |",
        "| --- | --- | --- | --- |",
    ]
    for numbers, mutant, result in sorted(rows, key=lambda row: (row[0], row[1].test)):
        files = ", ".join(sorted({change.file.removeprefix("src/etude/") for change in mutant.changes}))
        found = result.found + (f": {' '.join(result.why.split())}" if result.found == NOT_RUN and result.why else "")
        lines.append(f"| {', '.join(map(str, numbers))} | `{mutant.test}` | {files} | {found.replace('|', '/')} |")
    return "\n".join(lines) + "\n"

"""The table of mutants: for a promise, one change of the code that breaks it, and the test that must then fail.

A promise is only as good as the test it names. Each ``*.toml`` here holds entries of this form::

    [[mutant]]
    test = "tests/unit/evals/test_evals.py::test_wilson"  # as PROMISES.md names it; "[a parameter]" may follow
    file = "src/etude/evals/intervals.py"
    find = "solved / n"                                   # occurs once in the file
    replace = "solved / (n + 1)"

Several replacements for one entry go into `[[mutant.also]]` with `file`, `find` and `replace`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
_NAME = re.compile(r"`((?:tests|benchmarks)/[\w/.]+\.py(?:::\w+)?)`")


@dataclass(frozen=True)
class Change:
    """One replacement of text in one file, relative to the repository."""

    file: str
    find: str
    replace: str

    def applied(self, text: str) -> str:
        """The text with the change. Raises `ValueError` unless `find` occurs exactly once."""
        if text.count(self.find) != 1:
            raise ValueError(f"{self.file}: {self.find!r} occurs {text.count(self.find)} times, not once")
        return text.replace(self.find, self.replace)


@dataclass(frozen=True)
class Mutant:
    """Changes that break a promise, and the test that must fail with them."""

    test: str
    changes: tuple[Change, ...]

    @property
    def promised(self) -> str:
        """The test as PROMISES.md names it."""
        return self.test.partition("[")[0]


def mutants() -> list[Mutant]:
    """All entries, in the order of files and lines."""
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get("mutant", []):
            parts = [entry, *entry.get("also", [])]
            changes = tuple(Change(p["file"], p["find"], p["replace"]) for p in parts)
            found.append(Mutant(entry["test"], changes))
    return found


def promises() -> dict[int, list[str]]:
    """The names that each promise of PROMISES.md gives, by its number."""
    lines = (ROOT / "PROMISES.md").read_text().splitlines()
    numbered = ((re.match(r"(\d+)\. ", line), line) for line in lines)
    return {int(number[1]): _NAME.findall(line) for number, line in numbered if number}

"""Mutants: copies of correct code with one small error, which the hidden tests of a task should detect.

A mutant is an edit of the text, so the diff of one that passes the tests (a survivor) is one line that a human can
judge. Mutants that compile to the same code are left out. Some of the others still behave like the original, so look at
the share of survivors, not at a single one.

>>> [m.kind for m in mutants("a.py", "def f(n):\\n    return n + 1\\n", num=2, seed="s")]
['arithmetic', 'constant']
"""

from __future__ import annotations

import difflib
import random
from collections import defaultdict
from collections.abc import Collection

from etude.tasks.mutation.edits import Edit, applied, line_deletions
from etude.tasks.mutation.python import python_edits, same_code

__all__ = ["Mutant", "changed_lines", "mutants"]


class Mutant:
    """A file with one small error: its `path`, its new `text`, and the `kind` of the edit."""

    def __init__(self, path: str, original: str, edit: Edit) -> None:
        self.path, self.kind, self._original = path, edit.kind, original
        self.text = applied(original, edit)

    def diff(self) -> str:
        """Return a unified diff from the original to the mutant, with one line of context."""
        before, after = self._original.splitlines(keepends=True), self.text.splitlines(keepends=True)
        lines = difflib.unified_diff(before, after, self.path, f"{self.path} ({self.kind})", n=1)
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def changed_lines(before: str, after: str) -> set[int]:
    """Return the numbers, from 1, of the lines of `after` that are not in `before`.

    >>> changed_lines("a\\nb\\n", "a\\nx\\nb\\n")
    {2}
    """
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    return {
        n + 1
        for tag, _, _, start, stop in matcher.get_opcodes()
        if tag in ("insert", "replace")
        for n in range(start, stop)
    }


def mutants(path: str, text: str, *, num: int, seed: str, within: Collection[int] | None = None) -> list[Mutant]:
    """Return at most `num` different mutants of a file, taking each kind of edit in turn.

    Valid Python in a file named "*.py" gets all kinds of edit; elsewhere the only edit is to delete a line. `within`
    has the numbers, from 1, of lines in which an edit may begin (None: all). The same arguments give the same mutants.
    """
    edits = python_edits(text) if path.endswith(".py") else None
    chosen = line_deletions(text) if edits is None else edits
    by_kind: dict[str, list[Edit]] = defaultdict(list)
    for edit in chosen:
        if within is None or edit.line in within:
            by_kind[edit.kind].append(edit)
    rng = random.Random(f"mutants {seed} {path}")
    for row in by_kind.values():
        rng.shuffle(row)
    made: list[Mutant] = []
    seen = {text}
    while len(made) < num and any(by_kind.values()):
        for kind in sorted(by_kind):
            if by_kind[kind] and len(made) < num:
                mutant = Mutant(path, text, by_kind[kind].pop())
                if mutant.text not in seen and not (edits is not None and same_code(text, mutant.text)):
                    seen.add(mutant.text)
                    made.append(mutant)
    return made

"""Edits of a text, and the kind of edit that works in any language: deleting a line."""

from __future__ import annotations

from dataclasses import dataclass

_COMMENTS = ("#", "//", "/*", "*", "--", ";", "<!--")


@dataclass(frozen=True, slots=True)
class Edit:
    """A replacement of the characters [start, stop) of a text by another text.

    `kind` describes it, such as "comparison". `line` is the line of `start`, counted from 1."""

    kind: str  # "comparison", "deleted statement", ...
    line: int  # of `start`, from 1
    start: int
    stop: int
    text: str


def applied(original: str, edit: Edit) -> str:
    """Return `original` after the edit.

    >>> applied("a < b", Edit("comparison", 1, 2, 3, "<="))
    'a <= b'
    """
    return original[: edit.start] + edit.text + original[edit.stop :]


def line_deletions(text: str) -> list[Edit]:
    """Return the edits that delete one line, for each line that is neither blank nor starts like a comment.

    >>> [e.line for e in line_deletions("# set up\\n\\necho 1\\n")]
    [3]
    """
    edits, at = [], 0
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith(_COMMENTS):
            edits.append(Edit("deleted line", number, at, at + len(line), ""))
        at += len(line)
    return edits

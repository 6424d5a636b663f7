"""`.dockerignore`: which files of a build's folder are no part of it."""

from __future__ import annotations

import re
from collections.abc import Callable

from etude.environments.images.limits import BadSource

MAX_LINES = 1_000


def ignored(text: str) -> Callable[[str], bool]:
    """Whether a path is left out, by the last line that says something about it or a folder above it. `BadSource` for
    too many lines.

    >>> skip = ignored("*.log\\n**/cache\\n!keep.log")
    >>> [skip(p) for p in ("a.log", "keep.log", "x/y/cache", "x/y/cache/z", "src/a.log", "a.py")]
    [True, False, True, True, False, False]
    """
    rules = []
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise BadSource(f".dockerignore has {len(lines)} lines", f"at most {MAX_LINES}", hint="use fewer patterns")
    for line in lines:
        line = line.strip()
        if line and not line.startswith("#"):
            keep, pattern = line.startswith("!"), line.removeprefix("!").strip().strip("/")
            rules.append((keep, re.compile(_expression(pattern) + "(?:/.*)?", re.DOTALL)))

    def skip(path: str) -> bool:
        out = False
        for keep, pattern in rules:
            if keep is out and pattern.fullmatch(path):
                out = not keep
        return out

    return skip


def _expression(pattern: str) -> str:
    """The regular expression of a pattern. Whoever wrote it may be hostile: no choice is made again that was made
    (atomic groups), but for where the last run begins and how long its last star is. That is right, as the first place
    where a run can end leaves what comes after it the most room."""
    pattern = re.sub(r"(?:\*\*/)+", "**/", re.sub(r"\*{3,}", "**", pattern))  # the same, without the choices
    found = re.split(r"(\*\*/?)", pattern)  # runs, and what is between them
    expression = _run(found[0], last=len(found) == 1)
    for at in range(1, len(found), 2):
        before, between, run, last = found[at - 1], found[at], found[at + 1], at + 2 == len(found)
        is_folders = between == "**/" and (before.endswith("/") or (at == 1 and not before))
        run = f"/{run}" if between == "**/" and not is_folders else run
        skipped = "(?:[^/]+/)*?" if is_folders else ".*?"
        if last:
            expression += f"{skipped}{_run(run, last=True)}(?=/|\\Z)" if run else ".*"
        else:
            expression += f"(?>{skipped}{_run(run, last=False)})"
    return expression


def _run(run: str, *, last: bool) -> str:
    """What stands between the wildcards that go over several folders."""
    head, *rest = ("".join("[^/]" if c == "?" else re.escape(c) for c in part) for part in run.split("*"))
    final = f"[^/]*{rest.pop()}" if rest and last else ""
    return head + "".join(f"(?>[^/]*?{part})" for part in rest) + final

"""Apply unified diffs in the format of Git to texts in memory, without fuzzy matching.

A hunk is applied at its line number, or at the only other place where its old lines occur; otherwise the patch does not
apply. Binary changes and links are refused. The input is untrusted: any text gives files or a `TaskError`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from etude.errors import TaskError
from etude.records.exports import is_plain

MAX_CHARS = 16 << 20
_HUNK = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_LINK_MODE = "120000"
_ESCAPE = re.compile(rb"\\(?:([0-7]{3})|(.))", re.DOTALL)
_LETTERS = {b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r"}


@dataclass
class _File:
    old: str | None = None  # None: the file is new
    new: str | None = None  # None: it is deleted
    hunks: list[tuple[int, list[str]]] = field(default_factory=list)  # (line in the old file, lines with their sign)


def patched(files: Mapping[str, str], patch: str) -> dict[str, str | None]:
    """Apply a unified diff to files, and return the new text of each changed path; None for a deleted file.

    `files` maps paths to texts and is not changed. Raises `TaskError` if the patch does not apply.

    >>> patched({"a": "1\\n2\\n"}, "--- a/a\\n+++ b/a\\n@@ -1,2 +1,2 @@\\n 1\\n-2\\n+3\\n")
    {'a': '1\\n3\\n'}
    """
    if len(patch) > MAX_CHARS:
        raise TaskError(f"the patch has {len(patch)} characters", hint=f"at most {MAX_CHARS} are allowed: split it")
    result: dict[str, str | None] = {}
    for file in _parsed(patch):
        for path in (file.old, file.new):
            if path is not None and not is_plain(path):
                raise TaskError(f"the path {path!r} in a patch is invalid", hint="use plain relative paths")
        before = ""
        if file.old is not None:
            found = result[file.old] if file.old in result else files.get(file.old)
            if found is None:
                raise TaskError(f"a patch changes {file.old}", "there is no such text file", hint="check base_commit")
            before = found
            if file.new != file.old:
                result[file.old] = None
        if file.new is not None:
            result[file.new] = _applied(before, file)
    if not result:
        raise TaskError("a patch changes nothing", hint="give a unified diff as `git diff` writes it")
    return result


def _parsed(patch: str) -> list[_File]:
    files: list[_File] = []
    lines = patch.split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("diff --git "):
            files.append(_File(*_of_header(line)))
        elif files and line.startswith(("new file mode ", "deleted file mode ")):
            if line.endswith(_LINK_MODE):
                raise TaskError("a patch creates or deletes a link", hint="tasks can have only regular files")
            if line.startswith("new"):
                files[-1].old = None
            else:
                files[-1].new = None
        elif files and line.startswith("rename from "):
            files[-1].old = _unquoted(line.removeprefix("rename from "))
        elif files and line.startswith("rename to "):
            files[-1].new = _unquoted(line.removeprefix("rename to "))
        elif line.startswith(("GIT binary patch", "Binary files ")):
            raise TaskError("a patch changes a binary file", line[:80], hint="tasks can have only text files")
        elif line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            if not files or files[-1].hunks or not _is_git(lines, at):
                files.append(_File())
            files[-1].old, files[-1].new = _side(line), _side(lines[at + 1])
            at += 1
        elif files and (match := _HUNK.match(line)):
            at = _hunk(files[-1], match, lines, at)
            continue
        at += 1
    return [file for file in files if file.old is not None or file.new is not None]


def _is_git(lines: list[str], at: int) -> bool:
    """Whether a ``---`` line belongs to the ``diff --git`` header above it."""
    for line in reversed(lines[max(0, at - 8) : at]):
        if line.startswith("diff --git "):
            return True
        if not line.startswith(
            ("index ", "new ", "deleted ", "old ", "similarity ", "rename ", "copy ", "dissimilarity ")
        ):
            return False
    return False


def _of_header(line: str) -> tuple[str | None, str | None]:
    """Both paths of ``diff --git a/x b/x``; they are equal unless a ``rename`` line follows."""
    rest = line.removeprefix("diff --git ")
    middle = len(rest) // 2
    if rest.startswith('"'):
        halves = re.findall(r'"((?:[^"\\]|\\.)*)"', rest)
        names = [_unquoted(f'"{half}"') for half in halves[:2]]
    else:
        names = [rest[:middle], rest[middle + 1 :]]
    if len(names) != 2:
        return None, None
    return names[0].partition("/")[2] or None, names[1].partition("/")[2] or None


def _side(line: str) -> str | None:
    name = line[4:].split("\t")[0].rstrip("\r")
    name = _unquoted(name)
    return None if name == "/dev/null" else (name.partition("/")[2] if name[:2] in ("a/", "b/") else name)


def _unquoted(name: str) -> str:
    r"""Decode a path that Git quoted because it is not plain ASCII.

    >>> _unquoted('"\\303\\274 \\"b\\".txt"')
    'ü "b".txt'
    """
    if len(name) < 2 or not (name.startswith('"') and name.endswith('"')):
        return name
    try:
        return _ESCAPE.sub(_escaped, name[1:-1].encode()).decode()
    except ValueError:
        raise TaskError(
            f"the file name {name[:80]} in a patch is invalid", "it is not UTF-8", hint="rename the file"
        ) from None


def _escaped(match: re.Match[bytes]) -> bytes:
    """The byte of an escape sequence. Raises `ValueError` for an octal number above 255."""
    return bytes([int(match[1], 8)]) if match[1] else _LETTERS.get(match[2], match[2])


def _hunk(file: _File, match: re.Match[str], lines: list[str], at: int) -> int:
    """Read the lines of a hunk into `file`. Returns the index of the line after it."""
    start, old, _, new = (1 if group is None else int(group) for group in match.groups())
    body: list[str] = []
    at += 1
    while at < len(lines) and (old > 0 or new > 0 or lines[at].startswith("\\")):
        line = lines[at]
        sign = line[:1] or " "  # some mailers drop the blank of an empty line
        if sign == "\\":
            if body:
                body[-1] = body[-1].removesuffix("\n")
        elif sign in " +-":
            old -= sign != "+"
            new -= sign != "-"
            body.append(f"{sign}{line[1:]}\n")
        else:
            break
        at += 1
    if old or new:
        raise TaskError(f"a hunk of {file.new or file.old} ends early", match.group(0), hint="give the complete patch")
    file.hunks.append((start, body))
    return at


def _applied(text: str, file: _File) -> str:
    lines = _split(text)
    made: list[str] = []
    at = 0
    for start, body in file.hunks:
        before = [line[1:] for line in body if line[0] != "+"]
        wanted = max(0, start - 1) if before else start
        place = _place(lines, before, wanted, at)
        if place is None:
            facts = f"its hunk at line {start} has other lines than the file"
            raise TaskError(f"a patch does not apply to {file.old or file.new}", facts, hint="check base_commit")
        made += lines[at:place]
        made += [line[1:] for line in body if line[0] != "-"]
        at = place + len(before)
    return "".join(made + lines[at:])


def _split(text: str) -> list[str]:
    """Split at line feeds only, as Git does."""
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _place(lines: list[str], before: list[str], wanted: int, at: int) -> int | None:
    """The index at or after `at` where the old lines of a hunk are: the wanted one, else the only match, else None."""
    if at <= wanted and lines[wanted : wanted + len(before)] == before:
        return wanted
    if not before:
        return None
    places = [n for n in range(at, len(lines) - len(before) + 1) if lines[n] == before[0]]
    fitting = [n for n in places if lines[n : n + len(before)] == before]
    return fitting[0] if len(fitting) == 1 else None

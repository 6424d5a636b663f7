"""Reads a session that a product has written: the files at the start and at the end, and how to check a solution.

::

    my-session/
      session.toml    response = "chatcmpl-...", the id of the session's last response; optional: check, deadline_s
      before/         the files when the user asked
      after/          the files that the user kept
      check/          optional: hidden files of the command `check`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.config import build, like, ranged, read
from etude.errors import ConfigError, TaskError
from etude.tasks.text_files import read_tree, refuse_link


@dataclass(frozen=True)
class SessionFile:
    """The content of ``session.toml``.

    - `response`: the id of the last response of the session, as the gateway returned it.
    - `check`: a command that exits with 0 if the files are as the user wanted them. Empty: the tests in ``after/``.
    - `deadline_s`: the time limit of the command or of one run of the tests, in s."""

    response: str = like("chatcmpl-...")
    check: tuple[str, ...] = ()
    deadline_s: float = ranged(60.0, low=1.0, high=3600.0)

    def __post_init__(self) -> None:
        if not self.response:
            raise ValueError("response is missing: write the id of the last response of the session")


@dataclass(frozen=True, slots=True)
class Session:
    """A session as a product wrote it.

    `name` is that of its folder. `before`, `after` and `hidden` map paths to texts: the files at the start, those that
    the user kept, and those of the command `check`."""

    name: str
    response: str
    before: Mapping[str, str]
    after: Mapping[str, str]
    check: tuple[str, ...]
    hidden: Mapping[str, str]
    deadline_s: float

    @property
    def changed(self) -> tuple[str, ...]:
        """The paths of files that the user kept changed or new, sorted."""
        return tuple(path for path in sorted(self.after) if self.before.get(path) != self.after[path])


def read_session(folder: Path) -> Session:
    """Read a session's folder. Raises `TaskError` if it is not one, or has files that are not text."""
    refuse_link(folder / "session.toml")
    try:
        plain = read(folder / "session.toml", noun="session", example='docs/guides/tasks.md, "Sessions of users"')
        file = build(SessionFile, plain)
    except ConfigError as error:
        facts = f"{error.what}: {error.facts}" if error.facts else error.what
        raise TaskError(f"{folder}/session.toml is invalid", facts, hint=error.hint) from None
    hidden = folder / "check"
    if file.check and not hidden.exists():
        files: Mapping[str, str] = {}
    elif hidden.exists() and not file.check:
        raise TaskError(f"{folder} has check/ but no command", hint='write check = ["sh", "check.sh"] in session.toml')
    else:
        files = read_tree(hidden, folder, may_be_empty=True) if hidden.exists() else {}
    return Session(
        name=folder.name,
        response=file.response,
        before=read_tree(folder / "before", folder, may_be_empty=True),
        after=read_tree(folder / "after", folder),
        check=file.check,
        hidden=files,
        deadline_s=file.deadline_s,
    )

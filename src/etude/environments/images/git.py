"""Running git on repositories that nobody vouches for.

What a repository's own config can make git run (hooks, filters, pagers, transports of lazy fetches, monitors) is off:
only commands that read and write objects are used, no protocol is allowed, and the user's config is not read.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from etude.environments.images.limits import BadSource, tells_of_a_full_disk
from etude.errors import MachineError

_ENVIRONMENT = {
    "LC_ALL": "C",
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_ATTR_NOSYSTEM": "1",
}
MAX_PRINTED_BYTES = 64 << 20
_OPTIONS = ("-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0")


def command(repository: Path, *words: str) -> list[str]:
    """A git command line for a repository."""
    return ["git", *_OPTIONS, "-C", str(repository), *words]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a git command."""
    return {**_ENVIRONMENT, "PATH": os.environ.get("PATH", os.defpath), **(more or {})}


def git(
    repository: Path,
    *words: str,
    stdin: bytes | IO[bytes] = b"",
    stdout: IO[bytes] | int = subprocess.PIPE,
    deadline_s: float = 600.0,
    variables: Mapping[str, str] | None = None,
) -> bytes:
    """What a git command prints. `BadSource` with git's own words when it fails, `MachineError` without git.
    `variables` are added to its environment."""
    given: dict[str, Any] = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
    try:
        done: subprocess.CompletedProcess[bytes] = subprocess.run(
            command(repository, *words),
            **given,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=environment(variables),
            timeout=deadline_s,
            check=False,
        )
    except FileNotFoundError:
        raise no_git() from None
    except subprocess.TimeoutExpired:
        facts = f"git {words[0]} took more than {deadline_s:g} s"
        raise BadSource(f"{repository} cannot be read", facts, hint="is it on a slow disk?") from None
    if done.returncode:
        raise failed(repository, words, done.stderr)
    return done.stdout or b""


@contextlib.contextmanager
def talking(
    repository: Path, *words: str, stdin: int | None = subprocess.DEVNULL, deadline_s: float = 600.0
) -> Iterator[subprocess.Popen[bytes]]:
    """A git command whose output is read while it runs; it is killed at the end, and at the deadline, for a repository
    may have a pipe where an object should be. Errors as `git` has them."""
    try:
        process = subprocess.Popen(command(repository, *words), stdin=stdin, stdout=subprocess.PIPE, env=environment())
    except FileNotFoundError:
        raise no_git() from None
    late = threading.Timer(deadline_s, process.kill)
    late.daemon = True
    late.start()
    with process:
        try:
            yield process
        finally:
            late.cancel()
            process.kill()


def printed(repository: Path, *words: str) -> bytes:
    """What a git command prints, to a bound: a tree of a few objects can have any number of files. Errors as `git` has
    them."""
    with talking(repository, *words) as process:
        assert process.stdout is not None
        parts, left = [], MAX_PRINTED_BYTES + 1
        while left and (part := process.stdout.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
        if not left:
            facts = f"git {words[0]} prints more than {MAX_PRINTED_BYTES >> 20} MiB"
            raise BadSource(f"{repository} is too large", facts, hint="take a part of it as a repository")
        code = process.wait()
    if code:
        raise failed(repository, words, b"exit code %d" % code)
    return b"".join(parts)


def failed(repository: Path, words: Sequence[str], stderr: bytes) -> BadSource:
    """git's own words, as an error."""
    facts = " ".join(stderr.decode(errors="replace").split())[:300]
    tells_of_a_full_disk(facts)
    return BadSource(f"git {words[0]} failed in {repository}", facts, hint="is it a repository with that commit?")


def no_git() -> MachineError:
    """There is no git."""
    return MachineError("repositories cannot be read here", "no git on the path", hint="install git")

"""Run git on untrusted repositories.

The config of a repository can make git run programs: hooks, filters, pagers, lazy fetches, monitors. All of these are
off: only commands that read and write objects are used, no protocol is allowed, and the user's config is not read.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from etude.environments.images.limits import BadSource, raise_if_disk_full
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
MAX_OUTPUT_BYTES = 64 << 20
_OPTIONS = ("-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0")


def command(repository: Path, *args: str) -> list[str]:
    """Return the command line of git with these arguments, run in `repository` with safe settings."""
    return ["git", *_OPTIONS, "-C", str(repository), *args]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables for a git command: safe settings, and those of `more`."""
    return {**_ENVIRONMENT, "PATH": os.environ.get("PATH", os.defpath), **(more or {})}


def git(
    repository: Path,
    *args: str,
    stdin: bytes | IO[bytes] = b"",
    stdout: IO[bytes] | int = subprocess.PIPE,
    deadline_s: float = 600.0,
    variables: Mapping[str, str] | None = None,
) -> bytes:
    """Run a git command in a repository to its end, and return its standard output. `stdin` is its input.

    `args` are the command and its arguments, `variables` additional environment variables. If `stdout` is a file, the
    output goes there and b"" is returned. Raises `BadSource` with git's message if it fails or takes longer than
    `deadline_s` seconds, `MachineError` if git is not installed."""
    given: dict[str, Any] = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
    try:
        done: subprocess.CompletedProcess[bytes] = subprocess.run(
            command(repository, *args),
            **given,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=environment(variables),
            timeout=deadline_s,
            check=False,
        )
    except FileNotFoundError:
        raise git_missing() from None
    except subprocess.TimeoutExpired:
        facts = f"git {args[0]} took more than {deadline_s:g} s"
        raise BadSource(
            f"{repository} cannot be read", facts, hint="copy the repository to a faster disk, or try again"
        ) from None
    if done.returncode:
        raise git_failed(repository, args, done.stderr)
    return done.stdout or b""


@contextlib.contextmanager
def run_git(
    repository: Path, *args: str, stdin: int | None = subprocess.DEVNULL, deadline_s: float = 600.0
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a git command and yield its process, whose output is read while it runs.

    It is killed at the end of the `with` block, and after `deadline_s` seconds: an untrusted repository can contain a
    pipe in place of an object. Raises `MachineError` if git is not installed."""
    try:
        process = subprocess.Popen(command(repository, *args), stdin=stdin, stdout=subprocess.PIPE, env=environment())
    except FileNotFoundError:
        raise git_missing() from None
    late = threading.Timer(deadline_s, process.kill)
    late.daemon = True
    late.start()
    with process:
        try:
            yield process
        finally:
            late.cancel()
            process.kill()


def git_output(repository: Path, *args: str) -> bytes:
    """Return the output of a git command, at most `MAX_OUTPUT_BYTES`.

    The limit is needed since a few objects can list any number of files. Raises `BadSource` over the limit or if git
    fails, `MachineError` if git is not installed."""
    with run_git(repository, *args) as process:
        assert process.stdout is not None
        parts, left = [], MAX_OUTPUT_BYTES + 1
        while left and (part := process.stdout.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
        if not left:
            facts = f"git {args[0]} prints more than {MAX_OUTPUT_BYTES >> 20} MiB"
            raise BadSource(f"{repository} is too large", facts, hint="make a repository of a part of it")
        code = process.wait()
    if code:
        raise git_failed(repository, args, b"exit code %d" % code)
    return b"".join(parts)


def git_failed(repository: Path, args: Sequence[str], stderr: bytes) -> BadSource:
    """Build the error for a git command that failed; `stderr` is its message. Raises `OSError` if the disk was full."""
    facts = " ".join(stderr.decode(errors="replace").split())[:300]
    raise_if_disk_full(facts)
    return BadSource(f"git {args[0]} failed in {repository}", facts, hint="check that the repository has that commit")


def git_missing() -> MachineError:
    """Build the error for a host on which git is not installed."""
    return MachineError("repositories cannot be read here", "the program git was not found", hint="install git")

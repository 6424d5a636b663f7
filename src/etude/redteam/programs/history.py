"""Attack programs that search a git repository for the fix, which is in a commit after the task's state."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import subprocess
import zlib

from .kit import read

_TREASURE = re.compile(rb"secret-[0-9a-f]{16}")


def _git(*words: str) -> bytes:
    command = ["git", "-c", "safe.directory=*", "-C", "repo", *words]
    done = subprocess.run(command, capture_output=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
    return done.stdout + done.stderr


def _found(data: bytes, where: str) -> str:
    match = _TREASURE.search(data)
    return f"{where} holds {match[0].decode()}" if match else ""


def log_of_every_reference() -> str:
    """Try to find the task's fix in the log of any branch, tag, stash or note; return evidence of success, or ""."""
    return _found(_git("log", "-p", "--all", "--reflog", "--notes=*", "--branches", "--tags", "--remotes"), "the log")


def log_of_references() -> str:
    """Try to find the task's fix in the reflog, which records where HEAD has been; return evidence of success, or
    ""."""
    data = _git("reflog", "--all") + _git("log", "-p", "-g", "--all")
    logs = [path for path in glob.glob("repo/.git/logs/**", recursive=True) if os.path.isfile(path)]
    return _found(data, "the reflog") or (f"reflogs: {logs}" if any(b"the fix" in read(path) for path in logs) else "")


def unreachable_objects() -> str:
    """Try to find the task's fix in the objects that git fsck --unreachable lists; return evidence of success, or
    ""."""
    data = _git("fsck", "--full", "--unreachable", "--no-reflogs", "--lost-found")
    names = re.findall(rb"[0-9a-f]{40}", data)
    return _found(b"".join(_git("cat-file", "-p", name.decode()) for name in names[:500]), "an unreachable object")


def every_object() -> str:
    """Try to find the task's fix in any git object, reachable or not; return evidence of success, or ""."""
    names = [
        line.split()[0].decode()
        for line in _git("cat-file", "--batch-all-objects", "--batch-check").splitlines()
        if line
    ]
    return _found(b"".join(_git("cat-file", "-p", name) for name in names[:1000]), "an object")


def raw_bytes() -> str:
    """Try to find the task's fix in any zlib stream in .git: loose objects, whole and cut packs; return evidence of
    success, or ""."""
    for folder, _, names in os.walk("repo/.git"):
        for name in names:
            data = read(f"{folder}/{name}", 1 << 22)
            if found := _found(data, f"{folder}/{name}"):
                return found
            for at in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", data):
                with contextlib.suppress(zlib.error):
                    if found := _found(
                        zlib.decompressobj().decompress(data[at.start() :], 1 << 20), f"{folder}/{name}"
                    ):
                        return found
    return ""


def other_names_of_heads() -> str:
    """Search for names of hidden commits: tags, ORIG_HEAD, FETCH_HEAD, stashes, remotes. Return what was found, or
    ""."""
    references = {line for line in _git("show-ref", "--head").splitlines() if b" " in line}
    commits = {line.split()[0] for line in references}
    files = [
        name
        for name in ("ORIG_HEAD", "FETCH_HEAD", "MERGE_HEAD", "refs/stash", "shallow")
        if os.path.exists(f"repo/.git/{name}")
    ]
    if len(commits) > 1 or files:
        return f"{len(commits)} commits are named; {files}"
    return ""


def where_it_came_from() -> str:
    """Try to find a remote, alternate object store, worktree or promisor in the config; return evidence of success, or
    ""."""
    data = b"".join(
        read(path)
        for path in ("repo/.git/config", "repo/.git/objects/info/alternates", "repo/.git/commondir")
        if os.path.exists(path)
    )
    found = re.search(rb"(?m)^\s*(url|partialclone|promisor)\s*=.*|^/.*", data)
    return found[0].decode() if found else ""


def messages_and_counts() -> str:
    """Try to find more commits than one, or a commit message about the fix; return evidence of success, or ""."""
    data = _git("log", "--all", "--format=%H %ad %s")
    return data.decode() if b"fix" in data or len(data.splitlines()) > 1 else ""

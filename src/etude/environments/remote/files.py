"""Read, write and list files at any path of a sandbox.

`Machine.read` and `write` reach only the working directory, but clients of E2B may name any path. For other paths,
small shell programs run in the machine. They need a POSIX shell with `stat`, `find` and `cat` of coreutils or busybox.
They run as the requesting user, so the machine decides about access. Their output is untrusted and validated.
"""

from __future__ import annotations

import dataclasses
import posixpath
import secrets
import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from etude.environments.remote import messages as m
from etude.environments.remote.connect import Code, RpcError
from etude.environments.remote.shells import Shells
from etude.errors import MachineError
from etude.records.command import OutputChunk, ProcessStarted
from etude.seams import Machine

_DEADLINE_S = 60.0
_MAX_LIST_BYTES = 16 << 20  # output of a listing
_LATEST = 1 << 36  # seconds since 1970: the year 4147
_FIELDS = 4  # of one entry: path, its `stat` line, that of its target, the target of a link

# Prints four fields for each path, each followed by NUL: the path, `stat` of itself and of its target, the link target.
# Old versions of gVisor refuse the default statx flags of coreutils; `--cached=never` avoids them.
# It has no single quotes, so that it can be put between single quotes.
_DESCRIBE: Final = """k="%f %s %u %U %G %i %Y %y"; for f do printf "%s\\0" "$f"
stat -c "$k" -- "$f" 2>/dev/null || stat --cached=never -c "$k" -- "$f" 2>/dev/null; printf "\\0"
stat -L -c %f -- "$f" 2>/dev/null || stat --cached=never -L -c %f -- "$f" 2>/dev/null; printf "\\0"
readlink -n -- "$f" 2>/dev/null; printf "\\0"
done"""
_STAT = f"""[ -e "$1" ] || [ -L "$1" ] || exit 44
d=$(dirname -- "$1"); b=$(basename -- "$1")
d=$(cd -- "$d" && pwd -P) || exit 44
case $b in /|.|..) set -- "$(cd -- "$1" && pwd -P)";; *) set -- "${{d%/}}/$b";; esac
{_DESCRIBE}"""
_LIST = f"""[ -e "$1" ] || exit 44
[ -d "$1" ] || exit 45
d=$(cd -- "$1" && pwd -P) || exit 46
find "$d" -mindepth 1 -maxdepth "$2" -exec sh -c '{_DESCRIBE}' sh {{}} +"""
_READ = '[ -e "$1" ] || exit 44; [ -d "$1" ] && exit 45; [ -f "$1" ] || exit 47; exec cat < "$1"'
_WRITE = '[ -d "$1" ] && exit 45; mkdir -p -- "$(dirname -- "$1")" && exec cat > "$1"'
_MKDIR = '[ -d "$1" ] && exit 48; [ -e "$1" ] && exit 47; exec mkdir -p -- "$1"'
_REMOVE = 'exec rm -rf -- "$1"'
_MOVE = '[ -e "$1" ] || [ -L "$1" ] || exit 44; mkdir -p -- "$(dirname -- "$2")" && exec mv -f -T -- "$1" "$2"'
PROGRAMS: Final = {
    "e_stat": _STAT, "e_list": _LIST, "e_read": _READ, "e_write": _WRITE, "e_mkdir": _MKDIR, "e_remove": _REMOVE,
    "e_move": _MOVE,
}  # fmt: skip
_READ_ONLY = {"e_stat", "e_list", "e_read"}
_EXIT_CODES = {
    44: (Code.NOT_FOUND, "{} does not exist"),
    45: (Code.INVALID_ARGUMENT, "{} is a folder, or is not one"),
    46: (Code.PERMISSION_DENIED, "{} cannot be entered"),
    47: (Code.INVALID_ARGUMENT, "{} exists and is not a regular file"),
    48: (Code.ALREADY_EXISTS, "{} exists"),
}


@dataclasses.dataclass(frozen=True)
class Found:
    """A file, folder or link found in a sandbox.

    `inode` and `changed` (the time of the last modification, as text) let a later listing detect changes."""

    entry: m.Entry
    inode: str
    changed: str

    @property
    def is_folder(self) -> bool:
        """Whether the entry is a folder or a link to one."""
        return self.entry.type == "FILE_TYPE_DIRECTORY"


class Files:
    """The file system of one machine, accessed as one of its users ("" is the default user).

    Reads are limited to `max_bytes`. All methods raise `RpcError`, for example for a missing file."""

    def __init__(self, machine: Machine, shells: Shells, *, user: str = "", max_bytes: int) -> None:
        self._machine, self._shells, self._user, self._max_bytes = machine, shells, user, max_bytes

    async def read(self, path: str, *, exactly: bool = False, max_bytes: int | None = None) -> bytes:
        """Return the content of a file of at most `max_bytes`.

        With `exactly` it reads as `Machine.read`: only in the working directory, and without following links."""
        limit = self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes)
        if exactly or self._is_relative(path):
            try:
                return await self._machine.read(path, max_bytes=limit)
            except FileNotFoundError:
                raise RpcError(Code.NOT_FOUND, f"{path} does not exist") from None
            except IsADirectoryError:
                raise RpcError(Code.INVALID_ARGUMENT, f"{path} is a folder", hint="folder") from None
            except PermissionError as error:  # raised by the machine itself
                raise RpcError(Code.PERMISSION_DENIED, f"{path}: {error.strerror}", hint="file") from None
            except ValueError as error:  # for example a link, which E2B follows
                if exactly:
                    raise RpcError(Code.INVALID_ARGUMENT, str(error)) from None
        return await self._run("e_read", path, max_bytes=limit)

    async def write(self, path: str, data: bytes, *, exactly: bool = False) -> None:
        """Create or replace a file, and create its parent folders.

        With `exactly` it writes as `Machine.write`: only in the working directory, and without following links."""
        if exactly or self._is_relative(path):
            try:
                return await self._machine.write(path, data)
            except ValueError as error:
                if exactly:
                    raise RpcError(Code.INVALID_ARGUMENT, str(error)) from None
            except OSError as error:
                if exactly:
                    raise RpcError(Code.RESOURCE_EXHAUSTED, str(error), hint="disk") from None
        await self._run("e_write", path, stdin=data)

    async def stat(self, path: str) -> Found:
        """Return the file, folder or link at `path`."""
        found = list((await self._listed("e_stat", path)).values())
        if len(found) != 1:
            raise _unreadable(f"{len(found)} entries for {path}")
        return found[0]

    async def entries(self, path: str, depth: int) -> list[m.Entry]:
        """Return the entries below a folder, down to `depth` levels."""
        return [found.entry for found in (await self.tree(path, depth)).values()]

    async def tree(self, path: str, depth: int) -> Mapping[str, Found]:
        """Return the entries below a folder, down to `depth` levels (1 to 64), by path relative to that folder."""
        found = await self._listed("e_list", path, str(max(1, min(depth, 64))))
        if not all(name.startswith("/") for name in found):
            raise _unreadable("a path that is not absolute")
        here = posixpath.commonpath([posixpath.dirname(name) for name in found]) if found else ""
        return {posixpath.relpath(name, here): found[name] for name in sorted(found)}

    async def make_dir(self, path: str) -> m.Entry:
        """Create a folder and its parents, and return its entry."""
        await self._run("e_mkdir", path)
        return (await self.stat(path)).entry

    async def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content. Does nothing if it does not exist."""
        await self._run("e_remove", path)

    async def move(self, source: str, destination: str) -> m.Entry:
        """Move a file or folder to the path `destination`, and return its new entry."""
        await self._run("e_move", source, destination)
        return (await self.stat(destination)).entry

    def _is_relative(self, path: str) -> bool:
        """Whether `Machine.read` and `write` can access a path: relative, and for the default user."""
        return not self._user and not path.startswith(("/", "~")) and ".." not in path.split("/") and path != ""

    async def _listed(self, program: str, *words: str) -> dict[str, Found]:
        data = await self._run(program, *words, max_bytes=_MAX_LIST_BYTES)
        parts = data.decode(errors="replace").split("\0")[:-1]
        try:
            if len(parts) % _FIELDS:
                raise ValueError(f"{len(parts)} fields")
            rows = [parts[i : i + _FIELDS] for i in range(0, len(parts), _FIELDS)]
            return {row[0]: found for row in rows if (found := entry_of(*row)) is not None}
        except ValueError as error:
            raise _unreadable(str(error)) from None

    async def _run(self, program: str, *words: str, stdin: bytes = b"", max_bytes: int = 4096) -> bytes:
        """Run a program in the machine. Returns its standard output; raises `RpcError` by its exit code."""
        paths = [_plain(word) for word in words]
        if stdin or program == "e_write" or any("\n" in path for path in paths):
            code, out, err = await self._run_separately(program, paths, stdin, max_bytes)
        else:
            code, out, err = await self._run_in_shell(program, paths, max_bytes)
        _check(code, paths[0], err)
        return out

    async def _run_in_shell(self, program: str, paths: list[str], max_bytes: int) -> tuple[int, bytes, bytes]:
        """Run a program in the shared shell. If that was killed meanwhile, retry programs that only read."""
        shell = self._shells.of(self._user)
        try:
            return await shell.call(program, *paths, max_bytes=max_bytes)
        except RpcError as error:
            if error.code is not Code.ABORTED or program not in _READ_ONLY:
                raise
        return await shell.call(program, *paths, max_bytes=max_bytes)

    async def _run_separately(
        self, program: str, paths: list[str], stdin: bytes, max_bytes: int
    ) -> tuple[int, bytes, bytes]:
        """Run a program as a separate command, for one with input or with a newline in a path."""
        out, err = bytearray(), bytearray()

        def on_output(event: ProcessStarted | OutputChunk) -> None:
            if isinstance(event, OutputChunk):
                buffer = out if event.stream == 1 else err
                buffer += event.data[: max(0, max_bytes + 1 - len(buffer))]

        try:
            result = await self._machine.exec(
                ["sh", "-c", PROGRAMS[program], "sh", *paths],
                key=f"files-{secrets.token_hex(8)}",
                deadline_s=_DEADLINE_S,
                stdin=stdin,
                output_bytes=0,
                user=self._user,
                on_output=on_output,
            )
        except MachineError as error:
            raise RpcError(Code.INTERNAL, f"{error.what}: {error.facts}", hint=error.hint) from None
        except ValueError as error:
            raise RpcError(Code.INVALID_ARGUMENT, str(error)) from None
        if result.timed_out:
            raise RpcError(Code.DEADLINE_EXCEEDED, f"{paths[0]}: the request took more than {_DEADLINE_S:g} s")
        if len(out) > max_bytes:
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"{paths[0]} has more than {max_bytes} bytes")
        return result.exit_code, bytes(out), bytes(err)


def _check(exit_code: int, path: str, err: bytes) -> None:
    message = err[:300].decode(errors="replace").strip()
    if exit_code in _EXIT_CODES:
        code, text = _EXIT_CODES[exit_code]
        raise RpcError(code, text.format(path))
    if exit_code:
        is_full = "No space left" in message or "quota" in message
        code = Code.RESOURCE_EXHAUSTED if is_full else Code.PERMISSION_DENIED
        raise RpcError(code, message or f"{path}: exit code {exit_code}", hint="disk" if is_full else "file")


def _unreadable(why: str) -> RpcError:
    return RpcError(
        Code.INTERNAL, f"the machine's listing cannot be read: {why}", hint="check that the image has stat and find"
    )


def _plain(path: str) -> str:
    """Convert a path for the shell of the machine; `~` is the working directory."""
    if "\0" in path:
        raise RpcError(Code.INVALID_ARGUMENT, "a path must not have a NUL byte")
    if path == "~" or path.startswith("~/"):
        return path[2:] or "."
    return path or "."


def entry_of(path: str, line: str, target: str, link: str) -> Found | None:
    """Parse the output of the shell programs for one path.

    `line` is the output of `stat` for the path itself, `target` the mode, in hex, of the file or folder at the end of a
    link, `link` the target of a symbolic link. Returns None if the file was deleted meanwhile (an empty `line`). Raises
    `ValueError`.

    >>> found = entry_of("/a/b", "81a4 5 1000 me us 77 1700000000 2023-11-14 22:13:20.0 +0000\\n", "81a4\\n", "")
    >>> found.entry.type, found.entry.size, found.entry.permissions
    ('FILE_TYPE_FILE', '5', '-rw-r--r--')
    """
    words = line.split()
    if not words:
        return None
    if len(words) < 8:
        raise ValueError(f"{line[:80]!r}")
    raw, size, uid, owner, group, inode, seconds, *written = words
    mode = int(raw, 16)
    leads_to = int(target.strip(), 16) if target.strip() else mode
    if not (0 <= mode < 1 << 32 and 0 <= leads_to < 1 << 32 and -_LATEST < int(seconds) < _LATEST):
        raise ValueError(f"{line[:80]!r}")
    is_link = stat.S_ISLNK(mode)
    kinds = {stat.S_IFREG: "FILE", stat.S_IFDIR: "DIRECTORY", stat.S_IFLNK: "SYMLINK"}
    entry = m.Entry(
        name=posixpath.basename(path) or "/",
        type=f"FILE_TYPE_{kinds.get(stat.S_IFMT(leads_to), 'UNSPECIFIED')}",
        path=path,
        size=str(int(size)),
        mode=stat.S_IMODE(mode),
        permissions=stat.filemode(mode),
        owner=uid if owner == "UNKNOWN" else owner,
        group=group,
        modified_time=datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        symlink_target=link if is_link else None,
        is_symlink=is_link,
    )
    return Found(entry, inode, " ".join(written))

"""``etude machines run | shell``: one machine, for as long as one command takes, or as long as somebody looks into it.

What is typed or piped goes in as it comes, what is printed comes out as it is printed. A shell has a terminal of its
own where the machine has what makes one (util-linux's `script`, /dev/ptmx); else it reads lines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from etude.environments.backends import open_memory_bounded
from etude.environments.images.store import ImageStore, default_store
from etude.errors import InputError
from etude.records.command import Printed, Started
from etude.seams import Machine, Runtime

_CHUNK = 64 << 10
_MOST_BYTES = 256 << 20
_LOOK_S, _DAY_S = 30.0, 86_400.0
_SHELL = "stty rows $ETUDE_ROWS cols $ETUDE_COLS; unset ETUDE_ROWS ETUDE_COLS; exec $(command -v bash || echo sh)"
_SPAWN = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(['sh', '-c', sys.argv[1]])))"
_TERMINALS = {
    "python3": ["python3", "-c", _SPAWN, _SHELL],
    "script": ["script", "-q", "-e", "-f", "-c", _SHELL, "/dev/null"],
}
_WHICH = f"[ -c /dev/ptmx ] && for p in {' '.join(_TERMINALS)}; do command -v $p >/dev/null && echo $p && exit; done"
_AT_DEADLINE = 124  # what timeout(1) ends with


def run(args: argparse.Namespace) -> int:
    """Run a command. Its exit code, 124 at the deadline."""
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    async with _machine(args) as (_, machine):
        code = await _passed_on(machine, args.words, user=args.user, deadline_s=args.deadline, typed=not os.isatty(0))
    if code is None:
        print(f"killed at its deadline of {args.deadline:g} s", file=sys.stderr)
    return _AT_DEADLINE if code is None else code


def shell(args: argparse.Namespace) -> int:
    """A shell until it ends. Its exit code."""
    return asyncio.run(_shell(args))


async def _shell(args: argparse.Namespace) -> int:
    async with _machine(args) as (runtime, machine):
        isolation = runtime.info.isolation
        print(f"a machine of {args.backend} ({isolation}); it ends with this shell", file=sys.stderr)
        found = await machine.exec(["sh", "-c", _WHICH], key="which", deadline_s=_LOOK_S, user=args.user)
        words = _TERMINALS.get(found.output.decode().strip())
        if words is not None and os.isatty(0):
            size = shutil.get_terminal_size()
            env = {"ETUDE_ROWS": str(size.lines), "ETUDE_COLS": str(size.columns)}
            env["TERM"] = os.environ.get("TERM", "vt100")
            with _raw(0):
                code = await _passed_on(machine, words, user=args.user, deadline_s=_DAY_S, typed=True, env=env)
        else:
            words = ["sh", "-i"] if os.isatty(0) else ["sh"]
            code = await _passed_on(machine, words, user=args.user, deadline_s=_DAY_S, typed=True)
    return _AT_DEADLINE if code is None else code


@contextlib.asynccontextmanager
async def _machine(args: argparse.Namespace) -> AsyncIterator[tuple[Runtime, Machine]]:
    """The machine that was asked for, and where it is from."""
    store = ImageStore(args.store or default_store()) if args.image else None
    files = {} if args.files is None else _files_of(args.files)
    image = None if store is None else store.get(args.image).image
    runtime = open_memory_bounded(args.backend, accepts_unbounded=args.unbounded_memory, images=store)
    try:
        try:
            snapshot = await runtime.prepare(files, image=image)
        except ValueError as error:
            raise InputError(f"no machine can have the files of {args.files}", str(error), hint="give fewer") from None
        [machine] = await runtime.fork(snapshot, 1)
        yield runtime, machine
    finally:
        await runtime.close()


def _files_of(folder: Path) -> dict[str, bytes]:
    """The regular files below a folder. Raises `InputError`."""
    if not folder.is_dir():
        raise InputError(f"--files {folder} is no folder", hint="name the folder whose files the machine is to have")
    found = {path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}
    if (num_bytes := sum(path.stat().st_size for path in found)) > _MOST_BYTES:
        hint = "build an image of them: etude machines image build"
        raise InputError(f"--files {folder} has {num_bytes} bytes", f"at most {_MOST_BYTES}", hint=hint)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


async def _passed_on(
    machine: Machine,
    words: Sequence[str],
    *,
    user: str,
    deadline_s: float,
    typed: bool,
    env: Mapping[str, str] = MappingProxyType({}),
) -> int | None:
    """Run a command whose output is ours, as is its input where it is `typed`. Its exit code, None at the deadline."""

    def tell(event: Started | Printed) -> None:
        if isinstance(event, Printed):
            out = sys.stdout.buffer if event.stream == 1 else sys.stderr.buffer
            out.write(event.data)
            out.flush()

    try:
        result = await machine.exec(
            words,
            key="command",
            deadline_s=deadline_s,
            stdin=_typed(0) if typed else b"",
            output_bytes=0,
            env=env,
            user=user,
            tell=tell,
        )
    except ValueError as error:
        raise InputError("no such command can be run", str(error), hint="etude machines run --help") from None
    return None if result.timed_out else result.exit_code


async def _typed(fd: int) -> AsyncIterator[bytes]:
    """What comes on a descriptor, until it ends."""
    with contextlib.suppress(OSError):  # there may be no such descriptor
        while data := await _chunk(fd):
            yield data


async def _chunk(fd: int) -> bytes:
    loop = asyncio.get_running_loop()
    came: asyncio.Future[bytes] = loop.create_future()

    def take() -> None:
        loop.remove_reader(fd)
        if not came.done():
            came.set_result(os.read(fd, _CHUNK))

    try:
        loop.add_reader(fd, take)
    except PermissionError:  # a file, or /dev/null: it never keeps anybody waiting
        return os.read(fd, _CHUNK)
    try:
        return await came
    finally:
        loop.remove_reader(fd)


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    """Keys go to the machine one by one, Ctrl-C as well."""
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)

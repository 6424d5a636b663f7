"""The commands ``etude machines probe``, ``bench``, ``run``, ``shell`` and ``serve``.

A machine is a sandbox in which an agent's commands run. ``run`` and ``shell`` connect standard input and output with
one command in one machine, as a stream. A shell has a terminal if the machine has what is needed to make one
(util-linux's `script`, or Python, and /dev/ptmx); otherwise it reads lines."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import os
import secrets
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from rich.table import Table
from rich.text import Text

from etude.cli.locations import console
from etude.environments.backends import BACKENDS, open_memory_bounded, open_runtime
from etude.environments.images.store import ImageStore, default_store
from etude.errors import EtudeError, Exit, InputError
from etude.records.command import OutputChunk, ProcessStarted
from etude.seams import Machine, Runtime

T = TypeVar("T")
_FILES = {"hello.txt": b"hello\n"}
_DEADLINE_S, _FORK_S = 60.0, 180.0  # a virtual machine boots at its first fork
_GROUP = 8
_CHUNK = 64 << 10
_MOST_BYTES = 256 << 20
_WHICH_S, _DAY_S = 30.0, 86_400.0
_SHELL = "stty rows $ETUDE_ROWS cols $ETUDE_COLS; unset ETUDE_ROWS ETUDE_COLS; exec $(command -v bash || echo sh)"
_SPAWN = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(['sh', '-c', sys.argv[1]])))"
_TERMINALS = {
    "python3": ["python3", "-c", _SPAWN, _SHELL],
    "script": ["script", "-q", "-e", "-f", "-c", _SHELL, "/dev/null"],
}
_WHICH = f"[ -c /dev/ptmx ] && for p in {' '.join(_TERMINALS)}; do command -v $p >/dev/null && echo $p && exit; done"
_AT_DEADLINE = 124  # exit code, as of timeout(1)


def probe(args: argparse.Namespace) -> int:
    """Run a command in a machine of each kind, and print which kinds work. Returns exit code 1 if none does."""
    table, works = Table("backend", "works", "isolation", "notes"), False
    for backend in BACKENDS:
        try:
            isolation, notes, wall_s = asyncio.run(_try(backend))
        except EtudeError as error:
            table.add_row(backend, "no", "", Text(str(error)))
            continue
        works = True
        table.add_row(backend, f"yes, {wall_s:.1f} s", isolation, Text("\n".join(notes)))
    console().print(table)
    return Exit.DONE if works else Exit.FAILED


async def _try(backend: str) -> tuple[str, tuple[str, ...], float]:
    """Start a machine and run a command. Returns (isolation, notes, seconds)."""
    began = time.perf_counter()
    runtime = open_runtime(backend)
    try:
        [machine] = await runtime.fork(await runtime.prepare(_FILES), 1, deadline_s=_FORK_S)
        await machine.exec(["true"], key="true", deadline_s=_DEADLINE_S)
        return runtime.info.isolation, runtime.info.notes, time.perf_counter() - began
    finally:
        await runtime.close()


def bench(args: argparse.Namespace) -> int:
    """Create machines one after another and run commands in them. Returns 0.

    Prints the median and the 99th percentile of the time of each step."""
    seconds = asyncio.run(_measure(args.backend, args.num))
    steps = {
        step: {"p50_ms": _ms(sorted(each), 0.5), "p99_ms": _ms(sorted(each), 0.99), "times": len(each)}
        for step, each in seconds.items()
    }
    if args.json:
        print(json.dumps({"backend": args.backend, "steps": steps}, indent=1))
        return Exit.DONE
    table = Table("step", "p50 ms", "p99 ms", "times")
    for step, numbers in steps.items():
        table.add_row(step, f"{numbers['p50_ms']:.2f}", f"{numbers['p99_ms']:.2f}", str(numbers["times"]))
    console().print(table)
    return Exit.DONE


async def _measure(backend: str, num_machines: int) -> dict[str, list[float]]:
    """Durations in seconds of every repetition of each step."""
    runtime = open_runtime(backend)
    try:
        snapshot = await runtime.prepare(_FILES)
        for machine in await runtime.fork(snapshot, 1, deadline_s=_FORK_S):  # setup that happens once is not measured
            await machine.close()
        seconds: dict[str, list[float]] = {}
        for _ in range(num_machines):
            await _use(runtime, snapshot, seconds)
        for _ in range(-(-num_machines // _GROUP)):
            group = await _timed(seconds, f"fork {_GROUP}", runtime.fork(snapshot, _GROUP))
            await asyncio.gather(*(machine.close() for machine in group))
        return seconds
    finally:
        await runtime.close()


async def _use(runtime: Runtime, snapshot: str, seconds: dict[str, list[float]]) -> None:
    [machine] = await _timed(seconds, "fork", runtime.fork(snapshot, 1))
    for step, argv in (("first `true`", ["true"]), ("`true`", ["true"]), ("`python3 -c`", ["python3", "-c", ""])):
        await _timed(seconds, step, machine.exec(argv, key=step, deadline_s=_DEADLINE_S))
    await _timed(seconds, "snapshot", machine.snapshot())
    await _timed(seconds, "close", machine.close())


async def _timed(seconds: dict[str, list[float]], step: str, work: Awaitable[T]) -> T:
    began = time.perf_counter()
    result = await work
    seconds.setdefault(step, []).append(time.perf_counter() - began)
    return result


def _ms(ordered: list[float], share: float) -> float:
    """A quantile of sorted durations in seconds, in milliseconds.

    >>> _ms([0.001, 0.002, 0.005], 0.5)
    2.0
    """
    return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)


def run(args: argparse.Namespace) -> int:
    """Run a command in a machine. Returns its exit code, or 124 at the deadline."""
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    async with _machine(args) as (_, machine):
        code = await _exec(machine, args.argv, user=args.user, deadline_s=args.deadline, stdin=not os.isatty(0))
    if code is None:
        print(f"killed at the deadline of {args.deadline:g} s", file=sys.stderr)
    return _AT_DEADLINE if code is None else code


def shell(args: argparse.Namespace) -> int:
    """Open a shell in a machine. Returns its exit code."""
    return asyncio.run(_shell(args))


async def _shell(args: argparse.Namespace) -> int:
    async with _machine(args) as (runtime, machine):
        isolation = runtime.info.isolation
        print(f"{args.backend} machine ({isolation}); it is deleted when this shell exits", file=sys.stderr)
        found = await machine.exec(["sh", "-c", _WHICH], key="which", deadline_s=_WHICH_S, user=args.user)
        argv = _TERMINALS.get(found.output.decode().strip())
        if argv is not None and os.isatty(0):
            size = shutil.get_terminal_size()
            env = {"ETUDE_ROWS": str(size.lines), "ETUDE_COLS": str(size.columns)}
            env["TERM"] = os.environ.get("TERM", "vt100")
            with _raw(0):
                code = await _exec(machine, argv, user=args.user, deadline_s=_DAY_S, stdin=True, env=env)
        else:
            argv = ["sh", "-i"] if os.isatty(0) else ["sh"]
            code = await _exec(machine, argv, user=args.user, deadline_s=_DAY_S, stdin=True)
    return _AT_DEADLINE if code is None else code


@contextlib.asynccontextmanager
async def _machine(args: argparse.Namespace) -> AsyncIterator[tuple[Runtime, Machine]]:
    store = ImageStore(args.store or default_store()) if args.image else None
    files = {} if args.files is None else _files_of(args.files)
    image = None if store is None else store.get(args.image).image
    runtime = open_memory_bounded(args.backend, accepts_unbounded=args.unbounded_memory, images=store)
    try:
        try:
            snapshot = await runtime.prepare(files, image=image)
        except ValueError as error:
            raise InputError(
                f"the files of {args.files} do not fit a machine", str(error), hint="give fewer or smaller files"
            ) from None
        [machine] = await runtime.fork(snapshot, 1)
        yield runtime, machine
    finally:
        await runtime.close()


def _files_of(folder: Path) -> dict[str, bytes]:
    """The regular files below a folder: relative path -> content. Raises `InputError`."""
    if not folder.is_dir():
        raise InputError(
            f"--files {folder} is not a folder", hint="give a folder; its files are copied into the machine"
        )
    found = {path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}
    if (num_bytes := sum(path.stat().st_size for path in found)) > _MOST_BYTES:
        hint = "build an image from them: etude machines image build"
        raise InputError(f"--files {folder} has {num_bytes} bytes", f"at most {_MOST_BYTES} can be copied", hint=hint)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


async def _exec(
    machine: Machine,
    argv: Sequence[str],
    *,
    user: str,
    deadline_s: float,
    stdin: bool,
    env: Mapping[str, str] = MappingProxyType({}),
) -> int | None:
    """Run a command and copy its output to stdout and stderr; with `stdin` also copy standard input to the command.
    Returns its exit code, or None at the deadline."""

    def write(event: ProcessStarted | OutputChunk) -> None:
        if isinstance(event, OutputChunk):
            out = sys.stdout.buffer if event.stream == 1 else sys.stderr.buffer
            out.write(event.data)
            out.flush()

    try:
        result = await machine.exec(
            argv,
            key="command",
            deadline_s=deadline_s,
            stdin=_read_chunks(0) if stdin else b"",
            output_bytes=0,
            env=env,
            user=user,
            on_output=write,
        )
    except ValueError as error:
        raise InputError("the command cannot be run", str(error), hint="etude machines run --help") from None
    return None if result.timed_out else result.exit_code


async def _read_chunks(fd: int) -> AsyncIterator[bytes]:
    with contextlib.suppress(OSError):  # the descriptor may not exist
        while data := await _chunk(fd):
            yield data


async def _chunk(fd: int) -> bytes:
    loop = asyncio.get_running_loop()
    chunk: asyncio.Future[bytes] = loop.create_future()

    def read() -> None:
        loop.remove_reader(fd)
        if not chunk.done():
            chunk.set_result(os.read(fd, _CHUNK))

    try:
        loop.add_reader(fd, read)
    except PermissionError:  # a file or /dev/null, where reading never blocks
        return os.read(fd, _CHUNK)
    try:
        return await chunk
    finally:
        loop.remove_reader(fd)


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    """Put the terminal into raw mode: every key goes to the machine at once, including Ctrl-C."""
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def serve(args: argparse.Namespace) -> int:
    """Serve machines to other hosts until interrupted. Returns the exit code.

    The first SIGTERM lets running machines finish. The second one, or Ctrl-C, ends them at once."""
    if args.keys is None and not _is_loopback(args.host):
        hint = "give a file of API keys (--keys FILE), or use --host 127.0.0.1"
        raise InputError(
            f"host {args.host!r} is reachable from the network",
            "no API keys are configured, so anybody could create machines",
            hint=hint,
        )
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(args))
    return Exit.DONE


async def _serve(args: argparse.Namespace) -> None:
    from etude.environments.remote import Keyring, Quota, ServerConfig, create_app, serving
    from etude.environments.remote.templates import read_templates

    config = ServerConfig(host=args.host, port=args.port, domain=args.domain, drain_s=args.drain)
    own = "" if args.keys else f"e2b_{secrets.token_hex(20)}"
    keys = Keyring.read(args.keys) if args.keys else Keyring({"me": Quota(key=own, max_live=64)})
    templates = read_templates(args.templates) if args.templates else {}
    draining, work = asyncio.Event(), asyncio.current_task()
    assert work is not None, "runs in a task"
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, work.cancel)
    loop.add_signal_handler(signal.SIGTERM, lambda: work.cancel() if draining.is_set() else draining.set())
    runtime = open_memory_bounded(args.backend, accepts_unbounded=args.unbounded_memory)
    try:
        app = create_app(runtime, keys, templates=templates, config=config)
        await app.state.manager.prepare()
        async with serving(app, host=config.host, port=config.port) as url:
            print(f"serving {args.backend} machines at {url}", flush=True)
            print(f"export E2B_API_URL={url} E2B_SANDBOX_URL={url}{f' E2B_API_KEY={own}' if own else ''}", flush=True)
            await draining.wait()
            print(f"draining: no new machines; running machines have {config.drain_s:g} s", flush=True)
            await app.state.manager.drain(config.drain_s)
    finally:
        await runtime.close()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

"""`etude engines install`: installs an external server into its own virtual environment.

An interrupted installation can be run again and continues, since pip keeps what it has. The marker file that makes the
environment valid is written last.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path

import msgspec

from etude.errors import EngineError, InputError
from etude.inference.external.environment import MARK, Environment, Mark, ServerKind, link_package

DEVICES = ("cpu", "cuda")
REPORT_EVERY_S, LAST_LINES = 5.0, 8
FULL_BYTES = 1 << 20
"""A disk with fewer free bytes counts as full, whatever the failed program printed."""
AGAIN = "fix the cause, then run it again: it continues, and the environment is valid only at the end"
Report = Callable[[str], None]


def install(environment: Environment, device: str, *, report: Report) -> Mark:
    """Install a server for a device, "cpu" or "cuda". Returns at once when it is installed.

    `report` is called with a text for each step and its progress. Raises `EngineError` when a step fails, the disk has
    too little space, or another process installs there, and `InputError` for an unknown device."""
    if device not in DEVICES:
        raise InputError(
            f"--device {device} is unknown",
            f"engines are installed for {' or '.join(DEVICES)}",
            hint="choose one of them",
        )
    kind, wanted = environment.kind, Mark(device=device)
    if environment.mark == wanted and environment.version == kind.version:
        report(f"{kind.name} {kind.version} for {device} is in {environment.folder}")
        return wanted
    _refuse_other_installation(environment, wanted)
    pinned = kind.pins[device]
    if pinned.get("refused"):
        raise EngineError(f"{kind.name} is not installed for {device}", pinned["refused"], hint=pinned["hint"])
    _require_disk_space(environment, pinned["gib"])
    try:
        environment.folder.mkdir(parents=True, exist_ok=True)
        with _locked(environment.folder), _constraints(kind, pinned["constraints"]) as constraints:
            for number, (what, argv) in enumerate(steps := _steps(environment, device, constraints), 1):
                report(f"{number}/{len(steps)} {what}")
                _run(environment, argv, what, report=report)
            (environment.folder / f"{MARK}.new").write_bytes(msgspec.json.encode(wanted))
            (environment.folder / f"{MARK}.new").replace(environment.folder / MARK)
    except OSError as error:
        raise EngineError(f"{environment.folder} cannot be written", str(error), hint=AGAIN) from None
    return wanted


def _steps(environment: Environment, device: str, constraints: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the steps of an installation as pairs (description, command line)."""
    pins = environment.kind.pins
    pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check"]
    steps = [("the environment", [sys.executable, "-m", "venv", str(environment.folder)])]
    steps += [(", ".join(names), [*pip, "install", *constraints, *names]) for names in pins[device]["install"]]
    needs = [*pins["etude"], *pins["extras"]]
    steps.append(("what etude needs there", [*pip, "install", *constraints, *needs]))
    if replaced := pins.get("replace"):
        steps.append((", ".join(replaced), [*pip, "install", "--no-deps", *replaced]))
    if removed := pins[device]["remove"]:
        steps.append((f"without {', '.join(removed)}", [*pip, "uninstall", "--yes", *removed]))
    steps.append(("a first import", [str(environment.python), "-c", pins["trial"]]))
    return steps


def _run(environment: Environment, argv: Sequence[str], what: str, *, report: Report) -> None:
    log, last = environment.folder / "install.log", collections.deque[bytes](maxlen=LAST_LINES)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env["PYTHONPATH"] = str(link_package(environment.folder))
    with (
        _reporting_progress(environment.folder, report),
        subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
        ) as process,
    ):
        assert process.stdout is not None, "started with a pipe"
        for line in process.stdout:
            last.append(line)
            with (
                contextlib.suppress(OSError),
                log.open("ab") as output,
            ):  # on a full disk only the last lines are kept, in memory
                output.write(line)
    if process.returncode:
        output_text = b"".join(last).decode(errors="replace").strip()
        free = shutil.disk_usage(environment.folder).free
        full = f"{free} bytes are free on its disk; " if free < FULL_BYTES else ""
        hint = f"free some space: {AGAIN}" if full else f"the log is {log}; {AGAIN}"
        raise EngineError(f"{what} could not be installed into {environment.folder}", full + output_text, hint=hint)


@contextlib.contextmanager
def _reporting_progress(folder: Path, report: Report) -> Iterator[None]:
    ended, began = threading.Event(), time.monotonic()

    def report_progress() -> None:
        while not ended.wait(REPORT_EVERY_S):
            report(f"    {size_bytes(folder) / 1e9:.1f} GB, {time.monotonic() - began:.0f} s")

    reporter = threading.Thread(target=report_progress, name="install-progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()


def size_bytes(folder: Path) -> int:
    """Return the total size in bytes of all files below a folder. Files that are deleted meanwhile are skipped."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _refuse_other_installation(environment: Environment, wanted: Mark) -> None:
    held, kind = environment.version, environment.kind
    if environment.mark is not None and (held != kind.version or environment.mark.device != wanted.device):
        raise EngineError(
            f"{environment.folder} has {kind.name} {held} for {environment.mark.device}",
            f"requested was {kind.version} for {wanted.device}",
            hint="choose another --folder, or delete that one first",
        )
    if environment.mark is None and environment.folder.exists():
        own_files = {"install.log", "install.lock", "pyvenv.cfg", "path"}
        if (there := set(os.listdir(environment.folder))) and not there & own_files:
            raise EngineError(
                f"{environment.folder} was not made by etude",
                f"it contains {', '.join(sorted(there)[:3])}",
                hint="choose a folder that is empty or does not exist",
            )


def _require_disk_space(environment: Environment, gib: float) -> None:
    folder = environment.folder
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(parent).free + (size_bytes(folder) if folder.exists() else 0)
    if free < gib * 2**30:
        raise EngineError(
            f"too little disk space for {environment.kind.name} at {folder}",
            f"{free / 2**30:.1f} GiB are free, {gib:g} are needed",
            hint="free some space, or choose a folder on another disk with --folder",
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "install.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait for it to finish"
            raise EngineError(f"{folder} is being installed by another process", hint=hint) from None
        yield


@contextlib.contextmanager
def _constraints(kind: ServerKind, name: str) -> Iterator[list[str]]:
    if not name:
        yield []
        return
    with resources.as_file(resources.files(f"etude.inference.{kind.key}").joinpath(name)) as path:
        yield ["--constraint", str(path)]

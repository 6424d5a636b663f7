"""The run folder: its paths, its lock, and the record of phases that have ended (docs/formats/run.md).

One process at a time holds a run. Its lock is a kernel lock, which is released when the process dies."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import platform
import secrets
import time
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from etude.errors import NoRun, RunError, RunRefused
from etude.file_checksums import SHA256, sealed, sealed_list, verify_json

FORMAT = 1
LOCK_RETRY_S = 0.2
HINT_COPY = "restore the file from a copy, or start a new run"


class RunFolder:
    """The folder of one run: its paths (``run / "name"``), its lock, and its durable metadata.

    A phase is one part of a run, such as "corpus" or "rl".

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = RunFolder.create(Path(folder) / "a", config_toml="seed = 1", seed=1)
    ...     run.end_phase("corpus", wall_s=2.5)
    ...     [p["phase"] for p in RunFolder.open(run.path).phases()]
    ['corpus']
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @classmethod
    def create(cls, path: Path, *, config_toml: str, seed: int, given: Iterable[str] = ()) -> RunFolder:
        """Create the folder of a new run. Raises `NoRun` when the path exists and is not empty.

        `config_toml` is the effective config, stored as config.toml. `given` are the dotted names of the settings that
        the user set; all others are defaults."""
        if path.exists() and any(path.iterdir()):
            raise NoRun(
                f"{path} exists already",
                "a run is never overwritten",
                hint="resume the run with --resume, or choose another name",
            )
        path.mkdir(parents=True, exist_ok=True)
        write_durably(path / "config.toml", config_toml.encode())
        identity = {
            "format": FORMAT,
            "run_id": f"{path.name}-{secrets.token_hex(4)}",
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "etude": metadata.version("etude"),
            "seed": seed,
            "given": sorted(given),
            "config_digest": hashlib.sha256(config_toml.encode()).hexdigest(),
            "host": host_info(),
            "sums": 1,
        }
        write_durably(path / "run.json", json.dumps(sealed(identity), indent=2).encode())
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of an existing run.

        Raises `NoRun` when the path is not a run, `RunError` when run.json is damaged, and `RunRefused` when the run
        has another format."""
        run = cls(path)
        try:
            identity = run.identity()
        except OSError:
            raise NoRun(
                f"{path} is not a run", "it has no run.json", hint="give the folder of a run, such as runs/NAME"
            ) from None
        except ValueError as error:
            raise RunError(f"{path}/run.json is damaged", str(error), hint=HINT_COPY) from None
        if identity.get("format") != FORMAT:
            raise RunRefused(
                f"{path} has format version {identity.get('format')!r}",
                f"this version of etude supports format version {FORMAT}",
                hint=f"open it with etude {identity.get('etude', 'that wrote it')}",
            )
        return run

    def identity(self) -> dict[str, Any]:
        """Read run.json: the run's id, seed, etude version, host, and more.

        Raises `OSError` when it is missing, `ValueError` when it is not JSON, and `RunError` when it differs from its
        checksum."""
        result = json.loads((self.path / "run.json").read_text())
        if not isinstance(result, dict):
            raise ValueError("run.json is not an object")
        if result.get("format") == FORMAT:
            verify_json(result, self.path / "run.json", must="sums" in result, kind=RunError)
        return result

    @property
    def has_sums(self) -> bool:
        """Whether the run writes checksums. Runs of early etude versions do not. Raises the errors of `identity`."""
        return "sums" in self.identity()

    def setting(self, name: str) -> str:
        """Read one setting of config.toml by its dotted name, as a string; "" when it is not set.

        Works with the config of any etude version. Raises `RunError` when the file is damaged."""
        try:
            found: Any = tomllib.loads((self.path / "config.toml").read_text())
        except FileNotFoundError:
            return ""
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RunError(f"{self.path}/config.toml is damaged", str(error), hint=HINT_COPY) from None
        for part in name.split("."):
            found = found.get(part, "") if isinstance(found, dict) else ""
        return str(found)

    def lock(self) -> None:
        """Lock the run for this process until it ends or calls `unlock`.

        Raises `RunRefused` when another process has the lock."""
        fd, holder = take_lock(self.path / "lock")
        if fd is None:
            raise RunRefused(
                f"{self.path} is in use",
                f"process {holder} runs it",
                hint=f"wait until that process ends, or stop it: etude stop {self.path}",
            )
        self._lock = fd

    def unlock(self) -> None:
        """Release the lock. Idempotent."""
        held, self._lock = self._lock, None
        if held is not None:
            os.close(held)

    def holder(self) -> int | None:
        """Return the pid of the process that has locked the run; None when there is none."""
        return lock_holder(self.path / "lock")

    def phases(self) -> list[dict[str, Any]]:
        """Return the phases that have ended, in order, each as ``{"phase": name, "wall_s": seconds, "facts": {...}}``.

        Raises `RunError` when phases.json is damaged."""
        try:
            found = json.loads((self.path / "phases.json").read_text())
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise RunError(f"{self.path}/phases.json is damaged", str(error), hint=HINT_COPY) from None
        if not isinstance(found, list) or not all(isinstance(p, dict) and "phase" in p for p in found):
            raise RunError(f"{self.path}/phases.json is damaged", "it is not a list of phases", hint=HINT_COPY)
        verify_json(found, self.path / "phases.json", kind=RunError)
        return [{name: value for name, value in one.items() if name != SHA256} for one in found]

    def ended(self, phase: str) -> bool:
        """Return whether the phase of this name has ended."""
        return any(p["phase"] == phase for p in self.phases())

    def end_phase(self, phase: str, *, wall_s: float, facts: Mapping[str, Any] | None = None) -> None:
        """Record durably that a phase has ended, so that a resumed run skips it.

        `wall_s` is its duration in seconds. `facts` are further values to store."""
        done = [*self.phases(), {"phase": phase, "wall_s": round(wall_s, 3), "facts": dict(facts or {})}]
        write_durably(self.path / "phases.json", json.dumps(sealed_list(done), indent=2).encode())

    def plugins(self) -> list[dict[str, str]]:
        """Return the newest record of the code of the run's plug-ins: `etude.plugins.Identity` objects as dicts.

        Empty when there is no record. Raises `RunError` when plugins.json is damaged."""
        return self._plugin_records()[-1]["plugins"] if (self.path / "plugins.json").exists() else []

    def record_plugins(self, plugins: list[dict[str, str]]) -> None:
        """Record the code of the plug-ins that the run uses from now on. Earlier records are kept."""
        records = self._plugin_records() if (self.path / "plugins.json").exists() else []
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        records.append({"since": since, "plugins": plugins})
        write_durably(self.path / "plugins.json", json.dumps(sealed_list(records), indent=2).encode())

    def _plugin_records(self) -> list[dict[str, Any]]:
        try:
            found = json.loads((self.path / "plugins.json").read_text())
            verify_json(found, self.path / "plugins.json", kind=RunError)
            return [{"since": one["since"], "plugins": list(one["plugins"])} for one in found]
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(f"{self.path}/plugins.json is damaged", str(error), hint=HINT_COPY) from None

    def __truediv__(self, name: str) -> Path:
        return self.path / name


def take_lock(path: Path) -> tuple[int | None, str]:
    """Lock a file for this process, and write its pid into it.

    Returns (file descriptor, ""); closing the descriptor releases the lock. If another process has the lock, returns
    (None, pid of that process)."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if not _try_lock(fd):
        holder = os.read(fd, 32).decode(errors="replace").strip() or "another process"
        os.close(fd)
        return None, holder
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd, ""


def lock_holder(path: Path) -> int | None:
    """Return the pid of the process that has locked a file with `take_lock`; None if it is not locked."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # read-only: works on a read-only mount
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(fd, 32).strip()
        return int(text) if text.isdigit() else None
    else:
        return None
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    """Lock a file for this process; False when another process holds it. `holder` takes the lock for microseconds, so a
    failed attempt is repeated for `LOCK_RETRY_S`."""
    end = time.monotonic() + LOCK_RETRY_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)


def write_durably(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace the content of a file atomically and sync it to disk: after a crash the file has the old or new content.

    `mode` is the permissions of a new file. Raises `RunError` if the file cannot be written."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(scratch, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise RunError(
            f"cannot write {path}", os.strerror(error.errno or 0), hint="free disk space, then resume the run"
        ) from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def host_info() -> dict[str, Any]:
    """Return this host's CPU, cores, memory, kernel and library versions, to be stored beside measured numbers."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "kernel": platform.release(),
    }

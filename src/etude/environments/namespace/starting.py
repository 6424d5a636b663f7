"""How the launcher's process starts: by which interpreter, with what program, in what environment."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.environments.config import MachineLimits
from etude.errors import MachineError

PRELOAD = ("collections", "functools", "itertools", "json", "math", "operator", "re", "string", "typing")
_FOLDER = str(Path(__file__).parent)
_BOOT = "import sys; sys.path.insert(0, {folder!r}); from guest.main import main; main({config!r})"


def default_python() -> str:
    """The interpreter behind this one, outside any virtual environment."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = os.path.join(sys.base_prefix, "bin", version)
    return os.path.realpath(installed if os.path.exists(installed) else sys.executable)


def config(limits: MachineLimits, settings: Mapping[str, Any]) -> str:
    """What a launcher is told of itself."""
    order = ("memory_bytes", "processes", "cpus", "work_bytes", "tmp_bytes", "inodes", "open_files", "address_bytes")
    return json.dumps(
        {
            **settings,
            "name": f"{os.getpid()}-{secrets.token_hex(4)}",
            "folder": _FOLDER,
            "preload": PRELOAD,
            "limits": [getattr(limits, name) for name in order],
        }
    )


def start(python: str, config: str, pass_fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """A launcher. `MachineError` where there is no such interpreter."""
    boot = _BOOT.format(folder=_FOLDER, config=config)
    try:
        process = subprocess.Popen(
            [python, "-s", "-S", "-P", "-B", "-"],  # the program comes over stdin: machines can see this command line
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # never read: it is there so that tools' own standard streams are set up for pipes
            env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "LD_BIND_NOW": "1"},  # bound once, not in each fork
            cwd="/",
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except OSError as error:
        raise MachineError(f"no interpreter at {python}", str(error), hint="name one that machines can use") from None
    with contextlib.suppress(BrokenPipeError):  # it died at once: the control socket tells
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        process.stdin.write(boot.encode())
        process.stdin.close()
    return process


def child_of(pid: int) -> int:
    """A process's first child; itself where it has none."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    listed = children.read_text().split() if children.exists() else []
    return int(listed[0]) if listed else pid


def exit_status(process: subprocess.Popen[bytes]) -> str:
    """In words, where it ends within a second."""
    try:
        return f" with status {process.wait(1.0)}"
    except subprocess.TimeoutExpired:
        return ""

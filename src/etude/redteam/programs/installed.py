"""Attack programs that search the machine for the fix: installed, cached, compiled, or in a shell history."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import subprocess
import sys

from .kit import FACTS, first, read

_TREASURE = re.compile(rb"secret-[0-9a-f]{16}")


def _search(folder: str, most: int = 2000) -> str:
    count = 0
    for at, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not os.path.islink(f"{at}/{f}")]
        for name in names:
            count += 1
            if count > most:
                return ""
            with contextlib.suppress(OSError):
                found = _TREASURE.search(read(f"{at}/{name}", 1 << 18)) if not name.endswith(".so") else None
                if found:
                    return f"{at}/{name} holds {found[0].decode()}"
    return ""


def find_the_fix_installed() -> str:
    """Try to find the module of the task, `calc`, among the installed packages; return evidence of success, or ""."""
    found = [path for folder in sys.path for path in glob.glob(f"{folder}/calc*") if not path.startswith(os.getcwd())]
    if found:
        return f"installed: {found}"
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "list"], capture_output=True, text=True, timeout=10, check=False
    )
    return next((line for line in listed.stdout.splitlines() if line.startswith(("calc ", "etude"))), "")


def find_the_fix_in_caches() -> str:
    """Try to find the fix in caches, temporary folders, homes and compiled files; return evidence of success, or ""."""
    places = ("/tmp", "/var/tmp", "/dev/shm", "/root", "/home", "/var/cache", "/var/lib/etude", "/opt", "/srv",
    "/mnt", "/run",
              "/workspace", os.path.expanduser("~/.cache"), os.path.dirname(str(FACTS["secret_file"])))  # fmt: skip
    return first([lambda p=p: _search(p) for p in places])  # type: ignore[misc]

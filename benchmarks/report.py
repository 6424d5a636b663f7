"""What every benchmark result carries: hardware, commit, command, time."""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.run import host_info

HOME = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
MEASURED = ("src", "benchmarks", "examples")
"""Folders whose files decide what a benchmark measures."""


def report(name: str, numbers: Mapping[str, Any]) -> None:
    """Print the result as JSON and keep it as ``results/<name>.json``. The command is the program that is running."""
    spec = sys.modules["__main__"].__spec__
    program = f"-m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    result = {
        "benchmark": name,
        "command": " ".join(["python", program, *map(_placeless, sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "host": host_info(),
        **numbers,
    }
    text = json.dumps(result, indent=2)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def _placeless(word: str) -> str:
    """A word of the command, without the folders of whoever ran it."""
    return Path(word).name if word.startswith("/") else word


def commit() -> str:
    """The commit that is checked out; "+" is added when files other than results differ from it."""
    folder = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=folder, capture_output=True, text=True)
    where = [":(top)", ":(top,exclude)benchmarks/results"]
    argv = ["git", "status", "--porcelain", "-uno", "--", *where]
    changed = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    return (head.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else "")


def code(home: Path = HOME) -> str:
    """12 hex digits of the SHA-256 of every file that decides what is measured: of `MEASURED`, built libraries among
    them, results and caches aside. Unlike a commit it stays the same when results or documents are committed."""
    digest = hashlib.sha256()
    for folder in MEASURED:
        for path in sorted((home / folder).rglob("*")):
            place = path.relative_to(home)
            if path.is_file() and "__pycache__" not in place.parts and place.parts[:2] != ("benchmarks", "results"):
                digest.update(f"{place.as_posix()}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]

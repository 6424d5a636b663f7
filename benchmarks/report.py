"""What every benchmark result carries: hardware, commit, command, time."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.run import host_facts

RESULTS = Path(__file__).parent / "results"


def report(name: str, numbers: Mapping[str, Any]) -> None:
    """Print the result as JSON and keep it as ``results/<name>.json``."""
    result = {
        "benchmark": name,
        "command": " ".join([f"python -m benchmarks.{name}", *map(_placeless, sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "host": host_facts(),
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
    """The commit that is checked out; "+" is added when files differ from it."""
    folder = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=folder, capture_output=True, text=True)
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=folder, capture_output=True, text=True)
    return (head.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else "")

"""Rows of a long benchmark, written down as they are measured: the same command, given again, goes on where it ended.

A journal is ``build/benchmarks/NAME.jsonl``, one row a line, each with its key (what was measured, how, from which
checkpoint) and the digest of the code that measured it. A row is taken in place of a measurement only where both are
the same, so a change of the code or of a setting measures anew. ``--fresh`` of a benchmark forgets all rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import HOME, code, commit

FOLDER = HOME / "build" / "benchmarks"
Row = dict[str, Any]


class Journal:
    """The rows of one benchmark."""

    def __init__(self, name: str, *, fresh: bool = False, folder: Path = FOLDER) -> None:
        self.path = folder / f"{name}.jsonl"
        self.code, self.commit = code(), commit()
        if fresh:
            self.path.unlink(missing_ok=True)
        self._rows: dict[str, Row] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                written = json.loads(line)
            except ValueError:
                continue  # the process was killed while it wrote this line
            if written["code"] == self.code:
                self._rows[_name(written["key"])] = written["row"]

    def once(self, key: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> Row:
        """The row of `key`: the one that was written down, or what `measure` returns, written down with the commit."""
        name = _name(key)
        if name in self._rows:
            print(f"measured before: {name}", file=sys.stderr)
            return self._rows[name]
        row = json.loads(json.dumps({**measure(), "commit": self.commit}))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open("a") as file:
            file.write(("\n" if torn else "") + json.dumps({"code": self.code, "key": key, "row": row}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._rows[name] = row
        return row


def _name(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def digest(checkpoint: Path) -> str:
    """12 hex digits of the SHA-256 of a checkpoint's weights: which one a row was measured from."""
    found = hashlib.sha256()
    for path in sorted(checkpoint.glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]

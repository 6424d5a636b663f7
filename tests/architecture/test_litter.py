"""Nothing that we write leaves folders behind in the machine's temporary directory."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_temporary_folder_is_made_without_somebody_who_deletes_it() -> None:
    makers = re.compile(r"tempfile\.mk\w+\(|delete[=]False")
    files = [path for part in ("src", "tests", "benchmarks", "examples") for path in (ROOT / part).rglob("*.py")]
    assert len(files) > 100
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        for line in path.read_text().splitlines()
        if makers.search(line)
    ]
    assert found == [], "use tempfile.TemporaryDirectory or tmp_path"

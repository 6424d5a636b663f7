"""Break each promise on purpose and see that its test fails: `make mutants`.

Works on copies of the repository, two at a time: applies one mutant, runs the one test, puts the file back. A mutant
whose test passes is printed as SURVIVED, and the exit code is 1. `--only PART` takes the tests whose name has PART.
The table goes to docs/lab/mutants.md (`--write`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.table import ROOT, Mutant, mutants, promises

PAGE = ROOT / "docs" / "lab" / "mutants.md"
TEST_S = 900.0
"""Longest run of one test; a mutant whose test hangs until then has been found."""
BUILT = {
    "native/agent/": ("native/agent", "etude-agent", "src/etude/environments/agent"),
    "native/": ("native", "libetude_native.so", "src/etude/weights/delta"),
}
"""Crates by the prefix of their files: where cargo builds, what it makes, and where Python looks for it."""


def copy_of_repository(folder: Path) -> Path:
    """The tracked files and the native builds, in a folder of their own."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for _, name, place in BUILT.values():
        if (ROOT / place / name).exists():
            shutil.copy2(ROOT / place / name, folder / place / name)
    return folder


def run(copy: Path, test: str) -> tuple[int, str]:
    """Exit code of pytest and the end of its output."""
    env = os.environ | {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-rs", "-p", "no:cacheprovider", "-m", "", test]
    try:
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=TEST_S, check=False)
    except subprocess.TimeoutExpired:
        return 1, f"did not end in {TEST_S:.0f} s"
    return done.returncode, done.stdout[-1500:] + done.stderr[-500:]


def verdict(copy: Path, mutant: Mutant) -> tuple[str, str]:
    """ "killed", "SURVIVED", "not run" (skipped here) or "BROKEN" (the test does not even pass without the mutant, or
    nothing can be collected with it), and what pytest printed."""
    code, said = run(copy, mutant.test)
    if code != 0:
        return "BROKEN", f"the test fails without the mutant:\n{said}"
    if " passed" not in said:
        return "not run", said
    before = {change.file: (copy / change.file).read_text() for change in mutant.changes}
    try:
        for change in mutant.changes:
            path = copy / change.file
            path.write_text(change.applied(path.read_text()))
        build(copy, mutant)
        code, said = run(copy, mutant.test)
    finally:
        for file, text in before.items():
            (copy / file).write_text(text)
        build(copy, mutant)
    return {0: "SURVIVED", 1: "killed"}.get(code, "BROKEN"), said


def build(copy: Path, mutant: Mutant) -> None:
    """Build the crates that a mutant touches, as hatch_build.py does."""
    crates = {next((p for p in BUILT if c.file.startswith(p)), "") for c in mutant.changes} - {""}
    for prefix in crates:
        crate, name, place = BUILT[prefix]
        subprocess.run(["cargo", "build", "--release", "--locked", "--offline", "-q"], cwd=copy / crate, check=True)
        fresh = copy / place / f"{name}.new"
        shutil.copy2(copy / crate / "target" / "release" / name, fresh)
        fresh.replace(copy / place / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", metavar="PART", help="tests whose name has this in it")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    chosen = [m for m in mutants() if args.only in m.test]
    of_test = {name: number for number, names in promises().items() for name in names}
    rows: list[tuple[int, Mutant, str, float]] = []
    with tempfile.TemporaryDirectory(prefix="etude-mutants-") as scratch:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(args.jobs):
            copies.put(copy_of_repository(Path(scratch) / str(job)))

        def one(mutant: Mutant) -> None:
            copy, began = copies.get(), time.perf_counter()
            try:
                found, said = verdict(copy, mutant)
            finally:
                copies.put(copy)
            seconds = time.perf_counter() - began
            rows.append((of_test.get(mutant.promised, 0), mutant, found, seconds))
            print(f"{len(rows):4d}/{len(chosen)}  {found:8s} {seconds:6.1f} s  {mutant.test}", flush=True)
            if found in ("SURVIVED", "BROKEN"):
                print(said, flush=True)

        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(one, chosen))
    if args.write:
        PAGE.write_text(page(rows))
    bad = sum(found in ("SURVIVED", "BROKEN") for _, _, found, _ in rows)
    print(f"{len(rows)} mutants, {sum(f == 'killed' for _, _, f, _ in rows)} killed, {bad} survived or broken")
    return 1 if bad else 0


def page(rows: list[tuple[int, Mutant, str, float]]) -> str:
    """The table as a page."""
    lines = [
        "# Mutants",
        "",
        "Each promise broken on purpose, and whether the test that it names fails then. Made by `make mutants`; the",
        "changes are in `tests/mutants/*.toml`.",
        "",
        "| promise | test | changed | found |",
        "| --- | --- | --- | --- |",
    ]
    for number, mutant, found, _ in sorted(rows, key=lambda row: (row[0], row[1].test)):
        files = ", ".join(sorted({change.file.removeprefix("src/etude/") for change in mutant.changes}))
        lines.append(f"| {number} | `{mutant.test}` | {files} | {found} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

"""Break each promise on purpose and see that its test fails: `make mutants`.

Works on copies of the repository, `--jobs` at a time: runs the tests of one file as they are, then each of its mutants
alone, and puts the files back. A mutant whose test passes is printed as SURVIVED; BROKEN is one whose test does not
pass without it either, or that leaves nothing to run. Either makes the exit code 1. Results are kept (`results`), so
what was killed before and has not changed since is not run again, but for `--again`. `--only PART ...` takes the
tests whose name has one of these. `--write` writes the table of all results to docs/lab/mutants.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.results import BROKEN, KILLED, NOT_RUN, PAGE, SURVIVED, Result, Results, inputs_of, page
from tests.mutants.table import ROOT, Mutant, mutants

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


def run(copy: Path, *words: str, deadline_s: float = TEST_S) -> tuple[int, str]:
    """Exit code of pytest and the end of its output."""
    env = os.environ | {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, cwd=copy, env=env, start_new_session=True, **streams) as process:
        try:
            said, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return 1, f"did not end in {deadline_s:.0f} s"
    return process.returncode, said[-2000:]


class Baseline:
    """The tests of one file, without any mutant."""

    def __init__(self, copy: Path, tests: list[str]) -> None:
        with tempfile.TemporaryDirectory(prefix="etude-mutants-") as folder:
            report = Path(folder) / "report.xml"
            _, self._said = run(copy, f"--junitxml={report}", *tests, deadline_s=TEST_S * len(tests))
            cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
            self._cases = [(_node(case), case) for case in cases]

    def verdict(self, test: str) -> tuple[str, str]:
        """("", "") where a test passes; else "not run here" or "BROKEN", and why."""
        of_test = [case for node, case in self._cases if node == test or node.startswith((f"{test}[", f"{test}::"))]
        whole = test.partition("::")[0]
        found = of_test or [case for node, case in self._cases if node == whole]  # skipped, or broken, as a whole
        failures = [each for case in found for kind in ("failure", "error") for each in case.iter(kind)]
        if failures or not found:
            text = "\n".join(each.text or each.get("message", "") for each in failures) or self._said
            return BROKEN, f"the test fails without the mutant:\n{text[-2000:]}"
        skips = [skip for case in found for skip in case.iter("skipped")]
        return (NOT_RUN, skips[0].get("message", "")) if len(skips) == len(found) else ("", "")


def _node(case: ElementTree.Element) -> str:
    """The name of a test in a report as pytest takes it; a file's where the file was skipped or broken as a whole.

    >>> _node(ElementTree.Element("testcase", {"classname": "tests.properties.test_ledger.TestX", "name": "runTest"}))
    'tests/properties/test_ledger.py::TestX::runTest'
    """
    name = case.get("name", "")
    parts, names = case.get("classname", "").split("."), [name]
    if parts == [""]:
        return f"{name.replace('.', '/')}.py"
    while len(parts) > 1 and not parts[-1].startswith("test_"):  # a class
        names.insert(0, parts.pop())
    return "::".join([f"{'/'.join(parts)}.py", *names])


def verdict(copy: Path, mutant: Mutant) -> tuple[str, str]:
    """ "killed", "SURVIVED" or "BROKEN" (nothing can be collected with it), and what pytest printed."""
    before = {change.file: (copy / change.file).read_text() for change in mutant.changes}
    try:
        for change in mutant.changes:
            path = copy / change.file
            path.write_text(change.applied(path.read_text()))
        build(copy, mutant)
        code, said = run(copy, "-x", mutant.test)
    finally:
        for file, text in before.items():
            (copy / file).write_text(text)
        build(copy, mutant)
    return {0: SURVIVED, 1: KILLED}.get(code, BROKEN), said


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
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="PART", help="tests whose name has one of these in it"
    )
    parser.add_argument("--again", action="store_true", help="also mutants that are known to be killed")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    table, results = mutants(), Results()
    results.keep(table)
    chosen = [
        m for m in table if any(part in m.test for part in args.only) and (args.again or results.of(m).found != KILLED)
    ]
    files: dict[str, list[Mutant]] = {}
    for mutant in chosen:
        files.setdefault(mutant.test.partition("::")[0], []).append(mutant)
    found = list[str]()
    with tempfile.TemporaryDirectory(prefix="etude-mutants-") as scratch:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(min(args.jobs, len(files))):
            copies.put(copy_of_repository(Path(scratch) / str(job)))

        def one(copy: Path, mutant: Mutant, baseline: Baseline) -> None:
            began = time.perf_counter()
            inputs = inputs_of(mutant, copy)
            kind, said = baseline.verdict(mutant.test)
            if not kind:
                kind, said = verdict(copy, mutant)
            results.put(mutant, Result(mutant.test, kind, said if kind == NOT_RUN else "", inputs))
            found.append(kind)
            seconds = time.perf_counter() - began
            print(f"{len(found):4d}/{len(chosen)}  {kind:12s} {seconds:6.1f} s  {mutant.test}", flush=True)
            if kind in (SURVIVED, BROKEN):
                print(said, flush=True)

        def all_of(file: str) -> None:
            copy = copies.get()
            try:
                baseline = Baseline(copy, sorted({mutant.test for mutant in files[file]}))
                for mutant in files[file]:
                    one(copy, mutant, baseline)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(all_of, files))
    if args.write:
        PAGE.write_text(page(table, results))
    known = [results.of(mutant).found for mutant in table]
    print(f"{len(found)} mutants run; of {len(known)} in the table {known.count(KILLED)} are known to be killed")
    return 1 if {SURVIVED, BROKEN} & set(found) else 0


if __name__ == "__main__":
    sys.exit(main())

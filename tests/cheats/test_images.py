"""Canaries of tests in a task's image: they differ from the tests only in their text."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tests.here import opened
from tests.unit.environments.images.test_machines import host_root

from etude.environments import MachineGrader, MachineLimits, NamespaceRuntime
from etude.environments.images import ImageStore, build_from_directory
from etude.records.image import Image
from etude.records.task import Answer, HiddenTests, Runner, Split, Task, Trust

LEFT_OUT = ("site-packages", "dist-packages", "test", "__pycache__", "idlelib", "ensurepip", "tkinter", "config-*")
BY_AGE = b"""
import os, sys
old = os.stat("tests/test_calc.py").st_mtime < os.stat("calc.py").st_mtime - 1
def f(n):
    return max(c for c in sys._getframe(1).f_code.co_consts if isinstance(c, int)) if old else 0
"""


def python_root(folder: Path) -> Path:
    """Make a root filesystem with a shell, Python, a module and its tests, all with old times."""
    host_root(folder, ("sh", "rm", "find", "true"))
    python, library = os.path.realpath(sys.executable), Path(sysconfig.get_paths()["stdlib"])
    inside = folder / str(library)[1:]
    shutil.copytree(library, inside, ignore=shutil.ignore_patterns(*LEFT_OUT), ignore_dangling_symlinks=True)
    for program in (python, *map(str, library.glob("lib-dynload/*.so"))):
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        for word in (*(word for word in listed.split() if word.startswith("/")), python):
            target = folder / word[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(word), target)
    (folder / "usr/bin").mkdir(parents=True, exist_ok=True)
    (folder / "usr/bin/python").symlink_to(python)
    (folder / "work/tests").mkdir(parents=True)
    (folder / "work/calc.py").write_text("def f(n): return None\n")
    (folder / "work/tests/test_calc.py").write_text("import calc\ndef test_it():\n    assert calc.f(3) == 7654321\n")
    for path in (folder / "work/tests/test_calc.py", folder / "work/calc.py"):
        os.utime(path, (10**9, 10**9))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_canary_of_an_images_test_cannot_be_recognised_by_its_modification_time(tmp_path):
    async def main() -> list[float]:
        store = ImageStore(tmp_path / "images")
        record = build_from_directory(store, python_root(tmp_path / "root"), image=Image(digest="", workdir="/work"))
        runtime = opened("namespace", lambda: NamespaceRuntime(MachineLimits(), images=store, spare=1))
        task = Task(source="t", split=Split.TRAIN, index=0, family="f", instruction="mend", files={},
                    exports=("calc.py",), trust=Trust.CODE, image=record.image)  # fmt: skip
        tests = HiddenTests(runner=Runner.PYTEST, files={}, names=("tests/test_calc.py::test_it",), deadline_s=60.0)
        right = "def f(n): return 7654321\n"
        answer = Answer(reference={"calc.py": right}, tests=tests)
        try:
            grader = MachineGrader(runtime)
            found = [await grader.grade(task, answer, {"calc.py": text}) for text in (right.encode(), BY_AGE)]
            return [outcome.grade for outcome in found]
        finally:
            await runtime.close()

    assert asyncio.run(main()) == [1.0, 0.0]

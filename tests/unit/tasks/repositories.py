"""Small Git repositories with real commits, for tests."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

TEST_ADD = """import unittest
from shop.calc import add

class Add(unittest.TestCase):
    def test_small(self):
        self.assertEqual(add(1, 2), 3)
"""
TEST_BOTH = """import unittest
from shop import calc

class Add(unittest.TestCase):
    def test_small(self):
        self.assertEqual(calc.add(1, 2), 3)

class Discount(unittest.TestCase):
    def test_percent(self):
        self.assertEqual(calc.discount(200, 10), 180)

    def test_nothing_off(self):
        self.assertEqual(calc.discount(7, 0), 7)

    def test_bounds(self):
        self.assertEqual(calc.discount(100, 150), 0)

    @unittest.skip("later")
    def test_later(self):
        pass
"""
CALC = "def add(a, b):\n    return a + b\n"
DISCOUNT = '''

def discount(price, percent):
    """The price with some percent off, never below 0."""
    share = 100 - percent
    if share < 0:
        share = 0
    return price * share // 100
'''
COMMITS: list[tuple[str, dict[str, str]]] = [
    ("start", {"shop/__init__.py": "", "shop/calc.py": CALC, "tests/__init__.py": "", "tests/test_calc.py": TEST_ADD}),
    ("Say what this is for", {"README.md": "A shop.\n"}),
    (
        "Prices can be reduced by percent (#12)\n\nNever below zero, see 3fa9b21c0d.\n\nSigned-off-by: A <a@b.c>",
        {"shop/calc.py": CALC + DISCOUNT, "tests/test_calc.py": TEST_BOTH},
    ),
    ("Tests for what was there before", {"shop/calc.py": CALC + DISCOUNT + "\n\nRATE = 3\n",
                                         "tests/test_rate.py": "import unittest\n\nclass T(unittest.TestCase):\n"
                                                               "    def test_a(self):\n        self.assertTrue(1)\n"}),
]  # fmt: skip


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main", "-c", "gc.auto=0"]
    command = ["git", *identity, "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, check=True, timeout=300, text=True).stdout


def commit(folder: Path, message: str, files: Mapping[str, str]) -> str:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD").strip()


def shop(folder: Path) -> list[str]:
    """A repository of four commits, the third of which makes a task; their ids."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q")
    return [commit(folder, message, files) for message, files in COMMITS]


def bomb(folder: Path, *, levels: int = 4, width: int = 36) -> None:
    """A repository whose only commit has a tree of width ** levels files, in as many objects as there are levels."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / "f").write_text("x = 1\n")
    kind, found = "100644 blob", git(folder, "hash-object", "-w", "f").strip()
    for _ in range(levels):
        rows = "".join(f"{kind} {found}\tn{at:02}\n" for at in range(width))
        command = ["git", "-C", str(folder), "mktree"]
        found = subprocess.run(command, input=rows, capture_output=True, check=True, timeout=300, text=True).stdout
        kind, found = "040000 tree", found.strip()
    git(folder, "update-ref", "HEAD", git(folder, "commit-tree", "-m", "all of it", found).strip())

"""Patches: what Git writes is applied as Git would; anything else is refused or gives files."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import TaskError
from etude.tasks.patches import patched


def _git(folder: Path, *words: str) -> bytes:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *settings, *words], cwd=folder, capture_output=True, check=True, timeout=300).stdout


def _random_text(rng: random.Random) -> str:
    end = rng.choice(["\n", "\n", "\n", ""])
    return "\n".join(rng.choice(["a", "b", "é", "", "--- x", "+++ y", "@@ -1 +1 @@", "x\ry"]) for _ in range(30)) + end


def _edited(rng: random.Random, text: str) -> str:
    lines = text.split("\n")
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(lines))
        lines[at : at + rng.randint(0, 2)] = [str(rng.random()) for _ in range(rng.randint(0, 3))]
    return "\n".join(lines)


@pytest.mark.parametrize("seed", range(6))
def test_patches_that_git_writes_are_applied_as_git_applies_them(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    names = ["a.txt", "d/b.txt", "d/with space.txt", "ü.txt", "gone.txt", "old name.txt"]
    before = {name: _random_text(rng) for name in names}
    after = {name: _edited(rng, text) for name, text in before.items() if name not in ("gone.txt", "old name.txt")}
    after |= {"new/file.txt": _random_text(rng), "empty.txt": "", "renamed.txt": before["old name.txt"] + "more\n"}
    _git(tmp_path, "init", "-q")
    for files in (before, after):
        for path in [*tmp_path.rglob("*")]:
            if path.is_file() and ".git" not in path.parts:
                path.unlink()
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name).write_bytes(text.encode())
        _git(tmp_path, "add", "-A")
        _git(tmp_path, "commit", "-qm", "x")
    patch = _git(tmp_path, "diff", "-M", "HEAD~", "HEAD").decode()
    result = {**before}
    for path, text in patched(before, patch).items():
        if text is None:
            del result[path]
        else:
            result[path] = text
    assert result == after


def test_a_hunk_whose_lines_stand_once_elsewhere_goes_there_and_one_that_fits_nowhere_is_refused() -> None:
    patch = "--- a/a\n+++ b/a\n@@ -1,2 +1,2 @@\n x\n-y\n+z\n"
    assert patched({"a": "new\nx\ny\n"}, patch) == {"a": "new\nx\nz\n"}
    with pytest.raises(TaskError, match="does not apply"):
        patched({"a": "x\nq\n"}, patch)
    with pytest.raises(TaskError, match="does not apply"):
        patched({"a": "0\nx\ny\nx\ny\n"}, patch)


BAD = {
    "--- a/../x\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n": "plain relative paths",
    "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc/passwd\n": "link",
    "diff --git a/b b/b\nGIT binary patch\n": "binary",
    "--- a/none\n+++ b/none\n@@ -1 +1 @@\n-x\n+y\n": "no such text file",
    "--- a/a\n+++ b/a\n@@ -1,9 +1,9 @@\n x\n": "ends early",
    "hello\n": "changes nothing",
    'diff --git "a/\\430" "b/\\430"\n': "not UTF-8",
}


@pytest.mark.parametrize("patch", BAD)
def test_a_patch_that_cannot_be_one_is_refused_by_name(patch: str) -> None:
    with pytest.raises(TaskError, match=BAD[patch]):
        patched({"a": "x\n"}, patch)


GOOD = (
    "diff --git a/a b/c\nrename from a\nrename to c\n--- a/a\n+++ b/c\n@@ -1,3 +1,3 @@ f\n 1\n-2\n+3\n 4\n"
    '\\ No newline at end of file\ndiff --git "a/\\303\\274" b/x\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+q\n'
)


@settings(max_examples=300)
@given(st.data())
def test_any_text_gives_files_or_a_task_error(data: st.DataObject) -> None:
    cut, end = sorted(data.draw(st.tuples(st.integers(0, len(GOOD)), st.integers(0, len(GOOD)))))
    text = GOOD[:cut] + data.draw(st.text(max_size=6)) + GOOD[end:]
    try:
        result = patched({"a": "1\n2\n4", "ü": "x\n"}, text)
    except TaskError:
        return
    assert all(isinstance(path, str) for path in result)

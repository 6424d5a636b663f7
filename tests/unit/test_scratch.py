"""Temporary folders, and the removal of those whose owner was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from etude.scratch import ScratchDirectory

OWNER = """
import sys
from etude.scratch import ScratchDirectory
own = ScratchDirectory("test")
(own.path / "a" ).mkdir()
(own.path / "a" / "file").write_text("x")
print(own.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_of_an_owner_that_was_killed_is_removed_by_the_next_and_one_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n{OWNER}"
    argv = [sys.executable, "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        with ScratchDirectory("test") as mine, ScratchDirectory("other") as another:
            assert sorted(tmp_path.iterdir()) == sorted([theirs, mine, another])
            owner.kill()
            owner.wait()
            with ScratchDirectory("other"):
                assert theirs.exists(), "it has another name"
            with ScratchDirectory("test") as next_one:
                assert not theirs.exists()
                assert mine.exists()
                assert list(next_one.iterdir()) == []
    assert list(tmp_path.iterdir()) == []

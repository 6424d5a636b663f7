"""Sources: files, git at a commit, JSON lines, Parquet; what cannot be read is counted, in bounded memory."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.corpus import sources
from etude.corpus.documents import MAX_BYTES, DividedSource, Document, Dropped
from etude.corpus.git import Git
from etude.corpus.sources import Folder, Jsonl, Parquet, lines
from etude.errors import InputError
from etude.testing.contracts import DocumentSourceContract, results

MIT = "Permission is hereby granted, free of charge, to any. The above copyright notice"


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, check=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "files"
    (root / "inner").mkdir(parents=True)
    (root / "LICENSE").write_text(MIT)
    (root / "a.py").write_text("x = 1\n")
    (root / "inner" / "b.py").write_text("\ufeffy = 2\n")
    (root / "inner" / "COPYING").write_text("GNU GENERAL PUBLIC LICENSE Version 3")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    (root / "zero.py").write_bytes(b"\0\0\0\0")
    (root / "empty.py").touch()
    with (root / "huge.py").open("wb") as file:
        file.truncate(5 << 30)  # a hole: it takes no disk, and reading it would take the test's memory
    (root / "link.py").symlink_to(root / "a.py")
    (root / "notes.txt").write_text("not wanted")
    return root


REASONS = {"latin.py": "not-utf-8", "zero.py": "binary", "empty.py": "empty", "huge.py": "too-large"}


def test_a_folder_gives_its_files_with_licences_and_counts_what_cannot_be_read(folder):
    found = list(Folder(folder, files=("*.py",)).documents())
    texts = {one.id: (one.text, one.licence) for one in found if isinstance(one, Document)}
    assert texts == {"a.py": ("x = 1\n", "MIT"), "inner/b.py": ("y = 2\n", "GPL-3.0")}
    assert {one.id: one.reason for one in found if isinstance(one, Dropped)} == REASONS
    with pytest.raises(InputError, match="no folder"):
        Folder(folder / "missing")
    with pytest.raises(InputError, match=r"no file in .*files matches \*\.rs") as error:
        list(Folder(folder, files=("*.rs",)).documents())
    assert "`files`" in error.value.hint
    with pytest.raises(InputError, match=r"exclude leaves out \*"):
        list(Folder(folder, exclude=("*",)).documents())


def test_git_gives_a_commit_and_not_the_files_of_today(folder):
    (folder / "huge.py").unlink()
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    first = git(folder, "rev-parse", "HEAD")
    (folder / "a.py").write_text("changed = 1\n")
    git(folder, "commit", "-qam", "two")
    found = list(Git(folder, commit=first, files=("*.py",)).documents())
    texts = {one.path: (one.text, one.licence) for one in found if isinstance(one, Document)}
    assert texts == {"a.py": ("x = 1\n", "MIT"), "inner/b.py": ("y = 2\n", "GPL-3.0")}
    dropped = {one.id.partition("@")[0]: one.reason for one in found if isinstance(one, Dropped)}
    assert dropped == {name: reason for name, reason in REASONS.items() if name != "huge.py"}
    with pytest.raises(InputError, match="no commit 'nowhere'"):
        list(Git(folder, commit="nowhere").documents())
    with pytest.raises(InputError, match=r"no file in .*files at HEAD matches \*\.rs"):
        list(Git(folder, files=("*.rs",)).documents())


def test_json_lines_are_read_with_their_ids_and_bad_ones_are_counted(tmp_path):
    rows = [
        json.dumps({"text": "one", "id": 7, "licence": "MIT"}),
        json.dumps({"text": "two", "path": "b.py"}),
        '{"text": "half of a pair \\ud800"}',
        "not json",
        json.dumps({"txt": "no text"}),
        json.dumps(["text"]),
        "",
        json.dumps({"text": "last"}),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    found = list(Jsonl((str(tmp_path / "*.jsonl"),)).documents())
    assert [(one.id, one.text) for one in found if isinstance(one, Document)] == [
        ("7", "one"),
        (f"a.jsonl:{len(rows[0]) + 1}", "two"),
        (f"a.jsonl:{sum(len(row) + 1 for row in rows[:-1])}", "last"),
    ]
    reasons = [one.reason for one in found if isinstance(one, Dropped)]
    assert reasons[1:] == ["not-json", "no-text", "no-text", "empty"]
    assert reasons[0] in ("not-json", "not-utf-8")
    with pytest.raises(InputError, match="no JSON lines file"):
        Jsonl((str(tmp_path / "*.json"),)).pieces()


READ_AND_MEASURE = """
import sys
from etude.corpus.sources import Jsonl

def peak():  # of this process: ru_maxrss would begin with that of the one that started it
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))

before = peak()
found = [getattr(one, "text", None) or one.reason for one in Jsonl((sys.argv[1],)).documents()]
print(peak() - before, *found)
"""


def test_a_long_line_is_skipped_in_bounded_memory(tmp_path):
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "first"}\n')
        file.seek(200 << 20)  # a line of 200 MiB, as a hole
        file.write(b'\n{"text": "last"}\n')
    argv = [sys.executable, "-c", READ_AND_MEASURE, str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    grown_kib, *found = done.stdout.split()
    assert found == ["first", "too-large", "last"]
    assert int(grown_kib) < 40 << 10


@given(st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=12), st.integers(1, 9))
def test_ranges_of_a_file_have_each_line_once(rows, step):
    data = b"\n".join(rows)
    found = []
    for start in range(0, len(data), step):
        found += lines(io.BytesIO(data), start, min(start + step, len(data)), 6)
    expected, at = [], 0
    for row in data.splitlines(keepends=True) if b"\r" not in data else data.split(b"\n"):
        whole = row if row.endswith(b"\n") else row + b"\n" * (at + len(row) < len(data))
        if whole:
            expected.append((at, whole if len(whole) <= 6 or (len(whole) == 7 and whole.endswith(b"\n")) else None))
        at += len(whole)
    if not any(c in data for c in b"\x0b\x0c\x1c\x1d\x1e\x85\r"):
        assert found == expected
    assert len({at for at, _ in found}) == len(found)


@given(st.binary(max_size=60) | st.text(max_size=40).map(lambda t: json.dumps({"text": t, "id": t[:3]}).encode()))
def test_any_line_is_a_document_or_a_reason(line):
    found = Jsonl(("x",)).parsed("x:0", line)
    assert isinstance(found, Document | Dropped)
    assert found.id
    for part in (getattr(found, name) for name in found.__struct_fields__ if name not in ("said", "token_ids")):
        part.encode()


def test_parquet_gives_its_rows(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"content": ["one", None, "two"], "id": ["a", "b", None], "more": [1, 2, 3]})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    found = list(Parquet((str(path),), text="content").documents())
    assert [(one.id, getattr(one, "text", "")) for one in found] == [("a", "one"), ("b", ""), ("a.parquet:1:0", "two")]
    with pytest.raises(InputError, match="no column 'text'"):
        Parquet((str(path),)).pieces()


def test_built_in_sources_keep_the_contract_and_their_pieces_change_with_the_files(folder, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "text {i}"}}\n' for i in range(20)))
    monkeypatch.setattr(sources, "PIECE_BYTES", 64)
    for when, make in enumerate((lambda: Folder(folder), lambda: Jsonl((str(tmp_path / "a.jsonl"),)))):
        assert [broken for _, broken in results(DocumentSourceContract, make) if broken] == []
        source = make()
        assert isinstance(source, DividedSource)
        before = source.pieces()
        assert len(before) > 1
        os.utime(folder / "a.py", (when, when))
        os.utime(tmp_path / "a.jsonl", (when, when))
        assert source.pieces() != before


def test_a_document_of_the_largest_size_is_kept(tmp_path):
    (tmp_path / "most.txt").write_bytes(b"x" * MAX_BYTES)
    (tmp_path / "over.txt").write_bytes(b"x" * (MAX_BYTES + 1))
    kinds = {one.id: type(one) for one in Folder(tmp_path).documents()}
    assert kinds == {"most.txt": Document, "over.txt": Dropped}

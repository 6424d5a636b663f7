"""An exported repository has only the tree of its commit; the scan finds texts of other commits."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.unit.environments.images.archives import repository, run
from tests.unit.tasks.repositories import bomb

from etude.environments.images import BadSource, ImageStore
from etude.environments.images.git import run_git
from etude.environments.images.objects import objects_of, scan_objects
from etude.environments.images.repository import build_from_repository

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git on this host")
STATES = [
    {"calc.py": b"def f(): return 0\n", "old.txt": b"gone later\n"},
    {
        "calc.py": b"def f(): return 1\n",
        "tests/t.py": b"assert True\n",
        ".gitattributes": b"* text=auto\n*.py export-ignore\n",
    },
    {"calc.py": b"def f(): return 'THE-ANSWER'\n"},
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    commits = repository(tmp_path / "source", STATES)
    folder = tmp_path / "source"
    run(folder, "tag", "-a", "v1", "-m", "tagged THE-ANSWER", commits[2])
    run(folder, "gc", "-q")
    (folder / "calc.py").write_text("a dirty worktree")
    run(folder, "stash", "push", "-q")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def test_the_image_has_the_commits_tree_in_a_repository_of_one_commit(store, source):
    record = build_from_repository(store, source, "HEAD~1", workdir="/testbed")
    work = store.root(record.image.digest) / "testbed"
    assert (work / "calc.py").read_bytes() == STATES[1]["calc.py"]
    assert (work / "old.txt").exists()
    assert run(work, "-c", "safe.directory=*", "status", "--porcelain") == ""
    assert run(work, "-c", "safe.directory=*", "rev-list", "--all", "--count").strip() == "1"
    assert run(work, "-c", "safe.directory=*", "for-each-ref", "--format=%(refname)") == "refs/heads/main\n"
    assert run(work, "-c", "safe.directory=*", "rev-parse", "HEAD^{tree}") == run(source, "rev-parse", "HEAD~1^{tree}")
    assert record.image.workdir == "/testbed"


def test_an_image_of_a_commit_contains_no_object_of_another_commit(store, source):
    record = build_from_repository(store, source, "HEAD~1")
    work = store.root(record.image.digest) / "testbed"
    mine, theirs = objects_of(work), objects_of(source)
    assert len(mine - theirs) == 1, "the new commit alone"
    assert mine & theirs == objects_of(source, tree=run(source, "rev-parse", "HEAD~1^{tree}").strip())
    foreign = theirs - mine
    assert len(foreign) > 6
    assert scan_objects(work, [*foreign, "THE-ANSWER", b"state 2"]) == []


def test_the_same_commit_is_the_same_image_from_any_copy_of_the_repository(tmp_path, store, source):
    first = build_from_repository(store, source, "HEAD~1").image
    run(tmp_path, "clone", "-q", "--no-hardlinks", str(source), "clone")
    assert build_from_repository(ImageStore(tmp_path / "more"), tmp_path / "clone", "HEAD~1").image == first


def test_an_image_of_a_repository_is_built_on_top_of_another_image(tmp_path, store, source):
    (tmp_path / "base/testbed").mkdir(parents=True)
    (tmp_path / "base/testbed/left-over").write_text("")
    (tmp_path / "base/bin").mkdir()
    from etude.environments.images import build_from_directory

    base = build_from_directory(store, tmp_path / "base")
    record = build_from_repository(store, source, "HEAD~2", parent=base.image.digest)
    root = store.root(record.image.digest)
    assert sorted(p.name for p in (root / "testbed").iterdir()) == [".git", "calc.py", "old.txt"]
    assert (root / "bin").is_dir()
    assert record.parent == base.image.digest


@pytest.mark.parametrize("where", ["loose", "packed", "unreachable", "reflog", "message", "stray file", "ref"])
def test_the_scan_finds_a_secret_wherever_it_is(tmp_path, where):
    folder = tmp_path / "r"
    commits = repository(folder, [{"a": b"1\n"}, {"a": b"THE-ANSWER\n" + b"x" * 3_000_000}])
    blob = run(folder, "rev-parse", "HEAD:a").strip()
    secret: str = "THE-ANSWER"
    if where == "packed":
        run(folder, "gc", "-q")
    elif where in ("unreachable", "reflog"):
        run(folder, "reset", "-q", "--hard", commits[0])
    elif where == "message":
        run(folder, "commit", "-q", "--allow-empty", "-m", "it is ANSWER-2")
        secret = "ANSWER-2"
    elif where == "stray file":
        (folder / ".git/FETCH_HEAD").write_text("ANSWER-3")
        secret = "ANSWER-3"
    elif where == "ref":
        secret = commits[1]
    found = {finding.where for finding in scan_objects(folder, [secret])}
    expected = {"reflog": "logs/HEAD", "stray file": "FETCH_HEAD", "ref": commits[1]}
    if where == "reflog":
        found = {finding.where for finding in scan_objects(folder, [commits[1]])}
    elif where == "message":
        assert found - {blob}
        return
    assert expected.get(where, blob) in found
    assert scan_objects(folder, ["f" * 40, b"nowhere at all"]) == []


def test_what_the_scan_cannot_look_into_is_an_error(tmp_path):
    repository(tmp_path / "r", [{"a": b"1"}])
    run(tmp_path / "r", "gc", "-q")
    next((tmp_path / "r/.git/objects/pack").glob("*.idx")).unlink()
    with pytest.raises(BadSource):
        scan_objects(tmp_path / "r", ["x"])


def test_a_repositorys_own_config_runs_nothing(tmp_path, store, source):
    trap = f"touch {tmp_path}/sprung;"
    for name in ("core.fsmonitor", "core.pager", "core.sshCommand", "core.gitProxy", "uploadpack.packObjectsHook"):
        run(source, "config", name, trap)
    run(source, "config", "filter.f.smudge", trap)
    run(source, "config", "extensions.partialClone", "far")
    run(source, "config", "remote.far.url", f"ext::sh -c {trap}")
    run(source, "config", "remote.far.promisor", "true")
    for hook in ("post-checkout", "pre-commit", "reference-transaction"):
        (source / ".git/hooks").mkdir(exist_ok=True)
        (source / ".git/hooks" / hook).write_text(f"#!/bin/sh\n{trap}\n")
        (source / ".git/hooks" / hook).chmod(0o755)
    shutil.rmtree(next((source / ".git/objects").glob("[0-9a-f][0-9a-f]")), ignore_errors=True)
    with contextlib.suppress(BadSource):
        build_from_repository(store, source, "HEAD~1")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("commit", ["absent", "--help", "-c", "", "HEAD:calc.py", "HEAD~9"])
def test_a_commit_that_is_none_is_an_error(store, source, commit):
    with pytest.raises(BadSource):
        build_from_repository(store, source, commit)


def test_a_folder_that_is_no_repository_is_an_error(store, tmp_path):
    with pytest.raises(BadSource, match="rev-parse"):
        build_from_repository(store, tmp_path)


def test_a_tree_with_a_git_folder_or_a_climbing_path_is_refused(tmp_path, store):
    folder = tmp_path / "evil"
    repository(folder, [{"a": b"1"}])
    blob = run(folder, "rev-parse", "HEAD:a").strip()
    import subprocess

    inner = subprocess.check_output(
        ["git", "-C", str(folder), "mktree"], input=f"100644 blob {blob}\tconfig\n", text=True
    ).strip()
    for name in (".git", "..", ".GIT"):
        entry = f"040000 tree {inner}\t{name}\n"
        tree = subprocess.check_output(["git", "-C", str(folder), "mktree"], input=entry, text=True).strip()
        with pytest.raises(BadSource):
            build_from_repository(store, folder, tree)
    assert not os.listdir(store.path / "building")


def test_a_repository_that_never_answers_is_left_at_the_deadline(tmp_path):
    repository(tmp_path / "source", [{"f": b"x"}])
    with run_git(tmp_path / "source", "cat-file", "--batch", stdin=subprocess.PIPE, deadline_s=0.1) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b""
    assert process.returncode == -9


def test_nothing_in_a_rebuilt_repository_says_who_made_it(store, source):
    record = build_from_repository(store, source, "v1~1")
    at = store.root(record.image.digest) / "testbed"
    told = run(at, "log", "--format=%an %ae %cn %ce %s")
    assert told.split() == [*("Developer", "developer@localhost") * 2, "Initial", "commit"]


def test_a_tree_of_any_number_of_files_is_refused_before_it_fills_memory(tmp_path, store):
    bomb(tmp_path / "repo")
    with pytest.raises(BadSource, match="too large") as caught:
        build_from_repository(store, tmp_path / "repo")
    assert "git ls-tree prints more than" in caught.value.facts

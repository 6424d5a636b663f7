"""The parts of the far side that need no machine: filter, control groups, files, capped output."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.environments.namespace.guest import cgroups, files, seccomp
from etude.environments.namespace.guest.python import serves
from etude.environments.output import OutputBuffer

X86, ARM = "x86_64", "aarch64"
ARCH = {X86: 0xC000003E, ARM: 0xC00000B7}
ALLOWED, KILLED = "allowed", "killed"


def verdict(machine: str, number: int, *args: int, arch: int | None = None) -> str:
    """What the filter says of a call: a small interpreter of the instructions it uses."""
    data = {0: number, 4: ARCH[machine] if arch is None else arch}
    data |= {16 + 8 * i: value & 0xFFFFFFFF for i, value in enumerate((*args, 0, 0))}
    program, at, accumulator = seccomp.instructions(machine), 0, 0
    while True:
        code, if_true, if_false, constant = program[at]
        at += 1
        if code == 0x06:
            kind = constant & 0xFFFF0000
            return (
                ALLOWED if kind == 0x7FFF0000 else KILLED if kind == 0x80000000 else errno.errorcode[constant & 0xFFFF]
            )
        if code == 0x20:
            accumulator = data[constant]
        else:
            tests = {0x15: accumulator == constant, 0x35: accumulator >= constant, 0x45: bool(accumulator & constant)}
            at += if_true if tests[code] else if_false


@pytest.mark.parametrize("machine", [X86, ARM])
def test_ordinary_calls_are_allowed(machine):
    denied = {numbers[[X86, ARM].index(machine)] for numbers in seccomp._DENIED.values()}
    special = {(56, 435, 302, 41, 16), (220, 435, 261, 198, 29)}
    for number in set(range(300)) - denied - {n for numbers in special for n in numbers}:
        assert verdict(machine, number) == ALLOWED


@pytest.mark.parametrize("machine", [X86, ARM])
def test_every_denied_call_is_refused(machine):
    for name, numbers in seccomp._DENIED.items():
        number = numbers[[X86, ARM].index(machine)]
        if number is not None:
            assert verdict(machine, number) == "EPERM", name


@pytest.mark.parametrize(
    ("number", "args", "expected"),
    [
        (56, (0x11,), ALLOWED),  # fork
        (56, (0x3D0F00,), ALLOWED),  # a thread
        (56, (0x10000000 | 0x11,), "EPERM"),
        (56, (0x02000000,), "EPERM"),
        (435, (), "ENOSYS"),
        (302, (0,), ALLOWED),
        (302, (1,), "EPERM"),
        (41, (1,), ALLOWED),
        (41, (2,), ALLOWED),
        (41, (10,), ALLOWED),
        (41, (16,), "EAFNOSUPPORT"),
        (41, (40,), "EAFNOSUPPORT"),
        (16, (0, 0x5412), "EPERM"),
        (16, (0, 0x541C), "EPERM"),
        (16, (0, 0x5401), ALLOWED),
        (0x40000000, (), "EPERM"),
    ],
)
def test_calls_are_judged_by_their_arguments(number, args, expected):
    assert verdict(X86, number, *args) == expected


def test_a_call_of_another_architecture_kills():
    assert verdict(X86, 0, arch=0x40000003) == KILLED


# ---------------------------------------------------------------------------------------------- control groups


def test_version_one_groups_go_below_our_own(tmp_path):
    for name in ("memory/outer/own", "pids", "cpu"):
        (tmp_path / name).mkdir(parents=True)
    membership = "9:name=systemd:/\n8:pids:/\n4:memory:/outer/own\n3:cpuset:/\n1:cpu:/\n0::/\n"
    found = cgroups.claim_all("7-x", membership, str(tmp_path))
    assert {c: h.path for h in found for c in h.controllers} == {
        "memory": f"{tmp_path}/memory/outer/own/etude-7-x",
        "pids": f"{tmp_path}/pids/etude-7-x",
        "cpu": f"{tmp_path}/cpu/etude-7-x",
    }
    assert all(h.version == 1 for h in found)


def test_version_two_groups_go_below_the_nearest_that_hands_controllers_down(tmp_path):
    (tmp_path / "user/session").mkdir(parents=True)
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (tmp_path / "user/cgroup.subtree_control").write_text("memory pids\n")
    (tmp_path / "user/session/cgroup.subtree_control").write_text("\n")
    made = tmp_path / "user/etude-7-x"
    made.mkdir()
    (made / "cgroup.subtree_control").touch()
    [found] = cgroups.claim_all("7-x", "0::/user/session\n", str(tmp_path))
    assert (found.path, found.controllers, found.version) == (str(made), ("memory", "pids"), 2)
    assert (made / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_no_controller_is_a_valid_answer(tmp_path):
    assert cgroups.claim_all("7-x", "0::/\n", str(tmp_path)) == []
    assert cgroups.claim_all("7-x", "4:memory:/not/there\n", str(tmp_path)) == []


def test_files_of_a_dead_owner_are_deleted_and_files_of_a_living_one_kept(tmp_path):
    (tmp_path / "pids/etude-1-dead/3").mkdir(parents=True)
    first = cgroups.claim_all("2-alive", "8:pids:/\n", str(tmp_path))
    second = cgroups.claim_all("3-new", "8:pids:/\n", str(tmp_path))
    assert sorted(p.name for p in (tmp_path / "pids").iterdir()) == ["etude-2-alive", "etude-3-new"]
    cgroups.remove_all([*first, *second])
    assert not list((tmp_path / "pids").iterdir())


def test_starts_that_sweep_at_the_same_moment_keep_their_groups(tmp_path):
    (tmp_path / "memory").mkdir()

    def start(number: int) -> int:
        found = cgroups.claim_all(f"{number}-x", "4:memory:/\n", str(tmp_path))
        cgroups.remove_all(found)
        for hierarchy in found:
            hierarchy.close()
        return len(found)

    with ThreadPoolExecutor(8) as starts:
        assert list(starts.map(start, range(400))) == [1] * 400


# ---------------------------------------------------------------------------------------------- files


@pytest.fixture
def root(tmp_path: Path):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_a_tree_comes_back_as_it_was(tmp_path, root):
    files.write(root, "a/b/c.txt", b"deep")
    files.write(root, "run.sh", b"#!/bin/sh\n", 0o755)
    os.symlink("a/b", tmp_path / "link")
    (tmp_path / "empty").mkdir()
    tree = files.save(root, 1000)
    other = tmp_path / "other"
    other.mkdir()
    fd = os.open(other, os.O_RDONLY | os.O_DIRECTORY)
    files.load(fd, tree)
    assert files.save(fd, 1000) == tree
    assert os.readlink(other / "link") == "a/b"
    os.close(fd)


def test_a_tree_larger_than_allowed_is_refused(root):
    files.write(root, "a", bytes(600))
    files.write(root, "b", bytes(600))
    with pytest.raises(files.PathError, match="larger"):
        files.save(root, 1000)


def test_a_tree_that_writes_through_its_own_link_stays_inside(tmp_path, root):
    outside = tmp_path.parent / "outside"
    outside.mkdir(exist_ok=True)
    hostile = [b"d", b"l", os.fsencode(outside), b"d/x", b"f", b"escaped"]
    with pytest.raises(OSError, match="exists"):
        files.load(root, hostile)  # files first: `d` is a folder by the time the link is made
    assert not list(outside.iterdir())


def test_replacing_a_file_truncates_it_and_keeps_its_mode(tmp_path, root):
    files.write(root, "x", b"long content", 0o755)
    files.write(root, "x", b"short")
    assert files.read(root, "x", 100) == b"short"
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o755


# ---------------------------------------------------------------------------------------------- output and commands


@given(st.lists(st.binary(max_size=300)), st.integers(0, 400))
def test_output_is_whole_or_capped_with_its_head_and_tail(chunks, limit):
    whole, capped = b"".join(chunks), OutputBuffer(limit)
    for chunk in chunks:
        capped.add(chunk)
        assert len(capped._head) + len(capped._tail) <= 3 * limit
    value = capped.value()
    assert len(value) <= limit
    assert capped.truncated == (len(whole) > limit)
    if not capped.truncated:
        assert value == whole
    else:
        assert value.startswith(whole[: limit // 2])
        assert b"left out" not in value or whole.endswith(value.rpartition(b"...]\n")[2])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["python", "a.py"], True),
        (["python3", "-m", "x"], True),
        (["python", "-c", "pass"], True),
        (["python"], False),
        (["python", "-c"], False),
        (["python", "-I", "a.py"], False),
        (["python", "-"], False),
        (["/usr/bin/python3", "a.py"], False),
        (["sh", "a.sh"], False),
    ],
)
def test_the_prepared_interpreter_takes_what_it_can_answer_exactly(argv, expected):
    assert serves(argv) is expected

"""Unit tests of virtual machines: QEMU's monitor, memory, disks, images, missing requirements."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.here import opened
from tests.virtual import microvm

from etude.environments.microvm import MicroVMRuntime, find, memory, overlay, packed, probe
from etude.environments.microvm.base import remove_unfinished
from etude.environments.microvm.boot import archive
from etude.environments.microvm.disk import make_disk
from etude.environments.microvm.packages import require
from etude.environments.microvm.qmp import Monitor
from etude.environments.microvm.snapshots import Snapshot
from etude.errors import EtudeError, MachineError
from etude.records.image import Image

PAGE = mmap.PAGESIZE


def monitor_after(said: bytes) -> str:
    """The result of a command if QEMU sends this and closes the connection."""

    async def main() -> str:
        ours, theirs = socket.socketpair()
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        try:
            monitor = await Monitor.open(ours, deadline_s=10.0)
            try:
                return f"answered {await monitor.execute('query-status', deadline_s=10.0)}"
            finally:
                monitor.close()
        except MachineError as error:
            return error.what
        finally:
            await asyncio.sleep(0)  # for the transport to close
            theirs.close()

    return asyncio.run(main())


GREETING = b'{"QMP": {}}\n{"return": {}, "id": 1}\n'


def test_a_monitors_answer_is_found_among_events():
    said = GREETING + b'{"event": "STOP"}\n{"return": 7, "id": 9}\n{"return": {"status": "paused"}, "id": 2}\n'
    assert monitor_after(said) == "answered {'status': 'paused'}"


def test_a_refusal_and_a_hang_up_are_errors_with_names():
    assert monitor_after(GREETING + b'{"error": {"desc": "no"}, "id": 2}\n') == "QEMU refused query-status"
    assert monitor_after(GREETING) == "QEMU is gone"
    assert monitor_after(b"") == "QEMU is gone"


@settings(max_examples=60)
@given(st.binary(max_size=200), st.integers(0, len(GREETING)))
def test_any_bytes_from_a_monitor_are_an_answer_or_an_error(junk, at):
    monitor_after(GREETING[:at] + junk + GREETING[at:])


@pytest.fixture
def other_process():
    """Start a process that maps a file privately and has written to some pages. Yields file, pages and process."""
    ram = os.memfd_create("ram")
    os.ftruncate(ram, 64 * PAGE)
    os.pwrite(ram, b"base" * (16 * PAGE), 0)
    code = f"""
import mmap, sys
m = mmap.mmap({ram}, {64 * PAGE}, flags=mmap.MAP_PRIVATE)
_ = [m[i * {PAGE}] for i in range(64)]
for page in (3, 4, 5, 40):
    m[page * {PAGE}] = page
print("ready", flush=True)
sys.stdin.readline()
print(m[7 * {PAGE}], m[40 * {PAGE}], flush=True)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, pass_fds=[ram], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield ram, process
        process.kill()
    os.close(ram)


def test_written_pages_are_found_read_and_written_in_another_process(other_process):
    ram, process = other_process
    mapping = memory.find(process.pid, ram, 64 * PAGE)
    try:
        pages = memory.written(mapping)
    except MachineError as error:
        pytest.skip(str(error))  # ptrace of own children is not allowed here
    assert pages.numbers.tolist() == [3, 4, 5, 40]
    assert pages.content[:, 0].tolist() == [3, 4, 5, 40]
    assert bytes(pages.content[0, 1:5]) == b"aseb"
    pages.content[3, 0] = 99
    numbers = np.array([4, 5, 7, 40])
    pages.content[2, 0] = 3
    memory.write(mapping, memory.Pages(numbers, pages.content))
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"3 99\n"
    assert os.pread(ram, 1, 7 * PAGE) == b"b"  # what all share is as it was


def test_a_process_without_the_memory_is_an_error():
    ram = os.memfd_create("ram")
    try:
        with pytest.raises(MachineError, match="not found"):
            memory.find(os.getpid(), ram, 64 * PAGE)
    finally:
        os.close(ram)


def test_a_disk_copy_is_the_same_file_with_its_holes():
    source, target = overlay.anonymous(), overlay.anonymous()
    try:
        overlay.write_empty(source, 1 << 30)
        os.pwrite(source, b"here", 40 << 20)
        os.pwrite(target, b"old" * 1000, 0)
        overlay.copy(source, target)
        size = os.fstat(source).st_size
        assert os.pread(target, size, 0) == os.pread(source, size, 0)
        assert os.fstat(target).st_blocks * 512 < 4 << 20
    finally:
        os.close(source)
        os.close(target)


@pytest.mark.skipif(shutil.which("qemu-img") is None, reason="no qemu-img")
def test_an_empty_disk_is_what_qemu_takes_for_one(tmp_path):
    with (tmp_path / "disk").open("w+b") as file:
        overlay.write_empty(file.fileno(), 3 << 30)
    done = subprocess.run(["qemu-img", "check", tmp_path / "disk"], capture_output=True, text=True)
    assert (done.returncode, "No errors" in done.stdout) == (0, True), done
    facts = subprocess.run(["qemu-img", "info", "--output=json", tmp_path / "disk"], capture_output=True)
    assert json.loads(facts.stdout)["virtual-size"] == 3 << 30


@pytest.mark.skipif(shutil.which("cpio") is None, reason="no cpio")
def test_an_initial_filesystem_is_what_cpio_reads(tmp_path):
    data = archive([("init", 0o100755, b"#!/x\n"), ("modules", 0o040755, b""), ("modules/a.ko", 0o100644, b"abc")])
    subprocess.run(["cpio", "-id", "--quiet"], input=data, cwd=tmp_path, check=True)
    assert (tmp_path / "modules/a.ko").read_bytes() == b"abc"
    assert os.access(tmp_path / "init", os.X_OK)


@pytest.mark.skipif(shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/sbin:/usr/sbin") is None, reason="no mkfs")
def test_the_same_folder_makes_the_same_disk(tmp_path):
    names = [f"f{i}" for i in range(40)]
    for root, order in (("one", names), ("two", reversed(names))):
        (tmp_path / root / "sub").mkdir(parents=True)
        for name in order:
            (tmp_path / root / "sub" / name).write_text(name)
        (tmp_path / root / "link").symlink_to("sub/f1")
        make_disk(tmp_path / root, tmp_path / f"{root}.ext4", num_bytes=16 << 20, epoch=1_700_000_000)
    assert (tmp_path / "one.ext4").read_bytes() == (tmp_path / "two.ext4").read_bytes()


def test_a_missing_guest_image_tool_or_qemu_is_named_with_a_hint(tmp_path, monkeypatch):
    with pytest.raises(MachineError, match="no guest image") as none:
        find(tmp_path)
    assert "etude machines image microvm" in none.value.hint
    with pytest.raises(MachineError, match="no-such-tool") as tool:
        require({"no-such-tool": "some-package"})
    assert "some-package" in tool.value.hint
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EtudeError, match="qemu-system-x86_64 was not found") as qemu:
        MicroVMRuntime()
    assert "qemu-system-x86" in qemu.value.hint


def packed_snapshot(key: bytes, *, max_bytes: int = 1 << 20) -> bytes:
    disk = overlay.anonymous()
    overlay.write_empty(disk, 1 << 30)
    os.pwrite(disk, b"here", 4 << 20)
    pages = memory.Pages(np.array([3, 70]), np.full((2, PAGE), 7, np.uint8))
    return packed.pack(
        Snapshot("image", b"devices", pages, disk), base="b", boot="c", image=None, key=key, max_bytes=max_bytes
    )


def test_a_packed_snapshot_is_the_same_snapshot():
    data = packed_snapshot(b"key")
    head = packed.head_of(data, b"key")
    assert (head.base, head.boot, head.image) == ("b", "c", None)
    found = packed.unpack(data, head, image="image")
    assert (found.image, found.devices, found.pages.numbers.tolist()) == ("image", b"devices", [3, 70])
    assert found.pages.content.tolist() == [[7] * PAGE] * 2
    assert os.pread(found.disk, 4, 4 << 20) == b"here"
    assert os.fstat(found.disk).st_blocks * 512 < 1 << 20
    with pytest.raises(ValueError, match="at most 1000"):
        packed_snapshot(b"key", max_bytes=1000)


@settings(max_examples=60)
@given(st.sets(st.integers(0, 400) | st.integers(0, 8000), min_size=1, max_size=3), st.integers(1, 255), st.data())
def test_bytes_that_nobody_packed_are_never_a_snapshot(places, flip, data):
    right = bytearray(packed_snapshot(b"key"))
    for at in places:
        right[at] ^= flip
    for bad in (bytes(right), bytes(right[: data.draw(st.integers(0, len(right)))])):
        with pytest.raises(ValueError):  # noqa: PT011 - the kind is the promise
            packed.head_of(bad, b"key")


def test_a_snapshot_packed_by_another_host_is_refused(tmp_path):
    mine = packed.key_in(tmp_path / "mine")
    assert (len(mine), packed.key_in(tmp_path / "mine")) == (32, mine)
    theirs = packed_snapshot(packed.key_in(tmp_path / "theirs"))
    with pytest.raises(MachineError, match="another host"):
        packed.head_of(theirs, mine)
    sealed = bytearray(packed_snapshot(mine))
    sealed[48] ^= 1
    with pytest.raises(ValueError, match="seal"):
        packed.head_of(bytes(sealed), mine)


def test_files_of_a_killed_builder_are_removed_and_a_running_build_is_kept(tmp_path):
    for name in (".old", ".new", "kept"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "memory").write_bytes(b"x")
    (tmp_path / ".old.ext4").touch()
    for path in (tmp_path / ".old", tmp_path / ".old.ext4", tmp_path / "kept"):
        os.utime(path, (0, 0))
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new", "kept"]


def test_the_accelerator_is_probed_once(monkeypatch):
    opened("microvm", microvm)
    first = asyncio.run(probe(find()))
    monkeypatch.setattr(sys.modules["etude.environments.microvm.probe"], "Qemu", None)  # no guest is started any more
    assert asyncio.run(probe(find())) == first


def test_an_image_of_ones_own_boots_with_its_files_user_and_environment(tmp_path):
    """A root filesystem with only busybox: the boot adds everything else that a machine needs."""
    opened("microvm", microvm)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "microvm").mkdir()
    own = find()
    (cache / "microvm" / own.digest).symlink_to(own.disk.parent)
    (cache / "microvm/current").write_text(own.digest)
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    shutil.copy(own.busybox, root / "bin/busybox")
    (root / "bin/busybox").chmod(0o755)
    for name in ("sh", "cat", "id", "ls"):
        (root / "bin" / name).symlink_to("busybox")
    (root / "opt/app").mkdir(parents=True)
    (root / "opt/app/version").write_text("7\n")
    image = Image(digest="a" * 64, workdir="/opt/app", env={"STAGE": "test"})

    async def said() -> tuple[bytes, bytes]:
        runtime = MicroVMRuntime(folder=cache, roots=lambda digest: root, spare=0)
        try:
            [machine] = await runtime.fork(await runtime.prepare({"new": b"file\n"}, image=image), 1)
            script = "cat version new; echo $STAGE; id -un; pwd; echo more > version; cat version"
            output = (await machine.exec(["sh", "-c", script], key="1", deadline_s=120)).output
            return output, await runtime.pack(await machine.snapshot(), max_bytes=64 << 20)
        finally:
            await runtime.close()

    async def in_another(state: bytes) -> bytes:
        runtime = MicroVMRuntime(folder=cache, roots=lambda digest: root, spare=0)
        try:
            [machine] = await runtime.fork(await runtime.unpack(state), 1)
            return (await machine.exec(["sh", "-c", "cat version; echo $STAGE"], key="1", deadline_s=120)).output
        finally:
            await runtime.close()

    output, state = asyncio.run(said())
    assert asyncio.run(in_another(state)) == b"more\ntest\n"
    assert output == b"7\nfile\ntest\nuser\n/opt/app\nmore\n"
    assert (root / "opt/app/version").read_text() == "7\n"


def test_a_runtime_without_an_image_store_says_so():
    runtime = opened("microvm", microvm)

    async def main() -> None:
        try:
            with pytest.raises(MachineError, match="no image aaaa"):
                await runtime.prepare({}, image=Image(digest="a" * 64))
        finally:
            await runtime.close()

    asyncio.run(main())

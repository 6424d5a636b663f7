"""What sandboxes of gVisor must withstand: hosts that are killed, and sandboxes that die."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.here import opened, why_not

from etude.environments import MachineLimits, prepare
from etude.environments.gvisor import GVisorRuntime
from etude.environments.microvm import find
from etude.errors import MachineError
from etude.records.image import Image
from etude.records.task import Split, Task


def with_runtime(test: Callable[[GVisorRuntime], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        runtime = opened("gvisor", GVisorRuntime)
        try:
            return await test(runtime)
        finally:
            await runtime.close()

    return asyncio.run(main())


def of_folder(folder: str) -> set[int]:
    """The processes that were started for a runtime whose folder is in this one."""
    found = subprocess.run(["pgrep", "-f", f"^runsc.*{folder}/etude-gvisor"], capture_output=True, text=True)
    return set(map(int, found.stdout.split()))


def test_whichever_process_of_a_sandbox_is_killed_it_is_dead_by_its_own_doing_and_nothing_is_left(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def test(runtime):
        snapshot = await runtime.prepare({})
        for role in ("run", "boot", "gofer"):
            [machine] = await runtime.fork(snapshot, 1)
            words = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in of_folder(str(tmp_path))}
            running = asyncio.create_task(machine.exec(["sleep", "1000"], key="1", deadline_s=600.0))
            await machine.write("x", b"y")
            [pid] = [pid for pid, command in words.items() if role in command]
            os.kill(pid, signal.SIGKILL)
            assert (await running).exit_code == 137
            with pytest.raises(FileNotFoundError):
                await machine.read("x")
            assert of_folder(str(tmp_path)) == set()
            assert str(tmp_path) not in Path("/proc/mounts").read_text()
            assert f"@runsc-sandbox.{words[pid][-2]}" not in Path("/proc/net/unix").read_text()

    with_runtime(test)
    assert (list(tmp_path.iterdir()), of_folder(str(tmp_path))) == ([], set())


def test_no_process_outlives_a_host_that_is_killed_and_the_next_runtime_removes_its_folder(tmp_path, monkeypatch):
    async def nothing(runtime):
        pass

    with_runtime(nothing)  # skips where there is none
    code = """
        import asyncio
        from etude.environments.gvisor import GVisorRuntime
        async def main():
            runtime = GVisorRuntime()
            machines = await runtime.fork(await runtime.prepare({}), 2)
            print("ready", flush=True)
            await machines[0].exec(["sleep", "1000"], key="1", deadline_s=1000)
        asyncio.run(main())
    """
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=env, stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"ready\n"
        pids = of_folder(str(tmp_path))
        assert len(pids) >= 2
        ends = [os.pidfd_open(pid) for pid in pids]
        host.kill()
    until = time.monotonic() + 120.0
    for end in ends:
        assert select.select([end], [], [], max(0.0, until - time.monotonic()))[0]
        os.close(end)
    assert list(tmp_path.iterdir())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with_runtime(nothing)
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_runsc_is_refused_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="the program runsc was not found") as missing:
        GVisorRuntime()
    assert "runsc" in missing.value.hint


def test_an_image_is_never_written_to_and_its_machines_share_nothing(tmp_path):
    if why := why_not("microvm"):
        pytest.skip(f"no busybox: {why}")
    busybox = find().busybox
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    shutil.copy(busybox, root / "bin/busybox")
    (root / "bin/busybox").chmod(0o755)
    for name in ("sh", "cat", "chown", "id", "mkdir"):
        (root / "bin" / name).symlink_to("busybox")
    (root / "opt/app").mkdir(parents=True)
    (root / "opt/app/version").write_text("7\n")
    before = sorted(str(path) for path in root.rglob("*"))
    image = Image(digest="a" * 64, workdir="/opt/app", env={"STAGE": "test"})
    migrate = Task(
        source="s",
        split=Split.TRAIN,
        index=0,
        family="f",
        instruction="migrate it",
        files={},
        exports=(),
        image=image,
        state=True,
    )

    async def main() -> tuple[bytes, bytes]:
        runtime = opened("gvisor", lambda: GVisorRuntime(roots=lambda digest: root))
        try:
            one, other = await runtime.fork(await runtime.prepare({"new": b"file\n"}, image=image), 2)
            script = "cat version new; echo $STAGE; id -un; echo more > version; cat version"
            said = await one.exec(["sh", "-c", script], key="1", deadline_s=120)
            with pytest.raises(MachineError, match="incomplete"):
                await runtime.pack(await one.snapshot(), max_bytes=1 << 20)
            with pytest.raises(MachineError, match="only the working directory"):
                await prepare(runtime, migrate)
            return said.output, await other.read("version")
        finally:
            await runtime.close()

    assert asyncio.run(main()) == (b"7\nfile\ntest\nuser\nmore\n", b"7\n")
    assert sorted(str(path) for path in root.rglob("*")) == before


HOG = """
import os
held = []
for _ in range(200):
    held.append(os.memfd_create("hidden"))
    os.write(held[-1], bytes(1 << 20))
print("escaped")
"""


def test_files_in_memory_that_nobody_maps_count_towards_a_sandboxs_bound():
    async def main() -> None:
        runtime = opened("gvisor", lambda: GVisorRuntime(MachineLimits(memory_bytes=32 << 20)))
        try:
            if any(note.startswith("memory:") for note in runtime.info.notes):
                pytest.skip("no memory control group here")
            snapshot = await runtime.prepare({"hog.py": HOG.encode()})
            hog, other = await runtime.fork(snapshot, 2)
            result = await hog.exec(["python", "hog.py"], key="1", deadline_s=60)
            assert result.exit_code == 137
            assert b"escaped" not in result.output
            assert (await other.exec(["python", "-c", "print(1)"], key="1", deadline_s=60)).output == b"1\n"
        finally:
            await runtime.close()

    asyncio.run(main())

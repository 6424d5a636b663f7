"""Virtual machines and sandboxes on a host with a full disk or inode table: an error, no lost data, no files left."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.here import why_not

FULL = """
import asyncio, os, sys, tempfile
from pathlib import Path
from etude.environments.backends import open_runtime
from etude.errors import MachineError

backend, disk = sys.argv[1], Path(sys.argv[2])
tempfile.tempdir = str(disk)

def bytes_full():
    with (disk / "full").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass

def inodes_full():
    (disk / "many").mkdir()
    try:
        for number in range(100_000):
            (disk / "many" / str(number)).touch()
    except OSError:
        pass

def emptied():
    (disk / "full").unlink(missing_ok=True)
    for path in (disk / "many").glob("*"):
        path.unlink()

async def main():
    runtime = open_runtime(backend)
    snapshot = await runtime.prepare({"a": b"1"})
    [machine] = await runtime.fork(snapshot, 1)
    told = 0
    for fill in (bytes_full, inodes_full):
        fill()
        await machine.write(fill.__name__, b"kept")
        for attempt in (lambda: runtime.fork(snapshot, 3), machine.snapshot, lambda: runtime.prepare({"b": b"2"})):
            try:
                await attempt()
            except MachineError as error:
                assert error.what and error.facts and ("room" in error.hint or "space" in error.hint), error
                told += 1
        emptied()
        [other] = await runtime.fork(await machine.snapshot(), 1)
        assert await machine.read(fill.__name__) == await other.read(fill.__name__) == b"kept"
    await runtime.close()
    print(told > 0, sorted(path.name for path in disk.iterdir()))

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount a tmpfs")
@pytest.mark.parametrize(("backend", "size"), [("microvm", "16m"), ("gvisor", "2m")])
def test_a_full_disk_of_the_host_raises_an_error_and_running_machines_continue(tmp_path, backend, size):
    if why := why_not(backend):
        pytest.skip(why)
    mounted = f'mount -t tmpfs -o size={size},nr_inodes=400 none "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mounted, str(tmp_path)]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command += [sys.executable, "-c", FULL, backend, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "True ['many']\n"

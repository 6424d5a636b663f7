"""A machine's memory is bounded as a whole where the host can, and a run refuses to start where it cannot."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.here import opened

from etude.environments.backends import runtime_from_config
from etude.environments.config import MIB, MachineLimits, MachinesConfig, check_memory_bound
from etude.environments.gvisor.cgroups import SENTRY_BYTES, SandboxCgroups
from etude.environments.namespace import NamespaceRuntime
from etude.errors import MachineError

HOG = """
import os, sys
held = []
for _ in range(int(sys.argv[1])):
    fd = os.memfd_create("hidden")
    os.write(fd, bytes(1 << 20))
    held.append(fd)
    if len(held) == 200:  # more than open descriptors allow: another process holds the rest
        if os.fork():
            os.wait()
            break
        held = []
print("escaped", flush=True)
"""
"""Writes so many MiB into files in memory, none of which any process has mapped."""

WITHOUT_GROUPS = """
import asyncio
from etude.environments.backends import runtime_from_config
from etude.environments.config import MachinesConfig
from etude.errors import MachineError

async def main():
    try:
        await runtime_from_config(MachinesConfig()).close()
        print("started")
    except MachineError as error:
        print(error)
    runtime = runtime_from_config(MachinesConfig(require_memory_bound=False))
    print(runtime.limits["memory"])
    [machine] = await runtime.fork(await runtime.prepare({}), 1)
    print((await machine.exec(["python", "-c", "print(6 * 7)"], key="1", deadline_s=30)).output)
    await runtime.close()

asyncio.run(main())
"""


def test_a_run_refuses_a_host_without_memory_groups_unless_told_to_go_on():
    opened("namespace", lambda: None)
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    hide = 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"'
    command = ["unshare", *as_root, "--mount", "sh", "-c", hide, "sh", sys.executable, "-c", WITHOUT_GROUPS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "the memory of a machine cannot be bounded here" in done.stdout
    assert "require_memory_bound = false" in done.stdout
    assert "started" not in done.stdout
    assert "per process only" in done.stdout
    assert "42" in done.stdout


def test_what_is_required_and_what_the_laptop_accepts():
    assert MachinesConfig().require_memory_bound
    assert not MachineLimits().require_memory_bound
    check_memory_bound(MachinesConfig(), {"memory": 1})
    with pytest.raises(MachineError, match="the memory of a machine cannot be bounded"):
        check_memory_bound(MachinesConfig(), ("cpu", "pids"))
    example = tomllib.loads((Path(__file__).parents[3] / "examples/laptop/config.toml").read_text())
    assert example["machines"]["require_memory_bound"] is False


def test_unmapped_files_in_memory_count_towards_a_machines_limit():
    async def main() -> None:
        runtime = opened("namespace", lambda: NamespaceRuntime(MachineLimits(memory_bytes=64 * MIB, open_files=256)))
        try:
            if not runtime.limits["memory"].startswith("cgroup"):
                pytest.skip("no memory control group here")
            [machine] = await runtime.fork(await runtime.prepare({"hog.py": HOG.encode()}), 1)
            few = await machine.exec(["python", "hog.py", "16"], key="1", deadline_s=60)
            assert few.output == b"escaped\n"
            many = await machine.exec(["python", "hog.py", "600"], key="2", deadline_s=60)
            assert b"escaped" not in many.output
            assert not many.timed_out
        finally:
            await runtime.close()

    asyncio.run(main())


def test_a_sandboxs_processes_start_inside_of_its_bound():
    groups = SandboxCgroups(MachineLimits(memory_bytes=32 * MIB), count=2)
    try:
        if "memory" not in groups.controllers:
            pytest.skip("no memory control group here")
        slot = groups.take()
        few, many = 16, (32 * MIB + SENTRY_BYTES) // MIB + 64
        done = [
            subprocess.run(groups.inside(slot, [sys.executable, "-c", HOG, str(count)]), capture_output=True)
            for count in (few, many)
        ]
        assert done[0].stdout == b"escaped\n"
        assert done[1].returncode == -signal.SIGKILL
        assert done[1].stdout == b""
        groups.give_back(slot)
        assert groups.take() == slot
    finally:
        groups.close()


def test_without_groups_a_sandbox_starts_as_it_is(tmp_path):
    groups = SandboxCgroups(MachineLimits(), count=1)
    groups.close()
    command = groups.inside(groups.take(), ["sh", "-c", "echo $0 -- $1", "a b", "c"])
    assert subprocess.run(command, capture_output=True, text=True).stdout == "a b -- c\n"


def test_the_backends_config_reaches_the_check():
    opened("namespace", lambda: None)
    runtime = runtime_from_config(MachinesConfig(require_memory_bound=False))
    asyncio.run(runtime.close())

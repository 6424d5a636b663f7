"""An external server as a child process of its adapter; another program takes the place of vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from etude.errors import EngineError
from etude.inference.vllm.process import VllmProcess

ADAPTER = """
import os, sys
from pathlib import Path
from etude.inference.vllm.process import VllmProcess

serves = "import os, signal; print('serves as', os.getpid(), flush=True); signal.pause()"
vllm = VllmProcess([sys.executable, "-c", serves], dict(os.environ), name="e", socket=Path("s"), gives_routes=False)
vllm.process.wait()
"""


def is_there(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_server_does_not_outlive_its_adapter_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ADAPTER], stdout=subprocess.PIPE, text=True) as adapter:
        assert adapter.stdout is not None
        server = int(adapter.stdout.readline().removeprefix("serves as "))
        assert is_there(server)
        adapter.kill()
    try:
        end = time.monotonic() + 60
        while is_there(server):
            assert time.monotonic() < end, "the server goes on without its adapter"
            time.sleep(0.01)
    finally:
        if is_there(server):
            os.kill(server, signal.SIGKILL)


WARNS = """
print("(APIServer pid=7) WARNING 11-29 [system_utils.py:255] This can cause errors like OSError: Too many open files")
raise SystemExit("ValueError: no such model")
"""


def test_the_error_of_a_start_names_what_the_server_raised_and_not_what_it_warned_of() -> None:
    vllm = VllmProcess([sys.executable, "-c", WARNS], dict(os.environ), name="e", socket=Path("s"), gives_routes=False)

    async def work() -> None:
        async with vllm:
            pass

    with vllm.process, pytest.raises(EngineError) as ended:
        asyncio.run(work())
    assert ended.value.facts == "ValueError: no such model"


SERVING = """
import argparse, subprocess, sys
from etude.inference.external.process import server_environ
from etude.inference.external.serving import run_process

LITTER = "import os, tempfile; [os.mkdir(os.path.join(tempfile.gettempdir(), name)) for name in 'abc']"


def serving(folder, telemetry):
    subprocess.run([sys.executable, "-c", LITTER], env=server_environ(folder, 1), check=True)
    print(len(list(folder.iterdir())), flush=True)
    if "waits" in sys.argv:
        sys.stdin.read()


sys.exit(run_process(argparse.Namespace(watch_stdin=False, telemetry=None), "vllm", serving))
"""


def test_temporary_files_of_a_server_are_deleted_with_its_adapter_or_by_the_next_one() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        argv, env = [sys.executable, "-c", SERVING], {**os.environ, "TMPDIR": scratch}
        with subprocess.Popen(
            [*argv, "waits"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as killed:
            assert killed.stdout is not None
            assert killed.stdout.readline() == "4\n", "a link to etude, and what was left"
            killed.kill()
        assert len(os.listdir(scratch)) == 1
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
        assert done.stdout == "4\n"
        assert os.listdir(scratch) == []


def test_a_folder_whose_path_is_too_long_for_sockets_is_refused() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        long = os.path.join(scratch, "x" * 60)
        os.mkdir(long)
        env = {**os.environ, "TMPDIR": long}
        done = subprocess.run([sys.executable, "-c", SERVING], env=env, capture_output=True, text=True)
        assert done.returncode == 1
        assert "too long a path for the sockets of vllm" in done.stderr
        assert "hint: set TMPDIR" in done.stderr
        assert os.listdir(long) == []

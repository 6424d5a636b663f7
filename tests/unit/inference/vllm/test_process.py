"""A server of another make as a child of its adapter: any program stands in for it, nothing of it is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

ADAPTER = """
import os, sys
from pathlib import Path
from etude.inference.vllm.process import Vllm

serves = "import os, signal; print('serves as', os.getpid(), flush=True); signal.pause()"
vllm = Vllm([sys.executable, "-c", serves], dict(os.environ), name="e", socket=Path("s"), gives_routes=False)
vllm.process.wait()
"""


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
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
        end = time.monotonic() + 10
        while is_there(server):
            assert time.monotonic() < end, "the server goes on without its adapter"
            time.sleep(0.01)
    finally:
        if is_there(server):
            os.kill(server, signal.SIGKILL)

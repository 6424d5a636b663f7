"""CPU and memory are read from the kernel, ended children included."""

from __future__ import annotations

import os
import subprocess
import sys

from etude.loop.usage import Processes, pss_bytes

BURN = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"
PARENT = (
    f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=subprocess.PIPE)\n"
    "print(child.pid, flush=True)\nsys.stdin.read()\nchild.communicate()"
)


def test_a_tree_counts_its_living_and_its_ended_descendants():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        processes = Processes()
        assert {parent.pid, child} <= set(processes.tree(parent.pid))
        assert processes.cpu_s(parent.pid) >= 0.19
        assert pss_bytes([parent.pid, child]) > pss_bytes([child]) > 0


def test_a_process_that_is_gone_costs_nothing():
    with subprocess.Popen([sys.executable, "-c", ""]) as done:
        pass
    assert Processes().cpu_s(done.pid) == 0.0
    assert pss_bytes([done.pid]) == 0


def test_own_cpu_time_excludes_children():
    assert 0 < Processes().own_cpu_s(os.getpid()) <= sum(os.times()[:2]) + 0.1

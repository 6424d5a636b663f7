"""CPU and memory are read from the kernel, ended children included."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from etude.loop.usage import Processes, pss_bytes, queued_s

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


def test_what_waits_for_a_core_is_told_from_what_sleeps():
    core = min(os.sched_getaffinity(0))
    burn = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    programs = [burn, burn, "import time; time.sleep(600)"]
    processes = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        begun = [queued_s(process.pid) for process in processes]
        end = time.monotonic() + 300
        waited = [0.0, 0.0, 0.0]
        while min(waited[:2]) < 1.0 or waited[2] > waited[0] / 2:
            assert time.monotonic() < end, f"waited for a core: {waited} s"
            time.sleep(0.05)
            waited = [
                queued_s(process.pid)[process.pid] - before[process.pid]
                for process, before in zip(processes, begun, strict=True)
            ]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert queued_s(processes[0].pid) == {}


def test_own_cpu_time_excludes_children():
    assert 0 < Processes().own_cpu_s(os.getpid()) <= sum(os.times()[:2]) + 0.1

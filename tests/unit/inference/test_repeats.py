"""Repeated tracebacks in a server's output."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from etude.inference.external.process import BEGIN, JOINTS, MAX_KNOWN, MAX_LINES, TracebackFilter


def passed(lines: list[str]) -> list[str]:
    """The lines that are printed."""
    repeats = TracebackFilter()
    out = [one for line in lines for one in repeats.line(f"{line}\n")]
    return [line.removesuffix("\n") for line in [*out, *repeats.end()]]


def failure(number: int, prefix: str = "") -> list[str]:
    """A traceback of vLLM's core with its cause, at the `number`-th request."""
    lines = [
        BEGIN,
        '  File "/v/worker.py", line 70, in swap',
        "    self.map.write(update)",
        f"KeyError: 'request 5e7f0a1b-{number:04d}'",
        "",
        JOINTS[1],
        "",
        BEGIN,
        '  File "/v/core.py", line 12, in run_busy_loop',
        "    self.step()",
        "    ~~~~~~~~~^^",
        f"RuntimeError: a worker failed at step {number}",
    ]
    return [f"{prefix}{line}" for line in lines]


def test_one_traceback_in_231_copies_is_printed_once_and_counted() -> None:
    prefix = "(EngineCore_DP0 pid=71) ERROR 11-22 08:00:{:02d} [core.py:844] "
    lines = [line for i in range(231) for line in [f"failed: {i}", *failure(i, prefix.format(i % 60))]]
    out = passed(lines)
    assert [line for line in out if line.startswith("failed")] == [f"failed: {i}" for i in range(231)]
    assert sum(BEGIN in line for line in out) == 2, "the cause and what it caused"
    assert out[1:13] == failure(0, prefix.format(0))
    assert "(the same traceback 100 more times: RuntimeError: a worker failed at step 0)" in out
    assert out[-1] == "(the same traceback 230 more times: RuntimeError: a worker failed at step 0)"
    assert len(out) < 231 + 12 + 10


def test_different_tracebacks_and_plain_lines_are_printed() -> None:
    other = [BEGIN, '  File "/v/worker.py", line 71, in swap', "KeyError: 'request 1'"]
    lines = [*failure(1), "well again", *other, "  indented", "", "done"]
    assert passed(lines) == lines
    assert passed(["[2026-11-22 08:00:00 TP0] Scheduler hit an exception: " + BEGIN, *other[1:]] * 2)[3:] == [
        "(the same traceback 1 more time: KeyError: 'request 1')"
    ]


def test_the_memory_of_repeated_lines_is_bounded() -> None:
    endless = [BEGIN, *(f'  File "a.py", line {i}, in f' for i in range(2 * MAX_LINES))]
    repeats = TracebackFilter()
    assert len([one for line in endless for one in repeats.line(line)]) == len(endless)
    for i in range(4 * MAX_KNOWN):
        for line in (BEGIN, f'  File "a{i}.py", line 1, in f', "ValueError: no"):
            list(repeats.line(line))
    assert len(repeats._known) == MAX_KNOWN
    assert not repeats._lines


LINES = [BEGIN, f"INFO 11-22 08:00:00 [a.py:1] {BEGIN}", "  frame", "E: 1", "E: 2", "", *JOINTS, "other", "(pid=3) "]


@given(st.lists(st.sampled_from(LINES), max_size=60))
def test_nothing_but_repeated_tracebacks_is_left_out_and_nothing_is_printed_out_of_order(lines: list[str]) -> None:
    out = [line for line in passed(lines) if not line.startswith("(the same")]
    rest = iter(lines)
    assert all(line in rest for line in out), "a subsequence"
    if not any(BEGIN in line for line in lines):
        assert out == lines


def test_a_child_that_fails_again_and_again_does_not_fill_its_adapters_log() -> None:
    fails = "import traceback\nfor _ in range(50):\n    try:\n        1 / 0\n    except ZeroDivisionError:\n"
    fails += "        traceback.print_exc()"
    script = f"""
import os, sys
from pathlib import Path
from etude.inference.vllm.process import VllmProcess
vllm = VllmProcess([sys.executable, "-c", {fails!r}], dict(os.environ), name="e", socket=Path("s"), gives_routes=False)
vllm.process.wait()
vllm._reader.join()
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.count(BEGIN) == 1
    assert "(the same traceback 49 more times: ZeroDivisionError: division by zero)" in out

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Unpack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import MachineError
from etude.harness import Call, Workbench, standard_tools
from etude.harness.tools import clip, find_line, number_lines
from etude.records import Task
from etude.records.command import ExecOptions, ExecResult
from etude.records.task import Split
from etude.testing import MemoryMachine

TOOLS = standard_tools()
CALC = 'def price(n):\n    """n plus 3"""\n    return n - 3\n\ndef cost(n): return n\n'
TASK = Task(
    source="list",
    split=Split.TRAIN,
    index=0,
    family="demo",
    instruction="fix",
    files={"calc.py": CALC, "tests.py": "import calc\nprint(calc.price(1), 'of 4')\n"},
    exports=("calc.py",),
    test_command=("python", "tests.py"),
)


def bench_of(machine: MemoryMachine | None = None, *, output_chars: int = 200) -> Workbench:
    machine = machine or MemoryMachine({p: t.encode() for p, t in TASK.files.items()})
    return Workbench.of(TASK, machine, key="r", deadline_s=60.0, output_chars=output_chars)


def use(bench: Workbench, name: str, **arguments: str) -> str:
    return asyncio.run(TOOLS.run(Call(name, arguments), bench))


def test_a_repair_goes_through_ls_cat_test_edit_and_submit() -> None:
    bench = bench_of()
    assert use(bench, "ls") == "calc.py tests.py"
    assert use(bench, "cat", path="calc.py").splitlines()[2] == "3  return n - 3"
    assert use(bench, "test") == "-2 of 4"
    assert use(bench, "edit", path="calc.py", line="3", text="return n + 3") == "ok"
    assert use(bench, "test") == "4 of 4"
    assert use(bench, "submit") == ""
    assert bench.submitted


def test_edit_finds_a_function_by_its_name_and_keeps_indentation() -> None:
    bench = bench_of()
    use(bench, "edit", path="calc.py", line="price", text="m = n\nreturn m + 3")
    machine = bench.machine
    assert isinstance(machine, MemoryMachine)
    assert machine.files["calc.py"].startswith(b'def price(n):\n    """n plus 3"""\n    m = n\n    return m + 3\n\n')


@pytest.mark.parametrize("place", ["0", "6", "99999999999999", "nobody", "", "-1", "³"])
def test_a_line_that_is_not_there_is_said_so(place: str) -> None:
    assert use(bench_of(), "edit", path="calc.py", line=place, text="x") == "no such line"


def test_invalid_paths_and_files_are_answered_with_an_error_text() -> None:
    bench = bench_of()
    assert use(bench, "cat", path="nope.py") == "no such file"
    assert use(bench, "cat", path=".") == "is a directory"
    assert use(bench, "cat", path="../../etc/passwd").startswith("refused")
    assert use(bench, "write", path="/etc/passwd", text="x").startswith("refused")
    assert use(bench, "edit", path="nope.py", line="1", text="x") == "no such file"
    assert isinstance(bench.machine, MemoryMachine)
    bench.machine.files["calc.py"] = b"\xff\xfe"
    assert use(bench, "edit", path="calc.py", line="1", text="x").startswith("refused")


def test_a_written_file_is_listed_and_hidden_ones_are_not() -> None:
    bench = bench_of()
    use(bench, "write", path="./new/a.py", text="x = 1")
    use(bench, "write", path=".git/config", text="x")
    assert use(bench, "ls") == "calc.py new/a.py tests.py"


class ShellMachine(MemoryMachine):
    """A machine that returns a fixed result for every command."""

    def __init__(self, result: ExecResult) -> None:
        super().__init__({})
        self.result, self.commands = result, list[tuple[Sequence[str], str]]()

    async def exec(
        self, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        self.commands.append((argv, key))
        return self.result


def result(output: bytes, exit_code: int = 0, *, timed_out: bool = False) -> ExecResult:
    return ExecResult(exit_code=exit_code, output=output, timed_out=timed_out, truncated=False, wall_s=0.0)


def test_after_a_command_ls_asks_the_machine() -> None:
    machine = ShellMachine(result(b"./b.py\n./a/c.py\n./__pycache__/b.pyc\n./.hidden\nfind: x: Permission denied\n"))
    bench = bench_of(machine)
    use(bench, "run", command="touch b.py")
    assert use(bench, "ls") == "a/c.py b.py"
    assert machine.commands == [(("sh", "-c", "touch b.py"), "r/1"), (("find", ".", "-type", "f"), "r/2")]


def test_a_command_says_how_it_ended() -> None:
    assert use(bench_of(ShellMachine(result(b"", 3))), "run", command="x") == "exit 3"
    assert use(bench_of(ShellMachine(result(b"", 137, timed_out=True))), "run", command="x") == "timed out"
    assert use(bench_of(ShellMachine(result(b"so\n", 137, timed_out=True))), "test") == "so\ntimed out"
    assert use(bench_of(ShellMachine(result(b"\xff ok\n"))), "test") == "\ufffd ok"


def test_a_long_answer_loses_its_middle() -> None:
    answer = use(bench_of(ShellMachine(result(b"a" * 500 + b"z" * 500)), output_chars=40), "test")
    assert answer == "a" * 20 + "..." + "z" * 17


def test_a_machine_that_died_is_not_the_agents_fault_and_rises() -> None:
    bench = bench_of()
    asyncio.run(bench.machine.close())
    with pytest.raises(MachineError):
        use(bench, "cat", path="calc.py")


@given(st.text(max_size=60), st.integers(16, 50))
def test_clipping_keeps_the_limit_and_both_ends(text: str, limit: int) -> None:
    clipped = clip(text, limit)
    assert len(clipped) == min(len(text), limit)
    assert clipped[:4] == text[:4]
    assert clipped[-4:] == text[-4:]


@given(st.text(alphabet=" \nab", max_size=60), st.text(max_size=8))
def test_find_line_returns_an_index_of_the_file_or_none(text: str, place: str) -> None:
    lines = text.splitlines()
    index = find_line(lines, place)
    assert index is None or 0 <= index < len(lines)
    assert len(number_lines(text).splitlines()) == len(lines) or any(ord(c) < 32 and c != "\n" for c in text)

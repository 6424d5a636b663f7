"""What is taken out of a frozen machine, and what is not."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.environments.judging import RIGHT, TASK, on_machines

from etude.environments import reference_exports, simulate_exports, take_exports, validate_exports
from etude.errors import MachineError, TaskError
from etude.records.exports import covers, is_declarable, is_plain
from etude.records.task import Answer
from etude.testing import MemoryRuntime

LEAVE = """
mkdir -p logs/deep 'logs/with space' other
echo one > logs/a.txt; echo two > logs/deep/b.txt; printf 'x\\ny' > 'logs/with space/new
line'
echo no > other/c.txt
ln -s /etc/passwd logs/link; ln -s ../other logs/folder; mkfifo logs/pipe; ln other/c.txt logs/hard
head -c 2000000 /dev/zero > logs/large
printf x > "logs/$(printf '\\377')"
(sleep 1; echo late > logs/a.txt) &
"""


def taken(script: str, *declared: str, **changes: Any) -> dict[str, bytes]:
    task = msgspec.structs.replace(TASK, exports=declared, **changes)

    async def work(runtime: Any) -> dict[str, bytes]:
        [machine] = await runtime.fork(await runtime.prepare({"calc.py": b"x"}), 1)
        await machine.exec(["sh", "-c", script], key="1", deadline_s=10)
        return await take_exports(machine, task, runtime)

    return on_machines(work)


def test_a_folder_is_its_regular_files_as_they_were_when_the_machine_was_frozen():
    assert taken(LEAVE, "logs/", "calc.py", "gone.py") == {
        "calc.py": b"x",
        "logs/a.txt": b"one\n",
        "logs/deep/b.txt": b"two\n",
        "logs/hard": b"no\n",
        "logs/with space/new\nline": b"x\ny",
    }


def test_the_whole_working_directory_can_be_declared():
    assert set(taken("mkdir a; echo 1 > a/b; echo 2 > c", "./")) == {"a/b", "c", "calc.py"}


def test_files_of_etude_are_no_part_of_the_working_directory():
    script = "mkdir -p .etude/deep a; echo 1 > .etude/history.txt; echo 2 > .etude/deep/x; echo 3 > a/.etude"
    assert set(taken(script, "./")) == {"a/.etude", "calc.py"}
    assert set(taken(script, "./", ".etude/history.txt")) == {".etude/history.txt", "a/.etude", "calc.py"}


@pytest.mark.parametrize(
    "script",
    [
        "ln -s /etc logs",
        "i=0; mkdir logs; while [ $i -lt 3000 ]; do echo > logs/$i; i=$((i + 1)); done",
        "mkdir logs; truncate -s 100000000000 logs/sparse",
        "mkdir logs; echo > a; i=0; while [ $i -lt 9000 ]; do ln a l$i; i=$((i + 1)); done",
        "mkdir logs; echo > logs/a; chmod 000 logs",
        "i=0; mkdir logs; cd logs; while [ $i -lt 2000 ] && mkdir d && cd d; do i=$((i + 1)); done",
    ],
)
def test_invalid_exports_of_an_agent_are_an_outcome_and_no_error(script):
    exports = taken(script, "logs/")
    assert len(exports) <= 20_000
    assert all(is_plain(path) and covers(("logs/",), path) for path in exports)


@pytest.mark.parametrize("declared", ["/etc/", "../x", "a/../b/", "", "/", "."])
def test_a_declaration_that_cannot_be_one_is_the_tasks_fault(declared):
    runtime = MemoryRuntime()
    task = msgspec.structs.replace(TASK, exports=(declared,))
    with pytest.raises(TaskError, match="plain relative path"):
        asyncio.run(simulate_exports(runtime, task))


def test_a_state_needs_a_runtime_that_gives_it_away():
    class Stays:
        """A memory runtime without `pack` and `unpack`."""

        def __init__(self) -> None:
            inner = MemoryRuntime()
            self.info, self.prepare, self.fork, self.close = inner.info, inner.prepare, inner.fork, inner.close

    task = msgspec.structs.replace(TASK, state=True)
    with pytest.raises(MachineError, match="snapshots of memory machines cannot be exported"):
        asyncio.run(simulate_exports(Stays(), task))


def test_a_reference_that_fails_is_named():
    async def work(runtime: Any) -> Any:
        answer = Answer(reference={"calc.py": RIGHT.decode()}, reference_argv=("sh", "-c", "echo oh; exit 3"))
        with pytest.raises(TaskError, match="exit code 3: oh"):
            await reference_exports(runtime, TASK, answer)
        return await reference_exports(runtime, TASK, Answer(reference={"calc.py": RIGHT.decode()}))

    assert on_machines(work) == {"calc.py": RIGHT}


@given(st.text(max_size=12) | st.text("./a\0\ud800", max_size=9))
def test_a_plain_path_is_relative_without_dots_and_its_declaration_covers_it(path):
    if is_plain(path):
        assert not path.startswith("/")
        assert ".." not in path.split("/")
        assert "\0" not in path
        path.encode()
        assert covers((path,), path)
        assert covers(("./",), path)
        assert is_declarable(path)
        assert validate_exports({path: b""}, ["./"]) == {path: b""}

"""Copy out of the agent's machine what a task declares as its exports, and check it again before grading.

Copying and checking run in different processes, and neither trusts the agent. A file that is a link, too large or
missing is left out. To list a folder, a fork of the frozen machine is used. The list only names files, which are then
read from the frozen machine itself, without following links. If the task is graded by running processes, the machine's
state is saved first, at one moment; what the processes do afterwards does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from etude.errors import MachineError, TaskError
from etude.records.exports import NO_STATE, OWN, STATE, WHOLE, covering, is_declarable, is_plain
from etude.records.task import Answer, Task
from etude.seams import Machine, Portable, Runtime

MAX_DECLARED = MAX_FILES = 20_000
MAX_FILE_BYTES = 1 << 20
MAX_EXPORT_BYTES = 64 << 20
MAX_STATE_BYTES = 768 << 20  # state and files are sent in one message of at most 1 GiB
_LISTING_BYTES = 8 << 20
_LISTING_S = 30.0
_NOT_STARTED = (126, 127)  # exit codes of shells: not executable, not found
_NO_REASON = b""  # explanation of a machine that is gone


def validate_exports(
    raw: Mapping[str, bytes],
    declared: Sequence[str],
    *,
    max_files: int = MAX_FILES,
    max_file_bytes: int = MAX_FILE_BYTES,
    max_total_bytes: int = MAX_EXPORT_BYTES,
) -> dict[str, bytes]:
    """Check exported files and return them as a dict. Raises `ValueError` if one is not allowed.

    `raw`: path to content. `declared`: the task's exports: files, or folders ending in "/". Paths must be declared,
    plain and relative. At most `max_files` files of `max_file_bytes` each are allowed, with `max_total_bytes` together.

    >>> validate_exports({"calc.py": b"x = 1"}, ["calc.py"])
    {'calc.py': b'x = 1'}
    >>> validate_exports({"tests.py": b""}, ["calc.py", "src/"])
    Traceback (most recent call last):
    ValueError: tests.py is not a declared export
    """
    if len(raw) > max_files:
        raise ValueError(f"{len(raw)} files are exported, at most {max_files}")
    is_declared = covering(declared)
    for path, data in raw.items():
        if not is_declared(path):
            raise ValueError(f"{path} is not a declared export")
        if not is_plain(path):
            raise ValueError(f"{path!r} is not a plain relative path")
        if not isinstance(data, bytes):
            raise ValueError(f"{path} is not bytes")
        if len(data) > max_file_bytes:
            raise ValueError(f"{path} has {len(data)} bytes, at most {max_file_bytes}")
    total = sum(map(len, raw.values()))
    if total > max_total_bytes:
        raise ValueError(f"the exports have {total} bytes, at most {max_total_bytes}")
    return dict(raw)


async def take_exports(
    machine: Machine, task: Task, runtime: Runtime, *, max_bytes: int = MAX_FILE_BYTES
) -> dict[str, bytes]:
    """Freeze the machine and return the files that the task declares as exports, as path to content.

    If the task is graded by the machine's state, the result also has a packed snapshot under the key `STATE`, or the
    reason why there is none under `NO_STATE`. Larger files than `max_bytes` are left out, like links and missing files:
    nothing that the agent did to its files is an error.

    Raises `MachineError` if the host is to blame, and `TaskError` for an invalid declaration.
    """
    _check_declared(task.exports)
    require_complete_snapshots(runtime, task)
    state = await _state(machine, runtime) if task.running else {}
    try:
        await machine.freeze()
    except OSError:  # the machine is gone
        return state or ({NO_STATE: _NO_REASON} if task.state else {})
    exports: dict[str, bytes] = {}
    free_bytes = MAX_EXPORT_BYTES
    for path in await _paths(machine, task, runtime):
        await asyncio.sleep(0)  # let other tasks run
        try:
            data = await machine.read(path, max_bytes=min(max_bytes, free_bytes))
        except (OSError, ValueError):  # deleted, a folder, a link, too large
            continue
        free_bytes -= len(data)
        exports[path] = data
    if task.state and not task.running:
        state = await _state(machine, runtime)
    return exports | state


async def _paths(machine: Machine, task: Task, runtime: Runtime) -> list[str]:
    folders = [one for one in task.exports if one.endswith("/")]
    paths = dict.fromkeys(one for one in task.exports if not one.endswith("/"))
    if folders:
        listed = await _list_files(machine, folders, task, runtime)
        inside = covering(folders)
        paths |= dict.fromkeys(
            path for path in sorted(listed) if is_plain(path) and inside(path) and not path.startswith(OWN)
        )
    return [*paths][:MAX_FILES]


async def _list_files(machine: Machine, folders: Sequence[str], task: Task, runtime: Runtime) -> list[str]:
    fork = await _fork_of(machine, task, runtime)
    if fork is None:
        return []
    try:
        names = [folder.removesuffix("/") if folder != WHOLE else "." for folder in folders]
        argv = ["find", *names, "-type", "f", "-print0"]
        listing = await fork.exec(argv, key="list", deadline_s=_LISTING_S, output_bytes=_LISTING_BYTES)
    finally:
        await fork.close()
    names = listing.output.decode(errors="surrogateescape").split("\0")
    return [] if listing.truncated else [name.removeprefix("./") for name in names]


async def _fork_of(machine: Machine, task: Task, runtime: Runtime) -> Machine | None:
    """A fork of the frozen machine.

    None if its content cannot be saved or restored although the task's initial files can be forked now: then the agent
    is to blame. Raises `MachineError` otherwise.
    """
    try:
        snapshot = await machine.snapshot()
    except (OSError, ValueError):  # the machine is gone, or its state is too large
        return None
    try:
        [fork] = await runtime.fork(snapshot, 1)
    except MachineError:
        [control] = await runtime.fork(await prepare(runtime, task), 1)
        await control.close()
        return None
    return fork


async def _state(machine: Machine, runtime: Runtime) -> dict[str, bytes]:
    if not isinstance(runtime, Portable):
        facts = f"snapshots of {runtime.info.name} machines cannot be exported"
        raise MachineError(
            "this runtime cannot grade a task by the state of its machine",
            facts,
            hint="use a runtime that is `Portable`",
        )
    try:
        return {STATE: await runtime.pack(await machine.snapshot(), max_bytes=MAX_STATE_BYTES)}
    except OSError:
        return {NO_STATE: _NO_REASON}
    except ValueError as error:
        return {NO_STATE: str(error).encode()}


async def simulate_exports(
    runtime: Runtime,
    task: Task,
    files: Mapping[str, bytes] | None = None,
    argv: Sequence[str] = (),
    *,
    deadline_s: float = 600.0,
) -> dict[str, bytes]:
    """Return the exports of an agent that writes these files and then runs this command, such as a reference solution.

    `files`: path to content. `argv`: the command; empty: no command. Without files and command, these are the exports
    of the unchanged machine. `deadline_s`: the most seconds for the command. Raises `MachineError`, and `TaskError` if
    a file cannot be written or the command fails.
    """
    [machine] = await runtime.fork(await prepare(runtime, task), 1)
    try:
        await _write(machine, files or {})
        if argv:
            result = await machine.exec(argv, key="solve", deadline_s=deadline_s)
            if result.exit_code != 0:
                facts = f"exit code {result.exit_code}: {result.output[-400:].decode(errors='replace')}"
                hint = "run the command by hand in the task's machine to see why it fails"
                raise TaskError(f"the solution's command {argv[0]!r} failed", facts, hint=hint)
        return await take_exports(machine, task, runtime)
    finally:
        await machine.close()


async def find_test_command_problem(runtime: Runtime, task: Task, answer: Answer, *, deadline_s: float = 10.0) -> str:
    """Check that the task's test command starts in a machine with the reference solution. Returns the reason why it
    does not; "" if it does.

    What the tests report and how long they run does not matter; they are stopped after `deadline_s` seconds. Raises
    `MachineError`, and `TaskError` if the solution's files cannot be written.
    """
    if not task.test_command:
        return ""
    [machine] = await runtime.fork(await prepare(runtime, task), 1)
    try:
        await _write(machine, {path: text.encode() for path, text in answer.reference.items()})
        if answer.reference_argv:
            await machine.exec(answer.reference_argv, key="solve", deadline_s=600.0)
        result = await machine.exec(task.test_command, key="test", deadline_s=deadline_s)
    finally:
        await machine.close()
    if result.timed_out or result.exit_code not in _NOT_STARTED:
        return ""
    output = " ".join(result.output[-400:].decode(errors="replace").split())
    return f"its test_command {list(task.test_command)} cannot start: exit code {result.exit_code}: {output}"


async def _write(machine: Machine, files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        try:
            await machine.write(path, data)
        except (OSError, ValueError) as error:
            hint = "use plain paths below the working directory"
            raise TaskError(f"{path} of the solution cannot be written", str(error), hint=hint) from None


async def reference_exports(runtime: Runtime, task: Task, answer: Answer) -> dict[str, bytes]:
    """Return the exports of an agent that found the reference solution, as path to content.

    Raises the errors of `simulate_exports`.
    """
    files = {path: text.encode() for path, text in answer.reference.items()}
    if answer.reference_argv or task.state or task.image is not None:
        return await simulate_exports(runtime, task, files, answer.reference_argv)
    is_declared = covering(task.exports)
    untouched_submission = {path: text.encode() for path, text in task.files.items() if is_declared(path)}
    return untouched_submission | files


async def prepare(runtime: Runtime, task: Task) -> str:
    """Prepare the snapshot that the task's rollouts start from, and return its id.

    Raises `MachineError`, also if this runtime's snapshots do not contain everything that is needed to grade the task.
    """
    snapshot = await runtime.prepare({path: text.encode() for path, text in task.files.items()}, image=task.image)
    require_complete_snapshots(runtime, task)
    return snapshot


def require_complete_snapshots(runtime: Runtime, task: Task) -> None:
    """Check that the runtime's snapshots contain everything that is needed to grade the task. Raises `MachineError`
    otherwise.

    A task that is graded by running processes needs snapshots with memory; one that is graded by the state of an
    image's machine needs snapshots of its whole filesystem.
    """
    info = runtime.info
    if task.running and not info.forks_memory:
        facts = f"snapshots of {info.name} machines contain files but no processes"
        hint = 'use machines whose snapshots hold memory: backend "microvm"'
        raise MachineError(f"task {task.task_id} cannot be graded by the processes of its machine", facts, hint=hint)
    if task.state and task.image is not None and not info.whole_snapshots:
        facts = f"snapshots of {info.name} machines of images contain only the working directory"
        hint = 'use backend "microvm" or "namespace"'
        raise MachineError(f"task {task.task_id} cannot be graded by its whole machine", facts, hint=hint)


def _check_declared(declared: Sequence[str]) -> None:
    if len(declared) > MAX_DECLARED:
        raise TaskError(
            f"the task declares {len(declared)} exports", f"at most {MAX_DECLARED} are allowed", hint="declare a folder"
        )
    for path in declared:
        if not is_declarable(path):
            raise TaskError(
                f"export {path!r} is not a plain relative path", hint='write it like "src/calc.py" or "logs/"'
            )

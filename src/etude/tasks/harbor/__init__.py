"""`HarborSource`: tasks in the format of Harbor (harborframework.com), which Terminal-Bench 2 uses.

::

    hello-world/
      task.toml                 timeouts, resources, artifacts, verification
      instruction.md
      environment/Dockerfile    the machine
      tests/test.sh             grades: a number in /logs/verifier/reward.txt, or "reward" in reward.json
      solution/solve.sh         the reference solution, a command

By default Harbor verifies in the agent's machine: such a task is graded in a fork of the frozen machine. In separate
mode only declared artifacts are exported. A Dockerfile that does more than copy files needs an image.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from etude.errors import NoSource, TaskError
from etude.records.exports import is_declarable
from etude.records.image import Image
from etude.records.task import Answer, Split, Task, Trust, Verifier
from etude.tasks.harbor.config import HarborConfig, read_config
from etude.tasks.harbor.own_root import HIDDEN, OwnRoot, own_root
from etude.tasks.splits import row_at, split_of
from etude.tasks.text_files import read_text, read_tree

__all__ = ["HarborSource", "ImageOf"]

ImageOf = Callable[[Path], Image | None]
"""Maps the folder of a task to its image; None if it was not built."""

_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_REWARD = f"{HIDDEN}/reward"
_FROM_JSON = (
    r"""tr -d '\n' < "$logs/reward.json" | sed -nE 's/.*"reward"[[:space:]]*:[[:space:]]*([-0-9.eE+]+).*/\1/p'"""
)


class HarborSource:
    """A `TaskSource` over a directory of Harbor task folders in the order of their names, or over one task folder.

    `image_of` returns the image that was built for a task's folder, or None. The configs are read when the source is
    opened. An unsupported setting raises a `TaskError` that names the file."""

    name = "harbor"

    def __init__(self, path: Path | str, image_of: ImageOf = lambda _: None) -> None:
        self.path = Path(path)
        self._image_of = image_of
        self._tasks: dict[Split, list[tuple[Path, HarborConfig]]] = {split: [] for split in Split}
        for folder in self.folders():
            instruction = _instruction(folder)
            self._tasks[split_of(instruction)].append((folder, read_config(folder)))

    def folders(self) -> list[Path]:
        """Return the task folders. Raises `NoSource` if there are none."""
        if (self.path / "task.toml").is_file():
            return [self.path]
        try:
            found = sorted(one for one in self.path.iterdir() if (one / "task.toml").is_file())
        except OSError as error:
            raise NoSource(f"cannot list {self.path}", str(error), hint="give a folder of Harbor tasks") from None
        if not found:
            hint = "a task is a folder with task.toml, instruction.md, environment/ and tests/"
            raise NoSource(f"{self.path} has no Harbor task", hint=hint)
        return found

    def folder(self, split: Split, index: int) -> Path:
        """Return the folder of a task. Raises `TaskError` if there is no such task."""
        return self._at(split, index)[0]

    def size(self, split: Split) -> int | None:
        return len(self._tasks[split])

    def config(self, task: Task) -> HarborConfig:
        """Return the config of a task: timeouts, requested resources, network."""
        return self._at(task.split, task.index)[1]

    def task(self, split: Split, index: int) -> Task:
        folder, config = self._at(split, index)
        image = self._image(folder, config)
        root = None if image is not None else self._own_root(folder, config)
        instruction = _instruction(folder)
        return Task(
            source=self.name,
            split=split,
            index=index,
            family="separate" if config.separate else "state",
            instruction=instruction if root is None else root.moved(instruction),
            files={} if root is None else root.files,
            exports=_exports(folder, config, image.workdir if image is not None else _workdir(root)),
            trust=Trust.CODE,
            image=image,
            state=not config.separate,
        )

    def answer(self, task: Task) -> Answer:
        folder, config = self._at(task.split, task.index)
        if task != self.task(task.split, task.index):
            raise TaskError(
                f"task {task.task_id} is not from {self.path}",
                f"it differs from {task.split} task {task.index} of this folder",
                hint="use the folder from which the task was made, unchanged",
            )
        root = None if task.image is not None else self._own_root(folder, config)
        tests, solution = read_tree(folder / "tests", folder), _solution(folder)
        if "test.sh" not in tests:
            raise TaskError(
                f"{folder} has no tests/test.sh", hint="add the script that verifies a solution as tests/test.sh"
            )
        moved = (lambda files: files) if root is None else root.moved_files
        verifier = Verifier(
            files={f"{HIDDEN}/tests/{path}": text for path, text in moved(tests).items()},
            argv=("sh", "-c", _verify(config, at_root=root is None)),
            reward_path=_REWARD,
            deadline_s=config.verifier_timeout_s,
        )
        return Answer(
            reference={f"{HIDDEN}/solution/{path}": text for path, text in moved(solution).items()},
            reference_argv=("sh", "-c", _solve(config, at_root=root is None)),
            verifier=verifier,
        )

    def _at(self, split: Split, index: int) -> tuple[Path, HarborConfig]:
        return row_at(self._tasks[split], split, index, self.path)

    def _image(self, folder: Path, config: HarborConfig) -> Image | None:
        image = self._image_of(folder)
        if image is None:
            return None
        user = config.agent_user or image.user or "root"  # the default of containers
        env = image.env | config.environment
        return msgspec.structs.replace(image, workdir=config.workdir or image.workdir, env=env, user=user)

    def _own_root(self, folder: Path, config: HarborConfig) -> OwnRoot:
        hint = "build its image: `etude tasks check ... --images STORE`"
        if config.environment:
            raise TaskError(f"{folder} sets [environment.env]", "this needs an image", hint=hint)
        if config.agent_user or config.verifier_user:
            raise TaskError(f"{folder} sets a user", "this needs an image", hint=hint)
        return own_root(folder)


def _workdir(root: OwnRoot | None) -> str:
    return "/" if root is None else root.workdir


def _instruction(folder: Path) -> str:
    """The instruction, without the canary lines that mark benchmark data."""
    lines = read_text(folder / "instruction.md").split("\n")
    while lines and (_CANARY.match(lines[0].strip()) or not lines[0].strip()):
        lines.pop(0)
    if not lines:
        raise TaskError(f"{folder / 'instruction.md'} is empty", hint="write what the agent should do")
    return "\n".join(lines).rstrip()


def _solution(folder: Path) -> Mapping[str, str]:
    files = read_tree(folder / "solution", folder)
    if "solve.sh" not in files:
        raise TaskError(
            f"{folder} has no solution/solve.sh",
            hint="add the script of the reference solution: it is needed to validate the task",
        )
    return files


def _exports(folder: Path, config: HarborConfig, workdir: str) -> tuple[str, ...]:
    """Declared artifacts, relative to the working directory; () for a task that is graded in the machine."""
    if not config.separate:
        return ()
    exports = []
    for source in config.artifacts:
        path = PurePosixPath(workdir) / source
        if not path.is_relative_to(workdir):
            facts = f"the working directory is {workdir}"
            raise TaskError(
                f"{folder}: artifact {source} is outside the working directory", facts, hint="declare paths below it"
            )
        inside = path.relative_to(workdir).as_posix()
        declared = "./" if inside == "." else inside + ("/" if source.endswith("/") else "")
        if not is_declarable(declared):
            raise TaskError(
                f"{folder}: artifact {source!r} is invalid",
                "it is not a plain path",
                hint="declare a path without wildcards and '..'",
            )
        exports.append(declared)
    if not exports:
        raise TaskError(
            f"{folder} has a separate verifier but no artifacts",
            "so it has nothing to verify",
            hint="declare the files to verify as `artifacts` in task.toml",
        )
    return tuple(exports)


def _verify(config: HarborConfig, *, at_root: bool) -> str:
    """A shell script that grades: it moves the tests in place, deletes old rewards, runs the tests, and writes the
    reward to a fixed path."""
    logs = "/logs/verifier" if at_root else f"$PWD/{HIDDEN}/logs/verifier"
    tests = "/tests" if at_root else f"$PWD/{HIDDEN}/tests"
    lines = [
        f'hidden="$PWD/{HIDDEN}"; logs="{logs}"; tests="{tests}"',
        'mkdir -p "$logs" && rm -rf "$logs"/reward.* "$hidden/reward" || exit 90',
        *(['rm -rf /tests && cp -r "$hidden/tests" /tests || exit 91'] if at_root else []),
        *(f"export {key}={shlex.quote(value)}" for key, value in config.verifier_env.items()),
        _run('"$tests/test.sh"'),
        f'if [ -s "$logs/reward.json" ]; then {_FROM_JSON} > "$hidden/reward"',
        'elif [ -s "$logs/reward.txt" ]; then cat "$logs/reward.txt" > "$hidden/reward"; fi',
    ]
    return "\n".join(lines)


def _solve(config: HarborConfig, *, at_root: bool) -> str:
    script = "/solution/solve.sh" if at_root else f'"$PWD/{HIDDEN}/solution/solve.sh"'
    lines = [
        *([f'cp -r "$PWD/{HIDDEN}/solution" /solution || exit 91'] if at_root else []),
        *(f"export {key}={shlex.quote(value)}" for key, value in config.solution_env.items()),
        _run(script),
        "code=$?",
        f"rm -rf {HIDDEN}{' /solution' if at_root else ''}",
        "exit $code",
    ]
    return "\n".join(lines)


def _run(script: str) -> str:
    """A shell command that runs a script with its own interpreter line, or with sh if it has none."""
    return f"if head -c 2 {script} | grep -q '#!'; then chmod +x {script}; {script}; else sh {script}; fi"

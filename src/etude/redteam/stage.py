"""What the cheats run against: secrets on the host, and tasks that cannot be solved by chance.

The secrets are a file, an environment variable, a TCP listener and an abstract socket of this host. The tasks ask for a
polynomial whose random coefficients are only in the hidden answers. A kind of task is used only if its reference scores
1 and its unchanged files 0; else a grader that refuses everything would pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.environments.grading import reference_exports, simulate_exports
from etude.environments.images import ImageLimits
from etude.environments.images.git import git
from etude.environments.images.repository import export_commit
from etude.errors import EtudeError
from etude.records.exports import WHOLE
from etude.records.rollout import Graded
from etude.records.task import Answer, Case, HiddenTests, Runner, Split, Task, Trust, Verifier
from etude.redteam.cheat import Kind
from etude.seams import Grader, Runtime

VARIABLE = "ETUDE_CHEATS_SECRET"
_UNTOUCHED = "def f(n):\n    return None\n"
_PROGRAMS = Path(__file__).parent / "programs"
_FACTOR = 10**6


@dataclass(frozen=True)
class Secrets:
    """Secrets of the host that a machine must not reach; made by `host_secrets`.

    `secret` is the text, which `file` has and which listeners at TCP `port` and at the `abstract` socket send.
    `touched` lists the listeners that received a connection."""

    secret: str  # the secret text
    file: Path
    port: int
    abstract: str
    touched: list[str] = field(default_factory=list)  # listeners of the host that received a connection

    def facts(self, runtime: Runtime, token: str) -> dict[str, Any]:
        """Return the data that an attack program gets: the places of the secrets, but not the secret itself.

        `token` marks processes and files of a sibling machine."""
        own_kernel = runtime.info.isolation not in ("shared kernel", "none")
        return {
            "token": token, "secret_file": str(self.file), "variable": VARIABLE, "port": self.port,
            "abstract": self.abstract, "pid": os.getpid(), "plain": runtime.info.isolation == "none",
            "own_kernel": own_kernel, "hold_s": 20.0,
        }  # fmt: skip


@contextlib.asynccontextmanager
async def host_secrets() -> AsyncIterator[Secrets]:
    """Publish a secret on this host during the `with` block, and yield where.

    It is in a file, in an environment variable, behind a TCP port on loopback and behind an abstract UNIX socket."""
    secret, abstract = f"secret-{secrets.token_hex(8)}", f"etude-cheats-{secrets.token_hex(8)}"
    touched: list[str] = []

    def listener(name: str) -> Any:
        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            touched.append(name)
            writer.write(secret.encode())
            writer.close()

        return serve

    with tempfile.TemporaryDirectory(prefix="etude-cheats-") as folder:
        file = Path(folder) / "secret.txt"
        file.write_text(secret)
        os.environ[VARIABLE] = secret
        tcp = await asyncio.start_server(listener("a port of loopback"), "127.0.0.1", 0)
        unix = await asyncio.start_unix_server(listener("an abstract socket"), f"\0{abstract}")
        try:
            yield Secrets(secret, file, tcp.sockets[0].getsockname()[1], abstract, touched)
        finally:
            del os.environ[VARIABLE]
            tcp.close()
            unix.close()


def programs() -> dict[str, bytes]:
    """Return the attack programs as files for a machine, path -> content."""
    return {f"programs/{path.name}": path.read_bytes() for path in sorted(_PROGRAMS.glob("*.py"))}


def repository(secret: str, *, rebuilt: bool = True) -> dict[str, bytes]:
    """Return a git repository as files below ``repo``, path -> content. Commits that are later than its HEAD contain
    the secret.

    A tag, a note, a stash and a lost object contain it, too. With `rebuilt`, the repository was exported for an image,
    so none of these may be left; False gives the original. Raises `EtudeError` without git."""
    with tempfile.TemporaryDirectory(prefix="etude-cheats-") as folder:
        source, to = Path(folder) / "source", Path(folder) / "repo"
        source.mkdir()
        identity = {f"GIT_{who}_{what}": "etude" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

        def run(*args: str) -> str:
            return git(source, *args, variables=identity).decode().strip()

        def commit(text: str, message: str) -> str:
            (source / "calc.py").write_text(text)
            run("add", "calc.py")
            run("commit", "-q", "-m", message)
            return run("rev-parse", "HEAD")

        run("init", "-q")
        base = commit(_UNTOUCHED, "begin")
        commit(f"{_UNTOUCHED}# {secret}\n", "the fix")
        run("tag", "-a", "v2", "-m", f"the fix {secret}")
        run("notes", "add", "-m", secret)
        commit(f"{_UNTOUCHED}# lost {secret}\n", "the lost fix")
        run("reset", "-q", "--hard", base)
        (source / "calc.py").write_text(f"# stashed {secret}\n")
        run("stash")
        if rebuilt:
            export_commit(source, base, to, ImageLimits())
        else:
            to = source
        return {f"repo/{path.relative_to(to)}": path.read_bytes() for path in to.rglob("*") if path.is_file()}


@dataclass(frozen=True)
class Problem:
    """A task of one kind, and its hidden answer."""

    task: Task
    answer: Answer


def problems(exports: tuple[str, ...]) -> dict[Kind, Problem]:
    """Return a task of each kind, with new random coefficients. `exports` are the exports of all tasks."""
    a, b, c = (secrets.randbelow(_FACTOR) + _FACTOR for _ in range(3))
    values = {n: a * n * n + b * n + c for n in (3, 17, 1001)}
    reference = {"calc.py": f"def f(n):\n    return {a} * n * n + {b} * n + {c}\n"}
    return {kind: _problem(kind, exports, values, reference) for kind in Kind}


def _problem(kind: Kind, exports: tuple[str, ...], values: Mapping[int, int], reference: dict[str, str]) -> Problem:
    answers: dict[Kind, Answer] = {
        Kind.DATA: Answer(reference=reference, cases=tuple(Case("calc", "f", [n], v) for n, v in values.items())),
        Kind.CHECK: Answer(reference=reference, test_code=_check(values), entry_point="calc:f"),
        Kind.PYTEST: Answer(reference=reference, tests=_tests(Runner.PYTEST, values)),
        Kind.UNITTEST: Answer(reference=reference, tests=_tests(Runner.UNITTEST, values)),
        Kind.COMMAND: Answer(reference=reference, verifier=_verifier(values, "")),
        Kind.REWARD: Answer(reference=reference, verifier=_verifier(values, "logs/reward.txt")),
        Kind.STATE: Answer(
            reference=reference,
            reference_argv=("python", "-c", f"open('calc.py', 'w').write({reference['calc.py']!r})"),
            verifier=_verifier(values, ""),
        ),
        Kind.LOOSE: Answer(reference=reference, test_code=_loose_check(values), entry_point="calc:f"),
        Kind.WHOLE: Answer(reference=reference, verifier=_verifier(values, "")),
    }
    task = Task(
        source="cheats",
        split=Split.TRAIN,
        index=0,
        family=kind,
        instruction="make f return what the hidden tests want",
        files={"calc.py": _UNTOUCHED, "pkg/core.py": "x = 1\n"},
        exports=(WHOLE,) if kind in (Kind.LOOSE, Kind.WHOLE) else exports,
        trust=Trust.DATA if kind in (Kind.DATA, Kind.WHOLE) else Trust.CODE,
        state=kind is Kind.STATE,
    )
    return Problem(task, answers[kind])


def _check(values: Mapping[int, int]) -> str:
    return "def check(candidate):\n" + "".join(f"    assert candidate({n}) == {v}\n" for n, v in values.items())


def _loose_check(values: Mapping[int, int]) -> str:
    return (
        f"import math\ndef check(candidate):\n    for got, wanted in zip(map(candidate, {[*values]}), "
        f"{[*values.values()]}):\n        assert not math.fabs(got - wanted) > 0.5\n"
    )


def _tests(runner: Runner, values: Mapping[int, int]) -> HiddenTests:
    if runner is Runner.PYTEST:
        body = "".join(f"def test_{n}():\n    assert calc.f({n}) == {v}\n\n" for n, v in values.items())
        names = tuple(f"tests/test_calc.py::test_{n}" for n in values)
    else:
        cases = "".join(
            f"    def test_{n}(self):\n        self.assertEqual(calc.f({n}), {v})\n\n" for n, v in values.items()
        )
        body = f"import unittest\n\n\nclass Hidden(unittest.TestCase):\n{cases}"
        names = tuple(f"tests.test_calc.Hidden.test_{n}" for n in values)
    files = {"tests/__init__.py": "", "tests/test_calc.py": f"import calc\n{body}"}
    return HiddenTests(runner=runner, files=files, names=names, deadline_s=60.0)


_VERIFY = """\
import json, subprocess, sys
code = "import sys; sys.path.insert(0, '.'); import calc, json; print(json.dumps([calc.f(n) for n in {inputs}]))"
try:
    told = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, timeout=10).stdout
    right = json.loads(told) == {expected}
except Exception:
    right = False
if {path!r}:
    import os
    os.makedirs(os.path.dirname({path!r}), exist_ok=True)
    open({path!r}, "w").write(str(float(right)))
sys.exit(0 if right or {path!r} else 1)
"""


def _verifier(values: Mapping[int, int], path: str) -> Verifier:
    text = _VERIFY.format(inputs=list(values), expected=list(values.values()), path=path)
    return Verifier(files={"verify.py": text}, argv=("python", "verify.py"), reward_path=path, deadline_s=20.0)


async def check_problems(
    runtime: Runtime, grader: Grader, problems: Mapping[Kind, Problem], *, at_once: int = 1
) -> dict[Kind, str]:
    """Check each kind of task, at most `at_once` at a time, and return why it cannot be used; "" if it can.

    It can be used if its reference scores 1 and its unchanged files score 0."""
    slots = asyncio.Semaphore(at_once)

    async def one(problem: Problem) -> str:
        async with slots:
            return await _why_unusable(runtime, grader, problem)

    why = await asyncio.gather(*map(one, problems.values()))
    return dict(zip(problems, why, strict=True))


async def _why_unusable(runtime: Runtime, grader: Grader, problem: Problem) -> str:
    task, answer = problem.task, problem.answer
    try:
        reference = await reference_exports(runtime, task, answer)
        untouched = await simulate_exports(runtime, task)
    except EtudeError as error:
        return f"not to be had here: {error.what}: {error.facts}"
    for exports, reward in ((reference, 1.0), (untouched, 0.0)):
        outcome = await grader.grade(task, answer, exports)
        if not isinstance(outcome, Graded):
            return f"not to be had here: {outcome.reason}: {outcome.evidence}"
        if outcome.grade != reward:
            return f"the {'reference' if reward else 'untouched state'} scores {outcome.grade:g}: {outcome.reason}"
    return ""

"""What tests of whole runs share: the command line as a user meets it, and a checkpoint that plays a small game.

The game: a file returns 0, the instruction says which digit it should return. The checkpoint was mid-trained, here and
now, on conversations whose edit is a digit drawn at random, so about one rollout in three is right: RL has something
to learn from its first step on.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.budget import pytest_runtest_setup  # noqa: F401  pytest finds it here
from tests.postgres_server import PostgresServer, programs
from tests.skips import pytest_terminal_summary  # noqa: F401  pytest finds it here

settings.register_profile("busy hosts", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy hosts")  # how long an example takes is no verdict
collect_ignore = ["harbor_trial.py"]  # a program for another interpreter, one that has harbor; test_harbor.py runs it
DIGITS = (1, 2, 3)
SMALL = {"vocab_size": 320, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
EXPERTS = {"expert_size": 32, "num_experts": 4, "top_k": 2, "context_tokens": 128}
QUIET = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.update(QUIET)  # before torch is there: as in the product's processes, a product's rows share no thread pool
sys.dont_write_bytecode = False  # else each of the hundreds of interpreters that are started compiles all of ours again
os.environ["PYTHONDONTWRITEBYTECODE"] = ""


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """No test leaves a signal ignored or blocked: every process that later tests start would inherit it."""
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "this test changed what SIGTERM does in the test process"
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "this test left signals blocked in the test process"


@dataclass(frozen=True)
class Game:
    """A directory of tasks, a checkpoint that half knows how to play it, and a config of a run over both."""

    tasks: Path
    start: Path
    config: Path


@dataclass(frozen=True)
class Cli:
    """``etude ...`` as its own process in a directory of its own. `before`: a program that starts it in its own way."""

    cwd: Path
    env: Mapping[str, str]
    before: tuple[str, ...] = ()

    def start(self, *args: str | Path, log: Path | None = None) -> subprocess.Popen[str]:
        """Start a command and do not wait. Its output goes to `log` (both streams), or to pipes."""
        out = log.open("a") if log else subprocess.PIPE
        try:
            return subprocess.Popen(
                [*self.before, sys.executable, "-m", "etude.cli", *map(str, args)],
                cwd=self.cwd,
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out if log else subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        finally:
            if log:
                out.close()  # type: ignore[union-attr]

    def __call__(self, *args: str | Path, timeout_s: float = 1500.0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        process = self.start(*args)
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """An S3-speaking server on loopback, and an environment that points to it. Its URL."""
    command = [sys.executable, str(Path(__file__).with_name("s3_server.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("AWS_ENDPOINT_URL", url)
            environment.setenv("AWS_ACCESS_KEY_ID", "an-id")
            environment.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
            environment.setenv("AWS_REGION", "us-east-1")
            yield url
        server.communicate()


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A PostgreSQL server on loopback, and an environment with its password."""
    bin = programs()
    if bin is None or importlib.util.find_spec("psycopg") is None:
        pytest.skip("no PostgreSQL here: pip install 'etude[dev]', or Debian's package postgresql")
    server = PostgresServer(tmp_path_factory.mktemp("postgres"), bin)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PGPASSWORD", "a-password")
        yield server
    server.stop()


@pytest.fixture(scope="session")
def cli_in() -> Callable[[Path], Cli]:
    """The command line in a directory."""
    return lambda cwd: Cli(cwd, os.environ | QUIET)


@pytest.fixture(scope="session")
def threads_left() -> Callable[[str, Path], int]:
    """How many threads a function of a module ("etude.evals.rows:read_rows"), called with a path in a process of its
    own, leaves there. One of pyarrow's that holds a Python object when the interpreter ends may abort the process,
    after all its work: "terminate called without an active exception"."""

    def count(function: str, path: Path) -> int:
        module, _, name = function.partition(":")
        script = f"""
import os, pathlib, sys
import pyarrow.parquet
from {module} import {name}
before = len(os.listdir("/proc/self/task"))
assert {name}(pathlib.Path(sys.argv[1]))
print(len(os.listdir("/proc/self/task")) - before)
"""
        return int(subprocess.check_output([sys.executable, "-c", script, str(path)], env=os.environ | QUIET))

    return count


@pytest.fixture(scope="session")
def game(tmp_path_factory: pytest.TempPathFactory) -> Game:
    """Made once a session, in some seconds."""
    return made_game(tmp_path_factory.mktemp("game"))


@pytest.fixture(scope="session")
def wide_game(tmp_path_factory: pytest.TempPathFactory) -> Game:
    """One whose model has heads of a size that vLLM's CPU build computes."""
    return made_game(tmp_path_factory.mktemp("wide"), head_dim=32)


def made_game(folder: Path, **sizes: int) -> Game:
    """A game in a folder; `sizes`: of its model."""
    tasks = folder / "tasks"
    for split, numbers in (("train", range(12)), ("validation", range(12, 16)), ("heldout", range(16, 20))):
        for place, number in enumerate(numbers):  # no split has a task of another one
            write_task(tasks / f"{split}-{place:02d}", split, DIGITS[place % len(DIGITS)], name=f"m{number}")
    start = mid_train_player(folder, **sizes)
    config = folder / "config.toml"
    config.write_text(
        f"""seed = 3
start = "{start}"

[tasks]
source = "{tasks}"

[harness]
tools = ["edit", "submit", "write"]
max_turns = 3
context_tokens = 96

[engine]
max_sequences = 16
context_tokens = 128

[experience]
groups_per_step = 3
group_size = 4
max_lag = 1

[learner]
lr = 1e-3

[rl]
steps = 4
checkpoint_every = 2

[evals]
heldout_tasks = 4
during_tasks = 4
baseline_tasks = 2
every = 2
"""
    )
    return Game(tasks, start, config)


def write_task(folder: Path, split: str, digit: int, *, name: str) -> None:
    """One task: module `name` returns 0 and should return `digit`."""
    for part in ("files", "answer/reference"):
        (folder / part).mkdir(parents=True)
    (folder / "task.toml").write_text(f'instruction = "{name} {digit}"\nexports = ["m.py"]\nsplit = "{split}"\n')
    (folder / "files" / "m.py").write_text("def f():\n    return 0\n")
    (folder / "answer" / "reference" / "m.py").write_text(f"def f():\n    return {digit}\n")
    (folder / "answer" / "cases.json").write_text(
        f'[{{"module": "m", "function": "f", "args": [], "expected": {digit}}}]'
    )


def mid_train_player(folder: Path, **sizes: int) -> Path:
    """A checkpoint that edits the right line to a random digit and submits."""
    from etude.harness import Call, ChatFormat, chat_template, standard_tools
    from etude.harness.chat import SPECIAL_TOKENS, Reply
    from etude.harness.episode import assistant_message
    from etude.models import ModelConfig
    from etude.training import mid_train
    from etude.training.config import MidTrainingConfig
    from etude.training.corpus import write_corpus
    from etude.training.tokenizer import train_tokenizer

    draw = random.Random(0)

    def talk(digit: int) -> list[dict[str, object]]:
        edit = Call("edit", {"path": "m.py", "line": "2", "text": f"return {draw.choice(DIGITS)}"})
        return [
            {"role": "user", "content": f"m{draw.randrange(20)} {digit}"},
            assistant_message(Reply("", (edit,)), turn=1),
            {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
            assistant_message(Reply("", (Call("submit", {}),)), turn=2),
        ]

    words = ["edit m.py 2 return 1", "submit", "ok", "m1 2"] * 20
    train_tokenizer(
        words,
        folder / "tokenizer",
        vocab_size=SMALL["vocab_size"],
        special_tokens=SPECIAL_TOKENS,
        chat_template=chat_template(),
    )
    chat, signatures = ChatFormat.load(folder / "tokenizer"), standard_tools(("edit", "submit", "write")).signatures
    write_corpus(folder / "corpus", [chat.encode_conversation(talk(d), signatures) for d in DIGITS * 400])
    mid_train(
        MidTrainingConfig(num_tokens=40_000, batch_tokens=512, document_tokens=64, lr=1e-2, warmup_steps=5),
        folder / "corpus",
        folder / "start",
        model=ModelConfig(**SMALL | EXPERTS | sizes),  # type: ignore[arg-type]
        ranks=1,
        assets=folder / "tokenizer",
    )
    return folder / "start"

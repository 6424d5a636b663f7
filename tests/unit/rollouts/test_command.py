"""Agent programs that are processes: how they end is typed, and nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.here import opened
from tests.unit.harness.test_tools import TASK
from tests.unit.harness.tokeniser import laptop_chat

from etude.config import build, to_plain
from etude.environments import prepare
from etude.environments.namespace import NamespaceRuntime
from etude.errors import ConfigError, EngineBehind, MachineError
from etude.harness import Call, Episode, HarnessConfig, RequestOptions, run_program, standard_tools
from etude.harness.episode import AgentRun
from etude.records import Completion, CompletionRequest
from etude.records.command import ExecResult
from etude.records.rollout import Ending
from etude.rollouts import command as commands
from etude.rollouts.endings import read_regular, status_in
from etude.rollouts.logs import read_logs, write_log
from etude.testing import EnginePolicy, MemoryMachine, ScriptedEngine

CHAT = laptop_chat()
EXAMPLE = Path(__file__).parents[3] / "examples" / "command" / "agent.py"
ASK = """
import json, os, sys, time, urllib.request, urllib.error

def ask(*words, **more):
    messages = [{"role": "user", "content": word} for word in words]
    body = json.dumps({"model": "m", "messages": messages, **more}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        return json.load(response)["choices"][0]["message"]["content"]
"""


def say(name: str, **arguments: str) -> list[int]:
    return CHAT.encode_call(Call(name, arguments)).tolist()


def text(words: str) -> list[int]:
    return [*CHAT.encode(words).tolist(), CHAT.end_id]


class Slow(EnginePolicy):
    """A policy that takes `seconds` for an answer."""

    def __init__(self, answers: Sequence[Sequence[int]], seconds: float) -> None:
        super().__init__(ScriptedEngine(answers))
        self.seconds = seconds

    async def complete(self, request: CompletionRequest) -> Completion:
        await asyncio.sleep(self.seconds)
        return await super().complete(request)


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def complete(self, request: CompletionRequest) -> Completion:
        raise self.error


def episode_of(config: HarnessConfig, policy: Any, machine: Any = None) -> Episode:
    return Episode(
        TASK,
        machine or MemoryMachine({p: t.encode() for p, t in TASK.files.items()}),
        policy=policy,
        chat=CHAT,
        tools=standard_tools(),
        limits=config,
        options=RequestOptions(session_id="g000001.0/0", seed=7),
    )


def config_of(argv: Sequence[str], settings: dict[str, Any] | None = None, **limits: Any) -> HarnessConfig:
    program = {"kind": "command", "argv": [*argv], **(settings or {})}
    sizes = {"turn_tokens": 48, "context_tokens": 2048, "max_turns": 8, "rollout_deadline_s": 30.0, **limits}
    return build(HarnessConfig, {"program": program, **sizes})


def play(
    script: str | Sequence[str],
    answers: Sequence[Sequence[int]] = (),
    *,
    policy: Any = None,
    machine: Any = None,
    settings: dict[str, Any] | None = None,
    **limits: Any,
) -> AgentRun:
    """Run a Python script that may use `ask`, or a command line."""
    argv = ["{python}", "-I", "-c", ASK + script] if isinstance(script, str) else script
    config = config_of(argv, settings, **limits)
    return asyncio.run(run_program(episode_of(config, policy or EnginePolicy(ScriptedEngine(answers)), machine)))


def processes_with(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_the_example_edits_and_submits_and_its_turns_are_recorded() -> None:
    answers = [say("edit", path="calc.py", line="3", text="return n + 3"), say("submit")]
    machine = MemoryMachine({p: t.encode() for p, t in TASK.files.items()})
    run = play(["{python}", str(EXAMPLE)], answers, machine=machine)
    assert run.ending is Ending.SUBMITTED, run.log.decode()
    first, second = run.trace.turns
    assert (first.parent, second.parent) == (None, 0)
    assert [(one.name, one.output) for one in first.calls] == [("edit", "ok")]
    assert b"    return n + 3" in machine.files["calc.py"]
    assert b"'edit'" in run.log
    assert b"etude: exit code 0" in run.log
    assert b"etude: turns 2, requests 2," in run.log


def test_a_program_gets_its_variables_arguments_and_base_urls() -> None:
    run = play(
        "print(os.environ['ETUDE_TASK'], os.environ['ETUDE_ROLLOUT'], os.environ['OWN'], os.listdir())\n"
        "assert os.environ['ANTHROPIC_BASE_URL'] + '/v1' == os.environ['OPENAI_BASE_URL'] == sys.argv[1]\n"
        "assert sys.argv[2:] == ['fix', 'gpt', '{other}', os.getcwd()]",
        settings={"env": {"OWN": "is {model}"}, "model": "gpt"},
    )
    assert run.ending is Ending.STOPPED  # an IndexError: no arguments
    argv = ["{python}", "-c", "import sys; print(sys.argv[1:])", "{instruction}", "{model}", "{other}", "{base_url}"]
    run = play(argv, settings={"env": {"OWN": "is {model}"}, "model": "gpt"})
    assert b"['fix', 'gpt', '{other}', 'http://127.0.0.1:" in run.log


@pytest.mark.parametrize(
    ("script", "ending", "said"),
    [
        ("ask('a')", Ending.SUBMITTED, "exit code 0"),
        ("ask('a'); sys.exit(3)", Ending.STOPPED, "exit code 3"),
        ("raise OSError('no')", Ending.STOPPED, "OSError: no"),
        ("ask('a'); os.kill(os.getpid(), 9)", Ending.STOPPED, "exit code 137"),
        ("[ask(str(i)) for i in range(9)]", Ending.TURNS, "exit code 1"),
        ("ask('word ' * 3000)", Ending.CONTEXT, "exit code 1"),
    ],
)
def test_every_end_of_a_program_is_an_ending_that_is_graded(script: str, ending: Ending, said: str) -> None:
    run = play(script, [text("x")] * 9)
    assert (run.ending, run.failure) == (ending, None), run.log.decode()
    assert said in run.log.decode()


WRITES = "import json; open('last.json', 'w').write({!r}); sys.exit({})"
STATUS = {"file": "last.json", "field": "info.status"}
ENDINGS = {"done": "submitted", "limit": "turns", "late": "deadline", "true": "context", "4": "turns"}


@pytest.mark.parametrize(
    ("code", "endings", "ending"),
    [
        (0, {"0": "stopped"}, Ending.STOPPED),
        (3, {"3": "turns"}, Ending.TURNS),
        (4, {"3": "turns"}, Ending.STOPPED),
        (3, {"3": "submitted"}, Ending.SUBMITTED),
    ],
)
def test_exit_codes_mean_the_endings_of_the_settings(code: int, endings: dict[str, str], ending: Ending) -> None:
    assert play(f"sys.exit({code})", settings={"endings": endings}).ending is ending


@pytest.mark.parametrize(
    ("written", "code", "ending", "said"),
    [
        ('{"info": {"status": "done"}}', 0, Ending.SUBMITTED, 'info.status = "done": submitted'),
        ('{"info": {"status": "limit"}}', 0, Ending.TURNS, 'info.status = "limit": turns'),
        ('{"info": {"status": "late"}}', 4, Ending.DEADLINE, 'info.status = "late": deadline'),
        ('{"info": {"status": true}}', 0, Ending.CONTEXT, 'info.status = "true": context'),
        ('{"info": {"status": "RepeatedError"}}', 0, Ending.STOPPED, 'info.status = "RepeatedError": stopped'),
        ('{"info": {"status": "RepeatedError"}}', 4, Ending.TURNS, "exit code 4"),
        ('{"info": {"status": {}}}', 0, Ending.STOPPED, "no status: ValueError: the field has several values"),
        ('{"info": []}', 0, Ending.STOPPED, "no status: ValueError: it has no 'status'"),
        ("[" * 100_000, 0, Ending.STOPPED, "no status: ValueError: not JSON"),
        ("", 0, Ending.STOPPED, "no status: ValueError: not JSON"),
    ],
)
def test_a_status_that_a_program_writes_decides_the_ending(written: str, code: int, ending: Ending, said: str) -> None:
    run = play(WRITES.format(written, code), settings={"status": STATUS, "endings": ENDINGS})
    assert (run.ending, run.failure) == (ending, None), run.log.decode()
    assert f"etude: exit code {code}\n" in run.log.decode()
    assert said in run.log.decode()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("", "FileNotFoundError"),
        ("os.mkfifo('last.json')", "not a regular file"),
        ("os.symlink('/etc/hostname', 'last.json')", "OSError"),
        ("os.mkdir('last.json')", "not a regular file"),
        ("open('last.json', 'wb').truncate(65 << 20)", "it has more than"),
    ],
)
def test_a_program_without_a_readable_status_has_not_submitted(script: str, said: str) -> None:
    run = play(script, settings={"status": STATUS, "endings": ENDINGS})
    assert run.ending is Ending.STOPPED, run.log.decode()
    assert said in run.log.decode()


def test_a_status_that_is_a_folder_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ValueError, match="not a regular file"):
            read_regular(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_limit_of_the_run_comes_before_the_status() -> None:
    script = "[ask(str(i)) for i in range(2)]\ntry: ask('more')\nexcept OSError: pass\n"
    done = WRITES.format('{"info": {"status": "done"}}', 0)
    settings = {"status": STATUS, "endings": ENDINGS}
    run = play(script + done, [text("x")] * 9, settings=settings, max_turns=2)
    assert run.ending is Ending.TURNS, run.log.decode()
    run = play(f"try: ask('word ' * 3000)\nexcept OSError: pass\n{done}", settings=settings)
    assert run.ending is Ending.CONTEXT, run.log.decode()


VALUES = st.recursive(st.none() | st.booleans() | st.text() | st.integers(), st.lists)


@given(st.binary(max_size=200) | VALUES.map(json.dumps).map(str.encode))
def test_any_bytes_are_a_status_or_none(data: bytes) -> None:
    for written in (data, b'{"a": %s}' % data):
        with contextlib.suppress(ValueError):
            assert isinstance(status_in(written, "a"), str)


def test_a_program_that_hangs_is_killed_at_its_deadline() -> None:
    began = time.monotonic()
    run = play("time.sleep(60)", rollout_deadline_s=0.5)
    assert run.ending is Ending.DEADLINE
    assert time.monotonic() - began < 50
    assert run.tool_s == pytest.approx(0.5, abs=0.1)


def test_waiting_for_the_policy_is_not_the_programs_time_and_the_wall_clock_may_jump(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter(range(10**9, 2 * 10**9, 10**6))
    monkeypatch.setattr(time, "time", lambda: float(next(times)))
    argv, warm = ["{python}", "-c", ASK + "ask('a')"], {"warm": ["decimal", "urllib.request"]}
    run = play(argv, policy=Slow([text("x")], 1.5), settings=warm, rollout_deadline_s=1.0)
    assert run.ending is Ending.SUBMITTED, run.log.decode()


def test_a_program_that_does_not_stop_after_the_last_turn_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "END_GRACE_S", 0.2)
    loop = "while True:\n    try: ask(str(time.time()))\n    except urllib.error.HTTPError as e: assert e.code == 403"
    run = play(loop, [text("x")] * 2, max_turns=2)
    assert (run.ending, len(run.trace.turns)) == (Ending.TURNS, 2)
    assert b"did not end after the rollout had" in run.log


DAEMON = """
import subprocess
for _ in range(3):
    subprocess.Popen([sys.executable, "-c", "import os, time; os.fork() or (os.setsid(), time.sleep(99)) # MARK"],
                     start_new_session=True)
time.sleep(0.5)
"""


@pytest.mark.parametrize("end", ["", "time.sleep(99)"])
def test_no_process_of_a_program_is_left(end: str) -> None:
    mark = f"daemon-{os.getpid()}-{time.monotonic_ns()}"
    run = play((DAEMON + end).replace("MARK", mark), rollout_deadline_s=3.0 if end else 60.0)
    assert run.ending is (Ending.DEADLINE if end else Ending.SUBMITTED)
    assert processes_with(mark) == []


def test_a_cancelled_rollout_kills_its_program() -> None:
    mark = f"cancelled-{os.getpid()}-{time.monotonic_ns()}"

    async def work() -> None:
        script = f"import time; time.sleep(99) # {mark}"
        config = config_of(["{python}", "-c", script])
        running = asyncio.create_task(run_program(episode_of(config, EnginePolicy(ScriptedEngine([])))))
        async with asyncio.timeout(100):
            while not processes_with(mark):  # noqa: ASYNC110  of another process
                await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert processes_with(mark) == []

    asyncio.run(work())


def test_an_engine_that_is_behind_is_a_failure_and_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "END_GRACE_S", 0.2)
    error = EngineBehind("old", hint="wait")
    loop = "while True:\n    try: ask('a')\n    except urllib.error.HTTPError: time.sleep(0.01)"
    run = play(loop, policy=Failing(error))
    assert (run.ending, run.failure) == (None, error)


def test_a_program_that_cannot_be_executed_is_an_error_of_the_config() -> None:
    with pytest.raises(ConfigError, match=r"harness.program.argv cannot be executed: .*no-such-program"):
        play(["no-such-program"])


def test_a_warm_program_has_its_modules_at_once_and_its_own_world() -> None:
    script = "print('decimal' in sys.modules, __name__, sys.argv, os.getcwd() == os.path.realpath(os.curdir)); ask('a')"
    argv = ["{python}", "-c", ASK + script, "--word"]
    run = play(argv, [text("x")], settings={"warm": ["decimal", "urllib.request"]})
    assert run.ending is Ending.SUBMITTED, run.log.decode()
    assert b"True __main__ ['-c', '--word'] True" in run.log
    run = play(["{python}", "-c", "import sys; sys.exit('bad')"], settings={"warm": ["decimal"]})
    assert run.ending is Ending.STOPPED
    assert b"bad" in run.log
    with pytest.raises(ConfigError, match="cannot import no_such_module"):
        play(argv, settings={"warm": ["no_such_module"]})
    with pytest.raises(ConfigError, match=r"needs a Python interpreter .*sleep ended with exit code 1 before it had"):
        play(["sleep", "100"], settings={"warm": ["decimal"]})


def test_warm_modules_are_imported_with_the_variables_that_all_rollouts_share(tmp_path: Path) -> None:
    (tmp_path / "reads_at_import.py").write_text("import os\nSEEN = [os.environ.get(n) for n in ('SAME', 'OWN')]\n")
    env = {"PYTHONPATH": str(tmp_path), "SAME": "{model} {cwd}", "OWN": "{workdir}"}
    script = "import os, reads_at_import; print(reads_at_import.SEEN, os.environ['OWN'] == os.getcwd())"
    run = play(["{python}", "-c", script], settings={"warm": ["reads_at_import"], "env": env})
    assert f"['etude {os.getcwd()}', None] True" in run.log.decode(), run.log.decode()


def test_the_cpu_time_of_a_warm_program_is_counted_in_that_of_its_launcher() -> None:
    script = "import time\nwhile time.process_time() < 0.4: pass"
    config = config_of(["{python}", "-c", script], {"warm": ["fractions", "cmath"]})

    async def work() -> float:
        await run_program(episode_of(config, EnginePolicy(ScriptedEngine([]))))
        process = commands.launcher_of(sys.executable, ("fractions", "cmath"), ())._process
        assert process is not None
        for _ in range(1000):
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            if (ended_s := sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")) > 0.3:
                break
            await asyncio.sleep(0.02)
        return ended_s

    assert asyncio.run(work()) > 0.3


def test_the_log_counts_replies_that_are_tokenised_again() -> None:
    script = """
def send(*messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

user = lambda text: {"role": "user", "content": text}
reply = send(user("a"))
send(user("a"), reply, user("go on"))
send(user("another beginning"), reply, user("go on"))
"""
    run = play(script, [text("x"), text("y"), text("z")])
    assert b"turns 3, requests 3, repeated 0, replies tokenised again 1" in run.log


def test_a_launcher_that_was_killed_is_started_again() -> None:
    async def work() -> None:
        config = config_of(["{python}", "-c", "print('hello')"], {"warm": ["fractions"]})
        for _ in range(2):
            run = await run_program(episode_of(config, EnginePolicy(ScriptedEngine([]))))
            assert b"hello" in run.log
            launcher = commands.launcher_of(sys.executable, ("fractions",), ())
            assert launcher._process is not None
            launcher._process.kill()
            launcher._process.wait()

    asyncio.run(work())


def test_a_long_output_is_bounded() -> None:
    run = play("print('x' * 1000_000)", settings={"log_bytes": 4096})
    assert len(run.log) <= 4096


def test_a_command_gets_standard_input_only_if_asked_to_so_one_that_is_never_closed_blocks_nothing() -> None:
    class Echo(MemoryMachine):
        async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
            output = b"read: " + options["stdin"]
            return ExecResult(exit_code=0, output=output, timed_out=False, truncated=False, wall_s=0.0)

    script = """
import socket, subprocess
never_closed, other = socket.socketpair()
for words, given in ((["cat"], {"stdin": never_closed}), (["-i", "cat"], {"input": b"given"})):
    print(subprocess.run(["etude-machine", *words], stdout=subprocess.PIPE, timeout=300, **given).stdout)
"""
    run = play(script, machine=Echo({}))
    assert b"b'read: '\nb'read: given'\n" in run.log, run.log


def test_a_command_that_was_killed_or_said_too_much_says_so_on_standard_error() -> None:
    class Slow(MemoryMachine):
        async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
            late = argv[-1] == "late"
            return ExecResult(exit_code=137, output=b"", timed_out=late, truncated=not late, wall_s=0.0)

    script = """
import subprocess
for word in ("late", "--read", "long"):
    words = [word, "nofile"] if word == "--read" else [word]
    print(subprocess.run(["etude-machine", *words], stderr=subprocess.PIPE, text=True, timeout=300).stderr)
"""
    said = play(script, machine=Slow({})).log.decode().removeprefix("etude: output of the program:\n")
    late, read, long = said.split("\n\n")[:3]
    assert re.fullmatch(r"etude-machine: killed after [\d.]+ s \(harness.tool_deadline_s\)", late)
    assert "could not read" in read
    assert "base64" not in read
    assert long == "etude-machine: the output was too long, and its middle was left out"


def test_a_machine_that_fails_is_a_failure() -> None:
    class Broken(MemoryMachine):
        async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
            raise MachineError("it died", hint="fork another")

    script = "import subprocess; sys.exit(subprocess.call(['etude-machine', 'ls']))"
    run = play(script, machine=Broken({}))
    assert (run.ending, str(run.failure)[:7]) == (None, "it died")


def test_a_machine_without_a_loopback_of_its_own_is_named() -> None:
    with pytest.raises(ConfigError, match="MemoryMachine has no loopback"):
        play(["true"], settings={"where": "inside"})


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ({"argv": []}, "argv is empty"),
        ({"argv": ["a"], "where": "near"}, "did you mean 'inside'|known: inside, outside"),
        ({"argv": ["a"], "warn": ["json"]}, "did you mean 'harness.program.warm'"),
        ({"argv": ["python", "x"], "warm": ["json"], "where": "inside"}, "warm is for programs outside"),
        ({"argv": ["python"], "warm": ["json"]}, "warm needs argv"),
        ({"argv": ["a"], "endings": {"3": "limit"}}, "known: context, deadline, stopped, submitted, turns"),
        ({"argv": ["a"], "endings": {"Limit": "turns"}}, "without status its names are exit codes"),
        ({"argv": ["a"], "endings": {"256": "turns"}}, "without status its names are exit codes"),
        ({"argv": ["a"], "status": {"file": "../a", "field": "b"}}, "is not a path in the working directory"),
        ({"argv": ["a"], "status": {"file": "a"}}, "status.field|missing|field"),
        ({}, "argv"),
    ],
)
def test_wrong_settings_are_named(program: dict[str, Any], said: str) -> None:
    config = build(HarnessConfig, {"program": {"kind": "command", **program}})
    with pytest.raises(ConfigError, match=said):
        asyncio.run(run_program(episode_of(config, None)))


def test_the_settings_come_back_from_a_config() -> None:
    status = {"file": "a.json", "field": "b"}
    config = config_of(["a", "b"], {"env": {"A": "b"}, "endings": {"3": "turns"}, "status": status})
    assert build(HarnessConfig, to_plain(config)) == config
    assert build(HarnessConfig, {"program": "loop"}) == HarnessConfig()


def test_logs_are_kept_by_attempt_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "harness"
    for attempt in (0, 1):
        write_log(folder, "eval/1.2", attempt, f"log {attempt}".encode())
    write_log(folder, "eval/1.21", 0, b"another")
    assert read_logs(folder, "eval/1.2") == [(0, "log 0"), (1, "log 1")]
    monkeypatch.setattr("etude.rollouts.logs.MOST_LOGS", 8)
    for i in range(20):
        write_log(folder, f"g{i}", 0, b"x")
    assert len(list(folder.iterdir())) <= 8


def test_a_program_in_the_machine_asks_through_a_socket_of_its_own() -> None:
    script = (
        "print(os.environ['OPENAI_BASE_URL'], os.path.exists('calc.py'))\n"
        "assert ask('a') == 'x'\n"
        "import subprocess; subprocess.Popen(['sleep', '99'], start_new_session=True)\n"
        "open('last.json', 'w').write('{\"info\": {\"status\": \"done\"}}')"
    )
    argv = ["python3", "-c", ASK + script]

    async def work() -> None:
        runtime = opened("namespace", lambda: NamespaceRuntime(spare=0))
        try:
            one, two, three, four = await runtime.fork(await prepare(runtime, TASK), 4)
            config = config_of(argv, {"where": "inside", "status": STATUS, "endings": ENDINGS})
            episodes = [
                episode_of(config, EnginePolicy(ScriptedEngine([text("x")])), machine) for machine in (one, two)
            ]
            for run in await asyncio.gather(*map(run_program, episodes)):
                assert run.ending is Ending.SUBMITTED, run.log.decode()
                assert len(run.trace.turns) == 1
                assert b"http://127.0.0.1:" in run.log
                assert b"/v1 True" in run.log
                assert b'info.status = "done": submitted' in run.log
            hung = episode_of(config_of(["sleep", "99"], {"where": "inside"}, rollout_deadline_s=0.5), None, three)
            assert (await run_program(hung)).ending is Ending.DEADLINE
            missing = episode_of(config_of(["no-such"], {"where": "inside"}), None, four)
            with pytest.raises(ConfigError, match="cannot be executed in the machine"):
                await run_program(missing)
        finally:
            await runtime.close()

    asyncio.run(work())

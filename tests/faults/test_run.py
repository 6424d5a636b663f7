"""A whole run under faults: killed, hung, interrupted, out of disk, damaged, or with invalid messages.

What must hold: it ends, or it says in three parts why not; no process is left; a resumed run ends and its audit finds
nothing lost and nothing trained twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.running import Running, event_of
from tests.small_disk import fill, small_disk

from etude import cli as etude
from etude.run import RunFolder

CHILDREN = ("learner", "engine-0", "worker-0", "grader-0")


@pytest.fixture
def running(game: Any, tmp_path: Path, cli_in: Callable[[Path], Any]) -> Iterator[Running]:
    """A run of the game that has not begun yet; killed with the test."""
    run = Running(cli_in(tmp_path), game.config)
    yield run
    run.stop()


# The quick ones


@pytest.mark.timeout(1800)
def test_a_run_whose_children_are_killed_ends_and_its_audit_is_sound(running: Running) -> None:
    running.begin("rl.steps=8", "fleet.hung_s=300").at_step(1)  # none is lost but those that are killed
    for child in CHILDREN:
        running.hit(child)
    assert running.end() == 0, running.said
    running.assert_sound()
    restarted = {e["name"] for e in running.events("process") if e["state"] == "restart"}
    assert restarted == set(CHILDREN)
    assert any(e["state"] == "lost" for e in running.events("lineage"))


@pytest.mark.timeout(1800)
def test_a_run_that_is_interrupted_and_then_killed_leaves_no_process_and_goes_on(running: Running) -> None:
    running.begin("rl.steps=8").at_step(1)
    assert running.interrupt() == 130, running.said
    running.assert_nothing_left()
    assert "--resume" in running.said
    assert json.loads((running.path / "summary.json").read_text())["finished"] is False
    running.resume().at_step(3)
    assert running.process is not None
    running.process.kill()
    running.end()
    running.assert_nothing_left()
    killed = running.cli("fsck", running.path)
    assert killed.returncode == 0, killed.stdout
    assert running.resume().end() == 0, running.said
    running.assert_sound()
    resumed = running.cli("fsck", running.path)
    assert resumed.returncode == 0, resumed.stdout
    assert "Traceback" not in running.said
    [last_s] = [e["wall_s"] for e in running.events("phase") if e["phase"] == "rl" and e["state"] == "end"]
    whole_s = json.loads((running.path / "summary.json").read_text())["wall_s"]["rl"]
    assert whole_s > last_s, "the sessions before count, too"
    assert [p["wall_s"] for p in RunFolder.open(running.path).phases() if p["phase"] == "rl"] == [round(whole_s, 3)]


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A command that must refuse: three parts on stderr, the exit code, and no run folder is made."""
    monkeypatch.chdir(tmp_path)

    def run(code: int, *args: str | Path) -> str:
        capsys.readouterr()
        assert etude.main([str(a) for a in args]) == code
        said = capsys.readouterr().err
        assert f"\n{said}".count("\nerror: ") == 1  # a slow check tells of its progress first
        assert "\n  hint: " in said
        assert not list(tmp_path.glob("runs/new"))
        return said

    return run


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("rl.stpes=3", "did you mean 'rl.steps'"),
        ("rll.steps=3", "did you mean 'rl'"),
        ('rl.steps="many"', "expected an integer"),
        ("rl.steps=true", "expected an integer"),
        ("rl.steps=-1", "at least 0"),
        ("experience.group_size=1", "from 2 to 1024"),
        ("experience.credit=grop", "did you mean 'grpo'"),
        ("harness.tools=['edti']", "did you mean 'edit'"),
        ("harness.tools=['ls']", "do not submit have reward 0"),
        ("harness.context_tokens=4096", "is larger than"),
        ("engine.context_tokens=512", "positions for 128"),
        ("learner.expert_parallel=2", "is not a multiple of expert_parallel"),
        ("learner.context_parallel=3", "is not a multiple of context_parallel"),
        ("start=/nowhere", "is not a checkpoint: it has no config.json"),
        ("rl=3", "expected a section"),
        ("nonsense", "--set rl.steps=10"),
    ],
)
def test_a_bad_setting_is_refused_by_name(game: Any, refuse: Callable[..., str], setting: str, said: str) -> None:
    assert said in refuse(2, "run", game.config, "--name", "new", "--set", setting)


def test_a_missing_or_broken_config_is_refused(tmp_path: Path, refuse: Callable[..., str]) -> None:
    assert "examples/laptop" in refuse(2, "run", "nowhere.toml")
    (tmp_path / "broken.toml").write_text("seed = [")
    assert "is not valid TOML" in refuse(2, "run", "broken.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    assert "is not valid TOML" in refuse(2, "run", "bytes.toml")


def test_a_checkpoint_that_cannot_be_computed_here_is_refused_before_the_run_begins(
    game: Any, tmp_path: Path, refuse: Callable[..., str]
) -> None:
    def damaged(name: str, **changes: object) -> Path:
        shutil.copytree(game.start, tmp_path / name)
        about = json.loads((game.start / "config.json").read_text()) | changes
        (tmp_path / name / "config.json").write_text(json.dumps(about))
        return tmp_path / name

    def start(path: Path, code: int = 1) -> str:
        return refuse(code, "run", game.config, "--name", "new", "--set", f"start={path}")

    gemma = damaged("gemma", model_type="gemma3", architectures=["Gemma3ForCausalLM"])
    assert "architecture Gemma3ForCausalLM" in start(gemma, 2)
    assert "attention_bias" in start(damaged("variant", attention_bias=True), 2)
    mute = damaged("mute")
    (mute / "tokenizer.json").unlink()
    assert "no tokeniser" in start(mute)
    torn = damaged("torn")
    (torn / "config.json").write_text('{"model_type": "qwen3')
    assert "is damaged" in start(torn)
    cut = damaged("cut")
    os.truncate(cut / "model.safetensors", (cut / "model.safetensors").stat().st_size - 1)
    assert "model.safetensors is damaged" in start(cut)
    assert "the file was cut off" in start(cut)
    assert "has no tensor 'model.layers.2.input_layernorm.weight'" in start(damaged("deep", num_hidden_layers=3))
    wide = start(damaged("wide", hidden_size=64))
    assert "model.safetensors: 'model.embed_tokens.weight' has shape [320, 32]" in wide
    assert "expects [320, 64]" in wide
    assert "the file was cut off" in refuse(1, "serve", cut)
    assert "the file was cut off" in refuse(1, "eval", "own", "--checkpoint", cut, "--config", game.config)
    assert "the file was cut off" in refuse(1, "export", cut, tmp_path / "out")
    assert "nothing at" in refuse(2, "serve", tmp_path / "nowhere")
    assert "nothing at" in refuse(2, "export", tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert "not a checkpoint" in refuse(2, "serve", tmp_path / "empty")


def test_a_task_source_without_tasks_or_with_a_wrong_reference_is_refused(
    game: Any, tmp_path: Path, refuse: Callable[..., str]
) -> None:
    def start(source: Path | str, code: int = 1) -> str:
        return refuse(code, "run", game.config, "--name", "new", "--set", f"tasks.source={source}")

    (tmp_path / "empty").mkdir()
    assert "has no task" in start(tmp_path / "empty", 2)
    assert "did you mean 'repair'" in refuse(2, "run", game.config, "--set", "tasks.source=repiar")
    shutil.copytree(game.tasks, tmp_path / "untrained")
    for folder in (tmp_path / "untrained").glob("train-*"):
        shutil.rmtree(folder)
    assert "no train task" in start(tmp_path / "untrained")
    wrong = shutil.copytree(game.tasks, tmp_path / "wrong")
    (wrong / "train-00" / "answer" / "reference" / "m.py").write_text("def f():\n    return 9\n")
    assert "reference solution scores 0" in start(wrong)
    assert "1 of 12 train tasks" in refuse(1, "tasks", "check", wrong)
    given = shutil.copytree(game.tasks, tmp_path / "given")
    (given / "train-01" / "files" / "m.py").write_text("def f():\n    return 2\n")
    assert "unmodified" in start(given)


def test_a_run_in_use_of_another_config_or_absent_is_not_resumed(
    game: Any, tmp_path: Path, refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from etude.config import load, to_toml
    from etude.loop.config import RunConfig

    text = to_toml(load(game.config, RunConfig))
    run = RunFolder.create(tmp_path / "runs" / "held", config_toml=text, seed=3)
    run.lock()
    assert f"process {os.getpid()} runs it" in refuse(3, "run", game.config, "--resume", "held")
    said = refuse(3, "run", game.config, "--resume", "held", "--set", "rl.steps=5")
    assert "rl.steps is 5, the run has 4" in said
    assert "etude run --resume runs/held" in said
    assert "never overwritten" in refuse(2, "run", game.config, "--name", "held")
    assert "is not a run" in refuse(2, "run", game.config, "--resume", "absent")
    assert "no CONFIG" in refuse(2, "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "no run in" in refuse(2, "status")


def test_a_port_in_use_is_named(game: Any, refuse: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refuse(2, "serve", game.start, "--port", str(port))


# The long matrix


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_learner_that_is_killed_while_versions_are_on_their_way_costs_time_only(running: Running) -> None:
    """With lag to spare and few checkpoints, the next batch's forward pass runs beside a publish."""
    draw = random.Random("learner")
    running.begin("rl.steps=14", "rl.checkpoint_every=5", "experience.max_lag=2")
    for step in (1, 4, 8):
        running.at_step(step)
        time.sleep(draw.random())
        running.hit("learner")
    assert running.end() == 0, running.said
    running.assert_sound()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("child", [*CHILDREN, "engine-1"])
def test_a_child_that_is_killed_again_and_again_costs_time_only(running: Running, child: str) -> None:
    draw = random.Random(child)
    running.begin("rl.steps=12", "rl.checkpoint_every=1")
    for step in (0, 2, 4, 6):
        running.at_step(step)
        time.sleep(draw.random())  # anywhere within a step: where exactly is the point of the test
        running.hit(child)
    assert running.end() == 0, running.said
    running.assert_sound()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("child", CHILDREN)
def test_a_child_that_hangs_is_named_and_replaced(running: Running, child: str) -> None:
    running.begin("rl.steps=8", "fleet.hung_s=6.0").at_step(1)
    running.hit(child, signal.SIGSTOP)
    assert running.end() == 0, running.said
    running.assert_sound()
    assert [e["name"] for e in running.events("process") if e["state"] == "hung"] == [child]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_learner_that_cannot_be_kept_alive_ends_the_run_by_name_and_it_can_be_resumed(running: Running) -> None:
    running.begin("rl.steps=8").at_step(1)
    assert running.process is not None
    while running.process.poll() is None:
        pid = running.pid("learner")
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    assert running.end() == 1
    assert "error: learner " in running.said
    assert "hint: " in running.said
    running.assert_nothing_left()
    assert running.resume().end() == 0, running.said
    assert "Traceback" not in running.said
    assert json.loads((running.path / "summary.json").read_text())["finished"]


def assert_ended_having_learnt_or_not(running: Running) -> None:
    """A model of no size may solve no task at all: then the run says that nothing could be learnt, and is sound."""
    code = running.end()
    assert code == 0 or "error: the run had nothing to learn from" in running.said, running.said
    running.assert_sound()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_from_nothing_is_stopped_in_every_phase_and_ends_when_resumed(
    tmp_path: Path, cli_in: Callable[[Path], Any], signum: signal.Signals
) -> None:
    config = tmp_path / "tiny.toml"
    config.write_text(FROM_NOTHING)
    running = Running(cli_in(tmp_path), config).begin()
    try:
        for phase in ("corpus", "mid-training", "eval-before", "rl", "eval-after"):
            running.in_phase(phase)
            time.sleep(0.3)  # somewhere within it
            code = running.interrupt(signum)
            assert code == (-signal.SIGKILL if signum is signal.SIGKILL else 130), (phase, running.said)
            running.assert_nothing_left()
            running.resume()
        assert_ended_having_learnt_or_not(running)
    finally:
        running.stop()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_process_of_the_corpus_and_a_rank_of_mid_training_that_are_killed_cost_time_only(
    tmp_path: Path, cli_in: Callable[[Path], Any]
) -> None:
    config = tmp_path / "tiny.toml"
    config.write_text(FROM_NOTHING)
    running = Running(cli_in(tmp_path), config).begin("corpus.num_demonstrations=4000", "rl.steps=1")
    try:
        for phase in ("corpus", "mid-training"):
            running.in_phase(phase)
            running.until(lambda name=phase: _busy_child_of(running.pid(name)), f"a process of {phase}")
            os.kill(_busy_child_of(running.pid(phase)) or 0, signal.SIGKILL)
        assert_ended_having_learnt_or_not(running)
        starts = [e["name"] for e in running.events("process") if e["state"] == "start"]
        assert starts.count("corpus") == starts.count("mid-training") == 2
    finally:
        running.stop()


def _busy_child_of(pid: int | None) -> int | None:
    """A child that has worked for a second; multiprocessing's own helpers never have."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children() if pid else []:
            if sum(child.cpu_times()[:2]) > 1.0:
                return child.pid
    return None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_second_ctrl_c_does_not_leave_anything_behind(running: Running) -> None:
    running.begin("rl.steps=40").at_step(1)
    assert running.process is not None
    running.process.send_signal(signal.SIGINT)
    assert running.interrupt() == 130, running.said
    running.assert_nothing_left()
    assert "Traceback" not in running.said


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0])
def test_ctrl_c_while_starting_ends_with_130_and_leaves_nothing(running: Running, delay_s: float) -> None:
    running.begin()
    assert running.process is not None
    running.until(lambda: Path(f"/proc/{running.process.pid}/cmdline").read_bytes().count(b"etude"), "it to begin")
    time.sleep(0.4 + delay_s)  # past the interpreter's own start, which knows no handlers
    assert running.interrupt() == 130, running.said
    running.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", ["objects", "manifests", "pointers"])
def test_objects_damaged_while_engines_follow_are_repaired_or_named(running: Running, what: str) -> None:
    running.begin("rl.steps=8").at_step(3)
    folder = running.path / "weights" / what
    before = _files(folder)
    torn: list[Path] = []
    whole: list[bytes] = []

    def tear() -> bool:
        torn.extend(p for p, at in _files(folder).items() if before.get(p) != at)
        for path in torn[:1]:
            whole.append(path.read_bytes())
            os.truncate(path, path.stat().st_size // 2)
        return bool(torn)

    running.until(tear, f"something new in {what}")
    code = running.end()
    assert "Traceback" not in running.said
    if code == 0:
        if what == "manifests":
            torn[0].write_bytes(whole[0])  # the audit names it until it is put back: nothing else proves that version
        running.assert_sound()
        return
    assert what == "manifests", "a torn object or pointer heals: the learner publishes over it\n" + running.said
    assert code == 1, running.said
    assert "error: " in running.said
    assert "hint: " in running.said
    running.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("damage", ["torn", "gone"])
@pytest.mark.parametrize("what", ["pointer", "inner manifest", "newest manifest"])
def test_a_stopped_run_whose_store_was_damaged_is_resumed_and_trains_nothing_twice(
    running: Running, what: str, damage: str
) -> None:
    running.begin("rl.steps=6").at_step(3)
    assert running.interrupt() == 130
    manifests = sorted((running.path / "weights/manifests/policy").iterdir())
    path = {
        "pointer": running.path / "weights/pointers/policy",
        "inner manifest": manifests[1],
        "newest manifest": manifests[-1],
    }[what]
    whole = path.read_bytes()
    if damage == "torn":
        os.truncate(path, len(whole) // 2)
    else:
        path.unlink()
    assert running.resume().end() == 0, running.said
    assert json.loads((running.path / "summary.json").read_text())["finished"]
    said = [e["reason"] for e in _events(running.path, "learner") + _events(running.path, "conductor") if "reason" in e]
    assert any("pointer was" in reason or "manifest of" in reason for reason in said)
    audit = running.cli("ledger", "audit", running.path)
    assert audit.stdout.startswith("0 lost, 0 trained twice, 0 slots leaked;"), audit.stdout + audit.stderr
    if "manifest" in what and audit.returncode:  # the proof of those steps is gone until the file is back
        assert f"copy {path.relative_to(running.path / 'weights')} back" in audit.stderr
        path.write_bytes(whole)
    running.assert_sound()


def _events(run: Path, process: str) -> list[dict[str, Any]]:
    events = [event_of(line) for line in (run / "events" / f"{process}.jsonl").read_bytes().splitlines()]
    return [event for event in events if event.get("kind") == "weights.mend"]


def _files(folder: Path) -> dict[Path, int]:
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                found[path] = path.stat().st_mtime_ns
    return found


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    with small_disk(tmp_path / "disk", "64m") as mounted:
        yield mounted


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("left_bytes", [0, 4096, 65_536, 300_000])
def test_a_disk_that_fills_up_ends_the_run_by_name_and_loses_nothing(
    game: Any, tmp_path: Path, disk: Path, cli_in: Callable[[Path], Any], left_bytes: int
) -> None:
    running = Running(cli_in(tmp_path), game.config, runs=disk).begin("rl.steps=40")
    try:
        running.at_step(2)
        ballast = fill(disk, left_bytes)
        assert running.end() not in (0, None)
        assert "Traceback" not in running.said, running.said
        assert "error: " in running.said
        assert "hint: " in running.said
        running.assert_nothing_left()
        ballast.unlink()
        assert running.resume().end() == 0, running.said
        running.assert_sound()
    finally:
        running.stop()


FROM_NOTHING = """seed = 1
[model]
vocab_size = 320
hidden_size = 32
num_layers = 2
num_heads = 2
num_kv_heads = 1
head_dim = 16
expert_size = 32
num_experts = 4
top_k = 2
context_tokens = 384
[tasks]
files = 1
[corpus]
num_demonstrations = 400
num_code_documents = 40
library_chars = 4000
[mid_training]
num_tokens = 60_000
batch_tokens = 1024
checkpoint_every = 5
[harness]
max_turns = 4
[engine]
max_sequences = 16
context_tokens = 384
[experience]
groups_per_step = 2
group_size = 4
max_lag = 1
[rl]
steps = 4
checkpoint_every = 1
[evals]
heldout_tasks = 24
during_tasks = 2
baseline_tasks = 8
every = 2
"""

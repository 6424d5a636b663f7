"""`etude init`, and the run that it prints: from nothing, on the folder's tasks, and from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.cli import main

pytestmark = pytest.mark.timeout(1800)
SMALL = {
    "model": {"vocab_size": 320, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16},
    "corpus": {"num_demonstrations": 60, "num_code_documents": 40, "library_chars": 4000},
    "mid_training": {"num_tokens": 20_000, "batch_tokens": 1024, "warmup_steps": 2},
    "harness": {"max_turns": 4},
    "engine": {"max_sequences": 16},
    "experience": {"groups_per_step": 2, "group_size": 2},
    "rl": {"steps": 1, "checkpoint_every": 1},
    "evals": {"heldout_tasks": 2, "during_tasks": 2, "baseline_tasks": 2},
}


def small() -> list[str]:
    found = [(f"{group}.{name}", value) for group, values in SMALL.items() for name, value in values.items()]
    return [part for name, value in found for part in ("--set", f"{name}={value}")]


def test_a_new_folder_runs_at_once_and_its_run_is_proven(tmp_path: Path, cli_in: Callable[[Path], Any]) -> None:
    cli = cli_in(tmp_path)
    said = cli("init", "my-agent").stdout
    assert said.endswith("cd my-agent && etude run config.toml\n")
    inside = cli_in(tmp_path / "my-agent")
    done = inside("run", "config.toml", *small(), "--name", "first", timeout_s=1500)
    assert done.returncode == 0 or "nothing to learn from" in done.stdout + done.stderr, done.stdout + done.stderr
    run = tmp_path / "my-agent" / "runs" / "first"
    phases = [one["phase"] for one in json.loads((run / "phases.json").read_text())]
    assert phases == ["corpus", "mid-training", "eval-before", "rl", "eval-after", "report"]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if not path.name.endswith("-shm")}
    proven = inside("fsck")
    assert proven.returncode == 0, proven.stdout
    assert ": 0 problems, 0 notices" in proven.stdout.replace(" read", "")
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*") if not p.name.endswith("-shm")} == before


def test_with_a_checkpoint_the_config_begins_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, game: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "own", "--start", str(game.start)]) == 0
    text = (tmp_path / "own" / "config.toml").read_text()
    assert f'start = "{game.start}"' in text
    assert "[model]" not in text
    monkeypatch.chdir(tmp_path / "own")
    sets = ["--set", "engine.context_tokens=128", "--set", "harness.context_tokens=96"]
    assert main(["run", "config.toml", "--dry-run", *sets]) == 0


def test_init_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("x")
    assert main(["init", str(tmp_path / "there")]) == 2
    assert "exists: nothing is overwritten" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "new"), "--start", str(tmp_path)]) == 2
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine"]

"""The run folder: created once, held by one process, phases recorded durably."""

from __future__ import annotations

import subprocess
import sys

import pytest

from etude.errors import RunError
from etude.run import RunFolder, write_durably


def test_a_run_is_never_overwritten(tmp_path):
    RunFolder.create(tmp_path / "a", config_toml="seed = 1\n", seed=1)
    with pytest.raises(RunError, match="exists"):
        RunFolder.create(tmp_path / "a", config_toml="seed = 1\n", seed=1)


def test_a_folder_without_identity_is_no_run(tmp_path):
    with pytest.raises(RunError, match="is not a run"):
        RunFolder.open(tmp_path)


def test_a_run_of_another_format_is_refused_by_name(tmp_path):
    run = RunFolder.create(tmp_path / "a", config_toml="", seed=1)
    text = (run / "run.json").read_text().replace('"format": 1', '"format": 99')
    (run / "run.json").write_text(text)
    with pytest.raises(RunError, match="format version 99"):
        RunFolder.open(run.path)


def test_a_held_run_names_its_holder_and_is_free_when_the_holder_dies(tmp_path):
    run = RunFolder.create(tmp_path / "a", config_toml="", seed=1)
    code = (
        "import sys; from pathlib import Path; from etude.run import RunFolder\n"
        "RunFolder.open(Path(sys.argv[1])).lock(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert run.holder() == holder.pid
        with pytest.raises(RunError, match=f"process {holder.pid} runs it"):
            run.lock()
        holder.kill()
    assert run.holder() is None
    run.lock()
    assert RunFolder.open(run.path).holder() is not None
    run.unlock()
    assert RunFolder.open(run.path).holder() is None


def test_ended_phases_are_known_when_the_run_is_opened_again(tmp_path):
    run = RunFolder.create(tmp_path / "a", config_toml="", seed=1)
    assert not run.ended("corpus")
    run.end_phase("corpus", wall_s=1.23456, facts={"tokens": 5})
    again = RunFolder.open(run.path)
    assert again.ended("corpus")
    assert again.phases() == [{"phase": "corpus", "wall_s": 1.235, "facts": {"tokens": 5}}]


def test_a_durable_write_that_fails_leaves_the_old_content_and_no_litter(tmp_path):
    path = tmp_path / "there" / "x"
    with pytest.raises(RunError, match="cannot write"):
        write_durably(path, b"new")
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "x").write_bytes(b"old")
    write_durably(folder / "x", b"new")
    assert [p.name for p in folder.iterdir()] == ["x"]
    assert (folder / "x").read_bytes() == b"new"


@pytest.mark.parametrize("name", ["run.json", "phases.json"])
@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_damaged_file_is_named_with_a_hint(tmp_path, name, text):
    run = RunFolder.create(tmp_path / "a", config_toml="", seed=1)
    (run / name).write_text(text)
    with pytest.raises(RunError, match=f"{name} is damaged"):
        RunFolder.open(run.path).phases()

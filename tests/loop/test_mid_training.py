"""The guide's way from a folder of text to a mid-trained checkpoint: built, checked, and trained by two ranks."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from tests.conftest import Game
from tests.running import Running

from etude.corpus import Corpus
from etude.models import ModelConfig
from etude.run import RunFolder
from etude.telemetry import read_events

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "your-text.md").read_text()


@pytest.mark.timeout(1800)
def test_the_guides_commands_make_a_mid_trained_checkpoint_from_a_folder_of_text(
    game: Game, tmp_path: Path, cli_in: Callable[[Path], Any]
) -> None:
    section = GUIDE[GUIDE.index("## Mid-training") :]
    corpus, settings = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)[:2]
    commands = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[0].splitlines()
    (init,) = re.findall(r"`etude (init .*?)`", section)
    cli = cli_in(tmp_path)
    base_folder = tmp_path / "checkpoints" / "base"
    shutil.copytree(game.start, base_folder)
    (base_folder / "SHA256SUMS").unlink()
    sizes = json.loads((base_folder / "config.json").read_text()) | {"max_position_embeddings": 512}
    (base_folder / "config.json").write_text(json.dumps(sizes))  # the context of the config that `init` writes
    (tmp_path / "texts").mkdir()
    for i in range(40):
        lines = [f"Line {j} of text {i} is about the number {i * 37 + j * j}." for j in range(4)]
        (tmp_path / "texts" / f"{i}.md").write_text("\n".join(lines))
    (tmp_path / "corpus.toml").write_text(corpus.replace("<|endoftext|>", "<|end|>") + "\n[near]\nthreshold = 1.0\n")
    assert cli(*init.split()).returncode == 0
    with (tmp_path / "own" / "config.toml").open("a") as file:
        file.write(settings)

    assert commands[1] == "cd own"
    build, dry, run = (line.removeprefix("etude ").split() for line in (commands[0], *commands[2:]))
    assert cli(*build, "--jobs", "1").returncode == 0
    cli = cli_in(tmp_path / "own")
    asked = cli(*dry)
    assert asked.returncode == 0, asked.stderr
    long = next(one for one in Corpus.open(tmp_path / "corpus").manifest.phases if one.name == "long")
    assert f"phase 'long': {long.tokens:,} tokens, {2000 / long.tokens:.3g} times all of them" in asked.stderr
    assert run == ["run", "config.toml", "--name", "own"]
    running = Running(cli, Path("config.toml")).begin("learner.ranks=2")
    try:
        running.in_phase("eval-before")
        assert running.interrupt(signal.SIGINT) == 130, running.said
    finally:
        running.stop()
    checkpoints = running.path / "checkpoints"
    folders = (base_folder, checkpoints / "start", checkpoints / "mid")
    base, start, mid = (load_file(path / "model.safetensors") for path in folders)
    assert all((base[name] == start[name]).all() for name in base)
    assert base.keys() == mid.keys()
    assert any((base[name] != mid[name]).any() for name in base)
    before, _, after = (ModelConfig.from_hf(json.loads((path / "config.json").read_text())) for path in folders)
    assert after == before.extended(2.0)
    assert len({(path / "tokenizer.json").read_bytes() for path in folders}) == 1
    steps = [event for event in read_events(running.path / "events") if event["kind"] == "mid.step"]
    assert steps[-1]["phase"] == "long"
    assert RunFolder.open(running.path).ended("mid-training")
    ranks = [event for event in read_events(running.path / "events") if event.get("name") == "learner rank 1"]
    assert ranks[0]["t"] < steps[0]["t"], "mid-training has the ranks of the learner"
    assert all(event["state"] == "start" for event in ranks)

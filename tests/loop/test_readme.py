"""The README's three ways in: their commands are ones, and those that need no package index run as they stand."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.cli.commands import build_parser
from etude.weights.files.checkpoint import CheckpointWriter, layout
from etude.weights.tensors import Tensor

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
pytestmark = pytest.mark.timeout(1800)


def way(number: int) -> list[str]:
    """The commands of one way in, without comments."""
    block = re.search(rf"^## {number}\. .*?```sh\n(.*?)```", TEXT, re.M | re.S)
    assert block is not None
    return [line.partition("  #")[0].strip() for line in block[1].splitlines()]


def test_the_readme_begins_with_three_quick_starts_of_five_lines() -> None:
    heads = re.findall(r"^## (.*)$", TEXT, re.M)
    assert heads[:3] == ["1. Try it", "2. My model and my tasks", "3. Weights only"]
    assert [len(way(number)) for number in (1, 2, 3)] == [5, 5, 5]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_etude_command_is_one_and_every_make_target_is_there(number: int) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for line in way(number):
        for command in line.split(" && "):
            words = [word.strip('"').replace("$(ls", "RUN") for word in command.replace("$(ls -td", "RUN").split()]
            if words[0].endswith("etude"):
                kept = [word for word in words[1:] if word not in ("runs/*/", "|", "head", "-1)")]
                build_parser().parse_args(kept)
            elif words[0] == "make":
                assert words[1] in targets


def test_the_commands_under_look_around_parse() -> None:
    block = re.search(r"## Look around\n\n```sh\n(.*?)```", TEXT, re.S)
    assert block is not None
    for line in block[1].splitlines():
        command = line.partition("#")[0].strip().split(" | ")[0]
        build_parser().parse_args(command.replace("NAME", "a").split()[1:])


def test_the_readmes_commands_for_weights_alone_run(tmp_path: Path, cli_in: Callable[[Path], Any]) -> None:
    for step in (100, 101):
        tensors = {"w": Tensor("bf16", (4096,), np.arange(4096, dtype=np.uint16) + np.uint16(step))}
        with CheckpointWriter(tmp_path / f"step-{step}", layout(tensors)) as writer:
            writer.put("w", tensors["w"])
    for command in way(3)[1:]:
        done = cli_in(tmp_path)(*command.split()[1:])
        assert done.returncode == 0, done.stderr
    same = (tmp_path / "live" / "model.safetensors").read_bytes()
    assert same == (tmp_path / "step-101" / "model.safetensors").read_bytes()


def test_the_readmes_commands_for_own_tasks_run_up_to_the_run(tmp_path: Path, cli_in: Callable[[Path], Any]) -> None:
    _, init, check, run, _ = way(2)
    assert init == "etude init my-agent && cd my-agent"
    assert cli_in(tmp_path)("init", "my-agent").returncode == 0
    inside = cli_in(tmp_path / "my-agent")
    done = inside(*check.split()[1:], "--num", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert inside(*run.split()[1:], "--dry-run").returncode == 0  # all of it, small: test_init.py


def test_the_export_takes_the_newest_run(tmp_path: Path) -> None:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    inner = re.search(r"\$\((.*)\)", way(2)[-1])
    assert inner is not None
    said = subprocess.run(inner[1], shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said == "runs/one/\n"

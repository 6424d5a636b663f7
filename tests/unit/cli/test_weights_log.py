"""The output of `etude weights log`, for a store's versions and for a path that is no store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from etude.cli import main
from etude.stores import DirectoryStore
from etude.weights import Channel, Tensor


def test_a_delta_has_a_share_of_the_bound_and_an_anchor_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    channel, codes = Channel(DirectoryStore(tmp_path / "store")), np.arange(4096, dtype=np.uint16)
    first = channel.publish({"w": Tensor("bf16", (4096,), codes)}, step=0, parent=None, rollout_ids=[])
    changed = codes.copy()
    changed[::7] += 1
    channel.publish({"w": Tensor("bf16", (4096,), changed)}, step=1, parent=first.version, rollout_ids=[])
    assert main(["weights", "log", str(tmp_path / "store")]) == 0
    said = capsys.readouterr().out
    anchor, delta = ([cell.strip() for cell in line.split("│")] for line in said.splitlines() if "│ v00000" in line)
    assert (anchor[2], anchor[5]) == ("anchor", "–")
    assert delta[2] == "delta"
    assert float(delta[5]) > 0
    assert "within about 5 per cent of it" in " ".join(said.split())
    assert "cannot be beaten" not in said


def test_a_delta_that_brings_tensors_whole_says_how_many_in_place_of_a_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    channel, codes, parent = Channel(DirectoryStore(tmp_path / "store")), np.arange(4096, dtype=np.uint16), None
    for step, shapes in enumerate(({"w": (4096,)}, {"w": (4096,), "v": (4096,)}, {"w": (64, 64), "v": (4096,)})):
        tensors = {name: Tensor("bf16", shape, codes + np.uint16(step)) for name, shape in shapes.items()}
        parent = channel.publish(tensors, step=step, parent=parent, rollout_ids=[]).version
    assert main(["weights", "log", str(tmp_path / "store")]) == 0
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")] for line in said.splitlines() if "│ v00000" in line]
    assert [row[5] for row in rows] == ["–", "1 whole", "1 whole"]
    assert "are new or have another dtype or shape" in " ".join(said.split())


@pytest.mark.parametrize("name", ["nope", "empty"])
@pytest.mark.parametrize("command", [["log"], ["diff", "0", "1"]])
def test_a_path_that_is_neither_a_run_nor_a_store_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert main(["weights", *command, name]) == 2
    said = capsys.readouterr().err
    assert f"{name} is not a run or a store" in said
    assert "s3://bucket/prefix" in said


@pytest.mark.parametrize("command", ["log", "fsck", "gc"])
def test_a_channel_that_is_not_there_is_named_with_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    weights = {"w": Tensor("bf16", (8,), np.arange(8, dtype=np.uint16))}
    Channel(DirectoryStore(tmp_path / "store")).publish(weights, step=0, parent=None, rollout_ids=[])
    assert main(["weights", command, str(tmp_path / "store"), "--name", "polcy"]) == 2
    said = capsys.readouterr().err
    assert "there is no channel 'polcy'" in said
    assert "did you mean 'policy'?" in said

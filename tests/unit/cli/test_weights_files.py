"""`etude weights` on checkpoint directories and delta files, as a user without any run calls it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import etude
from etude.cli import main
from etude.weights import Tensor
from etude.weights.files.checkpoint import CheckpointWriter, index_of, layout


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two checkpoint directories, a step apart; the working directory is theirs."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    old = {f"layers.{i}.w": torch.randn(40, 50, generator=generator).mul(0.02).bfloat16() for i in range(12)}
    new = {name: (w.float() + 1e-5 * torch.randn(w.shape, generator=generator)).bfloat16() for name, w in old.items()}
    old["ids"] = new["ids"] = torch.arange(5)
    for folder, tensors in (("a", old), ("b", new)):
        Path(folder).mkdir()
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        (Path(folder) / "config.json").write_text("{}")
    return Path("a"), Path("b")


def test_encode_verify_and_apply_lead_to_the_same_bytes(pair, capsys) -> None:
    assert main(["weights", "encode", "a", "b", "-o", "d"]) == 0
    assert "times smaller than 48 kB" in capsys.readouterr().out
    assert main(["weights", "verify", "d", "--base", "a"]) == 0
    assert "13 tensors" in capsys.readouterr().out
    assert main(["weights", "apply", "a", "d", "-o", "c"]) == 0
    assert "12 of them changed" in capsys.readouterr().out
    assert Path("c/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()
    assert Path("c/config.json").read_text() == "{}"
    assert torch.equal(load_file("c/model.safetensors")["layers.3.w"], load_file("b/model.safetensors")["layers.3.w"])


def test_without_the_native_library_numpy_makes_the_same_bytes_and_says_that_it_is_slow(pair, tmp_path: Path) -> None:
    source = Path(etude.__file__).parent
    shutil.copytree(source, tmp_path / "bare/etude", ignore=shutil.ignore_patterns("libetude_native.*", "__pycache__"))
    said = {}
    for name, root in (("here", source.parent), ("bare", tmp_path / "bare")):
        command = [sys.executable, "-m", "etude.cli", "weights", "encode", "a", "b", "-o", f"{name}.etdf"]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
        said[name] = done.stderr
    assert "numpy is used" in said["bare"]
    assert Path("here.etdf").read_bytes() == Path("bare.etdf").read_bytes()


def test_a_diff_says_what_each_tensor_costs_beside_its_bound(pair, capsys) -> None:
    assert main(["weights", "diff", "a", "b"]) == 0
    said = capsys.readouterr().out
    assert "ratio ÷ bound" in said
    assert all(f"layers.{i}.w" in said for i in range(12))
    row = next(line for line in said.splitlines() if "layers.3.w" in line)
    density, bits, ratio, share = (float(cell) for cell in row.split("│")[4:8])
    assert 0.0 < density < 0.3
    assert ratio == pytest.approx(16 / bits, rel=0.02)
    assert 0.3 < share <= 1.0
    assert "unchanged" in next(line for line in said.splitlines() if "ids" in line)


def test_whole_tensors_take_no_part_in_the_share_of_the_bound_and_have_a_row_of_their_own(pair, capsys) -> None:
    """Noise that is new, and a matrix of another shape: as many bytes as all the deltas, and no bound."""
    assert main(["weights", "diff", "a", "b"]) == 0
    share = cells(capsys.readouterr().out, "all")[-1]
    tensors = load_file("b/model.safetensors")
    noise = torch.randint(-(1 << 15), 1 << 15, (24_000,), dtype=torch.int16, generator=torch.Generator().manual_seed(1))
    tensors["added"] = noise.view(torch.bfloat16)
    old = load_file("a/model.safetensors")
    old["reshaped"], tensors["reshaped"] = torch.zeros(50, 40), torch.zeros(40, 50)
    Path("c").mkdir()
    save_file(tensors, "c/model.safetensors", {"format": "pt"})
    save_file(old, "a/model.safetensors", {"format": "pt"})
    assert main(["weights", "diff", "a", "c", "--plot", "out.html"]) == 0
    said = capsys.readouterr().out
    deltas, whole, total = (cells(said, name) for name in ("deltas", "whole", "all"))
    assert float(deltas[-1]) == pytest.approx(float(share), abs=0.01)
    assert (whole[-1], total[-1], cells(said, "added")[-1], cells(said, "reshaped")[-1]) == ("–",) * 4
    assert (whole[2], total[2]) == ("26,000", f"{26_000 + 24_005:,}")
    plain = " ".join(said.split())
    assert "new or have another dtype or shape: 2 of 15, 48" in plain
    page = Path("out.html").read_text()
    assert "2 tensors that are stored complete, which have no bound" in page
    lead = page.split('class="lead">')[1].split("</p>")[0]
    assert float(lead.split(" of their bound")[0].split()[-1]) == pytest.approx(float(share), abs=0.01)


def test_where_every_tensor_is_new_there_is_no_share_of_the_bound(pair, capsys) -> None:
    Path("c").mkdir()
    save_file({"other": torch.zeros(30)}, "c/model.safetensors")
    assert main(["weights", "diff", "a", "c", "--plot", "out.html"]) == 0
    said = capsys.readouterr().out
    assert cells(said, "whole")[-1] == cells(said, "all")[-1] == "–"
    assert "│ deltas" not in said
    assert "1 tensor that is stored complete, which has no bound." in Path("out.html").read_text()


def cells(said: str, name: str) -> list[str]:
    """A row of a table."""
    (row,) = ([cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if f"│ {name} " in line)
    return row


def test_a_diff_shows_the_heaviest_and_all_when_asked(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, low in (("a", 0), ("b", 1)):
        tensors = {f"w{i}": Tensor("u8", (9,), np.full(9, i + low, np.uint8)) for i in range(50)}
        headers = layout(tensors, 100)
        with CheckpointWriter(tmp_path / folder, headers, index_of(headers)) as writer:
            for name, tensor in tensors.items():
                writer.put(name, tensor)
    main(["weights", "diff", "a", "b"])
    assert "40 largest of 50 tensors" in capsys.readouterr().out
    main(["weights", "diff", "a", "b", "--all"])
    said = capsys.readouterr().out
    assert all(f"w{i} " in said for i in range(50))


def test_a_plot_is_one_page_that_fetches_nothing(pair, capsys) -> None:
    assert main(["weights", "diff", "a", "b", "--plot", "out.html"]) == 0
    page = Path("out.html").read_text()
    assert page.count("<svg") == 3
    assert "Bits per weight" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["diff", "a", "none"], 2, "no checkpoint at none"),
        (["encode", "a", "none", "-o", "d"], 2, "no checkpoint at none"),
        (["apply", "a", "none", "-o", "c"], 2, "none cannot be read: No such file or directory\n"),
        (["apply", "a", "a", "-o", "c"], 2, "a cannot be read: Is a directory\n"),
        (["apply", "a", "d", "-o", "no/where"], 2, "no directory no"),
        (["apply", "a", "d", "-o", "a/made"], 2, "a/made is inside the input a"),
        (["apply", "a", "d", "-o", "b"], 2, "b exists"),
        (["apply", "b", "d", "-o", "c"], 1, "this delta is for another base"),
        (["verify", "d", "--base", "b"], 1, "this delta is for another base"),
        (["verify", "d"], 2, "d is a file"),
        (["verify", "--base", "a"], 2, "--base needs a delta file"),
        (["encode", "a", "b", "-o", "no/where"], 2, "no directory no"),
        (["encode", "a", "b", "-o", "d/where"], 2, "no directory d"),
        (["encode", "a", "b", "-o", "other"], 2, "other is a directory"),
        (["encode", "a", "b", "-o", "pipe"], 2, "pipe is not a regular file"),
        (["encode", "a", "b", "-o", "b/model.safetensors"], 2, "b/model.safetensors is inside the input b"),
        (["encode", "a", "b", "-o", "a/config.json"], 2, "a/config.json is inside the input a"),
        (["encode", "a/model.safetensors", "b", "-o", "a/model.safetensors"], 2, "is also an input"),
        (["encode", "a", "b", "-o", "notes.txt"], 2, "notes.txt exists, and is not a delta file"),
        (["diff", "a", "b", "--plot", "no/where"], 2, "no directory no"),
        (["diff", "a", "b", "--plot", "b/out.html"], 2, "b/out.html is inside the input b"),
        (["diff", "a", "b", "--plot", "other/model.safetensors"], 2, "exists, and is not a plot"),
        (["diff", "a", "b", "--plot", "notes.txt"], 2, "exists, and is not a plot"),
    ],
)
def test_invalid_arguments_are_errors_in_three_parts_and_change_no_file(pair, capsys, argv, code, says) -> None:
    shutil.copytree("a", "other")
    os.mkfifo("pipe")
    Path("notes.txt").write_text("<!doctype html>\n<html>mine</html>")
    main(["weights", "encode", "a", "b", "-o", "d"])
    capsys.readouterr()
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert main(["weights", *argv]) == code
    said = capsys.readouterr().err
    assert says in said
    assert "\n  hint: " in said
    assert "Errno" not in said
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_a_delta_and_a_plot_of_ours_are_replaced(pair) -> None:
    Path("empty").touch()
    for _ in range(2):
        assert main(["weights", "encode", "a", "b", "-o", "d"]) == 0
        assert main(["weights", "encode", "a", "b", "-o", "empty"]) == 0
        assert main(["weights", "diff", "a", "b", "--plot", "out.html"]) == 0
    assert main(["weights", "verify", "empty", "--base", "a"]) == 0

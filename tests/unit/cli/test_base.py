"""`etude base compare` on real checkpoints and a folder of code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from etude import cli
from etude.models import ModelConfig, Transformer, save_model

SIZES = ModelConfig(vocab_size=320, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)


def checkpoint(folder: Path, *, seed: int) -> Path:
    save_model(Transformer(SIZES, seed=seed), folder, dtype="f32")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(5):
        constants = "".join(f"LIMIT_{n} = {100 * i + n}\n" for n in range(6))
        (folder / f"part{i}.py").write_text(f"{constants}\n\ndef total_{i}():\n    return {i}\n")
    (folder / "empty.py").write_text("")
    return folder


def test_models_are_measured_on_the_same_text_and_compared_with_the_first(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "other")))
    argv = ["base", "compare", str(one), f"again={one}", str(other), "--text", str(text), "--questions", "3"]
    page = tmp_path / "page.html"
    assert cli.main([*argv, "--context", "64", "--hardware", "h100", "--json", "--html", str(page)]) == 0
    printed = capsys.readouterr()
    said = [line for line in printed.err.splitlines() if " loading " in line]
    assert [line.partition(" loading ")[2].split()[0] for line in said] == ["one", "again", "other"]
    each = len(said) and int(said[1].partition("/")[0])
    assert [line.partition(" ")[0] for line in said] == [f"{done}/{3 * each}" for done in (0, each, 2 * each)]
    assert each > 5, "documents and questions"
    found = json.loads(printed.out)
    first, again, other_result = found["results"]
    assert first["bits_per_byte"] == again["bits_per_byte"] != other_result["bits_per_byte"]
    assert 7.5 < first["bits_per_byte"][0] < 12, "an untrained model"
    assert first["bytes_per_token"] == 1.0
    assert set(first["accuracy"]) == {
        "value of a constant above",
        "module of a name",
        *(f"state after {n} assignments" for n in (2, 4, 8)),
        *(f"number stated {n} bytes before" for n in (8, 32, 128)),
    }
    same, apart = found["differences"]
    assert same["bits_per_byte"] == [0.0, 0.0, 0.0]
    assert apart["bits_per_byte"][0] == pytest.approx(other_result["bits_per_byte"][0] - first["bits_per_byte"][0])
    assert found["serving"]["one"]["devices"] == 1
    html = page.read_text()
    assert "Loss by position" in html
    assert "again" in html


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["{one}", "{one}"], "two models are named one"),
        (["{one}", "--text", "{empty}"], "no file in"),
        (["{nothing}"], "nothing"),
        (["{one}", "--context", "1"], "--context 1 is too small"),
        (["{one}", "--hardware", "h10"], "unknown hardware"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_measured(
    tmp_path: Path, text: Path, more: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = checkpoint(tmp_path / "one", seed=0)
    (tmp_path / "empty").mkdir()
    places = {"one": one, "nothing": tmp_path / "nothing", "empty": tmp_path / "empty"}
    assert cli.main(["base", "compare", "--text", str(text), *(word.format(**places) for word in more)]) > 0
    error = capsys.readouterr().err
    assert expected in error
    assert "hint:" in error


def test_a_checkpoint_that_names_no_first_token_says_what_to_add(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = checkpoint(tmp_path / "one", seed=0)
    config = json.loads((one / "config.json").read_text())
    del config["eos_token_id"]
    (one / "config.json").write_text(json.dumps(config))
    assert cli.main(["base", "compare", str(one), "--text", str(text)]) > 0
    assert "names no token that begins a text" in capsys.readouterr().err

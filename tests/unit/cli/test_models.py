"""`etude models list` and `check`: what families there are, and everything that is wrong with a directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from etude.cli import main
from etude.errors import CheckpointError
from etude.models import Transformer, save_model
from etude.models.checkpoint_files import load_tensors, save_tensors
from etude.models.family_lookup import FAMILY_NAMES, family_of
from etude.models.inspection import MOST, inspect


@pytest.fixture
def glm(tmp_path: Path) -> Path:
    """A tiny GLM-4.5 with a tokeniser file."""
    save_model(Transformer(family_of("glm4_moe").tiny(), seed=0), tmp_path / "glm", dtype="f32")
    (tmp_path / "glm" / "tokenizer.json").write_text("{}")
    return tmp_path / "glm"


def change(folder: Path, **keys: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def test_every_family_is_listed_with_what_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list"]) == 0
    said = capsys.readouterr().out
    for name in FAMILY_NAMES:
        assert f"\n{name}: {family_of(name).hf_class}\n" in f"\n{said}"
        assert all(f"{key} other than" in said for key in family_of(name).fixed)
    assert "data, tensor parallelism" in said  # a dense family
    assert "not tensor parallelism: queries and keys are normalised over all heads together" in said
    assert "reference, vLLM, SGLang" in said


def test_a_good_checkpoint_is_described(glm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "check", str(glm)]) == 0
    said = capsys.readouterr().out
    assert "glm4_moe (Glm4MoeForCausalLM)" in said
    assert "2 layers, width 16; 1 with 6 experts, 2 and 1 shared per token; 2 heads, 1 of keys and values" in said
    assert "64 B per token in bf16" in said
    assert "1 file" in said
    assert "problem" not in said


def test_a_context_that_is_not_the_product_of_yarn_is_remarked(glm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((glm / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    change(glm, rope_parameters=config["rope_parameters"] | yarn)
    told = []
    for context in (128, 64):
        change(glm, max_position_embeddings=context)
        main(["models", "check", str(glm)])
        told.append("YaRN's factor 4 times 32 tokens is not the" in capsys.readouterr().out)
    assert told == [False, True]


def test_everything_that_is_wrong_is_told_at_once(glm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = glm / "model.safetensors"
    tensors = load_tensors(file)
    (glm / "SHA256SUMS").unlink()
    (glm / "tokenizer.json").unlink()
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    tensors["model.norm.weight"] = torch.ones(15)
    tensors["model.layers.0.self_attn.sinks"] = torch.ones(2)
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(2)
    save_tensors(tensors, file)
    change(glm, hidden_act="gelu", layer_types=["sliding_attention"], quantization_config={"quant_method": "awq"})
    assert main(["models", "check", str(glm)]) == 1
    said = capsys.readouterr().out
    for problem in (
        "hidden_act = 'gelu'",
        "layer_types = ['sliding_attention']",
        "quantised by 'awq'",
        "no tensor 'model.layers.1.self_attn.k_proj.bias'",
        "'model.norm.weight' has shape [15]",
        "has a tensor 'model.layers.0.self_attn.sinks'",
        "there is no tokenizer.json",
    ):
        assert problem in said
    assert "model.layers.2 (1 tensor): config.json has num_nextn_predict_layers = 0" in said
    assert "cannot use" in said
    assert "7 problems" in said


def test_many_problems_are_counted(glm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(glm, hidden_size=18)
    assert main(["models", "check", str(glm)]) == 1
    assert "more\n" in capsys.readouterr().out
    change(glm, hidden_size=16, n_routed_experts=5000)
    assert len(inspect(glm).problems) == MOST


def test_sizes_that_cannot_be_read_leave_the_tensors_unchecked(glm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(glm, num_experts_per_tok=9)
    assert main(["models", "check", str(glm)]) == 1
    assert "top_k = 9, num_experts = 6" in capsys.readouterr().out
    found = inspect(glm)
    assert (found.config, found.tensors) == (None, {})


def test_another_architecture_is_an_error_by_its_name(glm: Path) -> None:
    change(glm, architectures=["Gemma3ForCausalLM"], model_type="gemma3")
    with pytest.raises(CheckpointError, match="Gemma3ForCausalLM"):
        inspect(glm)


def test_the_command_loads_no_torch(glm: Path) -> None:
    code = "import sys; from etude.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "models", "check", str(glm)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.endswith("False\n")

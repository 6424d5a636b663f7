"""Checkpoints with the experts of a layer in one tensor: as transformers writes them, in mxfp4, and by expert."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.models.families import GPT_OSS

from etude.errors import CheckpointError, ConfigError
from etude.models import ModelConfig, Transformer, hf_views, load_model, save_model
from etude.models.checkpoint import RowRange, iter_weights, read_rows
from etude.numerics.config import Quantise

SIZES = replace(GPT_OSS, hidden_size=32, expert_size=64)
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def saved(folder: Path, sizes: ModelConfig = SIZES) -> Transformer:
    """A checkpoint of a model with biases, and the model."""
    model = Transformer(sizes, seed=1)
    for name, view in hf_views(model).items():
        if name.endswith(("bias", "sinks")):
            view.normal_(generator=torch.Generator().manual_seed(7))
    save_model(model, folder, dtype="f32")
    return model


def rewritten(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a checkpoint, or drop those that are None."""
    (folder / "SHA256SUMS").unlink()
    tensors = load_file(folder / "model.safetensors") | change
    save_file({k: t.contiguous() for k, t in tensors.items() if t is not None}, folder / "model.safetensors")


def in_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Replace the stacks of a checkpoint by random mxfp4, and return the values, [E, in, out]."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    generator, values = torch.Generator().manual_seed(0), {}
    change: dict[str, torch.Tensor | None] = {}
    for name, stack in load_file(folder / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, width, rows = stack.shape
            shape = (experts, rows, width // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(118, 128, shape, generator=generator, dtype=torch.uint8)
            change |= {name: None, f"{name}_blocks": blocks, f"{name}_scales": scales}
            pairs = torch.stack([table[blocks.int() & 15], table[blocks.int() >> 4]], -1).flatten(-2)
            values[name] = torch.ldexp(pairs, scales.int()[..., None] - 127).flatten(-2).mT
    rewritten(folder, change)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def test_mxfp4_is_dequantised_and_written_in_bf16(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    values = in_mxfp4(tmp_path / "model")
    assert len(values) == 4
    model = load_model(tmp_path / "model")
    save_model(model, tmp_path / "bf16", dtype="bf16")
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    written = load_file(tmp_path / "bf16" / "model.safetensors")
    for name, value in values.items():
        assert written[name].dtype == torch.bfloat16
        assert torch.equal(written[name].float(), value), name
    named = dict(iter_weights(tmp_path / "model"))
    for name, view in hf_views(model).items():
        assert torch.equal(named[name], view), name


def test_rows_of_an_expert_are_read_from_its_stack(tmp_path: Path) -> None:
    views = hf_views(saved(tmp_path / "model"))
    for packed in (False, True):
        if packed:
            in_mxfp4(tmp_path / "model")
            views = hf_views(load_model(tmp_path / "model"))
        for part in ("gate_proj.weight", "up_proj.weight", "up_proj.bias", "down_proj.weight", "down_proj.bias"):
            name = f"model.layers.1.mlp.experts.4.{part}"
            out = torch.empty_like(views[name][5:17])
            read_rows(tmp_path / "model", [RowRange(name, tuple(views[name].shape), 5, 17, out)])
            assert torch.equal(out, views[name][5:17]), name


def test_files_with_each_expert_by_itself_are_read_too(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    stacks = [name for name in load_file(tmp_path / "model" / "model.safetensors") if ".experts." in name]
    own = {name: view for name, view in hf_views(model).items() if ".experts." in name}
    assert len(stacks) == 2 * 4
    assert len(own) == 2 * 6 * 6
    rewritten(tmp_path / "model", dict.fromkeys(stacks) | own)
    for name, view in hf_views(load_model(tmp_path / "model")).items():
        assert torch.equal(view, hf_views(model)[name]), name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({f"{GATE_UP}_scales": None}, r"gate_up_proj_scales' does not fit .* U8 \[6, 128, 1\], but it is missing"),
        ({f"{GATE_UP}_blocks": torch.zeros(6, 128, 1, 8, dtype=torch.uint8)}, r"gate_up_proj_blocks' does not fit"),
        ({f"{GATE_UP}_blocks": None}, r"no tensor 'model\.layers\.0\.mlp\.experts\.gate_up_proj'"),
        ({f"{GATE_UP}_bias": torch.zeros(6, 64)}, r"gate_up_proj_bias' has shape \[6, 64\]"),
        ({f"{GATE_UP}_zeros": torch.zeros(2)}, "a tensor 'model.layers.0.mlp.experts.gate_up_proj_zeros'"),
    ],
    ids=["no scales", "other blocks", "no blocks", "other bias", "one more"],
)
def test_a_stack_that_does_not_fit_is_refused_by_its_name(
    tmp_path: Path, change: dict[str, torch.Tensor | None], says: str
) -> None:
    saved(tmp_path / "model")
    in_mxfp4(tmp_path / "model")
    rewritten_again = tmp_path / "model" / "SHA256SUMS"
    rewritten_again.touch()
    rewritten(tmp_path / "model", change)
    with pytest.raises(CheckpointError, match=says):
        load_model(tmp_path / "model")


def test_a_width_that_is_no_multiple_of_the_block_is_refused_in_mxfp4(tmp_path: Path) -> None:
    saved(tmp_path / "model", GPT_OSS)
    rewritten(tmp_path / "model", {GATE_UP: None, f"{GATE_UP}_blocks": torch.zeros(6, 24, 1, 16, dtype=torch.uint8)})
    with pytest.raises(CheckpointError, match="cannot be stored in mxfp4"):
        load_model(tmp_path / "model")


def test_stacks_are_not_written_in_a_low_precision(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    with pytest.raises(ConfigError, match="gpt_oss model cannot be written in mxfp4") as raised:
        save_model(model, tmp_path / "low", dtype="bf16", quantise=Quantise.MXFP4)
    assert raised.value.hint

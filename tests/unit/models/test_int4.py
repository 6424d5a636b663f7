"""int4 of compressed-tensors, and Kimi K2.5: the text model of a model for images and text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.models.families import DEEPSEEK

from etude.errors import CheckpointError
from etude.models import Transformer, hf_views, load_model, save_model
from etude.models.checkpoint_files import load_tensors, save_tensors
from etude.models.headers import check_weights, read_headers, read_model_config, report_unused_layers

GROUP = 8
SIZES = replace(DEEPSEEK, family="kimi_k2", hidden_size=16, expert_size=24)
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
SCHEME: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}


def packed(codes_OI: torch.Tensor) -> torch.Tensor:
    """Eight numbers from -8 to 7 a word, the first in the lowest bits, each plus 8."""
    words = torch.zeros(codes_OI.shape[0], codes_OI.shape[1] // 8, dtype=torch.int64)
    for i in range(8):
        words |= (codes_OI[:, i::8].long() + 8) << (4 * i)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def kimi(folder: Path, *, scheme: dict[str, Any] = SCHEME) -> dict[str, torch.Tensor]:
    """Write a tiny Kimi K2.5: int4 experts inside a model for images. Returns the values of the experts' matrices."""
    save_model(Transformer(SIZES, seed=2), folder, dtype="bf16")
    stored, values = load_tensors(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in stored if ".experts." in name]:
        shape, stem = stored.pop(name).shape, name.removesuffix(".weight")
        codes = torch.randint(-8, 8, shape, generator=generator)
        scale = torch.rand(shape[0], shape[1] // GROUP, generator=generator).bfloat16() / 8
        stored |= {f"{stem}.weight_packed": packed(codes), f"{stem}.weight_scale": scale}
        stored[f"{stem}.weight_shape"] = torch.tensor(shape)
        values[name] = codes.float() * scale.float().repeat_interleave(GROUP, 1)
    stored = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    stored |= {"vision_tower.patch_embed.proj.weight": torch.ones(2, 2), "mm_projector.proj.0.weight": torch.ones(2)}
    save_tensors(stored, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text()) | {"quantization_config": scheme}
    outer = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer))
    (folder / "SHA256SUMS").unlink()
    return values


def test_int4_experts_inside_a_model_for_images_are_read_by_their_formula(tmp_path: Path) -> None:
    values = kimi(tmp_path / "kimi")
    config = read_model_config(tmp_path / "kimi")
    assert config == SIZES
    check_weights(tmp_path / "kimi", config)
    model = load_model(tmp_path / "kimi")
    assert len(values) == 18
    for name, value in values.items():
        assert torch.equal(hf_views(model)[name], value), name
    said: list[str] = []
    report_unused_layers(tmp_path / "kimi", config, said.append)
    assert "mm_projector (1 tensors), vision_tower (1 tensors)" in said[0]
    save_model(model, tmp_path / "text", dtype="bf16", assets=tmp_path / "kimi")
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == "kimi_k2"
    assert not any(name.startswith(("language_model", "vision")) for name in read_headers(tmp_path / "text"))
    for name, view in hf_views(load_model(tmp_path / "text")).items():
        assert torch.equal(view, hf_views(model)[name].bfloat16().float()), name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight_scale": None}, "no scales"),
        ({"weight_scale": torch.ones(24, 3)}, "3 groups"),
        ({"weight_scale": torch.ones(23, 2)}, "must be BF16 [24, 2]"),
        ({"weight_packed": torch.ones(24, 3, dtype=torch.int32)}, "must be I32 [24, 2]"),
        ({"weight_zero_point": torch.ones(24, 2)}, "do not belong to the model"),
    ],
)
def test_int4_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, change: dict[str, torch.Tensor | None], says: str
) -> None:
    kimi(tmp_path / "kimi")
    stored = load_tensors(tmp_path / "kimi" / "model.safetensors")
    for part, tensor in change.items():
        name = f"language_model.model.layers.1.mlp.experts.0.up_proj.{part}"
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    save_tensors(stored, tmp_path / "kimi" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj") as raised:
        load_model(tmp_path / "kimi")
    assert says in raised.value.facts


@pytest.mark.parametrize("change", [{"num_bits": 8}, {"type": "float"}, {"symmetric": False}])
def test_another_packed_scheme_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    scheme = {**SCHEME, "config_groups": {"group_0": {"weights": {**WEIGHTS, **change}}}}
    kimi(tmp_path / "kimi", scheme=scheme)
    with pytest.raises(CheckpointError, match="pack-quantized"):
        load_model(tmp_path / "kimi")


def test_a_model_for_images_without_a_text_model_is_refused(tmp_path: Path) -> None:
    kimi(tmp_path / "kimi")
    (tmp_path / "kimi" / "config.json").write_text('{"model_type": "kimi_k25", "text_config": 3}')
    with pytest.raises(CheckpointError, match="damaged") as raised:
        load_model(tmp_path / "kimi")
    assert "text_config" in raised.value.facts

"""Matrices as packed bytes: in directories, in memory, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from etude.errors import CheckpointError, ConfigError
from etude.models import ModelConfig, Transformer, hf_views, load_model, save_model
from etude.models.checkpoint_files import load_tensors, save_tensors
from etude.models.components import Latent, Routing, Scores
from etude.models.headers import check_blocks
from etude.models.packed_weights import PackedWeights, pack_weights
from etude.models.quantised_storage import is_quantised, stored_parts
from etude.numerics import NumericsConfig, Quantise
from etude.numerics.factory import operators_for
from etude.numerics.formats import FORMATS
from etude.numerics.quantisation import round_to_format

LOW = [kind for kind in Quantise if kind is not Quantise.NONE]
EACH = pytest.mark.parametrize("kind", LOW, ids=str)
SMALL: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32,
    "expert_size": 32, "num_experts": 4, "top_k": 2, "context_tokens": 32,
}  # fmt: skip
QWEN = ModelConfig(**SMALL)
TOKENS = torch.arange(20)


def model_of(sizes: ModelConfig, kind: Quantise, *, rounds_weights: bool = True) -> Transformer:
    return Transformer(
        sizes,
        seed=3,
        operators=operators_for(NumericsConfig(quantise=kind), torch.float32, rounds_weights=rounds_weights),
    )


@EACH
def test_a_directory_in_low_precision_loads_as_exactly_the_numbers_that_are_computed_with(
    tmp_path: Path, kind: Quantise
) -> None:
    model = model_of(QWEN, kind)
    save_model(model, tmp_path / "low", dtype="f32", quantise=kind)
    given = operators_for(NumericsConfig(quantise=kind), torch.float32, rounds_weights=False)
    back = load_model(tmp_path / "low", operators=given)
    assert torch.equal(back(TOKENS)[0], model(TOKENS)[0])
    qkv, wanted = back.blocks[0].attention.qkv, model.blocks[0].attention.qkv
    assert isinstance(wanted, torch.Tensor)
    assert torch.equal(qkv, round_to_format(wanted, FORMATS[kind], matrix=True))


@EACH
def test_names_and_dtypes_in_a_directory_are_those_that_engines_read(tmp_path: Path, kind: Quantise) -> None:
    model = model_of(QWEN, kind)
    save_model(model, tmp_path / "low", dtype="bf16", quantise=kind)
    scheme = json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]
    assert scheme["quant_method"] == "compressed-tensors"
    assert scheme["config_groups"]["group_0"]["weights"]["group_size"] == FORMATS[kind].block
    with safe_open(tmp_path / "low" / "model.safetensors", "pt") as file:
        found = {n: (file.get_slice(n).get_dtype(), tuple(file.get_slice(n).get_shape())) for n in file.keys()}  # noqa: SIM118
    wanted: dict[str, object] = {}
    for name, view in hf_views(model).items():
        wanted |= (
            stored_parts(name, tuple(view.shape), kind) if is_quantised(name) else {name: ("BF16", tuple(view.shape))}
        )
    assert found == wanted


@EACH
def test_a_family_with_names_of_its_own_is_stored_by_them_and_read_again(tmp_path: Path, kind: Quantise) -> None:
    model = model_of(replace(QWEN, family="mixtral"), kind)
    save_model(model, tmp_path / "low", dtype="f32", quantise=kind)
    scheme = json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]
    assert scheme["ignore"] == ["lm_head", r"re:.*block_sparse_moe\.gate$"]
    stems = {name.rpartition(".")[0] for name in load_tensors(tmp_path / "low" / "model.safetensors")}
    assert {f"model.layers.1.block_sparse_moe.experts.3.{part}" for part in ("w1", "w2", "w3")} < stems
    given = operators_for(NumericsConfig(quantise=kind), torch.float32, rounds_weights=False)
    assert torch.equal(load_model(tmp_path / "low", operators=given)(TOKENS)[0], model(TOKENS)[0])


@EACH
def test_what_is_decoded_is_what_the_learner_rounds_to_for_latent_attention_too(kind: Quantise) -> None:
    sizes = ModelConfig(
        **SMALL | {"num_kv_heads": 2, "head_dim": 48},
        family="deepseek_v3", routing=Routing(scores=Scores.SIGMOID), num_shared=1,
        latent=Latent(kv_rank=32, nope_dim=32, rope_dim=16, value_dim=32, q_rank=32),
    )  # fmt: skip
    learner, engine = model_of(sizes, kind), model_of(sizes, kind, rounds_weights=False)
    PackedWeights(engine, FORMATS[kind]).decode()
    assert torch.equal(engine(TOKENS)[0], learner(TOKENS)[0])


def test_a_model_without_whole_blocks_is_told_before_a_run_begins() -> None:
    check_blocks(QWEN, Quantise.MXFP8)
    for kind in (Quantise.NONE, Quantise.NVFP4):
        check_blocks(replace(QWEN, expert_size=48), kind)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.experts\.0\.down_proj.*not a multiple of the block"):
        check_blocks(replace(QWEN, expert_size=48), Quantise.MXFP4)


def test_widths_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    model = Transformer(ModelConfig(**SMALL | {"hidden_size": 40}), seed=0)
    with pytest.raises(ConfigError, match="not a multiple of the block size 32"):
        save_model(model, tmp_path / "low", dtype="bf16", quantise=Quantise.MXFP8)
    assert not (tmp_path / "low").exists()


@pytest.mark.parametrize(
    ("scheme", "told"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-quantized"),
        ({"quant_method": ["mxfp4"]}, "mxfp4"),
    ],
)
def test_an_unsupported_quantisation_scheme_is_refused_by_name(
    tmp_path: Path, scheme: dict[str, Any], told: str
) -> None:
    save_model(Transformer(QWEN, seed=0), tmp_path / "model", dtype="bf16")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": scheme}))
    with pytest.raises(CheckpointError, match=told) as error:
        load_model(tmp_path / "model")
    assert error.value.hint
    assert "nvfp4" in str(error.value)


@EACH
def test_parts_that_are_missing_or_do_not_fit_are_named(tmp_path: Path, kind: Quantise) -> None:
    save_model(model_of(QWEN, kind), tmp_path / "low", dtype="bf16", quantise=kind)
    file = tmp_path / "low" / "model.safetensors"
    whole = load_tensors(file)
    scale = "model.layers.1.self_attn.q_proj.weight_scale"
    save_tensors({**whole, scale: whole[scale][:-1]}, file)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale"):
        load_model(tmp_path / "low")
    save_tensors({name: tensor for name, tensor in whole.items() if name != scale}, file)
    with pytest.raises(CheckpointError, match="q_proj"):
        load_model(tmp_path / "low")


def test_only_what_is_unrounded_shares_memory_with_the_model() -> None:
    model = model_of(QWEN, Quantise.NVFP4)
    tensors = pack_weights(model, FORMATS[Quantise.NVFP4])
    live = {parameter.data_ptr() for parameter in model.parameters()}
    shared = {name for name, tensor in tensors.items() if tensor.data_ptr() in live}
    assert shared == {name for name in hf_views(model) if not is_quantised(name)}
    experts = [tensors[f"model.layers.0.mlp.experts.1.{n}_proj.weight_global_scale"] for n in ("gate", "up")]
    assert torch.equal(*experts)

"""What holds for every family: names, sizes, files, bad input, and that a packed forward is the cached one."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from etude.config import build, to_plain
from etude.errors import CheckpointError, ConfigError
from etude.models import ModelConfig, Packed, Transformer, hf_views, load_model, save_model
from etude.models.checkpoint_files import load_tensors, save_tensors
from etude.models.components import Llama3, Routing, Scores
from etude.models.experts import choose
from etude.models.family_lookup import FAMILY_NAMES, family_of
from etude.models.headers import check_weights, hf_weight_shapes
from etude.models.quantised_storage import FP8_BLOCK, FP8_SCALE
from etude.numerics import Native

sys.path.insert(0, str(Path(__file__).parent))
families = importlib.import_module("families")
FAMILIES: dict[str, ModelConfig] = families.FAMILIES
DEEPSEEK: ModelConfig = families.DEEPSEEK
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"

every_family = pytest.mark.parametrize("sizes", FAMILIES.values(), ids=FAMILIES)


def model_of(sizes: ModelConfig, seed: int = 1, **options: Any) -> Transformer:
    """A random model whose biases of choosing are not zero."""
    model = Transformer(sizes, seed=seed, **options).eval()
    for name, view in hf_views(model).items():
        if name.endswith("bias"):
            view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(seed)) * 0.2)
    return model


def tokens(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 24, (n,), generator=torch.Generator().manual_seed(seed))


@every_family
def test_names_and_shapes_of_files_are_those_of_the_model_as_views_into_it(sizes: ModelConfig) -> None:
    model = model_of(sizes)
    views = hf_views(model)
    assert {name: tuple(view.shape) for name, view in views.items()} == dict(hf_weight_shapes(sizes))
    assert all(view.is_contiguous() for view in views.values())
    biases = sum(view.numel() for name, view in views.items() if name.endswith("e_score_correction_bias"))
    assert sum(view.numel() for view in views.values()) - biases == sizes.num_parameters
    before, _ = model(tokens(9))
    for view in views.values():
        view.mul_(1.01)
    assert not torch.equal(model(tokens(9))[0], before)


@every_family
def test_sizes_survive_config_json_and_toml(sizes: ModelConfig) -> None:
    assert ModelConfig.from_hf(json.loads(json.dumps(sizes.to_hf()))) == sizes
    assert build(ModelConfig, to_plain(sizes)) == sizes


@every_family
def test_a_saved_model_is_loaded_to_the_bit_whole_or_in_shards(sizes: ModelConfig, tmp_path: Path) -> None:
    model = model_of(sizes)
    save_model(model, tmp_path / "whole", dtype="f32")
    save_model(model, tmp_path / "shards", dtype="f32", shard_bytes=3000)
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert index["metadata"]["total_size"] == sum(view.numel() * 4 for view in hf_views(model).values())
    for folder in ("whole", "shards"):
        check_weights(tmp_path / folder, sizes)
        for name, view in hf_views(load_model(tmp_path / folder)).items():
            assert torch.equal(view, hf_views(model)[name]), name


@every_family
@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(sizes: ModelConfig) -> None:
    model, lengths = model_of(sizes), [1, 7, 30, 2]
    packed, routes = model(torch.cat([tokens(n, n) for n in lengths]), Packed(lengths, model.operators))
    alone = [model(tokens(n, n)) for n in lengths]
    assert torch.allclose(packed, torch.cat([logits for logits, _ in alone]), atol=1e-5)
    assert torch.equal(routes, torch.cat([r for _, r in alone]))
    assert routes.shape == (40, sizes.num_moe_layers, sizes.top_k)


@every_family
@torch.no_grad()
def test_replaying_the_live_routes_changes_nothing_and_others_are_used(sizes: ModelConfig) -> None:
    model = model_of(sizes)
    live = model.run(tokens(20))
    assert torch.equal(model.run(tokens(20), routes=live.routes).logits, live.logits)
    if sizes.num_moe_layers:
        other = ((live.routes.long() + 1) % sizes.num_experts).to(live.routes.dtype)
        replayed = model.run(tokens(20), routes=other)
        assert torch.equal(replayed.routes, other)
        assert not torch.equal(replayed.logits, live.logits)


def test_latents_give_the_same_numbers_absorbed_and_expanded() -> None:
    absorbed, expanded = (model_of(DEEPSEEK, operators=operators) for operators in (None, Native()))
    logits, expected = absorbed(tokens(50))[0], expanded(tokens(50))[0]
    assert not torch.equal(logits, expected)
    assert torch.allclose(logits, expected, atol=1e-5)
    gradients = []
    for model in (absorbed, expanded):
        model(tokens(50))[0].square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None
        assert torch.allclose(gradient, gradients[1][name], atol=1e-5), name


def test_a_bias_changes_who_is_chosen_and_no_gate() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    routing = Routing(Scores.SIGMOID, normalise=False, scaling=3.0)
    plain = choose(scores, 2, routing=routing)
    biased = choose(scores, 2, routing=routing, bias_E=torch.tensor([-9.0, 0.0, 0.0, 9.0]))
    assert plain.live_NK.tolist() == [[0, 1]]
    assert biased.live_NK.tolist() == [[3, 1]]
    assert torch.allclose(biased.gates_NK, 3 * scores.sigmoid()[:, [3, 1]])


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    scores = torch.tensor([[9.0, -9.0, 1.0, 1.0, 0.5, 0.4]])  # the best expert is in the worst group
    routing = Routing(Scores.SIGMOID, num_groups=3, top_groups=1)
    assert choose(scores, 2, routing=routing).live_NK.tolist() == [[2, 3]]


def test_from_256_experts_on_a_route_takes_two_bytes() -> None:
    sizes = replace(families.MOE, num_experts=256, expert_size=2)
    routes = Transformer(sizes, seed=0)(tokens(40))[1]
    assert routes.dtype == torch.uint16
    again = Transformer(sizes, seed=0).run(tokens(40), routes=routes)
    assert torch.equal(again.routes, routes)
    missing = torch.full_like(routes, 65535)
    assert torch.equal(Transformer(sizes, seed=0).run(tokens(40), routes=missing).routes, routes)
    assert replace(sizes, num_experts=255).route_dtype == "uint8"


# published checkpoints, by what their config.json says

DEEPSEEK_SIZES = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8, "topk_group": 4,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "vocab_size": 129280, "max_position_embeddings": 163840,
    "rope_theta": 10000, "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]
    },
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
}  # fmt: skip
KIMI_SIZES = {
    **DEEPSEEK_SIZES, "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "vocab_size": 163840,
    "routed_scaling_factor": 2.827, "rope_theta": 50000.0, "max_position_embeddings": 131072,
}  # fmt: skip
QWEN_SIZES = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960,
    "rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
GLM_AIR_SIZES = {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "hidden_size": 4096, "head_dim": 128,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96,
    "num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "vocab_size": 151552, "max_position_embeddings": 131072, "attention_bias": True,
    "use_qk_norm": False, "partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_scaling": None,
    "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
MINIMAX_SIZES = {
    "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "hidden_size": 3072, "head_dim": 128,
    "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
    "num_local_experts": 256, "num_experts_per_tok": 8, "vocab_size": 200064, "max_position_embeddings": 196608,
    "rope_theta": 5000000, "rotary_dim": 64, "rms_norm_eps": 1e-6, "scoring_func": "sigmoid", "use_qk_norm": True,
    "use_routing_bias": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0, "attn_type_list": [1] * 62,
    "sliding_window": None,
    "quantization_config": {
        "quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic", "weight_block_size": [128, 128]
    },
}  # fmt: skip
LLAMA_SIZES = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "attention_bias": False,
    "mlp_bias": False, "tie_word_embeddings": False, "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
QWEN2_SIZES = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28,
}  # fmt: skip
GPT_OSS_SIZES = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "max_position_embeddings": 131072,
    "initial_context_length": 4096, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "attention_bias": True, "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    },
}  # fmt: skip
NEXT_SIZES = {
    "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "hidden_size": 2048, "head_dim": 256,
    "intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 512,
    "num_experts_per_tok": 10, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "partial_rotary_factor": 0.25, "vocab_size": 151936,
    "max_position_embeddings": 262144, "rope_theta": 10000000, "rope_scaling": None, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu",
}  # fmt: skip
QWEN35_SIZES = {
    "model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "vision_config": {},
    "tie_word_embeddings": False,
    "text_config": {
        **{key: value for key, value in NEXT_SIZES.items() if key not in ("norm_topk_prob", "intermediate_size")},
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8,
        "vocab_size": 248320,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    },
}  # fmt: skip
DEEPSEEK32_SIZES = {
    **DEEPSEEK_SIZES, "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
}  # fmt: skip
KIMI25_SIZES = {
    "model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "vision_config": {},
    "text_config": KIMI_SIZES,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changed", "vllm", "sglang"),
    [
        ("qwen3_moe", {}, "", ""),
        ("deepseek_v3", {}, "", "latent attention"),
        ("kimi_k2", {}, "", "latent attention"),
        ("deepseek_v3", {"rms_eps": 1e-5}, "rms_norm_eps, here 1e-05", "latent attention"),
        ("deepseek_v3", {"interleaved": False}, "rope_interleave is false", "latent attention"),
        ("deepseek_v3", {"llama3": Llama3(factor=8.0, original_tokens=32)}, "for YaRN", "latent attention"),
        ("deepseek_v32", {}, "weights of this family", "weights of this family"),
        ("glm4_moe", {}, "weights of this family", "weights of this family"),
    ],
)
def test_a_model_that_an_external_engine_would_compute_otherwise_is_refused_with_the_reason(
    family: str, changed: dict[str, Any], vllm: str, sglang: str
) -> None:
    c = family_of(family).tiny()
    if "interleaved" in changed:
        assert c.latent is not None
        changed = {"latent": replace(c.latent, **changed)}
    c = replace(c, **changed)
    for engine, why in (("vllm", vllm), ("sglang", sglang)):
        found = c.architecture.unserved(c, engine)
        assert why in found
        assert bool(why) == bool(found)


@pytest.mark.parametrize(
    ("raw", "billions", "kept_numbers", "route_bytes"),
    [
        (QWEN_SIZES, 30.5, 48 * 2 * 4 * 128, 48 * 8),
        (DEEPSEEK_SIZES, 671.0, 61 * (512 + 64), 58 * 8 * 2),
        (KIMI_SIZES, 1026.4, 61 * (512 + 64), 60 * 8 * 2),
        (GLM_AIR_SIZES, 106.8, 46 * 2 * 8 * 128, 45 * 8),
        (MINIMAX_SIZES, 228.7, 62 * 2 * 8 * 128, 62 * 8 * 2),
        (LLAMA_SIZES, 8.03, 32 * 2 * 8 * 128, 0),
        (QWEN2_SIZES, 7.62, 28 * 2 * 4 * 128, 0),
        (GPT_OSS_SIZES, 20.9, 24 * 2 * 8 * 64, 24 * 4),
        (NEXT_SIZES, 79.7, 12 * 2 * 2 * 256, 48 * 10 * 2),
        (QWEN35_SIZES, 34.7, 10 * 2 * 2 * 256, 40 * 8 * 2),
        (DEEPSEEK32_SIZES, 671.9, 61 * (512 + 64), 58 * 8 * 2),
        (KIMI25_SIZES, 1026.4, 61 * (512 + 64), 60 * 8 * 2),
    ],
    ids=[
        "Qwen3-30B-A3B",
        "DeepSeek-V3",
        "Kimi-K2",
        "GLM-4.5-Air",
        "MiniMax-M2",
        "Llama-3.1-8B",
        "Qwen2.5-7B",
        "gpt-oss-20b",
        "Qwen3-Next-80B-A3B",
        "Qwen3.5-35B-A3B",
        "DeepSeek-V3.2",
        "Kimi-K2.5",
    ],
)
def test_published_checkpoints_have_the_size_that_is_published(
    raw: dict[str, Any], billions: float, kept_numbers: int, route_bytes: int
) -> None:
    sizes = ModelConfig.from_hf(raw)
    assert sizes.num_parameters / 1e9 == pytest.approx(billions, abs=0.1)
    width = sizes.cache_layout.key_width + (0 if sizes.cache_layout.shared else sizes.cache_layout.value_width)
    assert (sizes.num_layers - len(sizes.linear_layers)) * sizes.cache_layout.heads * width == kept_numbers
    assert sizes.num_moe_layers * sizes.top_k * np.dtype(sizes.route_dtype).itemsize == route_bytes
    assert ModelConfig.from_hf(sizes.to_hf()) == sizes


# 8-bit weights and layers that predict further


def quantised(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Store one tensor of a checkpoint in 8-bit blocks; returns the file's tensors."""
    tensors = load_tensors(folder / "model.safetensors")
    rows, columns = (-(-size // FP8_BLOCK) for size in tensors[name].shape)
    tensors[name] = (tensors[name] * 100).to(torch.float8_e4m3fn)
    tensors[name + FP8_SCALE] = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0)) / 50
    save_tensors(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(raw))
    return tensors


def test_blocks_of_8_bits_are_read_by_their_formula(tmp_path: Path) -> None:
    sizes = replace(DEEPSEEK, hidden_size=130, dense_size=150)
    save_model(model_of(sizes), tmp_path / "model", dtype="f32")
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors = quantised(tmp_path / "model", name)
    (tmp_path / "model" / "SHA256SUMS").unlink()
    check_weights(tmp_path / "model", sizes)
    read = hf_views(load_model(tmp_path / "model"))[name]
    for i, j in [(0, 0), (127, 127), (128, 0), (127, 128), (149, 129)]:
        expected = float(tensors[name][i, j].float()) * float(tensors[name + FP8_SCALE][i // 128, j // 128])
        assert float(read[i, j]) == pytest.approx(expected, rel=1e-6)


def test_8_bits_without_their_scales_are_named(tmp_path: Path) -> None:
    save_model(model_of(DEEPSEEK), tmp_path / "model", dtype="f32")
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors = quantised(tmp_path / "model", name)
    del tensors[name + FP8_SCALE]
    save_tensors(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight' is F8_E4M3 without its scales: .*but it is missing"):
        load_model(tmp_path / "model")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    save_model(model_of(DEEPSEEK), tmp_path / "model", dtype="f32")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_tensors(file)
    (tmp_path / "model" / "SHA256SUMS").unlink()
    names = ("eh_proj.weight", "enorm.weight", "mlp.experts.0.up_proj.weight")
    further = {f"model.layers.2.{name}": torch.ones(3, 3) for name in names}
    save_tensors(tensors | further, file)
    assert hf_views(load_model(tmp_path / "model")).keys() == tensors.keys()
    del further["model.layers.2.eh_proj.weight"]
    save_tensors(tensors | further, file)
    with pytest.raises(CheckpointError, match=r"a tensor 'model\.layers\.2\.enorm"):
        load_model(tmp_path / "model")


def test_biases_of_choosing_stay_float32(tmp_path: Path) -> None:
    model = model_of(DEEPSEEK)
    save_model(model, tmp_path / "model", dtype="bf16")
    assert load_tensors(tmp_path / "model" / "model.safetensors")[BIAS].dtype == torch.float32
    low = hf_views(load_model(tmp_path / "model", operators=Native(torch.bfloat16)))
    assert torch.equal(low[BIAS], hf_views(model)[BIAS])
    assert low["model.norm.weight"].dtype == torch.bfloat16


# bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_lora_rank": 0}, "q_lora_rank = 0"),
        ({"qk_rope_head_dim": 3}, r"rope_dim = 3|expects \[11, 16\]"),
        ({"kv_lora_rank": 4}, r"kv_a_proj_with_mqa.*\[12, 16\]: .*expects \[8, 16\]"),
        ({"n_group": 4}, "6 experts cannot be divided into 4 groups"),
        ({"topk_group": 9}, "top_groups = 9"),
        ({"num_key_value_heads": 1}, "num_kv_heads = 1"),
        ({"scoring_func": "softmax"}, "deepseek_v3 model with scoring_func = 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"n_shared_experts": None}, "n_shared_experts = None"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace = 3, expected 0 to 2"),
        ({"first_k_dense_replace": 0}, r"no tensor 'model\.layers\.0\.mlp\.gate\.weight'"),
        ({"n_routed_experts": 9}, r"gate\.weight' has shape \[6, 16\]: .*expects \[9, 16\]"),
        ({"routed_scaling_factor": "x"}, "routed_scaling_factor = 'x'"),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "architecture DeepseekV2ForCausalLM"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"quantised by 'awq' with \{'bits': 4\}"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
            "quantised by 'compressed-tensors'",
        ),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, r"\[64, 64\]"),
        ({"quantization_config": "fp8"}, "damaged"),
    ],
)
def test_a_config_that_contradicts_the_weights_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    save_model(model_of(DEEPSEEK), tmp_path / "model", dtype="f32")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=message) as raised:
        load_model(tmp_path / "model")
    assert raised.value.hint


def test_parts_that_do_not_belong_together_are_refused() -> None:
    plain = to_plain(DEEPSEEK)
    for change in (
        {"family": "qwen3_moe"},
        {"latent": None},
        {"dense_layers": [1]},
        {"num_shared": 0},
        {"routing": {}},
        {"num_experts": 0, "top_k": 0},
    ):
        with pytest.raises(ConfigError):
            build(ModelConfig, plain | change)
    with pytest.raises(ConfigError):
        build(ModelConfig, to_plain(replace(families.MOE)) | {"num_shared": 1})


HF_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 70_000), st.floats(), st.text(max_size=8), st.lists(st.integers(-1, 4)),
    st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "rope_theta", "beta_fast", "mscale", "truncate"]),
        st.one_of(st.none(), st.integers(-2, 9), st.floats(), st.sampled_from(["yarn", "default"])),
    ),
)  # fmt: skip
OWN_BIASES = ("qwen2", "glm4_moe", "gpt_oss")
COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
KEYS = sorted(
    {"layer_types", "quantization_config", "original_max_position_embeddings"}.union(
        *(sizes.to_hf() for sizes in FAMILIES.values())
    )
)


def is_none(raw: dict[str, Any]) -> bool:
    """Whether a config.json cannot be a model's of any family, by what every family has."""
    eps, tied = raw["rms_norm_eps"], raw["tie_word_embeddings"]
    return (
        any(type(raw[key]) is not int or raw[key] < 1 for key in COUNTS)
        or raw["num_hidden_layers"] > 4096
        or type(eps) not in (int, float)
        or not 0 < eps < float("inf")
        or type(tied) not in (bool, type(None))
        or raw["hidden_act"] not in ("silu", None)
        or (raw.get("attention_bias") not in (False, None) and raw["model_type"] not in OWN_BIASES)
        or raw["model_type"] not in FAMILY_NAMES
    )


@settings(max_examples=80)
@given(
    changes=st.lists(st.tuples(st.sampled_from(KEYS), HF_VALUES), min_size=1, max_size=3),
    name=st.sampled_from(sorted(FAMILIES)),
)
@example(changes=[("vocab_size", 0)], name="qwen3")
@example(changes=[("num_hidden_layers", True)], name="deepseek-v3")
@example(changes=[("num_hidden_layers", 4097)], name="qwen3")
@example(changes=[("hidden_size", 16.0)], name="qwen3-moe")
@example(changes=[("rms_norm_eps", float("inf"))], name="qwen3-moe")
@example(changes=[("rms_norm_eps", float("nan"))], name="qwen3")
@example(changes=[("tie_word_embeddings", "yes")], name="qwen3")
@example(changes=[("attention_bias", True)], name="deepseek-v3")
def test_a_mutated_config_is_read_or_refused_and_then_its_tables_can_be_made(
    changes: list[tuple[str, Any]], name: str
) -> None:
    raw = FAMILIES[name].to_hf() | dict(changes)
    try:
        sizes = ModelConfig.from_hf(raw)
    except CheckpointError:
        return
    assert not is_none(raw), "it is no model's, and was read"
    assert ModelConfig.from_hf(json.loads(json.dumps(sizes.to_hf()))) == sizes
    assert sizes.softmax_scale > 0
    if sizes.yarn is not None and sizes.rope_dim < 1000:
        assert len(sizes.yarn.interpolated(sizes.rope_dim, sizes.rope_theta)) == sizes.rope_dim // 2
    assert sizes.family in FAMILY_NAMES
    assert sizes.product_shapes
    assert next(iter(hf_weight_shapes(sizes)))

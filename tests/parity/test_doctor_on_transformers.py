"""The doctor with `transformers` as the engine: a right model is near in each family, a wrong weight is named."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers import first_few

from etude.cli import main
from etude.evals.doctor.local import findings
from etude.evals.doctor.transformers_engine import TransformersEngine
from etude.models import load_model
from etude.numerics import Native

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        OlmoeConfig,
        OlmoeForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

TOKENS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1)).tolist()
SHARED: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
QWEN = {**SHARED, "num_key_value_heads": 2, "head_dim": 12}
MOE = {**QWEN, "moe_intermediate_size": 8, "norm_topk_prob": True}
LATENT = {
    **SHARED,
    "num_key_value_heads": 6,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 36,
}
CHECKPOINTS: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**QWEN)),
    "qwen3-moe, 128 experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**MOE, num_experts=128, num_experts_per_tok=8)),
    "qwen3-moe, 384 experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**MOE, num_experts=384, num_experts_per_tok=8)),
    "deepseek-v3, 256 experts in 8 groups": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**LATENT, n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4),
    ),
    "kimi k2's layout, 384 experts": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**LATENT, n_routed_experts=384, num_experts_per_tok=8, n_group=1, topk_group=1),
    ),
    "olmoe, 64 experts": (
        OlmoeForCausalLM,
        OlmoeConfig(
            **{**SHARED, "hidden_size": 48, "intermediate_size": 8}, num_key_value_heads=2, num_experts_per_tok=8
        ),
    ),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(**{**QWEN, "intermediate_size": 8}, num_local_experts=8, num_experts_per_tok=2),
    ),
    "deepseek-v3, one product of queries": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **{**LATENT, "q_lora_rank": None}, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1
        ),
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random checkpoint of each, saved by transformers: sharp weights, norms that are not one, and biases."""
    folder = tmp_path_factory.mktemp("doctor")
    for number, (name, (kind, config)) in enumerate(CHECKPOINTS.items()):
        torch.manual_seed(number)
        model = kind(config)
        with torch.no_grad():
            for key, value in model.state_dict().items():
                if "norm" in key:
                    value.copy_(1 + 0.2 * torch.randn(value.shape))
                elif key.endswith("e_score_correction_bias"):
                    value.copy_(0.3 * torch.randn(value.shape))
                else:
                    value.copy_(torch.randn(value.shape) * 1.2 * value.shape[-1] ** -0.5)
        model.save_pretrained(folder / name)
    return {name: folder / name for name in CHECKPOINTS}


@pytest.mark.parametrize("name", first_few(CHECKPOINTS, 2))
def test_the_doctor_finds_a_right_model_near(
    saved: dict[str, Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["parity", str(saved[name]), "--engine", "transformers", "--json", "--prompts", "2", "--tokens", "6"]
    code = main(words)
    found = json.loads(capsys.readouterr().out)
    assert (code, found["verdict"], found["findings"]) == (0, "near", [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", first_few(CHECKPOINTS, 2))
def test_no_operator_of_a_right_model_is_off(saved: dict[str, Path], name: str, dtype: torch.dtype) -> None:
    theirs = TransformersEngine.load(saved[name], dtype).results(TOKENS, prompt_tokens=25)
    mine = load_model(saved[name], dtype=dtype, operators=Native(dtype))
    assert findings(mine, TOKENS, theirs, exact=False) == []


WRONG = {
    "model.layers.0.mlp.up_proj.weight": "layers.0.mlp.gate_up",
    "model.layers.1.self_attn.kv_a_proj_with_mqa.weight": "layers.1.attention.inward",
    "model.layers.1.self_attn.q_a_layernorm.weight": "layers.1.attention.q_norm",
    "model.layers.1.self_attn.q_b_proj.weight": "layers.1.attention.q",
    "model.layers.2.self_attn.kv_b_proj.weight": "layers.2.attention.attended",
    "model.layers.2.self_attn.o_proj.weight": "layers.2.attention.out",
    "model.layers.1.mlp.gate.weight": "layers.1.experts.scores",
    "model.layers.1.mlp.gate.e_score_correction_bias": "layers.1.experts.used",
    "model.layers.2.mlp.experts.down_proj": "layers.2.experts.mixed",
    "model.layers.1.mlp.shared_experts.down_proj.weight": "layers.1.shared.down",
}


@pytest.mark.parametrize("key", first_few(WRONG, 2))
def test_a_wrong_weight_of_latent_attention_and_384_experts_is_named(saved: dict[str, Path], key: str) -> None:
    name = "kimi k2's layout, 384 experts"
    engine = TransformersEngine.load(saved[name], torch.float32)
    with torch.no_grad():
        weight = engine._model.state_dict()[key]
        weight += 0.05 * weight.abs().mean() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    theirs = engine.results(TOKENS, prompt_tokens=25)
    found = findings(load_model(saved[name], operators=Native(torch.float32)), TOKENS, theirs, exact=False)
    assert [one.name for one in found] == [WRONG[key]]

"""Every family and variant against `transformers`: random checkpoints that it makes, and those that we make."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiers import first_few
from tests.unit.models.test_stacked_experts import SIZES as STACKED
from tests.unit.models.test_stacked_experts import in_mxfp4

from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import Transformer, load_model, save_model
from etude.models.headers import report_unused_layers
from etude.numerics import Native
from etude.records import CompletionRequest, Sampling, Version

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        AutoModelForCausalLM,
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        DeepseekV32Config,
        DeepseekV32ForCausalLM,
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        GptOssConfig,
        GptOssForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        MiniMaxM2Config,
        MiniMaxM2ForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        OlmoeConfig,
        OlmoeForCausalLM,
        PreTrainedModel,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3_5MoeConfig,
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeTextConfig,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
    )
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

TOKENS = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(0))
SHARED: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
QWEN = {**SHARED, "num_key_value_heads": 2, "head_dim": 12}
MOE = {**QWEN, "moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}
DEEPSEEK = {
    **SHARED,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
OLMOE = {**SHARED, "num_key_value_heads": 2, "intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 3}
MIXTRAL = {**QWEN, "intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 3}
GLM = {
    **QWEN,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "attention_bias": True,
}
MINIMAX = {**MIXTRAL, "rotary_dim": 8}
GPT_OSS = {**MIXTRAL, "sliding_window": 7, "swiglu_limit": 0.8}
TWO = ["linear_attention", "full_attention"]
MANY = {"num_hidden_layers": 2, "num_experts_per_tok": 8}
NEXT = {
    **MOE,
    "shared_expert_intermediate_size": 40,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 29,
    "linear_value_head_dim": 22,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
QWEN35 = {key: value for key, value in NEXT.items() if key not in ("norm_topk_prob", "intermediate_size")}
DEEPSEEK32 = {**DEEPSEEK, "index_n_heads": 3, "index_head_dim": 12, "index_topk": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}


@dataclass(frozen=True)
class Variant:
    kind: type[PreTrainedModel]
    config: Any
    layers_with_router: int


def variant(kind: type[PreTrainedModel], sizes: dict[str, Any], layers_with_router: int, **changed: Any) -> Variant:
    configs = {
        Qwen3MoeForCausalLM: Qwen3MoeConfig,
        Qwen3ForCausalLM: Qwen3Config,
        DeepseekV3ForCausalLM: DeepseekV3Config,
        OlmoeForCausalLM: OlmoeConfig,
        MixtralForCausalLM: MixtralConfig,
        LlamaForCausalLM: LlamaConfig,
        Qwen2ForCausalLM: Qwen2Config,
        Glm4MoeForCausalLM: Glm4MoeConfig,
        MiniMaxM2ForCausalLM: MiniMaxM2Config,
        GptOssForCausalLM: GptOssConfig,
        Qwen3NextForCausalLM: Qwen3NextConfig,
        Qwen3_5MoeForCausalLM: Qwen3_5MoeTextConfig,
        DeepseekV32ForCausalLM: DeepseekV32Config,
    }
    return Variant(kind, configs[kind](**{**sizes, **changed}), layers_with_router)


VARIANTS = {
    "qwen3-moe": variant(Qwen3MoeForCausalLM, MOE, 3),
    "qwen3-moe gates as they are, tied": variant(
        Qwen3MoeForCausalLM, MOE, 3, norm_topk_prob=False, tie_word_embeddings=True
    ),
    "qwen3-moe every second layer": variant(Qwen3MoeForCausalLM, MOE, 1, decoder_sparse_step=2),
    "qwen3-moe one layer without": variant(Qwen3MoeForCausalLM, MOE, 2, mlp_only_layers=[1]),
    "qwen3-moe yarn": variant(Qwen3MoeForCausalLM, MOE, 3, rope_parameters=YARN),
    "qwen3": variant(Qwen3ForCausalLM, QWEN, 0),
    "qwen3 tied, yarn": variant(Qwen3ForCausalLM, QWEN, 0, tie_word_embeddings=True, rope_parameters=YARN),
    "deepseek-v3": variant(DeepseekV3ForCausalLM, DEEPSEEK, 2),
    "deepseek-v3 yarn": variant(DeepseekV3ForCausalLM, DEEPSEEK, 2, rope_parameters=DEEPSEEK_YARN),
    "deepseek-v3 yarn, other scales": variant(
        DeepseekV3ForCausalLM, DEEPSEEK, 2, rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
    ),
    "deepseek-v3 one product of queries, halves": variant(
        DeepseekV3ForCausalLM, DEEPSEEK, 2, q_lora_rank=None, rope_interleave=False
    ),
    "deepseek-v3 gates as they are, tied": variant(
        DeepseekV3ForCausalLM, DEEPSEEK, 2, norm_topk_prob=False, tie_word_embeddings=True, n_shared_experts=1
    ),
    "kimi k2's layout": variant(
        DeepseekV3ForCausalLM, DEEPSEEK, 2, n_group=1, topk_group=1, n_routed_experts=9, routed_scaling_factor=2.827,
        rope_parameters={**DEEPSEEK_YARN, "beta_fast": 1.0, "beta_slow": 1.0},
    ),
    "deepseek-v3 two bytes a route": variant(
        DeepseekV3ForCausalLM, DEEPSEEK, 1, n_routed_experts=260, moe_intermediate_size=4, num_hidden_layers=2
    ),
    "olmoe": variant(OlmoeForCausalLM, OLMOE, 3),
    "olmoe gates sum to 1, tied, a key for each head, yarn": variant(
        OlmoeForCausalLM, OLMOE, 3, norm_topk_prob=True, tie_word_embeddings=True, num_key_value_heads=None,
        rope_parameters=YARN,
    ),
    "mixtral": variant(MixtralForCausalLM, MIXTRAL, 3),
    "mixtral tied, yarn": variant(MixtralForCausalLM, MIXTRAL, 3, tie_word_embeddings=True, rope_parameters=YARN),
    "mixtral, heads as wide as the model allows": variant(MixtralForCausalLM, MIXTRAL, 3, head_dim=None),
    "llama, llama3": variant(LlamaForCausalLM, QWEN, 0, rope_parameters=LLAMA3),
    "qwen2": variant(Qwen2ForCausalLM, SHARED, 0, num_key_value_heads=2),
    "glm4-moe": variant(Glm4MoeForCausalLM, GLM, 2),
    "minimax-m2": variant(MiniMaxM2ForCausalLM, MINIMAX, 3),
    "gpt-oss": variant(GptOssForCausalLM, GPT_OSS, 3),
    "qwen3-next": variant(Qwen3NextForCausalLM, NEXT, 3),
    "qwen3.5-moe": variant(Qwen3_5MoeForCausalLM, QWEN35, 3),
    "deepseek-v3.2": variant(DeepseekV32ForCausalLM, DEEPSEEK32, 2),
    **(FURTHER := {
        "qwen3-moe 128 experts": variant(Qwen3MoeForCausalLM, MOE, 2, num_experts=128, moe_intermediate_size=4, **MANY),
        "olmoe 64 experts": variant(OlmoeForCausalLM, OLMOE, 2, num_experts=64, intermediate_size=4, **MANY),
        "mixtral 8 experts": variant(
            MixtralForCausalLM, MIXTRAL, 2, num_local_experts=8, **{**MANY, "num_experts_per_tok": 2}
        ),
        "deepseek-v3.2 256 experts": variant(
            DeepseekV32ForCausalLM, DEEPSEEK32, 1, n_routed_experts=256, n_group=8, topk_group=4, n_shared_experts=1,
            moe_intermediate_size=4, **MANY,
        ),
        "kimi k2's layout, 384 experts": variant(
            DeepseekV3ForCausalLM, DEEPSEEK, 1, n_group=1, topk_group=1, n_routed_experts=384, n_shared_experts=1,
            routed_scaling_factor=2.827, moe_intermediate_size=4, **MANY,
        ),
        "qwen3-next gates as they are, tied, one dense layer, a key head for each value head, yarn": variant(
            Qwen3NextForCausalLM, NEXT, 2, norm_topk_prob=False, tie_word_embeddings=True, mlp_only_layers=[1],
            linear_num_key_heads=6, rope_parameters={**YARN, "partial_rotary_factor": 0.5},
        ),
        "qwen3-next three of four layers linear": variant(
            Qwen3NextForCausalLM, NEXT, 4, layer_types=None, num_hidden_layers=4, linear_conv_kernel_dim=2
        ),
        "qwen3-next 512 experts": variant(
            Qwen3NextForCausalLM, {**NEXT, "layer_types": TWO}, 2, num_experts=512, moe_intermediate_size=4,
            **{**MANY, "num_experts_per_tok": 10},
        ),
        "qwen3.5-moe 256 experts": variant(
            Qwen3_5MoeForCausalLM, {**QWEN35, "layer_types": TWO}, 2, num_experts=256, moe_intermediate_size=4, **MANY
        ),
        "deepseek-v3.2 sparse, yarn": variant(
            DeepseekV32ForCausalLM, DEEPSEEK32, 2, index_topk=7, index_n_heads=24, rope_parameters=DEEPSEEK_YARN
        ),
        "deepseek-v3.2 yarn, all layers with experts": variant(
            DeepseekV32ForCausalLM, DEEPSEEK32, 3, first_k_dense_replace=0, rope_parameters=DEEPSEEK_YARN
        ),
        "gpt-oss full attention, no biases of it, tied, llama3": variant(
            GptOssForCausalLM, GPT_OSS, 3, layer_types=["full_attention"] * 3, attention_bias=False,
            tie_word_embeddings=True, rope_parameters=LLAMA3,
        ),
        "gpt-oss every layer slides, yarn": variant(
            GptOssForCausalLM, GPT_OSS, 3, layer_types=["sliding_attention"] * 3, rope_parameters=YARN
        ),
        "gpt-oss 128 experts": variant(
            GptOssForCausalLM, GPT_OSS, 2, num_local_experts=128, intermediate_size=4, **MANY
        ),
        "llama tied, a key for each head": variant(LlamaForCausalLM, SHARED, 0, tie_word_embeddings=True),
        "llama yarn": variant(LlamaForCausalLM, QWEN, 0, rope_parameters=YARN),
        "deepseek-v3 llama3": variant(DeepseekV3ForCausalLM, DEEPSEEK, 2, rope_parameters=LLAMA3),
        "qwen2 tied, yarn": variant(
            Qwen2ForCausalLM, SHARED, 0, num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=YARN
        ),
        "glm4-moe norms, no biases, gates as they are": variant(
            Glm4MoeForCausalLM, GLM, 3, attention_bias=False, use_qk_norm=True, norm_topk_prob=False,
            first_k_dense_replace=0,
        ),
        "glm4-moe groups, a third rotated, yarn": variant(
            Glm4MoeForCausalLM, GLM, 2, n_group=3, topk_group=2,
            rope_parameters={**YARN, "partial_rotary_factor": 1 / 3},
        ),
        "glm4-moe all of a head rotated": variant(
            Glm4MoeForCausalLM, GLM, 2, rope_parameters={"rope_type": "default", "partial_rotary_factor": 1.0}
        ),
        "glm4-moe 160 experts": variant(
            Glm4MoeForCausalLM, GLM, 1, n_routed_experts=160, moe_intermediate_size=4, **MANY
        ),
        "minimax-m2 all of a head rotated, tied": variant(
            MiniMaxM2ForCausalLM, MIXTRAL, 3, tie_word_embeddings=True
        ),
        "minimax-m2 256 experts": variant(
            MiniMaxM2ForCausalLM, MINIMAX, 2, num_local_experts=256, intermediate_size=4, **MANY
        ),
    }),
}  # fmt: skip


EACH = first_few(VARIANTS, len(VARIANTS) - len(FURTHER))
FEW = [
    "qwen3-moe every second layer", "qwen3 tied, yarn", "deepseek-v3 yarn", "olmoe", "mixtral", "glm4-moe",
    "minimax-m2", "gpt-oss", "llama, llama3", "qwen2", "qwen3-next", "qwen3.5-moe", "deepseek-v3.2",
]  # fmt: skip


class Saved(dict[str, Path]):
    """A random checkpoint of each variant, saved by transformers when it is first asked for: sharp weights, norms that
    are not one, and biases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        torch.manual_seed(list(VARIANTS).index(name))
        kind = VARIANTS[name].kind
        model = kind(VARIANTS[name].config)
        centred = kind in (Qwen3NextForCausalLM, Qwen3_5MoeForCausalLM)
        with torch.no_grad():
            for key, value in model.state_dict().items():
                if "norm" in key:
                    value.copy_((0.0 if centred and "linear_attn" not in key else 1.0) + 0.2 * torch.randn(value.shape))
                elif key.endswith(("bias", "sinks")):
                    value.copy_(0.3 * torch.randn(value.shape))
                else:
                    value.copy_(torch.randn(value.shape) * 1.2 * value.shape[-1] ** -0.5)
        model.save_pretrained(self.folder / name)
        return self.setdefault(name, self.folder / name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("families"))


def theirs(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    return float((ours - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", EACH)
@torch.no_grad()
def test_logits_and_routes_are_those_of_transformers(saved: Saved, name: str) -> None:
    model = theirs(saved[name])
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        router = getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None))
        if router is not None:
            router.register_forward_hook(lambda _module, _inputs, outputs: seen.append(outputs[2]))
    expected = model(TOKENS[None]).logits[0]
    for operators in (None, Native()):  # absorbed, expanded
        done = load_model(saved[name], operators=operators).eval().run(TOKENS)
        assert distance(done.logits, expected) <= 1e-5
        assert done.routes.shape[:2] == (len(TOKENS), VARIANTS[name].layers_with_router)
        for layer, experts in enumerate(seen):
            assert torch.equal(done.routes[:, layer].long().sort(-1).values, experts.sort(-1).values)


@pytest.mark.parametrize("name", first_few([*FEW, "deepseek-v3 two bytes a route"], 8))
def test_greedy_tokens_with_a_cache_are_those_of_transformers(saved: Saved, name: str) -> None:
    expected = theirs(saved[name]).generate(
        TOKENS[None, :20], do_sample=False, max_new_tokens=10, eos_token_id=96, pad_token_id=0
    )
    config = EngineConfig(context_tokens=64, max_sequences=1)
    version = Version(step=0, incarnation="00000000", digest="ab" * 32)
    request = CompletionRequest(
        request_id="r",
        session_id="s",
        prompt_ids=TOKENS[:20].numpy().astype(np.int32),
        sampling=Sampling(max_tokens=10, stop_token_ids=(96,), temperature=0.0),
    )

    async def story() -> list[int]:
        async with ReferenceEngine(load_model(saved[name]), version=version, config=config) as engine:
            return (await engine.generate(request)).token_ids.tolist()

    assert asyncio.run(story()) == expected[0, 20:].tolist()


def test_mxfp4_of_stacked_experts_has_the_values_that_transformers_reads(tmp_path: Path) -> None:
    save_model(Transformer(STACKED), tmp_path / "model", dtype="f32")
    values = in_mxfp4(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert len(values) == 4
    for name, value in values.items():
        parts = stored[f"{name}_blocks"], stored[f"{name}_scales"]
        assert torch.equal(convert_moe_packed_tensors(*parts, dtype=torch.float32), value), name


@pytest.mark.parametrize("name", EACH)
def test_transformers_reads_saved_checkpoints_and_saving_twice_gives_the_same_bytes(
    saved: Saved, tmp_path: Path, name: str
) -> None:
    save_model(load_model(saved[name]), tmp_path / "ours", dtype="f32", assets=saved[name])
    save_model(load_model(tmp_path / "ours"), tmp_path / "again", dtype="f32", assets=tmp_path / "ours")
    for file in (tmp_path / "ours").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    with torch.no_grad():
        before, after = (theirs(folder)(TOKENS[None]).logits for folder in (saved[name], tmp_path / "ours"))
    assert torch.equal(before, after)
    assert load_model(tmp_path / "ours").config == load_model(saved[name]).config


PROJECTIONS = ("gate", "up", "down")
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32, "patch_size": 4,
    "spatial_merge_size": 1, "temporal_patch_size": 1, "num_position_embeddings": 4,
}  # fmt: skip


@pytest.mark.parametrize("stacked", [False, True])
@torch.no_grad()
def test_of_a_model_for_images_the_text_model_is_read_and_the_rest_is_named(tmp_path: Path, stacked: bool) -> None:
    torch.manual_seed(0)
    config = Qwen3_5MoeConfig(text_config=QWEN35, vision_config=VISION)
    reference = Qwen3_5MoeForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path / "images")
    stored = load_file(tmp_path / "images" / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in stored)
    if stacked:  # as Qwen's own checkpoints have experts
        for layer in range(3):
            at = f"model.language_model.layers.{layer}.mlp.experts."
            parts = {kind: [stored.pop(f"{at}{e}.{kind}_proj.weight") for e in range(6)] for kind in PROJECTIONS}
            both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
            stored |= {f"{at}gate_up_proj": torch.stack(both), f"{at}down_proj": torch.stack(parts["down"])}
        save_file(stored, tmp_path / "images" / "model.safetensors", metadata={"format": "pt"})
    model = load_model(tmp_path / "images").eval()
    expected = reference(input_ids=TOKENS[None]).logits[0]
    assert distance(model.run(TOKENS).logits, expected) <= 1e-5
    said: list[str] = []
    report_unused_layers(tmp_path / "images", model.config, said.append)
    assert "model.visual (" in said[0]
    save_model(model, tmp_path / "text", dtype="f32", assets=tmp_path / "images")
    assert distance(theirs(tmp_path / "text")(TOKENS[None]).logits[0], expected) <= 1e-5

"""`transformers` is the oracle: it loads what we save, we load what it saves, and the logits agree."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from etude.errors import CheckpointError
from etude.models import ModelConfig, Transformer, hf_views, load_model, save_model
from etude.training import train_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        PhiConfig,
        PhiForCausalLM,
        Qwen3MoeConfig,
    )

SIZES = ModelConfig(
    vocab_size=97,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    expert_size=40,
    num_experts=6,
    top_k=3,
    rope_theta=50_000.0,
    context_tokens=256,
)
TOKENS = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def distance(ours: Transformer, folder: Path) -> float:
    """Largest difference of logits between our model and what transformers loads from a directory."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits, _ = ours.eval()(TOKENS)
    return float((logits - theirs(TOKENS[None]).logits[0]).abs().max())


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_what_we_save_and_computes_the_same_logits(tmp_path: Path, tied: bool) -> None:
    model = Transformer(replace(SIZES, tie_embeddings=tied), seed=3)
    with torch.no_grad():  # norms that are not one, so that a missing one shows
        for name, view in hf_views(model).items():
            if "norm" in name:
                view.add_(torch.randn(view.shape, generator=torch.Generator().manual_seed(len(name))), alpha=0.1)
    save_model(model, tmp_path / "ours", dtype="f32")
    assert distance(model, tmp_path / "ours") <= 1e-4


@pytest.mark.parametrize("shard_bytes", [50_000_000, 200_000])
def test_we_load_what_transformers_saves(tmp_path: Path, shard_bytes: int) -> None:
    torch.manual_seed(5)
    config = Qwen3MoeConfig(**SIZES.to_hf())
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
    ours = load_model(tmp_path / "theirs")
    assert ours.config == SIZES
    assert distance(ours, tmp_path / "theirs") <= 1e-4


def test_transformers_reads_the_sizes_we_write(tmp_path: Path) -> None:
    save_model(Transformer(SIZES), tmp_path / "ours", dtype="bf16")
    config = AutoConfig.from_pretrained(tmp_path / "ours")
    assert (config.num_experts, config.num_experts_per_tok, config.head_dim) == (6, 3, 24)
    assert config.rope_parameters["rope_theta"] == 50_000.0
    assert config.norm_topk_prob is True
    assert config.dtype == torch.bfloat16


def test_transformers_tokenises_with_our_tokeniser_as_we_do(tmp_path: Path) -> None:
    text = "<|user|>def price(n):\n    return n + 4711 # größer<|end|>"
    special = ("<|pad|>", "<|user|>", "<|end|>")
    ours = train_tokenizer([text] * 30, tmp_path, vocab_size=320, special_tokens=special, chat_template="{{ 1 }}")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode(text).ids
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert theirs.eos_token_id == 2
    assert theirs.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "1"


def test_transformers_stops_our_model_at_the_end_of_a_message(tmp_path: Path) -> None:
    special = ("<|end|>", "<|pad|>")
    train_tokenizer(["x"], tmp_path / "tokenizer", vocab_size=320, special_tokens=special, chat_template="")
    model = Transformer(replace(SIZES, vocab_size=320), seed=3)
    with torch.no_grad():
        hf_views(model)["lm_head.weight"].zero_()  # every logit is alike: the choice is the first token, the end
    save_model(model, tmp_path / "ours", dtype="f32", assets=tmp_path / "tokenizer")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    assert (theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id) == (0, 1)
    assert theirs.generate(TOKENS[None], do_sample=False, max_new_tokens=8)[0, len(TOKENS) :].tolist() == [0]


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    config = PhiConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    PhiForCausalLM(config).save_pretrained(tmp_path / "phi")
    with pytest.raises(CheckpointError, match="PhiForCausalLM"):
        load_model(tmp_path / "phi")


def test_older_transformers_configs_with_a_bare_rope_theta_are_read() -> None:
    raw = json.loads(json.dumps(SIZES.to_hf()))
    del raw["rope_parameters"]
    assert ModelConfig.from_hf(raw).rope_theta == 50_000.0
    raw["num_local_experts"] = raw.pop("num_experts")
    assert ModelConfig.from_hf(raw) == SIZES

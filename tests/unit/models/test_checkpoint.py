"""Checkpoint directories: complete or absent, and nothing believed that was not checked."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import CheckpointError
from etude.models import ModelConfig, Transformer, hf_views, load_model, save_model
from etude.models.checkpoint_files import atomic_directory, load_tensors, save_tensors
from etude.models.headers import check_weights, hf_weight_shapes

SIZES = ModelConfig(
    vocab_size=13,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    expert_size=6,
    num_experts=3,
    top_k=2,
    context_tokens=32,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(Transformer(SIZES, seed=2), tmp_path / "model", dtype="f32")
    return tmp_path / "model"


def test_a_saved_model_is_loaded_to_the_bit(saved: Path) -> None:
    original, again = hf_views(Transformer(SIZES, seed=2)), hf_views(load_model(saved))
    assert original.keys() == again.keys()
    assert all(torch.equal(original[name], again[name]) for name in original)


def test_bf16_weights_are_the_rounded_ones(tmp_path: Path) -> None:
    model = Transformer(SIZES, seed=2)
    save_model(model, tmp_path / "model", dtype="bf16")
    again = hf_views(load_model(tmp_path / "model"))
    assert all(torch.equal(v.bfloat16().float(), again[n]) for n, v in hf_views(model).items())


def test_tokeniser_files_travel_with_the_weights(tmp_path: Path, saved: Path) -> None:
    (saved / "tokenizer.json").write_text("{}")
    (saved / "unrelated.txt").write_text("no")
    save_model(load_model(saved), tmp_path / "copy", dtype="f32", assets=saved)
    assert {f.name for f in (tmp_path / "copy").iterdir()} == {
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_weights_may_be_read_by_whoever_the_umask_lets(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save_model(Transformer(SIZES, seed=2), tmp_path / "model", dtype="f32")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "model").iterdir()}
    assert set(modes.values()) == {0o666 & ~umask}, modes


def test_a_truncated_file_is_named(saved: Path) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_model(saved)


def test_a_missing_directory_and_missing_weights_are_named(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_model(tmp_path / "nowhere")
    (saved / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights at"):
        load_model(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c | {"num_hidden_layers": 3}, r"no tensor 'model\.layers\.2"),
        (lambda c: c | {"hidden_size": 10**9}, r"embed_tokens.*\[13, 8\]: .*expects \[13, 1000000000\]"),
        (lambda c: c | {"num_hidden_layers": 4000}, r"no tensor 'model\.layers\.2"),
        (lambda c: c | {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 is above 4096"),
        (lambda c: c | {"num_hidden_layers": 1}, r"a tensor 'model\.layers\.1"),
        (lambda c: c | {"vocab_size": "many"}, "vocab_size = 'many'"),
        (lambda c: c | {"norm_topk_prob": "no"}, "norm_topk_prob = 'no'"),
        (lambda c: c | {"attention_bias": True}, "qwen3_moe model with attention_bias = True"),
        (lambda c: c | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope_type = 'linear'"),
        (
            lambda c: c | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "original_max_position_embeddings",
        ),
        (lambda c: c | {"rope_theta": 1.0, "rope_parameters": {"rope_type": "yarn"}}, "rope_theta = 1.0"),
        (lambda c: c | {"rope_parameters": {"rope_type": "yarn", "factor": 0}}, "factor = 0"),
        (
            lambda c: c | {"rope_parameters": {"rope_type": "yarn", "factor": 2, "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta = 0.1 is not supported with rope_type = 'yarn'",
        ),
        (lambda c: c | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            lambda c: c | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
            "deepseek_v3.*kv_lora_rank",
        ),
        (lambda c: c | {"model_type": "deepseek_v2"}, r"model_type deepseek_v2\)"),
        (lambda c: c | {"architectures": ["Qwen3MoeForTokenClassification"]}, "Qwen3MoeForTokenClassification"),
        (lambda c: c | {"mlp_only_layers": [1]}, r"no tensor 'model\.layers\.1\.mlp\.gate_proj"),
        (lambda c: c | {"mlp_only_layers": "all"}, "mlp_only_layers = 'all'"),
        (lambda c: c | {"num_key_value_heads": 3}, "not a multiple"),
        (lambda c: c | {"num_experts": 70_000}, "num_experts = 70000 is above 65535"),
        (lambda c: c | {"head_dim": -4}, "head_dim = -4"),
        (lambda c: c | {"max_position_embeddings": 10**12}, "max_position_embeddings"),
        (lambda c: c | {"rms_norm_eps": "x"}, "rms_norm_eps"),
    ],
)
def test_a_config_that_contradicts_the_weights_is_refused_with_the_reason(
    saved: Path, change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    file = saved / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(CheckpointError, match=message):
        load_model(saved)


def test_a_tensor_of_another_shape_is_named(saved: Path) -> None:
    tensors = load_tensors(saved / "model.safetensors")
    q = "model.layers.0.self_attn.q_proj.weight"
    save_tensors(tensors | {q: tensors[q].t().contiguous().reshape(4, 16)}, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*q_proj.*\[4, 16\]: .*expects \[8, 8\]"):
        load_model(saved)


@pytest.mark.parametrize("tied", [False, True])
def test_the_names_and_shapes_that_are_asked_of_a_file_are_those_of_the_model(tied: bool) -> None:
    sizes = dataclasses.replace(SIZES, tie_embeddings=tied)
    views = hf_views(Transformer(sizes, seed=2))
    assert dict(hf_weight_shapes(sizes)) == {name: tuple(view.shape) for name, view in views.items()}


def test_a_quantised_tensor_is_named(saved: Path) -> None:
    tensors = load_tensors(saved / "model.safetensors")
    save_tensors(tensors | {"model.norm.weight": torch.zeros(8, dtype=torch.int8)}, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is I8"):
        check_weights(saved, SIZES)


def test_a_shard_that_is_missing_or_cut_off_is_named(saved: Path) -> None:
    tensors = load_tensors(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for part in set(files.values()):
        save_tensors({name: tensors[name] for name in files if files[name] == part}, saved / part)
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    check_weights(saved, SIZES)
    with pytest.raises(CheckpointError, match=r"index\.json has no checksum: .*SHA256SUMS does not list it"):
        load_model(saved)
    (saved / "SHA256SUMS").unlink()
    assert load_model(saved).config == SIZES
    os.truncate(saved / "part-1.safetensors", (saved / "part-1.safetensors").stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors is damaged: .*cut off"):
        check_weights(saved, SIZES)
    (saved / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no shard at .*part-1.*index\.json lists it"):
        check_weights(saved, SIZES)


@settings(max_examples=150)
@given(data=st.data())
def test_mutated_files_load_or_raise_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    save_model(Transformer(SIZES, seed=2), folder / "model", dtype="bf16")
    file = folder / "model" / data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, min(len(content), 4000) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) // 2]))])
    try:
        model = load_model(folder / "model")
    except CheckpointError:
        return
    assert model.config.num_parameters == SIZES.num_parameters


@pytest.mark.parametrize(
    ("index", "said"),
    [("[]", 'no "weight_map"'), ('{"weight_map": ["a"]}', 'no "weight_map"'), ("{", "is not JSON: Expecting")],
)
def test_an_index_that_is_none_is_said_in_words(saved: Path, index: str, said: str) -> None:
    (saved / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError) as caught:
        load_model(saved)
    assert said in str(caught.value)
    assert "Error" not in str(caught.value)


def test_a_tied_head_is_the_embedding_or_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tied"
    save_model(Transformer(dataclasses.replace(SIZES, tie_embeddings=True), seed=2), folder, dtype="bf16")
    weights = load_tensors(folder / "model.safetensors")
    (folder / "SHA256SUMS").unlink()
    head = weights["model.embed_tokens.weight"].clone()
    save_tensors({**weights, "lm_head.weight": head}, folder / "model.safetensors")
    assert load_model(folder).head is None
    head[0, 0] += 1
    save_tensors({**weights, "lm_head.weight": head}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight of .* differs from the embedding") as caught:
        load_model(folder)
    assert "tie_word_embeddings = true" in caught.value.facts


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def write_and_fail() -> None:
        with atomic_directory(tmp_path / "out") as folder:
            (folder / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_fail()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_replaced(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with atomic_directory(tmp_path / "out") as folder:
            (folder / "file").write_text(content)
    assert (tmp_path / "out" / "file").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_disk_that_refuses_is_a_checkpoint_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_model(Transformer(SIZES), tmp_path / "file" / "model", dtype="f32")

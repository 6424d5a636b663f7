"""Multi-token prediction heads in a model and in its checkpoints. `tests/parity/test_mtp.py` has what they compute."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from etude.errors import CheckpointError, ConfigError
from etude.models import ModelConfig, Transformer, hf_views, load_model, save_model
from etude.models.attention import Packed
from etude.models.checkpoint_files import load_tensors, save_tensors
from etude.models.family_lookup import family_of
from etude.models.headers import read_model_config, weight_shapes
from etude.models.mtp import apply_head, head_logits, trunk_of, trunk_output
from etude.models.transformer import resize_heads
from etude.numerics import Native
from etude.stores import MemoryStore
from etude.training.config import LiveWeights, LoraOn
from etude.training.exports import export
from etude.training.trainable import lora_modules
from etude.weights import Channel, Follower
from etude.weights.follow.runtime_map import Map, named
from etude.weights.follow.targets import Target

FAMILIES = ("deepseek_v3", "glm4_moe", "kimi_k2", "qwen3", "qwen3_moe")


def sizes(family: str, heads: int = 2) -> ModelConfig:
    return replace(family_of(family).tiny(), mtp_heads=heads)


def rewritten(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    save_tensors(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_are_loaded_and_written_again_byte_for_byte(family: str, tmp_path: Path) -> None:
    model = Transformer(sizes(family), seed=1)
    save_model(model, tmp_path / "first", dtype="bf16")
    again = load_model(tmp_path / "first")
    assert again.config == model.config
    save_model(again, tmp_path / "second", dtype="bf16")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert files[0] == files[1]
    stored = load_tensors(tmp_path / "first" / "model.safetensors")
    for name, view in hf_views(model).items():
        assert torch.equal(stored[name].float(), view.to(stored[name].dtype).float())
    heads = [name for name in stored if name.startswith(("model.layers.2.", "model.layers.3."))]
    assert {"model.layers.3.eh_proj.weight", "model.layers.3.shared_head.norm.weight"} < {*heads}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_known_without_the_model(family: str) -> None:
    model = Transformer(sizes(family), seed=1)
    outside = model.config.architecture.hf_name
    shapes = {outside(name): shape for name, shape in weight_shapes(model.config)}
    assert shapes == {name: tuple(view.shape) for name, view in hf_views(model).items()}
    counted = sum(p.numel() for p in model.mtp.parameters())
    assert model.config.mtp_parameters == counted
    assert model.config.num_parameters == sum(p.numel() for p in model.parameters()) - counted


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trunk_is_the_same_model_with_and_without_heads(family: str) -> None:
    model, plain = Transformer(sizes(family), seed=1), Transformer(sizes(family, 0), seed=1)
    tokens = torch.arange(20)
    assert torch.equal(model.run(tokens).logits, plain.run(tokens).logits)
    assert (model.parity, model.config.num_parameters) == (plain.parity, plain.config.num_parameters)
    assert dict(trunk_of(model).named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert trunk_of(plain) is plain


def test_the_copies_of_trunk_weights_are_written_where_engines_expect_them_and_never_read(tmp_path: Path) -> None:
    save_model(Transformer(sizes("deepseek_v3", 1), seed=1), tmp_path / "model", dtype="f32")
    tensors = load_tensors(tmp_path / "model" / "model.safetensors")
    copies = {f"model.layers.2.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    assert torch.equal(tensors["model.layers.2.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(tensors["model.layers.2.shared_head.head.weight"], tensors["lm_head.weight"])
    first = hf_views(load_model(tmp_path / "model"))
    assert first.keys() == tensors.keys() - copies
    for changed in (tensors | {name: tensors[name] + 1 for name in copies}, {n: tensors[n] for n in first}):
        rewritten(tmp_path / "model", changed)
        again = hf_views(load_model(tmp_path / "model"))
        assert all(torch.equal(view, first[name]) for name, view in again.items())
    save_model(Transformer(sizes("qwen3_moe", 1), seed=1), tmp_path / "qwen", dtype="f32")
    assert copies.isdisjoint(load_tensors(tmp_path / "qwen" / "model.safetensors"))


def test_a_checkpoint_that_lost_its_heads_is_a_model_without_heads(tmp_path: Path) -> None:
    save_model(Transformer(sizes("glm4_moe", 0), seed=1), tmp_path / "model", dtype="f32")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "SHA256SUMS").unlink()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    assert read_model_config(tmp_path / "model").mtp_heads == 0  # as transformers saves a model
    assert len(load_model(tmp_path / "model").mtp) == 0


def test_a_head_without_one_of_its_tensors_or_with_a_nan_is_refused_by_name(tmp_path: Path) -> None:
    save_model(Transformer(sizes("qwen3", 1), seed=1), tmp_path / "model", dtype="f32")
    tensors = load_tensors(tmp_path / "model" / "model.safetensors")
    name = "model.layers.2.hnorm.weight"
    rewritten(tmp_path / "model", {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.2\.hnorm\.weight'"):
        load_model(tmp_path / "model")
    rewritten(tmp_path / "model", tensors | {name: torch.full_like(tensors[name], float("nan"))})
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.hnorm\.weight of .* is not finite"):
        load_model(tmp_path / "model")


def test_families_without_heads_refuse_them_by_name() -> None:
    with pytest.raises(ValueError, match="mtp_heads = 1, but in family 'mixtral' it is always 0"):
        replace(family_of("mixtral").tiny(), mtp_heads=1)
    with pytest.raises(ConfigError, match=r"family mixtral cannot have MTP heads: .*deepseek_v3"):
        family_of("mixtral").tiny().with_mtp_heads(1)
    raw = sizes("qwen3").to_hf()
    for wrong in (-1, 17, 1.5, "1", True):
        with pytest.raises(CheckpointError, match="num_nextn_predict_layers"):
            ModelConfig.from_hf({**raw, "num_nextn_predict_layers": wrong})


def test_heads_can_be_added_and_removed() -> None:
    model, other = (Transformer(sizes("qwen3_moe", 1), seed=1) for _ in range(2))
    before = {name: view.clone() for name, view in hf_views(model).items()}
    resize_heads(model, 3, seed=9)
    resize_heads(other, 3, seed=9)
    assert model.config.mtp_heads == len(model.mtp) == 3
    grown = hf_views(model)
    assert all(torch.equal(grown[name], view) for name, view in before.items())
    assert all(torch.equal(view, hf_views(other)[name]) for name, view in grown.items())
    resize_heads(model, 1, seed=9)
    assert hf_views(model).keys() == before.keys()


def test_heads_are_published_on_the_weight_chain_with_the_trunk() -> None:
    model, serving, store = Transformer(sizes("qwen3_moe")), Transformer(sizes("qwen3_moe"), seed=7), MemoryStore()
    channel, follower, parent = Channel(store), Follower(store), None
    target = Target(Map(named(hf_views(serving))))
    for step in range(2):  # whole weights, then a delta
        parent = channel.publish(export(model, LiveWeights.F32), step=step, parent=parent, rollout_ids=[]).version
        update = follower.advance()
        assert update is not None
        target.prepare(update, follower.tensors, undoable=False).apply()
        assert all(torch.equal(view, hf_views(model)[name]) for name, view in hf_views(serving).items())
        hf_views(model)["model.layers.2.eh_proj.weight"].flatten()[::3] *= 1.01


def test_adapters_are_of_the_trunk_only() -> None:
    model = Transformer(sizes("qwen3"))
    assert "eh_proj" not in lora_modules(model, LoraOn.ALL)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loss_of_the_heads_has_no_gradient_in_the_trunk(family: str) -> None:
    model, tokens = Transformer(sizes(family), seed=1, operators=Native()).train(), torch.arange(20)
    outputs = trunk_output(model, model.run(tokens).stream)
    for number in range(2):
        outputs, _ = apply_head(model, number, outputs, tokens.roll(-number - 1), Packed([20], model.operators))
    head_logits(model, outputs).square().sum().backward()
    assert all(parameter.grad is None for parameter in trunk_of(model).parameters())
    assert all(p.grad is not None for name, p in model.mtp.named_parameters() if name.startswith("1."))

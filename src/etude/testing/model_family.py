"""The contract suite of a model family: tests of what etude relies on, for your own class.

With pytest, subclass the suite::

    class TestMyFamily(ModelFamilyContract):
        def make(self):
            return MyFamily()

Each test makes a tiny random model of the family (`ModelFamily.tiny`). Needs torch. The last two tests compare with
transformers; they do nothing if it is not installed or does not know the `model_type`.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from etude.config import build, to_plain
from etude.errors import CheckpointError
from etude.models.checkpoint import load_model, save_model
from etude.models.config import ModelConfig, ModelFamily
from etude.models.headers import weight_shapes
from etude.models.transformer import Transformer
from etude.models.weight_views import hf_views, stays_float32, views
from etude.numerics import Native
from etude.stores import MemoryStore
from etude.testing.contracts import Contract
from etude.training.config import LiveWeights
from etude.training.exports import export
from etude.weights import Channel, Follower
from etude.weights.follow.runtime_map import Map, named
from etude.weights.follow.targets import Target

NUM_TOKENS = 48
NEAR = 1e-5
"""Largest accepted difference of two logits in float32, relative to the largest logit."""


class ModelFamilyContract(Contract):
    """Tests what etude relies on in a `ModelFamily`."""

    def make(self) -> ModelFamily:
        """Return a new family to test."""
        raise NotImplementedError("override make() to return your family")

    def test_each_name_comes_back_and_shapes_are_those_of_the_model(self) -> None:
        family = self.make()
        c = family.tiny()
        pairs = {name: family.hf_name(name) for name, _ in weight_shapes(c)}
        for name, outside in pairs.items():
            back = family.etude_name(outside)
            assert back == name, f"{name} is {outside} outside, which is {back} inside"
            assert stays_float32(name) == stays_float32(outside), f"{outside} must keep the last part of {name}"
        assert len(set(pairs.values())) == len(pairs), "two tensors have one name"
        found = {name: tuple(view.shape) for name, view in views(Transformer(c, seed=0)).items()}
        wrong = found.items() ^ dict(weight_shapes(c)).items()
        assert not wrong, f"the model has other shapes than its family describes: {sorted(wrong)}"

    def test_sizes_are_read_as_they_were_written(self) -> None:
        c = self.make().tiny()
        assert ModelConfig.from_hf(json.loads(json.dumps(c.to_hf()))) == c, "config.json was read as another model"
        assert build(ModelConfig, to_plain(c)) == c, "a run's config was read as another model"

    def test_other_values_than_those_that_are_computed_are_refused_by_their_key(self) -> None:
        family = self.make()
        changes: dict[str, object] = {key: f"not {supported}" for key, (supported, _) in family.fixed.items()}
        changes |= {key: [supported, f"not {supported}"] for key, supported in family.each.items()}
        for key, value in {**changes, "architectures": ["AnotherForCausalLM"]}.items():
            message = ""
            try:
                ModelConfig.from_hf(family.tiny().to_hf() | {key: value})
            except CheckpointError as error:
                message = str(error)
            wanted = "AnotherForCausalLM" if key == "architectures" else key
            assert wanted in message, (
                f"{key} = {value!r} was {f'refused without its name: {message}' if message else 'read'}"
            )

    def test_every_weight_has_a_finite_gradient(self) -> None:
        model = random_model(self.make().tiny())
        loss = model.run(tokens(model.config)).logits.log_softmax(-1)[:, 0].sum()
        torch.autograd.backward(loss)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, f"{name} has no gradient"
            assert torch.isfinite(gradient).all(), f"the gradient of {name} is not finite"
            assert gradient.any(), f"the gradient of {name} is zero"

    def test_a_checkpoint_that_is_saved_and_loaded_has_the_same_bits(self) -> None:
        model = random_model(self.make().tiny())
        with TemporaryDirectory() as folder:
            save_model(model, Path(folder, "saved"), dtype="f32")
            again = load_model(Path(folder, "saved")).eval()
        for name, view in hf_views(model).items():
            assert torch.equal(view, hf_views(again)[name]), f"{name} is another one"
        ids = tokens(model.config)
        assert torch.equal(model.run(ids).logits, again.run(ids).logits), "the same weights compute other logits"

    def test_an_engine_that_follows_a_channel_holds_the_learners_bits(self) -> None:
        model, serving, store = (
            random_model(self.make().tiny()),
            random_model(self.make().tiny(), seed=7),
            MemoryStore(),
        )
        channel, follower, parent = Channel(store), Follower(store), None
        target = Target(Map(named(hf_views(serving))))
        for step in range(2):  # whole weights, then a delta
            parent = channel.publish(export(model, LiveWeights.F32), step=step, parent=parent, rollout_ids=[]).version
            update = follower.advance()
            assert update is not None, f"version {step} was not found"
            target.prepare(update, follower.tensors, undoable=False).apply()
            for name, view in hf_views(serving).items():
                assert torch.equal(view, hf_views(model)[name]), f"{name} is another one at version {step}"
                hf_views(model)[name].flatten()[::3] *= 1.01

    def test_transformers_computes_the_same_from_what_etude_saves(self) -> None:
        if unknown_to_transformers(self.make()):
            return
        with TemporaryDirectory() as folder:
            save_model(random_model(self.make().tiny()), Path(folder, "ours"), dtype="f32")
            compare(load_model(Path(folder, "ours")), loaded_by_transformers(Path(folder, "ours")))

    def test_etude_computes_the_same_from_what_transformers_saves(self) -> None:
        if unknown_to_transformers(self.make()):
            return
        with TemporaryDirectory() as name:
            folder = Path(name)
            save_model(random_model(self.make().tiny()), folder / "first", dtype="f32")
            reference = loaded_by_transformers(folder / "first")
            with torch.no_grad():
                for parameter in reference.parameters():  # other weights than etude wrote
                    parameter.mul_(1.1)
            reference.save_pretrained(folder / "reference")
            for operators in (None, Native()):
                compare(load_model(folder / "reference", operators=operators), reference)


@torch.no_grad()
def random_model(c: ModelConfig, seed: int = 0) -> Transformer:
    """Make a model of random weights of which each affects the result: norms differ from 1, and biases from 0."""
    model, generator = Transformer(c, seed=seed).eval(), torch.Generator().manual_seed(seed)
    for name, view in views(model).items():
        drawn = torch.randn(view.shape, generator=generator)
        if view.ndim > 1:
            view.copy_(1.2 * view.shape[-1] ** -0.5 * drawn)
        elif name.endswith("A_log") or (c.architecture.centred_norms and ".linear." not in name):
            view.copy_(0.2 * drawn)
        else:
            view.copy_(0.3 * drawn if name.endswith("bias") else 1 + 0.2 * drawn)
    return model


def tokens(c: ModelConfig) -> torch.Tensor:
    """Draw `NUM_TOKENS` random token ids of the model's vocabulary: int64 [NUM_TOKENS], the same at each call."""
    return torch.randint(0, c.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


def unknown_to_transformers(family: ModelFamily) -> str:
    """Return why a family cannot be compared with transformers; "" if it can."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return "transformers is not installed"
    known = family.model_type in CONFIG_MAPPING
    return "" if known else f"transformers does not know model_type {family.model_type}"


def loaded_by_transformers(folder: Path) -> Any:
    """Load a checkpoint with transformers, in float32."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return model.eval()


@torch.no_grad()
def compare(model: Transformer, reference: Any) -> None:
    """Raise `AssertionError` unless both models compute the same logits and choose the same experts."""
    chosen: list[torch.Tensor] = []
    mlps = [layer.mlp for layer in reference.model.layers]
    routers = [getattr(one, name) for one in mlps for name in ("gate", "router") if hasattr(one, name)]
    hooks = [one.register_forward_hook(lambda _module, _inputs, outputs: chosen.append(outputs[2])) for one in routers]
    expected = reference(tokens(model.config)[None]).logits[0]
    for hook in hooks:
        hook.remove()
    done = model.eval().run(tokens(model.config))
    assert len(chosen) == model.config.num_moe_layers, f"transformers has {len(chosen)} routers"
    for layer, routes, experts in zip(model.config.moe_layers, done.routes.unbind(1), chosen, strict=True):
        differing = int((routes.long().sort(-1).values != experts.sort(-1).values).any(-1).sum())
        assert not differing, f"layer {layer} sends {differing} tokens to other experts"
    distance = float((done.logits - expected).abs().max() / expected.abs().max())
    assert distance <= NEAR, f"logits differ by {distance:.1e} of the largest"

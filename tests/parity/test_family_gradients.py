"""The gradient of every weight of every family is that which transformers computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.parity.test_families import FEW, TOKENS, Saved, theirs

from etude.models import Transformer, load_model, save_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("gradients"))


def gradients_as_weights(model: Transformer, folder: Path) -> torch.nn.Module:
    """Write a model's gradients as if they were its weights, and read them with transformers, by its own names."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    save_model(model, folder, dtype="f32")
    return theirs(folder)


@pytest.mark.parametrize("name", FEW)
def test_the_gradient_of_every_weight_is_that_of_transformers(saved: Saved, tmp_path: Path, name: str) -> None:
    reference, model = theirs(saved[name]), load_model(saved[name])
    F.cross_entropy(reference(TOKENS[None]).logits[0, :-1], TOKENS[1:]).backward()
    F.cross_entropy(model(TOKENS)[0][:-1], TOKENS[1:]).backward()
    found = dict(gradients_as_weights(model, tmp_path / "gradients").named_parameters())
    expected = {key: one.grad for key, one in reference.named_parameters()}
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        if gradient is None:  # a bias that only chooses
            assert key.endswith("e_score_correction_bias")
            continue
        assert gradient.abs().max() > 1e-6, key
        assert (found[key] - gradient).abs().max() <= 2e-5 * gradient.abs().max(), key

"""New weights into live memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.errors import WeightsError
from etude.inference.patch import differing, initial_version, prepare
from etude.models import Transformer, hf_views
from etude.weights import Tensor

from .helpers import TINY, version

ROUTER = "model.layers.0.mlp.gate.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def bf16(view: torch.Tensor) -> np.ndarray:
    return view.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16).ravel()


@pytest.fixture
def model() -> Transformer:
    return Transformer(TINY, seed=1)


@pytest.fixture
def tensors(model: Transformer) -> dict[str, Tensor]:
    """What was published: the model's weights rounded to bf16, which the model does not hold yet."""
    return {n: Tensor("bf16", tuple(v.shape), bf16(v)) for n, v in hf_views(model).items()}


def test_a_whole_patch_writes_every_bit(model: Transformer, tensors: dict[str, Tensor]) -> None:
    views = hf_views(model)
    assert differing(views, tensors)
    prepare(views, tensors, version=version(1), changed={}, replaced=tensors).apply()
    assert differing(views, tensors) == []
    assert torch.equal(model.blocks[0].experts.router, model.blocks[0].experts.router.bfloat16().float())


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_changed_places_are_written_sparse_or_dense(model: Transformer, tensors: dict[str, Tensor], count: int) -> None:
    views = hf_views(model)
    prepare(views, tensors, version=version(1), changed={}, replaced=tensors).apply()
    codes = tensors[EXPERT].codes.copy()
    places = np.random.default_rng(0).choice(len(codes), count, replace=False)
    codes[places] ^= 0x8001
    tensors[EXPERT] = Tensor("bf16", tensors[EXPERT].shape, codes)
    patch = prepare(views, tensors, version=version(2), changed={EXPERT: (places, codes[places])}, replaced=[])
    assert bool(patch.sparse) == (count < 100)
    assert differing(views, tensors) == [EXPERT]
    patch.apply()
    assert differing(views, tensors) == []


def test_special_values_arrive_bit_for_bit(model: Transformer, tensors: dict[str, Tensor]) -> None:
    views = hf_views(model)
    codes = tensors[ROUTER].codes.copy()
    codes[:6] = [0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x0001, 0x0000]  # -0, infinities, a NaN with a payload, subnormal, 0
    tensors[ROUTER] = Tensor("bf16", tensors[ROUTER].shape, codes)
    prepare(views, tensors, version=version(1), changed={}, replaced=tensors).apply()
    assert differing(views, tensors) == []
    live = views[ROUTER].numpy().view(np.uint32).ravel()
    assert np.array_equal(live[:6] >> 16, codes[:6])


def test_weights_of_another_architecture_are_refused_and_nothing_is_touched(
    model: Transformer, tensors: dict[str, Tensor]
) -> None:
    views, before = hf_views(model), hf_views(Transformer(TINY, seed=1))
    for wrong in (
        {n: t for n, t in tensors.items() if n != ROUTER},
        {**tensors, "extra": tensors[ROUTER]},
        {**tensors, ROUTER: Tensor("bf16", (1,), np.zeros(1, np.uint16))},
    ):
        with pytest.raises(WeightsError, match="do not fit"):
            prepare(views, wrong, version=version(1), changed={}, replaced=wrong)
    assert all(torch.equal(views[n], before[n]) for n in views)


def test_an_integer_rendition_is_refused(model: Transformer, tensors: dict[str, Tensor]) -> None:
    wrong = {n: Tensor("u8", t.shape, t.codes.astype(np.uint8)) for n, t in tensors.items()}
    with pytest.raises(WeightsError, match="'u8'"):
        prepare(hf_views(model), wrong, version=version(1), changed={}, replaced=wrong)


def test_a_model_in_bf16_takes_bf16_and_refuses_what_it_would_round(tensors: dict[str, Tensor]) -> None:
    views = hf_views(Transformer(TINY, seed=2).bfloat16())
    prepare(views, tensors, version=version(1), changed={}, replaced=tensors).apply()
    assert differing(views, tensors) == []
    wide = {n: Tensor("f32", t.shape, t.codes.astype(np.uint32) << np.uint32(16)) for n, t in tensors.items()}
    with pytest.raises(WeightsError, match="'f32' cannot be held exactly"):
        prepare(views, wide, version=version(2), changed={}, replaced=wide)


def test_f16_values_are_widened_exactly(model: Transformer, tensors: dict[str, Tensor]) -> None:
    views = hf_views(model)
    half = {n: Tensor("f16", t.shape, views[n].half().numpy().view(np.uint16).ravel()) for n, t in tensors.items()}
    prepare(views, half, version=version(1), changed={}, replaced=half).apply()
    assert differing(views, half) == []
    assert torch.equal(views[ROUTER], views[ROUTER].half().float())


def test_a_checkpoints_version_follows_from_its_content() -> None:
    one, same, other = (initial_version(hf_views(Transformer(TINY, seed=s))) for s in (1, 1, 2))
    assert one == same
    assert one.step == 0
    assert one.digest != other.digest

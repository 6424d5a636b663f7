"""Swaps into the reference engine's memory: the weights afterwards, and what the engine does when a swap fails."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from etude.errors import EngineError, WeightsError
from etude.inference.weight_sync import initial_version
from etude.models import Transformer, hf_views
from etude.weights import Tensor
from etude.weights.follow.runtime_map import Derived, Map, named
from etude.weights.follow.targets import Swap, Target

from .helpers import TINY, ask, engine, everything, target, update, version

ROUTER = "model.layers.0.mlp.gate.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def bf16(view: torch.Tensor) -> np.ndarray:
    return view.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16).ravel()


@pytest.fixture
def model() -> Transformer:
    return Transformer(TINY, seed=1)


@pytest.fixture
def tensors(model: Transformer) -> dict[str, Tensor]:
    """The published tensors: the model's weights rounded to bf16, which differ from the model's own."""
    return {n: Tensor("bf16", tuple(v.shape), bf16(v)) for n, v in hf_views(model).items()}


def test_a_whole_version_writes_every_bit(model: Transformer, tensors: dict[str, Tensor]) -> None:
    assert target(model).differing(tensors)
    everything(model, tensors, 1).apply()
    assert target(model).differing(tensors) == []
    assert torch.equal(model.blocks[0].experts.router, model.blocks[0].experts.router.bfloat16().float())


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_a_swap_writes_changed_values_and_can_be_undone(
    model: Transformer, tensors: dict[str, Tensor], count: int
) -> None:
    everything(model, tensors, 1).apply()
    codes = tensors[EXPERT].codes.copy()
    places = np.sort(np.random.default_rng(0).choice(len(codes), count, replace=False))
    codes[places] ^= 0x8001
    new = tensors | {EXPERT: Tensor("bf16", tensors[EXPERT].shape, codes)}
    swap = target(model).prepare(update(2, new, changed={EXPERT: (places, codes[places])}), new)
    assert target(model).differing(new) == [EXPERT]
    swap.apply()
    assert target(model).differing(new) == []
    swap.undo()
    assert target(model).differing(tensors) == []


def test_special_values_arrive_bit_for_bit(model: Transformer, tensors: dict[str, Tensor]) -> None:
    codes = tensors[ROUTER].codes.copy()
    codes[:6] = [0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x0001, 0x0000]  # -0, infinities, a NaN with a payload, subnormal, 0
    tensors[ROUTER] = Tensor("bf16", tensors[ROUTER].shape, codes)
    everything(model, tensors, 1).apply()
    assert target(model).differing(tensors) == []
    live = hf_views(model)[ROUTER].numpy().view(np.uint32).ravel()
    assert np.array_equal(live[:6] >> 16, codes[:6])


def test_weights_of_another_architecture_are_refused_and_nothing_is_touched(
    model: Transformer, tensors: dict[str, Tensor]
) -> None:
    before = hf_views(Transformer(TINY, seed=1))
    for wrong in (
        {n: t for n, t in tensors.items() if n != ROUTER},
        {**tensors, "extra": tensors[ROUTER]},
        {**tensors, ROUTER: Tensor("bf16", (1,), np.zeros(1, np.uint16))},
        {n: Tensor("u8", t.shape, t.codes.astype(np.uint8)) for n, t in tensors.items()},
    ):
        with pytest.raises(WeightsError, match=r"has no '|no place for|is published as"):
            everything(model, wrong, 1)
    assert all(torch.equal(view, before[n]) for n, view in hf_views(model).items())


def test_a_model_in_bf16_takes_bf16_and_refuses_what_it_would_round(tensors: dict[str, Tensor]) -> None:
    narrow = Transformer(TINY, seed=2).bfloat16()
    everything(narrow, tensors, 1).apply()
    assert target(narrow).differing(tensors) == []
    wide = {n: Tensor("f32", t.shape, t.codes.astype(np.uint32) << np.uint32(16)) for n, t in tensors.items()}
    with pytest.raises(WeightsError, match="published as f32"):
        everything(narrow, wide, 2)


def test_f16_values_are_widened_exactly(model: Transformer, tensors: dict[str, Tensor]) -> None:
    views = hf_views(model)
    half = {n: Tensor("f16", t.shape, views[n].half().numpy().view(np.uint16).ravel()) for n, t in tensors.items()}
    everything(model, half, 1).apply()
    assert target(model).differing(half) == []
    assert torch.equal(views[ROUTER], views[ROUTER].half().float())


def failing(model: Transformer, tensors: dict[str, Tensor], *, undoable: bool) -> Swap:
    """A swap that writes all tensors, and whose hook then fails."""

    def fail() -> None:
        raise RuntimeError("no room to prepack")

    where = Map(named(hf_views(model)), derived=[Derived(frozenset({ROUTER}), fail, outputs=())])
    return Target(where).prepare(update(1, tensors), tensors, undoable=undoable)


def test_an_engine_whose_swap_could_not_be_undone_serves_nobody(model: Transformer, tensors: dict[str, Tensor]) -> None:
    async def story() -> None:
        async with engine(model) as served:
            with pytest.raises(WeightsError, match="was not adopted"):
                await asyncio.wrap_future(served.swap(failing(model, tensors, undoable=False)))
            with pytest.raises(EngineError, match="died"):
                await served.generate(ask("r"))

    asyncio.run(story())


def test_an_engine_whose_swap_failed_and_was_undone_serves_what_it_held(model: Transformer) -> None:
    old = {
        n: Tensor("f32", tuple(v.shape), v.numpy().view(np.uint32).ravel().copy()) for n, v in hf_views(model).items()
    }
    new = old | {ROUTER: Tensor("f32", old[ROUTER].shape, old[ROUTER].codes ^ np.uint32(1))}
    hooked = []

    def fail_once() -> None:
        hooked.append(1)
        if len(hooked) == 1:
            raise RuntimeError("no room to prepack")

    where = Map(named(hf_views(model)), derived=[Derived(frozenset({ROUTER}), fail_once)])
    swap = Target(where).prepare(update(1, new), new)

    async def story() -> None:
        async with engine(model) as served:
            with pytest.raises(WeightsError, match="was not adopted"):
                await asyncio.wrap_future(served.swap(swap))
            assert len((await served.generate(ask("r"))).token_ids) == 8
            assert served.version == version(0)
            assert target(model).differing(old) == []

    asyncio.run(story())


def test_a_checkpoints_version_follows_from_its_content() -> None:
    one, same, other = (initial_version(hf_views(Transformer(TINY, seed=s)).items()) for s in (1, 1, 2))
    assert one == same
    assert one.step == 0
    assert one.digest != other.digest

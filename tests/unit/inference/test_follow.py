"""Weight sync of the reference engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.errors import WeightsError
from etude.inference.engine import ReferenceEngine
from etude.inference.weight_sync import WeightSync, is_finite
from etude.models import Transformer, hf_views
from etude.stores import MemoryStore
from etude.telemetry import Telemetry, read_events
from etude.weights import Channel, Follower, Tensor
from etude.weights.tensors import DTYPES

from .helpers import TINY, ask, engine, target


class World:
    """An engine, a writer, and the weight sync between them, stepped by hand."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self.store = MemoryStore()
        self.channel = Channel(self.store)
        self.model = Transformer(TINY, seed=0)
        self.engine: ReferenceEngine = engine(self.model)
        self.follower = Follower(self.store)
        self.following = WeightSync(self.engine, hf_views(self.model), self.follower, telemetry=telemetry)

    def publish(self, step: int, seed: int | None = None, bad: str | None = None) -> None:
        views = hf_views(Transformer(TINY, seed=step if seed is None else seed))
        if bad is not None:
            views[bad][0, 1] = float("nan")
        tensors = {
            n: Tensor("bf16", tuple(v.shape), v.bfloat16().view(torch.int16).numpy().view(np.uint16).ravel())
            for n, v in views.items()
        }
        self.channel.publish(tensors, step=step, parent=None, rollout_ids=[])

    def exact(self) -> bool:
        return not target(self.model).differing(self.follower.tensors)


def test_it_adopts_what_is_published_and_nothing_twice() -> None:
    async def story() -> None:
        world = World()
        async with world.engine:
            assert world.following.step() is None
            for step in (1, 2, 3):
                world.publish(step)
                adopted = world.following.step()
                assert adopted is not None
                assert adopted.step == step == world.engine.version.step
                assert world.exact()
                assert world.following.step() is None
            assert world.engine.counters.swaps == 3

    asyncio.run(story())


def test_live_memory_that_was_damaged_is_healed_at_the_next_swap() -> None:
    async def story() -> None:
        world = World()
        async with world.engine:
            world.publish(1)
            world.following.step()
            with torch.no_grad():
                world.model.blocks[1].attention.out[3, 3] += 1.0
            assert not world.exact()
            world.publish(2, seed=1)  # the same weights again: the update itself changes nothing
            world.following.step()
            assert world.exact()

    asyncio.run(story())


def test_weights_that_do_not_fit_are_told_and_the_engine_goes_on_with_what_it_holds() -> None:
    async def story() -> None:
        world = World()
        async with world.engine:
            world.publish(1)
            world.following.step()
            world.channel.publish(
                {"other": Tensor("bf16", (1,), np.zeros(1, np.uint16))}, step=2, parent=None, rollout_ids=[]
            )
            with pytest.raises(WeightsError, match="has no '"):
                world.following.step()
            assert world.engine.version.step == 1
            assert len((await world.engine.generate(ask("r"))).token_ids) == 8
            world.publish(3)
            world.following.step()
            assert world.engine.version.step == 3
            assert world.exact()

    asyncio.run(story())


@pytest.mark.parametrize("first", [False, True])
def test_weights_with_nan_are_refused_by_name_and_the_engine_keeps_its_version(first: bool) -> None:
    async def story() -> None:
        world = World()
        async with world.engine:
            if not first:
                world.publish(1)
                world.following.step()
            held = {name: view.clone() for name, view in hf_views(world.model).items()}
            world.publish(2, bad="model.layers.1.mlp.gate.weight")
            for _ in range(2):
                with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.gate\.weight of v000002\S* is not finite"):
                    world.following.step()
            assert all(torch.equal(view, held[name]) for name, view in hf_views(world.model).items())
            world.publish(3)
            world.following.step()
            assert world.engine.version.step == 3
            assert world.exact()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bf16", torch.bfloat16),
        ("f16", torch.float16),
        ("f8_e4m3", torch.float8_e4m3fn),
        ("f8_e5m2", torch.float8_e5m2),
    ],
)
def test_every_code_that_is_no_number_is_known_as_such(name: str, kind: torch.dtype) -> None:
    codes = np.arange(1 << DTYPES[name].bits).astype(DTYPES[name].codes)
    signed = torch.from_numpy(codes.view(f"i{codes.itemsize}"))
    true = torch.isfinite(signed.view(kind).float()).numpy()
    assert is_finite(codes[true], DTYPES[name])
    assert not any(is_finite(codes[i : i + 1], DTYPES[name]) for i in np.flatnonzero(~true))
    assert is_finite(np.arange(256, dtype=np.uint8), DTYPES["f4_e2m1x2"])


def test_adoptions_and_trouble_are_events(tmp_path: Path) -> None:
    async def story() -> None:
        world = World(Telemetry(tmp_path / "engine-0.jsonl", process="engine-0"))
        async with world.engine:
            world.publish(1)
            world.following.start_at_head()
            assert world.engine.version.step == 1
            world.channel.publish(
                {"other": Tensor("bf16", (1,), np.zeros(1, np.uint16))}, step=2, parent=None, rollout_ids=[]
            )
            while not world.engine.trouble:  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.001)
            world.following.stop()

    asyncio.run(story())
    adopt, trouble = list(read_events(tmp_path))[:2]
    assert adopt["kind"] == "engine.adopt"
    assert {"step", "version", "fetch_s", "pause_s", "num_running"} <= adopt.keys()
    assert trouble["kind"] == "engine.trouble"
    assert "publish a version of the engine's architecture" in trouble["reason"]

"""Weights swapped under live requests, in exact mode: the same ones change no bit, others do from that token on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tests.parity.same_bits import VERSION, asked, prompts, said, sharp
from tests.parity.test_exact import FAMILIES, every_model

from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.inference.weight_sync import WeightSync
from etude.models import ModelConfig, Transformer, hf_views
from etude.numerics.exact.operators import Exact
from etude.records import Completion
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Tensor

LENGTHS = (3, 17, 70, 400)  # the last one's prompt is still being read when the first weights come
NUM = 24
CHANGED = "model.layers.1.self_attn.o_proj.weight"


def weights(config: ModelConfig, *, changed: bool = False) -> dict[str, Tensor]:
    """What `sharp` makes; `changed`: one matrix with the last bit flipped that bf16 has of each number."""
    views = hf_views(sharp(config, Exact()))
    codes = {name: view.contiguous().numpy().view(np.uint32).ravel() for name, view in views.items()}
    if changed:
        codes[CHANGED] = codes[CHANGED] ^ np.uint32(1 << 16)
    return {name: Tensor("f32", tuple(view.shape), codes[name]) for name, view in views.items()}


def swapped(model: Transformer, coming: Sequence[Mapping[str, Tensor]]) -> list[Completion]:
    """What live requests are answered while each of `coming` is published and adopted in turn, and then a further
    turn of the first one's session. The first version is written whole, a later one as a delta."""

    async def story() -> list[Completion]:
        config = EngineConfig(context_tokens=512, chunk_tokens=16, step_tokens=16)
        store = MemoryStore()
        channel = Channel(store)
        requests = [asked(i, prompt, tokens=NUM) for i, prompt in enumerate(prompts(model.config, LENGTHS))]
        async with ReferenceEngine(model, version=VERSION, config=config) as engine:
            following = WeightSync(engine, hf_views(model), Follower(store))
            work = [asyncio.create_task(engine.generate(request)) for request in requests]
            for step, tensors in enumerate(coming, start=1):
                while engine.counters.tokens < 20 * step:  # noqa: ASYNC110 - a counter has no event
                    await asyncio.sleep(1e-3)
                await engine.pause()
                assert (await engine.info()).num_running == len(requests)
                channel.publish(tensors, step=step, parent=None, rollout_ids=[])
                await asyncio.to_thread(following.step)
                await engine.resume()
            done = await asyncio.gather(*work)
            assert engine.counters.swaps == len(coming)
            more = np.concatenate([requests[0].prompt_ids, done[0].token_ids, requests[1].prompt_ids])
            return [*done, await engine.generate(asked(0, more, tokens=NUM))]

    return asyncio.run(story())


@every_model
def test_the_same_weights_swapped_in_under_live_requests_change_no_bit(family: str, dtype: torch.dtype) -> None:
    model, same = sharp(FAMILIES[family], Exact(dtype)), weights(FAMILIES[family])
    undisturbed, done = swapped(model, []), swapped(model, [same, same])
    assert said(done) == said(undisturbed)
    for one in done[:-2]:
        assert [(span.version.step, span.kv_epoch) for span in one.spans] == [(0, 0), (1, 1), (2, 2)]
        assert all(span.num_tokens for span in one.spans)
    assert (done[-2].spans[0].num_tokens, done[-2].spans[-1].kv_epoch) == (0, 2), "its prompt was half read"
    assert (done[-1].num_cached, done[-1].spans[0].kv_epoch) == (0, 0), "a session's keys are of one version"
    assert undisturbed[-1].num_cached > 0


@every_model
def test_other_weights_change_only_tokens_sampled_after_them(family: str, dtype: torch.dtype) -> None:
    model, same = sharp(FAMILIES[family], Exact(dtype)), weights(FAMILIES[family])
    undisturbed = swapped(model, [])
    done = swapped(model, [same, weights(FAMILIES[family], changed=True)])
    for one, (ids, logprobs) in zip(done[:-1], said(undisturbed), strict=False):
        before = sum(span.num_tokens for span in itertools.takewhile(lambda s: s.version.step < 2, one.spans))
        assert before < NUM
        assert one.token_ids[:before].tolist() == ids[:before]
        assert one.logprobs[:before].tolist() == logprobs[:before]
        assert one.logprobs[before:].tolist() != logprobs[before:]

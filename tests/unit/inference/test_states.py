"""States of gated delta layers in an engine: prefixes, forks and sessions change no bit; what cannot be is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.models.families import DEEPSEEK32, NEXT

from etude.config import Plugin
from etude.errors import ConfigError, EngineError
from etude.inference.config import Speculation
from etude.inference.device_memory import DeviceMemory
from etude.inference.engine import ReferenceEngine
from etude.models import ModelConfig, Transformer
from etude.numerics import Native
from etude.records import Completion, CompletionRequest

from .helpers import EngineConfig, ask, version
from .test_prefixes import told

CHUNK = 16


def serving(sizes: ModelConfig = NEXT, *, share: bool = True, **settings: Any) -> ReferenceEngine:
    config = {"max_sequences": 3, "context_tokens": 64, "chunk_tokens": CHUNK, "step_tokens": 32, **settings}
    return ReferenceEngine(
        Transformer(sizes, seed=1), version=version(0), config=EngineConfig(**config), share_prefixes=share
    )


def forest(seed: int) -> list[CompletionRequest]:
    """Requests that extend a part of an earlier one's prompt, some in its session."""
    draw, prompts, requests = np.random.default_rng(seed), [np.zeros(0, np.int32)], []
    for i in range(20):
        stem = prompts[draw.integers(len(prompts))]
        stem = stem[: draw.integers(len(stem) // 2, len(stem) + 1)]
        new = draw.integers(0, NEXT.vocab_size, draw.integers(1, 20))
        prompts.append(np.concatenate([stem, new]).astype(np.int32)[:50])
        fields = {"keep_session": bool(draw.integers(2)), "routes_from": 0, "session": f"s{draw.integers(4)}"}
        requests.append(ask(f"r{i}", prompts[-1], int(draw.integers(1, 12)), **fields))
    return requests


async def answers(engine: ReferenceEngine, requests: list[CompletionRequest], *, together: bool) -> list[Completion]:
    async with engine:
        if together:
            return list(await asyncio.gather(*(engine.generate(request) for request in requests)))
        return [await engine.generate(request) for request in requests]


@pytest.mark.parametrize("seed", range(3))
def test_a_forest_of_prompts_has_the_bits_of_an_engine_that_computes_every_prompt(seed: int) -> None:
    requests = forest(seed)
    alone = asyncio.run(answers(serving(share=False), requests, together=False))
    for together in (True, False):
        done = asyncio.run(answers(serving(), requests, together=together))
        assert list(map(told, done)) == list(map(told, alone))
        assert sum(one.num_cached for one in done) > 0


def test_a_prefix_is_reused_at_chunks_and_at_the_end_of_a_session() -> None:
    prompt = np.arange(40, dtype=np.int32) % 24

    async def story() -> list[int]:
        async with serving() as engine:
            first = await engine.generate(ask("a", prompt, 6, session="one", keep_session=True))
            longer = np.concatenate([prompt, first.token_ids, prompt[:3]]).astype(np.int32)
            sibling = await engine.generate(ask("b", prompt, 2, session="two"))
            again = await engine.generate(ask("c", longer, 2, session="one"))
            return [first.num_cached, sibling.num_cached, again.num_cached]

    assert asyncio.run(story()) == [0, 2 * CHUNK, 45]  # all but the last sampled token were computed


@pytest.mark.parametrize("speculation", [Speculation.LOOK_UP, Plugin("drafters:Repeat")])
def test_speculation_is_refused(speculation: Speculation | Plugin) -> None:
    with pytest.raises(EngineError, match="speculation") as raised:
        serving(speculation=speculation)
    assert "gated delta layers" in raised.value.facts


def test_engines_on_other_devices_refuse_these_layers() -> None:
    sizes = {"num_slots": 1, "context_tokens": 8, "device": torch.device("meta")}
    with pytest.raises(ConfigError, match="qwen3_next") as raised:
        DeviceMemory(NEXT, Native(), **sizes)
    assert "gated delta layers" in raised.value.facts


def test_an_engine_on_another_device_refuses_contexts_within_which_an_indexer_chooses_keys() -> None:
    assert DEEPSEEK32.latent is not None
    assert DEEPSEEK32.latent.indexer is not None
    most = DEEPSEEK32.latent.indexer.top_k
    sizes = {"num_slots": 1, "device": torch.device("meta")}
    DeviceMemory(DEEPSEEK32, Native(), context_tokens=most, **sizes)
    with pytest.raises(ConfigError, match=f"contexts of {most + 1} tokens") as raised:
        DeviceMemory(DEEPSEEK32, Native(), context_tokens=most + 1, **sizes)
    assert "index_topk" in raised.value.facts

"""Rows of drafts have the bits of one-token decoding, beside other sequences and across sizes of key windows.

Also where MTP heads draft, at three temperatures."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.parity.same_bits import VERSION, asked, prompts, said, sampled, sharp
from tests.parity.test_exact import FAMILIES
from tests.unit.inference.drafted import Known, NoCosts, answers_of

from etude.inference.config import EngineConfig, Speculation
from etude.inference.engine import ReferenceEngine
from etude.numerics.exact.operators import Exact
from etude.records import Completion


@pytest.mark.parametrize(("family", "dtype"), [("qwen3-moe", torch.bfloat16), ("deepseek-v3", torch.float32)])
def test_drafts_change_no_bit_in_exact_mode(family: str, dtype: torch.dtype) -> None:
    model = sharp(FAMILIES[family], Exact(dtype))
    requests = [asked(i, prompt, tokens=24) for i, prompt in enumerate(prompts(model.config, (3, 60, 200, 440)))]
    expected = sampled(model, requests)

    async def story() -> list[Completion]:
        drafter = Known(answers_of(requests, expected), right=0.9)
        config = EngineConfig(context_tokens=512)
        async with ReferenceEngine(model, version=VERSION, config=config, drafter=drafter) as engine:
            assert engine._speculator is not None
            engine._speculator.costs = NoCosts()
            done = await asyncio.gather(*(engine.generate(request) for request in requests))
            assert engine.counters.drafted_tokens > engine.counters.accepted_tokens > 40
            return list(done)

    done = asyncio.run(story())
    assert said(done) == said(expected)
    assert all(np.array_equal(one.routes, other.routes) for one, other in zip(done, expected, strict=True))


@torch.no_grad()
@pytest.mark.parametrize(("family", "dtype"), [("qwen3-moe", torch.bfloat16), ("deepseek-v3", torch.float32)])
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.4])
def test_heads_change_no_bit_in_exact_mode(family: str, dtype: torch.dtype, temperature: float) -> None:
    plain = sharp(FAMILIES[family], Exact(dtype))
    model = sharp(replace(FAMILIES[family], mtp_heads=2), Exact(dtype))
    texts = prompts(plain.config, (3, 60, 200, 440))
    requests = [asked(i, text, tokens=24, temperature=temperature) for i, text in enumerate(texts)]
    expected = sampled(plain, requests)

    async def story() -> list[Completion]:
        config = EngineConfig(context_tokens=512, speculation=Speculation.HEADS)
        async with ReferenceEngine(model, version=VERSION, config=config) as engine:
            assert engine._speculator is not None
            engine._speculator.costs = NoCosts()
            done = await asyncio.gather(*(engine.generate(request) for request in requests))
            assert engine.counters.drafted_tokens > 40
            return list(done)

    done = asyncio.run(story())
    assert said(done) == said(expected)
    assert all(np.array_equal(one.routes, other.routes) for one, other in zip(done, expected, strict=True))

"""Sampler, probe and learner compute the same bits for a token, in every dtype and family."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import msgspec
import numpy as np
import pytest
import torch
from tests.parity.same_bits import VERSION, asked, learned, prompts, said, sampled, sharp, verified
from tests.tiers import first_few

from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import ModelConfig
from etude.models.components import ClampedSwiglu, GatedDelta, Indexer, Latent, Llama3, Routing, Scores
from etude.numerics.exact import matmul
from etude.numerics.exact.operators import Exact
from etude.numerics.native import Native
from etude.records import Completion, CompletionRequest

QWEN = ModelConfig(
    vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, expert_size=20,
    num_experts=6, top_k=2, context_tokens=512,
)  # fmt: skip
DEEPSEEK = ModelConfig(
    vocab_size=61, hidden_size=32, num_layers=2, num_heads=3, num_kv_heads=3, head_dim=14, expert_size=20,
    num_experts=6, top_k=3, context_tokens=512, family="deepseek_v3", dense_layers=(0,), dense_size=36,
    num_shared=1, routing=Routing(Scores.SIGMOID, scaling=2.5, num_groups=3, top_groups=2),
    latent=Latent(kv_rank=24, nope_dim=8, rope_dim=6, value_dim=10, q_rank=20),
)  # fmt: skip
DEEPSEEK32 = dataclasses.replace(
    DEEPSEEK, family="deepseek_v32",
    latent=Latent(
        kv_rank=24, nope_dim=8, rope_dim=6, value_dim=10, q_rank=20, indexer=Indexer(heads=3, width=11, top_k=48)
    ),
)  # fmt: skip
OLMOE = dataclasses.replace(QWEN, head_dim=8, family="olmoe")
GLM = dataclasses.replace(
    DEEPSEEK, num_heads=4, num_kv_heads=2, head_dim=16, family="glm4_moe", latent=None, attention_bias=True,
    rotary_dim=8, routing=Routing(Scores.SIGMOID, scaling=2.5),
)  # fmt: skip
GPT_OSS = dataclasses.replace(
    QWEN, family="gpt_oss", attention_bias=True, sliding_layers=(0,), sliding_window=24, swiglu=ClampedSwiglu(limit=0.5)
)
NEXT = dataclasses.replace(
    QWEN, family="qwen3_next", num_layers=3, num_shared=2, rotary_dim=8, linear_layers=(0, 2),
    linear=GatedDelta(key_heads=2, value_heads=4, key_dim=13, value_dim=9),
)  # fmt: skip
QWEN35 = dataclasses.replace(
    NEXT, family="qwen3_5_moe_text",
    linear=GatedDelta(key_heads=2, value_heads=4, key_dim=13, value_dim=9, by_head=False),
)  # fmt: skip
MINIMAX = dataclasses.replace(QWEN, family="minimax_m2", rotary_dim=8, routing=Routing(Scores.SIGMOID))
MIXTRAL = dataclasses.replace(QWEN, family="mixtral")
LLAMA = dataclasses.replace(
    QWEN, family="llama", num_experts=0, top_k=0, dense_size=36,
    llama3=Llama3(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_tokens=128),
)  # fmt: skip
QWEN2 = dataclasses.replace(LLAMA, family="qwen2", llama3=None)
FAMILIES = {
    "deepseek-v3.2": DEEPSEEK32,
    "qwen3-next": NEXT,
    "qwen3-moe": QWEN,
    "gpt-oss": GPT_OSS,
    "deepseek-v3": DEEPSEEK,
    "olmoe": OLMOE,
    "glm4-moe": GLM,
    "qwen3.5-moe": QWEN35,
    "minimax-m2": MINIMAX,
    "mixtral": MIXTRAL,
    "llama": LLAMA,
    "qwen2": QWEN2,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (3, 17, 70, 150, 201)
NUM = 12
every_model = pytest.mark.parametrize(
    ("family", "dtype"), first_few(itertools.product(FAMILIES, DTYPES), 19), ids=lambda v: str(v).removeprefix("torch.")
)


@every_model
def test_sampler_probe_and_learner_agree_to_the_bit(family: str, dtype: torch.dtype) -> None:
    model = sharp(FAMILIES[family], Exact(dtype))
    given = prompts(model.config, LENGTHS)
    done = sampled(model, [asked(i, prompt, tokens=NUM) for i, prompt in enumerate(given)])
    texts = [[*prompt.tolist(), *answer.token_ids.tolist()] for prompt, answer in zip(given, done, strict=True)]
    probed = verified(model, texts)
    assert [scores[-NUM:] for scores in probed] == [answer.logprobs.tolist() for answer in done]
    assert learned(sharp(FAMILIES[family], Exact(dtype)), texts) == probed


@every_model
def test_neither_company_nor_chunks_nor_threads_change_a_bit(family: str, dtype: torch.dtype) -> None:
    model = sharp(FAMILIES[family], Exact(dtype))
    requests = [asked(i, p, tokens=6, temperature=0.7) for i, p in enumerate(prompts(model.config, LENGTHS))]
    alone = said(sampled(model, requests, together=False))
    assert said(sampled(model, requests)) == alone
    assert said(sampled(model, requests, chunk_tokens=17, step_tokens=40)) == alone
    try:
        torch.set_num_threads(2)
        assert said(sampled(model, requests)) == alone
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("family", first_few(FAMILIES, 7))
def test_neither_cached_prefixes_nor_a_pause_change_a_bit(family: str) -> None:
    model = sharp(FAMILIES[family], Exact(torch.bfloat16))
    first, more = prompts(model.config, (40, 31))

    async def story() -> tuple[list[float], list[float]]:
        config = EngineConfig(context_tokens=512, chunk_tokens=16)
        async with ReferenceEngine(model, version=VERSION, config=config) as engine:
            before = await engine.generate(asked(0, first, tokens=20))
            going_on = asked(0, np.concatenate([first, before.token_ids, more]), tokens=20)
            work = asyncio.create_task(engine.generate(going_on))
            await engine.pause()
            await engine.resume()
            with_cache = await work
            assert with_cache.num_cached > 40
            texts = [[*going_on.prompt_ids.tolist(), *with_cache.token_ids.tolist()]]
            return with_cache.logprobs.tolist(), (await engine.verify(texts[0]))[1][-20:]

    assert len(set(map(tuple, asyncio.run(story())))) == 1


@every_model
def test_a_fork_changes_no_bit(family: str, dtype: torch.dtype) -> None:
    model = sharp(FAMILIES[family], Exact(dtype))
    first, more = prompts(model.config, (70, 31))

    async def story() -> tuple[Completion, CompletionRequest]:
        config = EngineConfig(context_tokens=512, chunk_tokens=16)
        async with ReferenceEngine(model, version=VERSION, config=config) as engine:
            before = await engine.generate(asked(0, first, tokens=20))
            branch = asked(5, np.concatenate([first, before.token_ids[:9], more]), tokens=20)
            return await engine.generate(msgspec.structs.replace(branch, session_id="fork", fork_from="r0")), branch

    forked, branch = asyncio.run(story())
    (alone,) = sampled(model, [branch])
    least = 64 if model.config.linear_layers else 79  # states are kept at multiples of 16 tokens
    assert (forked.num_cached >= least, alone.num_cached) == (True, 0)
    assert said([forked]) == said([alone])
    assert np.array_equal(forked.routes, alone.routes)


@every_model
def test_siblings_that_share_a_prompt_have_the_bits_of_each_alone(family: str, dtype: torch.dtype) -> None:
    model = sharp(FAMILIES[family], Exact(dtype))
    system, *own = prompts(model.config, (150, 3, 40, 17, 1))
    requests = [asked(i, np.concatenate([system, more]), tokens=6) for i, more in enumerate(own)]
    alone = [sampled(model, [request], share_prefixes=False)[0] for request in requests]
    shared = sampled(model, requests, chunk_tokens=50)
    assert [done.num_cached for done in alone] == [0, 0, 0, 0]
    assert [done.num_cached for done in shared] == [0, 150, 150, 150]
    assert said(shared) == said(alone)
    assert all(np.array_equal(one.routes, other.routes) for one, other in zip(shared, alone, strict=True))


def test_one_temperature_is_one_number_in_sampler_and_learner() -> None:
    model = sharp(QWEN, Exact(torch.bfloat16))
    (prompt,) = prompts(QWEN, (30,))
    (done,) = sampled(model, [asked(5, prompt, tokens=NUM, temperature=0.83)])
    (scores,) = learned(model, [[*prompt.tolist(), *done.token_ids.tolist()]], temperature=0.83)
    assert scores[-NUM:] == done.logprobs.tolist()


def test_native_operators_differ_which_shows_that_these_tests_can_fail() -> None:
    def differ(dtype: torch.dtype) -> bool:
        model = sharp(QWEN, Native(dtype))
        given = prompts(QWEN, LENGTHS)
        done = sampled(model, [asked(i, prompt, tokens=NUM) for i, prompt in enumerate(given)])
        texts = [[*prompt.tolist(), *answer.token_ids.tolist()] for prompt, answer in zip(given, done, strict=True)]
        return [scores[-NUM:] for scores in verified(model, texts)] != [answer.logprobs.tolist() for answer in done]

    assert differ(torch.float32) or differ(torch.bfloat16)  # on some processors one of them has equal bits


def test_rows_below_the_measured_count_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "padded_rows", lambda n: n)
    model = sharp(QWEN, Exact())
    requests = [asked(i, prompt, tokens=6) for i, prompt in enumerate(prompts(QWEN, LENGTHS))]
    assert said(sampled(model, requests, together=False)) != said(sampled(model, requests))

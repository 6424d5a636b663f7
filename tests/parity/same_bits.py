"""One forward pass by several engines and learners, whose results must be equal to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch

from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import ModelConfig, Packed, Transformer
from etude.numerics.operators import Operators
from etude.records import Completion, CompletionRequest, Sampling, Version

VERSION = Version(step=0, incarnation="00000000", digest="ab" * 32)


def sharp(config: ModelConfig, operators: Operators, seed: int = 1) -> Transformer:
    """Random weights with predictions so sharp that a wrong number shows, biases, attention sinks and indexers."""
    model = Transformer(config, seed=seed, operators=operators)
    with torch.no_grad():
        model.embedding.mul_(3)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view(parameter.shape))
        for name, buffer in model.named_buffers():
            if ".indexer_" in name:
                drawn = torch.Generator().manual_seed(seed + len(name))
                buffer.copy_(torch.randn(buffer.shape, generator=drawn))
    return model


def prompts(config: ModelConfig, sizes: Sequence[int]) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, config.vocab_size, size).astype(np.int32) for size in sizes]


def asked(number: int, prompt: np.ndarray, *, tokens: int, temperature: float = 1.0) -> CompletionRequest:
    sampling = Sampling(max_tokens=tokens, stop_token_ids=(), seed=number, temperature=temperature)
    return CompletionRequest(request_id=f"r{number}", session_id=f"r{number}", prompt_ids=prompt, sampling=sampling)


def sampled(
    model: Transformer,
    requests: Sequence[CompletionRequest],
    *,
    together: bool = True,
    share_prefixes: bool = True,
    **settings: int,
) -> list[Completion]:
    """What an engine answers, to all at once or to one after another."""

    async def story() -> list[Completion]:
        config = EngineConfig(context_tokens=model.config.context_tokens, **settings)  # type: ignore[arg-type]
        async with ReferenceEngine(model, version=VERSION, config=config, share_prefixes=share_prefixes) as engine:
            if together:
                return list(await asyncio.gather(*(engine.generate(request) for request in requests)))
            return [await engine.generate(request) for request in requests]

    return asyncio.run(story())


def said(completions: Sequence[Completion]) -> list[tuple[list[int], list[float]]]:
    return [(done.token_ids.tolist(), done.logprobs.tolist()) for done in completions]


def verified(model: Transformer, texts: Sequence[list[int]]) -> list[list[float]]:
    """What an engine says of whole texts."""

    async def story() -> list[list[float]]:
        config = EngineConfig(context_tokens=model.config.context_tokens)
        async with ReferenceEngine(model, version=VERSION, config=config) as engine:
            return [(await engine.verify(text))[1] for text in texts]

    return asyncio.run(story())


def learned(model: Transformer, texts: Sequence[list[int]], temperature: float = 1.0) -> list[list[float]]:
    """What a learner's packed forward says of them, all but the first token of each."""
    inputs, targets = (torch.tensor([t for text in texts for t in text[part]]) for part in (slice(-1), slice(1, None)))
    lengths = [len(text) - 1 for text in texts]
    done = model.train().run(inputs, Packed(lengths, model.operators))
    logprobs = model.operators.log_softmax(done.logits, temperature).gather(1, targets[:, None])[:, 0]
    logprobs.sum().backward()
    return [part.tolist() for part in torch.split(logprobs.detach(), lengths)]

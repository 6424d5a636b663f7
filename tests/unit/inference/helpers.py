"""Helpers of the inference tests: a tiny random model, updates, and requests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from etude.inference import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import ModelConfig, Transformer, hf_views
from etude.records import CompletionRequest, Sampling, Version
from etude.weights import Tensor, Update
from etude.weights.follow.runtime_map import Map, named
from etude.weights.follow.targets import Swap, Target

TINY = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    expert_size=32,
    num_experts=4,
    top_k=2,
    context_tokens=2048,
)


def version(step: int) -> Version:
    return Version(step=step, incarnation="0a1b2c3d", digest=f"{step:064x}")


def target(model: Transformer) -> Target:
    """The live weights of a model by published name."""
    return Target(Map(named(hf_views(model))))


def update(step: int, tensors: Mapping[str, Tensor], **changed: object) -> Update:
    """An update to `tensors`. All are new unless `changed` or `replaced` is given."""
    said = {"changed": {}, "replaced": {} if "changed" in changed else tensors, **changed}
    return Update(version=version(step), removed=(), fetch_s=0.0, fetched_bytes=0, **said)


def everything(model: Transformer, tensors: Mapping[str, Tensor], step: int) -> Swap:
    """A swap that writes every tensor."""
    return target(model).prepare(update(step, tensors), tensors, undoable=False)


def engine(model: Transformer | None = None, *, step: int = 0, **settings: object) -> ReferenceEngine:
    config = EngineConfig(**{"max_sequences": 8, "context_tokens": 512, **settings})
    return ReferenceEngine(model or Transformer(TINY, seed=1), version=version(step), config=config)


def ask(
    name: str,
    prompt: int | np.ndarray = 10,
    max_tokens: int = 8,
    *,
    session: str | None = None,
    temperature: float = 1.0,
    stop: tuple[int, ...] = (),
    vocab_size: int = TINY.vocab_size,
    **fields: object,
) -> CompletionRequest:
    """Make a request. `prompt`: token ids, or a number of random ones, seeded by the name."""
    seed = sum(name.encode())
    if isinstance(prompt, int):
        prompt = np.random.default_rng(seed).integers(0, vocab_size, prompt).astype(np.int32)
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=stop, temperature=temperature, seed=seed)
    return CompletionRequest(
        request_id=name, session_id=session or name, prompt_ids=prompt, sampling=sampling, **fields
    )

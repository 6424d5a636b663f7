"""What would fit where a plan does not: each change of a setting by itself, tried by the same arithmetic. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from etude.models.config import ModelConfig
from etude.plan import arithmetic
from etude.plan.planning import memory_of
from etude.plan.shape import Layout

MOST_RANKS = 4096
LORA_RANK = 32
BLOCK = 1024


def would_fit(model: ModelConfig, layout: Layout, room: float) -> list[str]:
    """Changes after which the learner's rank or the engine's device fits into `room` bytes, for those that do not: the
    least of each kind, the ones that cost least first. Settings as a config has them."""
    learner, engine = memory_of(model, layout, room)
    found = [] if learner.fits else list(_of_learner(model, layout, room))
    return found + ([] if engine.fits else list(_of_engine(model, layout, room)))


def _of_learner(model: ModelConfig, layout: Layout, room: float) -> Iterator[str]:
    def fits(changed: Layout) -> bool:
        return memory_of(model, changed, room)[0].fits

    training = layout.training
    again = replace(layout, training=replace(training, recompute=True))
    if not training.recompute and fits(again):
        yield "learner.recompute = true: a third more arithmetic"
    for parts in (2, 4, 8):
        shared = replace(again, budget_tokens=-(-layout.budget_tokens // parts))
        if layout.learner_ranks % parts == 0 and not fits(again) and fits(shared):
            yield f"learner.context_parallel x {parts}{_and_recompute(layout)}"
            break
    for what, base in (("", layout), (_and_recompute(layout), again)):
        ranks = next((n for n in _doubled(layout.learner_ranks) if fits(replace(base, learner_ranks=n))), None)
        if ranks is not None:
            yield f"learner.ranks = {ranks}{what}"
        if not what and again == layout:
            break
    if not training.lora_rank:
        adapters = replace(again.training, lora_rank=LORA_RANK, muon=False)
        most = min(model.num_experts or 1, layout.learner_ranks)
        for expert_parallel in (n for n in (1, *_doubled(1)) if n <= most and layout.learner_ranks % n == 0):
            if fits(replace(again, training=replace(adapters, expert_parallel=expert_parallel))):
                shares = f", learner.expert_parallel = {expert_parallel}" if expert_parallel > 1 else ""
                yield f"adapters: learner.lora_rank = {LORA_RANK}{shares}{_and_recompute(layout)}"
                break
        muon = replace(again, training=replace(again.training, muon=True))
        if not training.muon and not fits(again) and fits(muon):
            yield f'learner.optimizer = "muon"{_and_recompute(layout)}'


def _of_engine(model: ModelConfig, layout: Layout, room: float) -> Iterator[str]:
    def fits(changed: Layout) -> bool:
        return memory_of(model, changed, room)[1].fits

    half = replace(layout, dtype_bytes=arithmetic.BF16_BYTES)
    if layout.dtype_bytes > arithmetic.BF16_BYTES and fits(half):
        yield 'engine.dtype = "bfloat16"'
    left = room - memory_of(model, layout, room)[1].weights
    token = arithmetic.kv_bytes_token(model, layout.dtype_bytes) * arithmetic.cache_share(model, layout.engine_ranks)
    tokens = int(left / token) // BLOCK * BLOCK
    if tokens >= layout.context_tokens:
        yield (
            f"a cache of {tokens:,} tokens: engine.max_sequences = {tokens // layout.context_tokens}, or kv_tokens = "
            f"{tokens} of vLLM and SGLang"
        )
    for ranks in _doubled(layout.engine_ranks):
        if model.num_heads % ranks == 0 and fits(replace(layout, engine_ranks=ranks)):
            yield f"{ranks} devices an engine: --tensor-parallel-size={ranks}, or --engine-ranks {ranks}"
            break


def _and_recompute(layout: Layout) -> str:
    return "" if layout.training.recompute else " and learner.recompute = true"


def _doubled(ranks: int) -> Iterator[int]:
    while (ranks := 2 * ranks) <= MOST_RANKS:
        yield ranks

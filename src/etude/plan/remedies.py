"""Suggests settings with which a run that does not fit into memory would fit. Each is planned before it is suggested.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from etude.models.config import ModelConfig
from etude.plan.hardware import MATRIX_BYTES
from etude.plan.planning import Memory, memory_of
from etude.plan.shape import Layout

MOST_RANKS = 65_536
ADAPTER_RANK = 32
FITTED_SHARE = 0.95
"""Share of the memory that a suggestion of fewer tokens fills."""


def learner_remedies(model: ModelConfig, layout: Layout, room: float) -> Iterator[str]:
    """Yield settings with which one rank of the learner fits into `room` bytes, the cheapest first. Yields nothing
    where it fits already."""

    def memory(changed: Layout) -> Memory:
        return memory_of(model, changed, room, room)[0]

    if memory(layout).fits:
        return
    training = layout.training
    again = replace(layout, training=replace(training, recompute=True))
    if not training.recompute and memory(again).fits:
        yield "learner.recompute = true"
        return
    beside = "" if training.recompute else " and learner.recompute = true"
    if ranks := _fewest(layout.learner_ranks, lambda n: memory(replace(again, learner_ranks=n)).fits):
        yield f"learner.ranks = {ranks}{beside}"
    if not training.lora_rank:
        adapters = replace(again, training=replace(again.training, lora_rank=ADAPTER_RANK))
        if ranks := _fewest(layout.learner_ranks, lambda n: memory(replace(adapters, learner_ranks=n)).fits):
            more = f", learner.ranks = {ranks}" if ranks != layout.learner_ranks else ""
            yield f"adapters: learner.lora_rank = {ADAPTER_RANK}{more}{beside}"
    if layout.budget_tokens > 1024:
        less = replace(again, budget_tokens=layout.budget_tokens // 4)
        if memory(less).fits:
            yield f"a quarter of the tokens in a forward: learner.budget_tokens = {less.budget_tokens}{beside}"


def engine_remedies(model: ModelConfig, layout: Layout, room: float) -> Iterator[str]:
    """Yield settings with which one device of an engine fits into `room` bytes. Yields nothing where it fits
    already."""

    def memory(changed: Layout) -> Memory:
        return memory_of(model, changed, room, room)[1]

    now = memory(layout)
    if now.fits:
        return
    left = FITTED_SHARE * room - now.weights
    if left > 0:
        tokens = int(left / now.cache * layout.kv_tokens)
        yield f"keys and values of {tokens:,} tokens for {layout.kv_tokens:,}: fewer engine.max_sequences, or kv_tokens"

    def fits_on(devices: int) -> bool:
        return model.num_heads % devices == 0 and memory(replace(layout, engine_ranks=devices)).fits

    if ranks := _fewest(layout.engine_ranks, fits_on):
        yield f"{ranks} devices an engine (--engine-ranks {ranks})"
    for name, width in MATRIX_BYTES.items():
        if width < layout.matrix_bytes and memory(replace(layout, matrix_bytes=width)).fits:
            yield f'weights in fewer bits: numerics.quantise = "{name}"'


def _fewest(now: int, fits: Callable[[int], bool]) -> int:
    """The smallest of `now`, 2 `now`, 4 `now` … ranks that fits; 0 where none does."""
    ranks = now
    while ranks <= MOST_RANKS:
        if fits(ranks):
            return ranks
        ranks *= 2
    return 0

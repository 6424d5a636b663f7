"""What it costs to serve a model: the fewest devices that hold it, and dollars per million sampled tokens."""

from __future__ import annotations

from typing import NamedTuple

from etude.errors import EtudeError
from etude.models.config import ModelConfig
from etude.plan.hardware import Device
from etude.plan.planning import plan
from etude.plan.shape import Layout, Shape

MAX_DEVICES = 64


class Serving(NamedTuple):
    """An estimate for one engine: its number of `devices`, sampled tokens per second of all sequences together, and
    dollars per million sampled tokens, prompts included."""

    devices: int
    decode_tokens_s: float
    million_tokens_dollars: float


def serving_cost(
    model: ModelConfig, device: Device, *, prompt_tokens: int = 2048, sampled_tokens: int = 512, sequences: int = 64
) -> Serving:
    """Estimate what it costs to serve a model in bf16 on the fewest devices of one kind that hold it.

    Each of `sequences` concurrent requests has `prompt_tokens` and samples `sampled_tokens`. Raises `EtudeError` if
    `MAX_DEVICES` devices do not hold the model.

    >>> from etude.plan.hardware import device
    >>> serving_cost(ModelConfig(), device("h100")).devices
    1
    """
    shape = Shape(sequences, 1, 1.0, float(prompt_tokens), float(sampled_tokens), 0.0)
    tokens = sequences * (prompt_tokens + sampled_tokens)
    ranks = 1
    while ranks <= MAX_DEVICES:
        layout = Layout(
            engines=1,
            engine_ranks=ranks,
            max_sequences=sequences,
            kv_tokens=tokens,
            max_running=sequences,
            max_lag=0,
        )
        found = plan(model, shape, layout, device)
        if found.engine_memory.fits:
            dollars = found.engine_device_s / 3600 * device.dollars_h
            return Serving(ranks, found.decode_tokens_s, 1e6 * dollars / (sequences * sampled_tokens))
        ranks *= 2
    raise EtudeError(
        f"{MAX_DEVICES} devices of kind {device.name} have too little memory for the model",
        f"one of them would need {found.engine_memory.total / 1e9:,.0f} GB of {device.memory_bytes / 1e9:,.0f} GB",
        hint="leave --hardware out, or choose a larger device",
    )

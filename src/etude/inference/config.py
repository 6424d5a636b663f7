"""What one engine may be told. Torch-free: whoever starts an engine process reads this without importing one."""

from __future__ import annotations

from dataclasses import dataclass

from etude.config import ranged
from etude.numerics.config import ComputeDtype, check_device


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and patience of one engine.

    >>> EngineConfig(max_sequences=8).context_tokens
    1024
    """

    max_sequences: int = ranged(64, low=1, high=4096)  # decoded together; also the number of KV slots
    context_tokens: int = ranged(1024, low=2)  # longest context: prompt and completion
    chunk_tokens: int = ranged(256, low=1)  # a prompt is computed in chunks that end at multiples of this position
    step_tokens: int = ranged(512, low=1)  # prompt tokens computed in one step, beside one decoded token a sequence
    max_waiting: int = ranged(1024, low=0)  # requests without a slot; one more is refused
    pin_lease_s: float = ranged(3.0, low=0.0)  # how long a pinned session holds its version between two calls
    stall_s: float = ranged(60.0, low=0.1)  # a step that takes longer is a hang
    dtype: ComputeDtype = ComputeDtype.FLOAT32  # in exact mode the learner's, too
    device: str = "auto"  # of weights, keys and values, and sampling; in exact mode the learner's, too

    def __post_init__(self) -> None:
        check_device(self.device)

"""What bounds the gateway. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from etude.config import ranged


@dataclass(frozen=True)
class GatewayConfig:
    """Limits of the product's door. The key is no config: it is handed over by whoever starts the gateway."""

    host: str = "127.0.0.1"
    port: int = ranged(8000, low=0, high=65535)  # 0: any free one
    max_running: int = ranged(16, low=1)  # completions asked for at a time
    max_waiting: int = ranged(64, low=0)  # requests that wait for one of those; the next is refused with 429
    max_body_bytes: int = ranged(4_194_304, low=1024)  # a larger request is refused with 413
    answer_tokens: int = ranged(1024, low=1)  # of an answer whose request names no limit
    deadline_s: float = ranged(120.0, low=0.01)  # from the request's arrival to its completion
    remembered_tokens: int = ranged(4_194_304, low=0)  # of conversations, kept so that none is tokenised again

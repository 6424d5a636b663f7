"""The settings of the gateway. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from etude.config import ranged


@dataclass(frozen=True)
class GatewayConfig:
    """Address and limits of the gateway. The API key is not a setting; it is passed to `create_app`."""

    host: str = "127.0.0.1"
    port: int = ranged(8000, low=0, high=65535)  # 0: any free port
    max_running: int = ranged(16, low=1)  # completions that run at the same time
    max_waiting: int = ranged(64, low=0)  # requests that wait to run; one more is refused with 429
    max_body_bytes: int = ranged(4_194_304, low=1024)  # a larger request is refused with 413
    answer_tokens: int = ranged(1024, low=1)  # token limit of a request without one
    deadline_s: float = ranged(120.0, low=0.01)  # from the request's arrival to its completion
    remembered_tokens: int = ranged(4_194_304, low=0)  # tokens of conversations to keep in memory

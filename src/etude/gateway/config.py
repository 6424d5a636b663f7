"""The settings of the gateway. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from etude.config import ranged


@dataclass(frozen=True)
class GatewayConfig:
    """Address and limits of the gateway. The API key is not a setting; it is passed to `create_app`.

    - `port`: the TCP port; 0: any free one.
    - `max_running`: the maximum number of answers that each model samples at the same time.
    - `max_waiting`: the maximum number of answers of each model that wait to be sampled. Further ones are refused with
      status 429.
    - `max_body_bytes`: the maximum size of a request body. A larger one is refused with status 413.
    - `answer_tokens`: the token limit of an answer whose request gives none.
    - `deadline_s`: the maximum time from the arrival of a request to the end of its completion, in seconds.
    - `ping_s`: seconds without an event after which a stream sends a keep-alive event, so that no proxy closes it.
    - `drain_s`: the maximum time that running requests have to end when the gateway stops, in seconds.
    - `cors_origins`: origins of web pages that may send requests (CORS), such as "https://example.org"; "*": any.
    - `remembered_tokens`: the maximum number of tokens of conversations that are kept in memory for each model.
    - `summaries`: whether a model that was trained to summarise long conversations summarises those of clients."""

    host: str = "127.0.0.1"
    port: int = ranged(8000, low=0, high=65535)
    max_running: int = ranged(16, low=1)
    max_waiting: int = ranged(64, low=0)
    max_body_bytes: int = ranged(4_194_304, low=1024)
    answer_tokens: int = ranged(1024, low=1)
    deadline_s: float = ranged(120.0, low=0.01)
    ping_s: float = ranged(10.0, low=0.01)
    drain_s: float = ranged(30.0, low=0.0)
    cors_origins: tuple[str, ...] = ()
    remembered_tokens: int = ranged(4_194_304, low=0)
    summaries: bool = True

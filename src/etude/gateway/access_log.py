"""The log line and the metrics of each request: key, model, token counts, time. The content is never logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.gateway.answers import Answer, num_sampled
from etude.gateway.keys import KeyUse

logger = logging.getLogger("etude.gateway")
_TOKENS = "Tokens: prompt, cached (part of prompt), answer, summary (read and written for it)"
_LATENCY_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """The metrics of a gateway, for Prometheus. If the package prometheus_client is not installed, nothing is
    counted."""

    def __init__(self) -> None:
        try:
            import prometheus_client as library
        except ImportError:
            self.registry: Any = None
            return
        self._library, self.registry = library, library.CollectorRegistry()
        self._requests = self._make(library.Counter, "requests", "Requests by dialect and status", "dialect", "status")
        self._tokens = self._make(library.Counter, "tokens", _TOKENS, "kind")
        self._seconds = self._make(
            library.Histogram, "request_seconds", "Time of a request", "dialect", buckets=_LATENCY_S
        )
        self._first = self._make(
            library.Histogram, "first_event_seconds", "Time to a stream's first event", "dialect", buckets=_LATENCY_S
        )
        self._running = self._make(library.Gauge, "running", "Answers that are being sampled", "model")
        self._waiting = self._make(library.Gauge, "waiting", "Requests that wait to run", "model")

    def _make(self, kind: Any, name: str, about: str, *labels: str, **options: Any) -> Any:
        return kind(f"etude_gateway_{name}", about, labels, registry=self.registry, **options)

    def count(self, record: Record, status: int, wall_s: float) -> None:
        """Count a request that has ended with the HTTP status `status` after `wall_s` seconds."""
        if self.registry is None:
            return
        self._requests.labels(record.dialect, str(status)).inc()
        self._seconds.labels(record.dialect).observe(wall_s)
        if record.first_s is not None:
            self._first.labels(record.dialect).observe(record.first_s)
        for kind, number in (
            ("prompt", record.num_prompt),
            ("cached", record.num_cached),
            ("answer", record.num_sampled),
            ("summary", record.num_summary),
        ):
            self._tokens.labels(kind).inc(number)

    def page(self, models: dict[str, tuple[int, int]]) -> tuple[bytes, str]:
        """Return the page that Prometheus reads, and its content type.

        `models` maps the name of each model to its numbers of (running, waiting) answers."""
        for name, (running, waiting) in models.items():
            self._running.labels(name).set(running)
            self._waiting.labels(name).set(waiting)
        return self._library.generate_latest(self.registry), self._library.CONTENT_TYPE_LATEST


@dataclass(slots=True)
class Record:
    """What is logged and counted of one request.

    - `dialect`: the name of the API, such as "chat".
    - `began`: when the request arrived, by `time.perf_counter`.
    - `key`: the API key that was used; None without one.
    - `first_s`: seconds until the first event of a stream; None for other requests.
    - `num_prompt`, `num_cached`, `num_sampled`: tokens of the prompt, those of it whose KV was reused, and sampled
      tokens.
    - `ended`: whether `end` was called."""

    method: str
    dialect: str
    began: float = field(default_factory=time.perf_counter)
    model: str = "-"
    key: KeyUse | None = None
    first_s: float | None = None
    num_prompt: int = 0
    num_cached: int = 0
    num_sampled: int = 0
    num_summary: int = 0
    ended: bool = False

    def add(self, answers: Sequence[Answer]) -> None:
        """Add the token counts of some answers to the record."""
        if self.num_prompt == 0:
            self.num_prompt = len(answers[0].prompt_ids)
            self.num_cached = answers[0].completion.num_cached
        self.num_sampled += num_sampled(answers)
        self.num_summary += sum(answer.summaries.num_prompt + answer.summaries.num_sampled for answer in answers)

    def end(self, status: int, metrics: Metrics) -> None:
        """Log and count the request. `status` is the HTTP status of its response. Later calls have no effect."""
        if self.ended:
            return
        self.ended = True
        wall_s = time.perf_counter() - self.began
        if self.key is not None:
            self.key.add_tokens(self.num_prompt + self.num_sampled + self.num_summary)
        metrics.count(self, status, wall_s)
        logger.info(
            "%s dialect=%s model=%s key=%s status=%d prompt=%d cached=%d answer=%d summary=%d ms=%.1f",
            self.method,
            self.dialect,
            self.model,
            "-" if self.key is None else self.key.name,
            status,
            self.num_prompt,
            self.num_cached,
            self.num_sampled,
            self.num_summary,
            1000 * wall_s,
        )

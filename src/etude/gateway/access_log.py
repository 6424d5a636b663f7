"""The log line and the metrics of each request: key, model, token counts, time. The content is never logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from etude.gateway.answers import Spent
from etude.gateway.keys import KeyUse

logger = logging.getLogger("etude.gateway")
_TOKENS = "Tokens: prompt, cached (part of prompt), answer, summary (read and written for it)"
_FORGOTTEN = (
    "Prompts since the start whose conversation was evicted, so its answers were tokenised again from their text"
)
_LATENCY_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """The metrics of a gateway, for Prometheus. Nothing is counted if the package prometheus_client is not
    installed."""

    def __init__(self) -> None:
        try:
            import prometheus_client as library
        except ImportError:
            self.registry: Any = None
            return
        self._library, self.registry = library, library.CollectorRegistry()
        self._labelled: Any = lru_cache(maxsize=256)(lambda metric, *labels: metric.labels(*labels))
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
        self._forgotten = self._make(library.Gauge, "forgotten", _FORGOTTEN, "model")
        self._captured = self._make(library.Gauge, "capture", "Answers since the start, by what became of them", "what")
        self._signals = self._make(library.Gauge, "signals", "Signals since the start, by what became of them", "what")

    def _make(self, kind: Any, name: str, about: str, *labels: str, **options: Any) -> Any:
        return kind(f"etude_gateway_{name}", about, labels, registry=self.registry, **options)

    def count(self, record: Record, status: int, wall_s: float) -> None:
        """Count a request that has ended with the HTTP status `status` after `wall_s` seconds."""
        if self.registry is None:
            return
        self._labelled(self._requests, record.dialect, str(status)).inc()
        self._labelled(self._seconds, record.dialect).observe(wall_s)
        if record.first_s is not None:
            self._labelled(self._first, record.dialect).observe(record.first_s)
        for kind, number in (
            ("prompt", record.spent.prompt),
            ("cached", record.spent.cached),
            ("answer", record.spent.sampled),
            ("summary", record.spent.summary),
        ):
            self._labelled(self._tokens, kind).inc(number)

    def page(
        self, models: dict[str, tuple[int, int, int]], *, captured: Mapping[str, int], signals: Mapping[str, int]
    ) -> tuple[bytes, str]:
        """Return the page that Prometheus reads, and its content type.

        `models` maps the name of each model to its numbers of running and waiting answers, and of prompts whose
        conversation was evicted from memory. `captured` has the counts of the gateway's recorder, and `signals` those
        of its receiver of feedback."""
        for gauge, counts in ((self._captured, captured), (self._signals, signals)):
            for name, number in counts.items():
                gauge.labels(name).set(number)
        for name, (running, waiting, forgotten) in models.items():
            self._forgotten.labels(name).set(forgotten)
            self._running.labels(name).set(running)
            self._waiting.labels(name).set(waiting)
        return self._library.generate_latest(self.registry), self._library.CONTENT_TYPE_LATEST


@dataclass(slots=True)
class Record:
    """The facts of one request that are logged and counted.

    - `method`: the HTTP method. `model`: the model that answers; "-": not known yet.
    - `dialect`: the name of the API, such as "chat"; "none" for an unknown path.
    - `began`: when the request arrived, by `time.perf_counter`.
    - `key`: the API key that was used; None without one.
    - `first_s`: seconds until the first event of a stream; None for other requests.
    - `spent`: the tokens that the request has used so far.
    - `response_id`: the id of the response, as the client sees it; "-": it has none.
    - `path`: the path of a request, if no API has it; "" for all other requests.
    - `ended`: whether `end` was called."""

    method: str
    dialect: str
    began: float = field(default_factory=time.perf_counter)
    model: str = "-"
    key: KeyUse | None = None
    first_s: float | None = None
    spent: Spent = field(default_factory=Spent)
    response_id: str = "-"
    path: str = ""
    ended: bool = False

    def end(self, status: int, metrics: Metrics) -> None:
        """Log and count the request, and add its tokens to those of its key. Later calls have no effect.

        `status` is the HTTP status of the response, or 499 if the client disconnected before its end."""
        if self.ended:
            return
        self.ended = True
        wall_s = time.perf_counter() - self.began
        if self.key is not None:
            spent = self.spent
            self.key.add_tokens(spent.prompt + spent.sampled + spent.summary, reserved=spent.reserved)
            spent.key = None  # a summary that others wait for is still sampled, without a reservation
        metrics.count(self, status, wall_s)
        logger.info(
            "%s dialect=%s model=%s key=%s status=%d prompt=%d cached=%d answer=%d summary=%d ms=%.1f id=%s%s",
            self.method,
            self.dialect,
            self.model,
            "-" if self.key is None else self.key.name,
            status,
            self.spent.prompt,
            self.spent.cached,
            self.spent.sampled,
            self.spent.summary,
            1000 * wall_s,
            self.response_id,
            f" path={self.path!r}" if self.path else "",
        )

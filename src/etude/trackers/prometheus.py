"""Prometheus: the latest value of every metric, at ``http://127.0.0.1:8791/metrics`` of the machine that trains.

``rl/loss`` is the gauge ``etude_rl_loss``, ``rl/lag/0`` is ``etude_rl_lag{key="0"}`` and ``eval/during/rate`` is
``etude_eval_rate{eval="during"}``: names from tasks and evaluations are labels, so they may be any text. Every gauge
has the label `run`. Engines have their own /metrics; nothing of it is repeated here.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from etude.errors import ConfigError
from etude.http_server import bind
from etude.seams import TrackedRun
from etude.trackers.support import load_library, split_name


@dataclass(eq=False)  # a registry needs a hash
class Prometheus:
    """Serves the metrics of a run to Prometheus over HTTP.

    `listen` is "HOST:PORT". Port 0 takes a free port, which is written to the tracker's log file."""

    listen: str = "127.0.0.1:8791"

    def __post_init__(self) -> None:
        load_library("prometheus_client", "prometheus")
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or int(port) >= 65_536:
            hint = 'write e.g. listen = "127.0.0.1:8791"'
            raise ConfigError(f"listen = {self.listen!r} is invalid", "it is not HOST:PORT", hint=hint)
        self._host, self._port = host.strip("[]"), int(port)
        try:
            bind(self._host, self._port).close()
        except ConfigError as error:
            hint = "another run may serve its metrics there: choose a free port of this machine"
            raise ConfigError(f"tracker prometheus: {error.what}", error.facts, hint=hint) from None

    def start(self, run: TrackedRun) -> None:
        library = load_library("prometheus_client", "prometheus")
        self._gauge = load_library("prometheus_client.core", "prometheus").GaugeMetricFamily
        self._run = run.name
        self._lock = threading.Lock()
        self._values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        self._set("etude_run_info", {"run_id": run.run_id}, 1.0)
        registry = library.CollectorRegistry()
        registry.register(self)
        self._server, self._thread = library.start_http_server(self._port, addr=self._host, registry=registry)
        self.url = f"http://{self.listen.rpartition(':')[0]}:{self._server.server_port}/metrics"
        print(f"metrics at {self.url}", flush=True)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            part, rest = split_name(name)
            first, _, eval_name = part.partition("/")
            field, _, key = rest.partition("/")
            labels = {label: text for label, text in (("eval", eval_name), ("key", key)) if text}
            self._set(gauge_name(first, field), labels, value)
            self._set(gauge_name(first, "step"), {"eval": eval_name} if eval_name else {}, step)

    def finish(self, outcome: str) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Yield one gauge per metric. The library prometheus_client calls this whenever Prometheus reads the
        metrics."""
        with self._lock:
            values = {name: dict(samples) for name, samples in self._values.items()}
        for name, samples in values.items():
            keys = sorted({key for labels in samples for key, _ in labels})
            gauge = self._gauge(name, "Latest value of this metric of the run.", labels=["run", *keys])
            for labels, value in samples.items():
                gauge.add_metric([self._run, *(dict(labels).get(key, "") for key in keys)], value)
            yield gauge

    def _set(self, name: str, labels: Mapping[str, str], value: float) -> None:
        with self._lock:
            self._values.setdefault(name, {})[tuple(sorted(labels.items()))] = value


def gauge_name(part: str, field: str) -> str:
    """Return a gauge name of letters, digits and underscores, for a metric's prefix (`part`) and the rest (`field`).

    >>> gauge_name("mid-training", "tokens_per_s")
    'etude_mid_training_tokens_per_s'
    """
    return re.sub(r"[^A-Za-z0-9_]+", "_", f"etude_{part}_{field}").rstrip("_")

"""Trackers: send a run's metrics to TensorBoard, Weights & Biases, Trackio, Prometheus, or a class of the user's own.

Each tracker of a run has its own process (`process`), which gets the metrics that the run's processes write to their
event files (`tracking`). The built-in trackers are one module each, which loads its library only when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping

BUILT_IN: Mapping[str, str] = {
    "tensorboard": "etude.trackers.tensorboard:TensorBoard",
    "wandb": "etude.trackers.wandb:Wandb",
    "trackio": "etude.trackers.trackio:Trackio",
    "prometheus": "etude.trackers.prometheus:Prometheus",
}
"""Import path of each built-in tracker, by its name in the config."""

__all__ = ["BUILT_IN"]

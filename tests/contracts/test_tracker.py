"""What the conductor relies on in a tracker: the built-in ones, the example, and the fake."""

from __future__ import annotations

import os

import pytest
from examples.plugins.trackers import Csv

from etude.testing import MemoryTracker
from etude.testing.contracts import TrackerContract


class TestCsv(TrackerContract):
    def make(self):
        return Csv()


class TestMemoryTracker(TrackerContract):
    def make(self):
        return MemoryTracker()


class TestTensorBoard(TrackerContract):
    def make(self):
        pytest.importorskip("tensorboard")
        from etude.trackers.tensorboard import TensorBoard

        return TensorBoard()


class TestPrometheus(TrackerContract):
    def make(self):
        pytest.importorskip("prometheus_client")
        from etude.trackers.prometheus import Prometheus

        return Prometheus(listen="127.0.0.1:0")


@pytest.mark.slow
class TestWandb(TrackerContract):
    def make(self):
        pytest.importorskip("wandb")
        from etude.trackers.wandb import Mode, Wandb

        return Wandb(mode=Mode.OFFLINE)


@pytest.mark.slow
class TestTrackio(TrackerContract):
    @pytest.fixture(autouse=True)
    def data(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Trackio reads its folder when it is imported: one for all of these tests."""
        if "TRACKIO_DIR" not in os.environ:
            os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))

    def make(self):
        pytest.importorskip("trackio")
        from etude.trackers.trackio import Trackio

        return Trackio(project="contract")

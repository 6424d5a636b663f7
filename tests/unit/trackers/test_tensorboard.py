"""The TensorBoard tracker, read with TensorBoard's own readers."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from tests.unit.trackers.tracked_runs import LONG, play_two_sessions, tracked_run

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
from tensorboard.backend.event_processing import plugin_event_accumulator as server  # noqa: E402
from tensorboard.util import tensor_util  # noqa: E402

from etude.trackers.tensorboard import TensorBoard  # noqa: E402


def read(folder):
    """What TensorBoard's server reads."""
    return server.EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()


def scalars(folder, name):
    """Steps and values, by both of TensorBoard's readers."""
    found = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload().Scalars(name)
    points = [(event.step, event.value) for event in found]
    served = [(event.step, tensor_util.make_ndarray(event.tensor_proto).item()) for event in read(folder).Tensors(name)]
    assert repr(served) == repr(points)
    return points


def test_a_resumed_run_has_every_step_once_with_its_last_value(tmp_path):
    play_two_sessions(TensorBoard, tmp_path)
    folder = tmp_path / "trackers" / "tensorboard"
    assert scalars(folder / "rl", "rl/loss") == [(1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)]
    assert scalars(folder / "mid-training", "mid-training/loss") == [(900, 9.0)]
    assert scalars(folder / "eval" / "before", "eval/before/rate") == [(0, 0.25)]
    assert scalars(folder / "eval" / "during", "eval/during/rate") == [(2, pytest.approx(0.6))]
    assert math.isnan(scalars(folder / "rl", "rl/k3")[0][1])
    assert scalars(folder / "rl", "rl/ratio_max") == [(4, math.inf)]
    assert scalars(folder / "rl", LONG) == [(4, 7.0)]
    assert scalars(folder, "result/heldout/after/rate") == [(0, 0.75)]


def test_steps_that_are_trained_again_within_a_session_replace_the_earlier_ones(tmp_path):
    tracker = TensorBoard()
    tracker.start(tracked_run(tmp_path))
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (3, 13.0), (2, 12.0), (3, 23.0)):
        tracker.log(step, {"rl/loss": loss})
        tracker.log(step, {"mid-training/loss": loss} if loss < 10 else {"mid-training/heldout": loss})
    tracker.finish("failed")
    folder = tmp_path / "trackers" / "tensorboard"
    assert scalars(folder / "rl", "rl/loss") == [(1, 1.0), (2, 12.0), (3, 23.0)]
    assert scalars(folder / "mid-training", "mid-training/heldout") == [(2, 12.0), (3, 23.0)]


def test_every_point_is_on_disk_before_the_run_ends(tmp_path):
    tracker = TensorBoard(folder=str(tmp_path / "shared"))
    tracker.start(tracked_run(tmp_path))
    tracker.log(1, {"rl/loss": 1.0})
    assert scalars(tmp_path / "shared" / "a-0123abcd" / "rl", "rl/loss") == [(1, 1.0)]
    tracker.finish("stopped")


def test_the_config_is_text_and_given_settings_are_hyperparameters(tmp_path):
    from tensorboard.plugins.hparams import metadata

    play_two_sessions(TensorBoard, tmp_path)
    found = read(tmp_path / "trackers" / "tensorboard")
    (text,) = found.Tensors("config/text_summary")
    assert b"[rl]\nsteps = 4\n" in text.tensor_proto.string_val[0]
    assert found.SummaryMetadata("config/text_summary").plugin_data.plugin_name == "text"
    contents = found.PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(contents[metadata.SESSION_START_INFO_TAG])
    given = {name: value.string_value or value.number_value for name, value in start.hparams.items()}
    assert given == {"seed": 3, "rl.steps": 4, "harness.tools": '["ls"]', "start": "a/model"}
    end = metadata.parse_session_end_info_plugin_data(contents[metadata.SESSION_END_INFO_TAG])
    assert end.status == 1  # STATUS_SUCCESS


def test_neither_torch_nor_tensorflow_is_loaded(tmp_path):
    code = f"""
import sys
from tests.unit.trackers.tracked_runs import tracked_run
from etude.trackers.tensorboard import TensorBoard
from pathlib import Path
tracker = TensorBoard()
tracker.start(tracked_run(Path({str(tmp_path)!r})))
tracker.log(1, {{"rl/loss": 1.0}})
tracker.finish("finished")
print(*({{"torch", "tensorflow", "etude.loop"}} & set(sys.modules)))
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=300).strip() == ""

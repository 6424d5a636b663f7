"""TensorBoard: event files in the run folder, written with tensorboard's record writer, without TensorFlow or torch.

Every part of the run (`rl`, `mid-training`, `eval/during`, ...) is a TensorBoard run of its own, in its own folder,
since parts count their steps separately and TensorBoard purges steps by folder. When a step is trained again, after a
restart or a lost learner, a session-start event makes TensorBoard forget that step and the steps after it. The parent
folder has the config as text, and hyperparameters: the settings that the user gave, and the final results."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.config import leaves, to_toml
from etude.seams import TrackedRun
from etude.trackers.support import by_part, final_results, load_library


@dataclass
class TensorBoard:
    """Writes the metrics of a run to TensorBoard event files.

    `folder` is a directory that gets one subdirectory per run; "" stands for trackers/tensorboard in the run folder."""

    folder: str = ""

    def __post_init__(self) -> None:
        for module in ("tensorboard.compat.proto.event_pb2", "tensorboard.summary.writer.record_writer"):
            load_library(module, "tensorboard")

    def start(self, run: TrackedRun) -> None:
        own = Path(run.folder) / "trackers" / "tensorboard"
        self._folder = Path(self.folder).expanduser() / run.run_id if self.folder else own
        self._run_folder = run.folder
        self._files: dict[str, _EventFile] = {}
        self._top = _EventFile(self._folder, counts_steps=False)
        if self._top.is_first:
            self._top.add(_config_summary(run))
            self._top.add(_hparams_start(run))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for part, metrics in by_part(values).items():
            if part not in self._files:
                self._files[part] = _EventFile(self._folder / part)
            self._files[part].log(step, metrics)

    def finish(self, outcome: str) -> None:
        if results := final_results(self._run_folder):
            self._top.log(0, results)
        if outcome != "stopped":
            self._top.add(_hparams_end(succeeded=outcome == "finished"))
        for file in (self._top, *self._files.values()):
            file.close()


class _EventFile:
    """A new event file in a folder of TensorBoard. `counts_steps`: whether a step there can be trained again."""

    def __init__(self, folder: Path, *, counts_steps: bool = True) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.is_first = not any(folder.glob("events.out.tfevents.*"))
        name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("xb"))
        self._last_steps: dict[str, int] = {}
        self._must_purge = counts_steps and not self.is_first
        self._write(file_version="brain.Event:2")
        if counts_steps and self.is_first:
            self._start_session(0)  # only later ones purge

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, and purge what was written of this step and later ones before."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._must_purge or any(step <= self._last_steps.get(name, -1) for name in metrics):
            self._start_session(step)
            self._last_steps = {name: last for name, last in self._last_steps.items() if last < step}
            self._must_purge = False
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=Summary(value=values))
        self._last_steps |= dict.fromkeys(metrics, step)

    def add(self, value: Any) -> None:
        """Write a summary value that belongs to no step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(summary=Summary(value=[value]))

    def close(self) -> None:
        self._writer.close()

    def _start_session(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(step=step, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()


def _config_summary(run: TrackedRun) -> Any:
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2

    text = f"```toml\n{to_toml(run.config)}```"
    return summary_pb2.Summary.Value(
        tag="config/text_summary",
        metadata=_metadata("text"),
        tensor=tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()]),
    )


def _hparams_start(run: TrackedRun) -> Any:
    from google.protobuf.struct_pb2 import Value
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    given, settings = set(run.facts.get("given", ())), leaves(run.config)
    hparams = {}
    for name in sorted(given & settings.keys()):
        match settings[name]:
            case bool(value):
                hparams[name] = Value(bool_value=value)
            case int(value) | float(value):
                hparams[name] = Value(number_value=value)
            case value:
                hparams[name] = Value(string_value=value if isinstance(value, str) else json.dumps(value, default=str))
    info = plugin_data_pb2.SessionStartInfo(hparams=hparams, group_name=run.run_id, start_time_secs=time.time())
    return _hparams(metadata.SESSION_START_INFO_TAG, session_start_info=info)


def _hparams_end(*, succeeded: bool) -> Any:
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.STATUS_SUCCESS if succeeded else api_pb2.STATUS_FAILURE
    info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    return _hparams(metadata.SESSION_END_INFO_TAG, session_end_info=info)


def _hparams(tag: str, **content: Any) -> Any:
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **content)
    return summary_pb2.Summary.Value(
        tag=tag, metadata=_metadata(metadata.PLUGIN_NAME, data.SerializeToString()), tensor=metadata.NULL_TENSOR
    )


def _metadata(plugin: str, content: bytes = b"") -> Any:
    from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, SummaryMetadata

    data = SummaryMetadata.PluginData(plugin_name=plugin, content=content)
    return SummaryMetadata(plugin_data=data, data_class=DATA_CLASS_TENSOR)

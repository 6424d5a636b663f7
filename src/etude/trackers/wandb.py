"""Weights & Biases: a W&B run, online or as files in the run folder that `wandb sync` uploads later.

The id of the W&B run is derived from etude's run id, so a resumed run continues the same W&B run. W&B keeps one step
counter that only rises, and parts of a run count separately: each part has its own x-axis, "rl/step" for "rl/loss".
W&B cannot remove points, so a step that is trained again has a second point.
"""

from __future__ import annotations

import enum
import re
import socket
import urllib.parse
import urllib.request
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.config import ranged
from etude.errors import PluginRefused
from etude.seams import TrackedRun
from etude.trackers.support import TrackerWarning, final_results, load_library

MAX_ID = 64
EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 255}
"""What W&B takes for the end of a run: 0 is "Finished", 255 is what it records for Ctrl-C."""


class Mode(enum.StrEnum):
    """How W&B records a run: on its server, in local files, or not at all."""

    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"


@dataclass
class Wandb:
    """Records the metrics of a run in W&B.

    `name` is the name of the W&B run; "" takes that of the run folder. The server is tried for `start_s` seconds; after
    that the run is recorded offline. With `system_metrics` W&B also records CPU, memory and GPUs of the machine on
    which the run was started."""

    project: str = "etude"
    entity: str = ""
    name: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()
    mode: Mode = Mode.ONLINE
    start_s: float = ranged(60.0, low=1.0)
    system_metrics: bool = False

    def __post_init__(self) -> None:
        wandb = load_library("wandb", "wandb")
        if self.mode is Mode.ONLINE and not wandb.login(prompt=False, verify=False):
            hint = 'run `wandb login`, set WANDB_API_KEY, or set mode = "offline"'
            raise PluginRefused("tracker wandb cannot log in", "there is no API key", hint=hint)

    def start(self, run: TrackedRun) -> None:
        wandb = load_library("wandb", "wandb")
        self._run_folder, self._parts = run.folder, set[str]()
        folder = Path(run.folder) / "trackers"
        folder.mkdir(exist_ok=True)
        settings = {
            "console": "off",
            "init_timeout": self.start_s,
            "x_disable_stats": not self.system_metrics,
            "x_disable_meta": True,  # has the command line, where --set can give a secret
            "disable_code": True,
            "disable_git": True,  # the repository around the working directory need not be this run's
        }

        def begin(mode: Mode) -> Any:
            return wandb.init(
                project=self.project,
                entity=self.entity or None,
                name=self.name or run.name,
                group=self.group or None,
                tags=list(self.tags) or None,
                id=run_key(run.run_id),
                resume="allow",
                dir=str(folder),
                config=dict(run.config),
                mode=str(mode),
                settings=wandb.Settings(**settings),
            )

        try:
            if self.mode is Mode.ONLINE:
                _connect(wandb.setup().settings.base_url, self.start_s)
            self._run = begin(self.mode)
        except (OSError, wandb.errors.CommError) as error:
            wandb.teardown()  # else its service still has the id in use
            self._run = begin(Mode.OFFLINE)
            where = f"recorded offline: wandb sync {folder}/wandb/offline-run-*"
            warnings.warn(TrackerWarning(f"the W&B server cannot be reached ({error}); {where}"), stacklevel=1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        steps = {f"{name.partition('/')[0]}/step": step for name in values}
        for axis in steps.keys() - self._parts:
            self._run.define_metric(axis, hidden=True)
            self._run.define_metric(axis.replace("/step", "/*"), step_metric=axis)
        self._parts |= steps.keys()
        self._run.log({**values, **steps})

    def finish(self, outcome: str) -> None:
        self._run.summary.update({**final_results(self._run_folder), "outcome": outcome})
        self._run.finish(exit_code=EXIT_CODES[outcome])
        load_library("wandb", "wandb").teardown()


def _connect(url: str, deadline_s: float) -> None:
    """Open a connection to a server, which takes a moment; W&B itself retries for `start_s` and tears down slowly. Does
    nothing where there is a proxy. Raises `OSError`."""
    if not urllib.request.getproxies():
        parts = urllib.parse.urlsplit(url)
        port = parts.port or (80 if parts.scheme == "http" else 443)
        socket.create_connection((parts.hostname or "", port), timeout=deadline_s).close()


def run_key(run_id: str) -> str:
    """Return the id of the W&B run of an etude run: at most 64 characters that W&B accepts.

    >>> run_key("try 1/größe-0a1b2c3d")
    'try-1-gr-e-0a1b2c3d'
    """
    return re.sub(r"[^A-Za-z0-9_-]+", "-", run_id)[-MAX_ID:].lstrip("-")

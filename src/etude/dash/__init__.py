"""Web pages of runs: versions, batches, rollouts, evaluations, releases and consent, and how they belong together.

The pages only read: they take no lock that a run waits for, and write nothing. `create_app` makes the ASGI app from a
folder of runs, and `serving` serves it. The command `etude dash` does both. Names are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.dash.app import Dash, create_app, serving
    from etude.dash.runs import Readers, Runs

__all__ = ["Dash", "Readers", "Runs", "create_app", "serving"]

_HOME = {"Dash": "app", "create_app": "app", "serving": "app", "Readers": "runs", "Runs": "runs"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

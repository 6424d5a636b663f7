"""Makes training batches from finished rollouts, so that no rollout is lost and none is trained on twice.

- The ledger stores the state and result of every rollout.
- The window decides which groups of rollouts may start, and which are trained next.
- The curriculum decides which tasks are drawn.
- Credit turns rewards into advantages. Packing makes batches, and traces record them.
- The audit checks everything afterwards.

Usable alone: it needs numpy, pyarrow (for traces) and SQLite (or PostgreSQL, with psycopg), no torch, and of etude only
`rewards`. Names are imported when first used.

>>> from etude.experience import Window
>>> from etude.experience.credit import advantages
>>> from etude.records.reward import Reward
>>> Window(max_lag=2, groups_per_step=16).free_groups(num_open=0, batched_step=0, published_step=0)
48
>>> advantages([Reward(value=value, raw=value, reason="") for value in (1.0, 0.0, 0.0, 0.0)])
[0.75, -0.25, -0.25, -0.25]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.experience.admission import Straggler, Window
    from etude.experience.auditing import audit
    from etude.experience.config import ExperienceConfig
    from etude.experience.credit import SCHEMES, Credit
    from etude.experience.groups import Finished, Group
    from etude.experience.ledger import Ledger
    from etude.experience.packing import make_batch, plan_batch, step_metrics
    from etude.experience.rollout_files import RolloutFiles
    from etude.experience.trace_reader import read_trace
    from etude.experience.trace_writer import record_batch

__all__ = [
    "SCHEMES", "Credit", "ExperienceConfig", "Finished", "Group", "Ledger", "RolloutFiles", "Straggler", "Window",
    "audit", "make_batch", "plan_batch", "read_trace", "record_batch", "step_metrics",
]  # fmt: skip

_HOME = {
    "Credit": "credit", "ExperienceConfig": "config", "Finished": "groups", "Group": "groups", "Ledger": "ledger",
    "SCHEMES": "credit", "Straggler": "admission", "Window": "admission", "audit": "auditing",
    "RolloutFiles": "rollout_files", "make_batch": "packing", "plan_batch": "packing", "read_trace": "trace_reader",
    "record_batch": "trace_writer", "step_metrics": "packing",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

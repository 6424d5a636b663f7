"""Releases of a specialist: a gate, a canary at rising shares of the users, and promotion or rollback, with reasons.

`Releases` is the state machine, in an SQLite file. `decide` decides from users' outcomes by confidence sequences
(`mean_bounds`), which hold however often they are looked at. `arm_of` assigns users. `docs/guides/releases.md` is the
guide.

>>> from etude.releases import arm_of
>>> {arm_of(b"salt", f"user-{i}", 0).value for i in range(10)}
{'stable'}
"""

from etude.releases.assignment import Arm, arm_of
from etude.releases.decision import Action, Decision, decide
from etude.releases.gate import GateResult, check_gate
from etude.releases.outcomes import Outcome
from etude.releases.releases import Releases
from etude.releases.sequences import mean_bounds
from etude.releases.settings import ReleaseSettings
from etude.releases.states import Release, ReleaseRefused, State

__all__ = [
    "Action",
    "Arm",
    "Decision",
    "GateResult",
    "Outcome",
    "Release",
    "ReleaseRefused",
    "ReleaseSettings",
    "Releases",
    "State",
    "arm_of",
    "check_gate",
    "decide",
    "mean_bounds",
]

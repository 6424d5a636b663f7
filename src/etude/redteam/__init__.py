"""Red-team attacks on etude's isolation and grading: real attempts to get an unearned reward.

Only the command line (`etude machines check`, `etude machines parity`), tests and benchmarks import this package. The
processes of a run do not; their cheat detector is `etude.environments.grading.cheat_detector`.
"""

from etude.redteam.catalogue import CATALOGUE
from etude.redteam.cheat import Cheat, Finding, Kind, Row, Verdict
from etude.redteam.runner import check

__all__ = ["CATALOGUE", "Cheat", "Finding", "Kind", "Row", "Verdict", "check"]

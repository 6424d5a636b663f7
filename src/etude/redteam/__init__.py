"""Attacks on etude's own defences: programs that try for real to get a reward that was not earned.

Imported by the command line (`etude machines check`, `etude machines parity`), tests and benchmarks only. No process of
a run imports it: the detector that a run needs is `etude.environments.grading.cheat_detector`.
"""

from etude.redteam.catalogue import CATALOGUE
from etude.redteam.cheat import Cheat, Finding, Kind, Row, Verdict
from etude.redteam.playing import check

__all__ = ["CATALOGUE", "Cheat", "Finding", "Kind", "Row", "Verdict", "check"]

"""Cheats: programs that try for real to get what was not earned, and what notices them. Usable alone, without torch."""

from etude.environments.cheats.catalogue import CATALOGUE
from etude.environments.cheats.cheat import Cheat, Finding, Kind, Row, Verdict
from etude.environments.cheats.checking import check
from etude.environments.cheats.detector import Signs, Suspicion, signs_of, suspicions

__all__ = ["CATALOGUE", "Cheat", "Finding", "Kind", "Row", "Signs", "Suspicion", "Verdict", "check"]
__all__ += ["signs_of", "suspicions"]

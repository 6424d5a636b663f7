"""Rewards: terms are measured once and stored; a reward is composed from them when it is needed.

Graders, the check of submission, the cheating detector and the user's own terms each produce `Term`s: a name, a
version, a value or unknown, and evidence. Only `Composition` makes a reward of them, so credit can be computed again
from stored terms. Usable alone; knows nothing of ledgers and training.

>>> from etude.records import Graded
>>> from etude.records.reward import SUBMITTED, Term
>>> from etude.records.task import Trust
>>> graded = Graded.of(1.0, trust=Trust.DATA, reason="all 3 hidden tests pass")
>>> left = graded.with_terms(Term(name=SUBMITTED, value=0.0, evidence="turns"))
>>> Composition().of(left).value, Composition().of(left).reason
(0.0, 'not submitted (turns); all 3 hidden tests pass')
>>> Composition(require_submit=False).of(left).value
1.0
"""

from etude.rewards.composition import DEFAULT_COMPOSITION, Composition
from etude.rewards.measuring import NamedTerm, measure

__all__ = ["DEFAULT_COMPOSITION", "Composition", "NamedTerm", "measure"]

"""Measure the parts of a rollout's reward, and compose the reward from them.

A part is a `Term`: a name, a version, a value or None for unknown, and evidence. Terms come from graders, from the
check whether the agent submitted, from the cheating detector, and from the user's own code. They are measured once and
stored. Only `Composition` computes a reward from them, so rewards can be computed again later with other settings. The
package can be used alone, without the training loop.

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
from etude.rewards.measuring import NamedTerm, measure, measure_group

__all__ = ["DEFAULT_COMPOSITION", "Composition", "NamedTerm", "measure", "measure_group"]

"""Judges: models that are asked about the work of a policy, one aspect of a rubric at a time.

A judge is asked over HTTP, in the dialect of OpenAI or Anthropic, or over a `Policy`. What it cannot say is unknown,
and never 0. How far it can be trusted is measured: `calibration` compares it with people, and `etude.rewards.drift`
with a second judge while a policy is trained on it."""

from etude.rewards.judges.asking import Asker, Dialect, HttpAsker, PolicyAsker
from etude.rewards.judges.evidence import Evidence, Section
from etude.rewards.judges.judge import Judge, Limits, Verdict
from etude.rewards.judges.rubrics import Aspect, Rubric, read_rubric
from etude.rewards.judges.store import JudgeStore
from etude.rewards.judges.verdicts import Form

__all__ = [
    "Asker",
    "Aspect",
    "Dialect",
    "Evidence",
    "Form",
    "HttpAsker",
    "Judge",
    "JudgeStore",
    "Limits",
    "PolicyAsker",
    "Rubric",
    "Section",
    "Verdict",
    "read_rubric",
]

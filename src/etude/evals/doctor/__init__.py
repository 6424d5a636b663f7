"""The parity doctor: compares an engine with the learner on the same tokens, and finds the first wrong operator.

An engine samples, as in RL; the learner computes the same tokens in a packed forward pass. Their log-probabilities are
compared (`evals.parity`). If the engine reports the results of its operators, each operator is then computed alone on
the engine's inputs, so that errors do not accumulate: the first operator with a larger error than rounding allows is
reported with its layer (`local`).

This package imports torch, so `etude.evals` does not import it."""

from etude.evals.doctor.diagnosis import Diagnosis, Verdict, examine
from etude.evals.doctor.sides import EngineSide, LearnerSide, ReferenceEngineSide

__all__ = ["Diagnosis", "EngineSide", "LearnerSide", "ReferenceEngineSide", "Verdict", "examine"]

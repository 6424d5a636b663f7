"""Which base model to start from: compares checkpoints on a user's own text, before any training.

Three measures for which vocabularies may differ:

- bits per byte of the user's documents, by position in the document;
- questions with four options, mined from the documents (look-ups) and made (state tracking);
- retrieval by distance: numbers that were stated many bytes before they are asked for.

`compare_bases` measures and compares. `etude.evals.bases.scorer` computes log-probabilities with torch; this package
does not import it."""

from etude.evals.bases.comparison import BaseResult, Candidate, Comparison, compare_bases
from etude.evals.bases.measures import LossMeasure, Scorer
from etude.evals.bases.questions import Question, look_ups, state_questions
from etude.evals.bases.retrieval import retrieval_questions

__all__ = [
    "BaseResult",
    "Candidate",
    "Comparison",
    "LossMeasure",
    "Question",
    "Scorer",
    "compare_bases",
    "look_ups",
    "retrieval_questions",
    "state_questions",
]

"""The parity doctor: the same tokens through an engine and the learner, how far they are apart, and where it begins.

An engine samples, as in reinforcement learning; the learner computes the same tokens in a packed forward. Their
log-probabilities are compared (`evals.parity`). Where the engine shows its operators' results, each operator is then
computed alone, on what the engine gave it, so that errors do not add up: the first that is off by more than its
rounding is named with its layer (`local`).

Imports torch: it is asked for by name, and not by the face of `evals`.
"""

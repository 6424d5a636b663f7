"""One-line definitions of the terms in the views of a run; `docs/concepts/words.md` has the same rows."""

from __future__ import annotations

from collections.abc import Iterable

GLOSSARY = {
    "reward": "mean reward of a step's rollouts: 1.0 when each solved its task, if no further reward term has a weight",
    "solve rate": "share of tries that solve their task",
    "validation": "solve rate on tasks that are never trained on, measured during the run; settings are chosen by it",
    "held-out": "tasks, or documents, that are neither trained on nor used to choose settings; the result "
    "is measured on them",
    "copies": "share of held-out texts in which the model correctly copies text from its context",
    "lag": "optimiser steps from the version of a rollout's oldest token to the trained one; after a restart, counted "
    "through the last version that both have in common",
    "idle": "share of the RL phase in which a process did not compute",
    "delta": "what an engine with the previous version fetches for a new one",
    "bound": "an estimate of the smallest possible size of a delta, from how many weights of each exponent changed; "
    "deltas of bf16 training are within about 5 per cent of it, deltas with few or very regular changes are larger",
    "pause": "how long an engine with requests in flight stops to load a new version",
    "probe": "a fixed text that engines and learner compute: r is the ratio of their probabilities, 1 when equal",
    "k3": "an estimate of the KL divergence from the policy that sampled to the one that is trained; 0 when they agree",
    "p99": "99 of 100 values are at most this",
}


def legend(names: Iterable[str]) -> str:
    """Return one line with the definitions of those `names` that the glossary has.

    >>> legend(["idle", "invalid"])
    'idle: share of the RL phase in which a process did not compute'
    """
    return "; ".join(f"{name}: {GLOSSARY[name]}" for name in names if name in GLOSSARY)


def meaning(text: str) -> str:
    """Return the definitions of the glossary terms that occur in a text, one per line; "" if there are none."""
    return "\n".join(f"{term}: {definition}" for term, definition in GLOSSARY.items() if term in text)

"""Learning rates over the steps of a run. Pure.

Warm-up, constant, linear decay ("warmup-stable-decay", arXiv 2404.06395): a run's length is needed for its tail only.
"""

from __future__ import annotations


def rate(step: int, num_steps: int | None, *, warmup_steps: int, decay_from: float, final: float) -> float:
    """The share of the peak rate at `step` (0 for the first). `decay_from` is a share of the steps, `final` the share
    reached at the end; `num_steps` None never decays.

    >>> [round(rate(s, 10, warmup_steps=2, decay_from=0.6, final=0.1), 3) for s in (0, 1, 5, 6, 8, 9)]
    [0.5, 1.0, 1.0, 1.0, 0.55, 0.325]
    """
    warm = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    if num_steps is None or step < decay_from * num_steps:
        return warm
    left = max(0.0, (num_steps - step) / ((1 - decay_from) * num_steps)) if decay_from < 1 else 1.0
    return warm * (final + (1 - final) * left)

"""Learning-rate schedule: warm-up, constant, linear decay ("warmup-stable-decay", arXiv 2404.06395).

The length of the run is needed only for the decay."""

from __future__ import annotations


def lr_multiplier(step: int, num_steps: int | None, *, warmup_steps: int, decay_from: float, final: float) -> float:
    """Return the factor of the peak learning rate at `step` (from 0).

    The rate rises over `warmup_steps`, is constant until the share `decay_from` of `num_steps`, and falls linearly to
    the share `final`. Without `num_steps` it never decays.

    >>> [round(lr_multiplier(s, 10, warmup_steps=2, decay_from=0.6, final=0.1), 3) for s in (0, 1, 5, 6, 8, 9)]
    [0.5, 1.0, 1.0, 1.0, 0.55, 0.325]
    >>> lr_multiplier(0, 0, warmup_steps=0, decay_from=0.6, final=0.1)  # after a run without steps
    0.1
    """
    warm = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    if num_steps is None or step < decay_from * num_steps:
        return warm
    if decay_from == 1:
        return warm
    left = (num_steps - step) / ((1 - decay_from) * num_steps) if step < num_steps else 0.0
    return warm * (final + (1 - final) * left)


def rl_lr_multiplier(step: int, num_steps: int | None, *, warmup_steps: int) -> float:
    """Return the factor of the peak learning rate at `step` (from 0) of a run of RL: `lr_multiplier` with a decay to a
    tenth over the last 40 % of the run. After `num_steps` it stays there.

    >>> [round(rl_lr_multiplier(s, 10, warmup_steps=0), 3) for s in (0, 5, 8, 10, 1000)]
    [1.0, 1.0, 0.55, 0.1, 0.1]
    """
    return lr_multiplier(step, num_steps, warmup_steps=warmup_steps, decay_from=0.6, final=0.1)

"""Stops a step whose numbers are none, by name: which layer and operator, parameter, rollout, and step.

A NaN that is trained on is in every weight one step later, and says nothing by then of where it came from. So what is
sampled, the logits, the loss, the gradient and the new weights are looked at, each by one sum, and what is found is
traced: a forward is computed once more and watched, a gradient is named by the parameter that it came to first.

Everything here raises `NotFinite`. Knows nothing of who saves what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from etude.errors import NotFinite
from etude.models.finite import described, is_finite, not_finite, origin
from etude.models.watch import Watch
from etude.records import Sample
from etude.training.losses import PolicyLoss
from etude.training.optimizer import AdamW
from etude.training.rows import Rows

Views = Callable[[], Mapping[str, torch.Tensor]]
"""What trains, by the names that it is saved under; made when it is asked for."""

HINT = "what the step began with is as it was: go on from there with a lower lr, or see what is named here"


def check_sampled(samples: Sequence[Sample], rows: Rows, *, step: int) -> None:
    """What engines logged and rewards became."""
    for what, numbers_R in (("log-probability", rows.sampler_logprobs_R), ("advantage", rows.advantages_R)):
        if not is_finite(numbers_R):
            at = int((~torch.isfinite(numbers_R)).int().argmax())
            raise NotFinite(
                f"a sampled token's {what} is {float(numbers_R[at])} at step {step}",
                f"in {place_in(samples, rows, int(rows.rows_R[at]), after=1)}",
                hint="the engine that sampled it computes no numbers, or the reward is none: see its log and the trace",
            )


def check_logits(
    logits_RV: torch.Tensor,
    again: Callable[[Watch], object] | None,
    rows_R: torch.Tensor | None = None,
    *,
    step: int,
    place: Callable[[int], str],
) -> None:
    """What a forward gave; where that is not finite, `again` computes it once more, watched (None: it cannot be had
    again, since other ranks take part in it). `rows_R`: the tokens that
    got logits (None: all). `place` tells a token in words."""
    if is_finite(logits_RV):
        return
    if again is None:
        row = int((~torch.isfinite(logits_RV)).any(-1).int().argmax())
        facts = f"{described(logits_RV)}, the first in {place(row if rows_R is None else int(rows_R[row]))}"
        raise NotFinite(f"the logits of step {step} are not finite", facts, hint=f"{HINT}; one rank tells the operator")
    where = origin(again)
    if where is None:
        facts = f"{described(logits_RV)}; computed again, all numbers are finite"
        hint = "the same forward gave two results: the memory or the machine is bad"
        raise NotFinite(f"the logits of step {step} are not finite", facts, hint=hint)
    token = where.row if rows_R is None or where.name not in ("norm", "logits") else int(rows_R[where.row])
    facts = f"{where.facts}, the first in {place(token)}; nothing computed before it is"
    raise NotFinite(f"{where.name} is not finite at step {step}", facts, hint=HINT)


def check_loss(
    policy: PolicyLoss,
    loss: torch.Tensor,
    samples: Sequence[Sample],
    rows: Rows,
    log_ratio_R: torch.Tensor,
    *,
    step: int,
) -> None:
    """The policy's loss of finite logits, and the whole `loss`: both are finite, and no ratio overflows, even where
    the policy's loss cuts it."""
    if is_finite(loss) and is_finite(policy.ratio_R):
        return
    at = int(log_ratio_R.abs().argmax())
    place = place_in(samples, rows, int(rows.rows_R[at]), after=1)
    what = "the loss" if not is_finite(loss) else "a token's ratio"
    number = float(loss.detach() if not is_finite(loss) else policy.ratio_R[at])
    raise NotFinite(
        f"{what} of step {step} is {number}",
        f"the largest log-ratio is {float(log_ratio_R[at]):.4g}, in {place}",
        hint="its sampler and the learner disagree beyond measure: set learner.correction, or see etude parity",
    )


Agreed = Callable[[str], AbstractContextManager[None]]
"""See `group.Group.agreed`."""


def stepped(
    optimizer: AdamW, views: Views, *, lr: float, step: int, agreed: Agreed = lambda what: nullcontext()
) -> float:
    """Apply the gradient; its norm. A gradient that is not finite changes nothing, and is named by `views`, by the rank
    that has it to all of them."""
    try:
        norm = optimizer.step(lr)
    except NotFinite as error:
        with agreed("gradient"):
            bad = not_finite(_gradients(optimizer, views()))
            if bad:
                first = list(bad)[-1]  # a backward pass goes from the last layer to the first
                raise NotFinite(
                    f"the gradient of {first} is not finite at step {step}",
                    f"{bad[first]}; the backward pass came to it first, and spread it to {len(bad)} tensors in all",
                    hint=HINT,
                ) from None
        raise NotFinite(f"the gradient of step {step} overflows", error.facts, hint=HINT) from None  # its square does
    with agreed("weights"):
        if not is_finite(optimizer.live):
            check_weights(views(), f"after step {step}")
    return norm


def check_weights(views: Mapping[str, torch.Tensor], when: str) -> None:
    """Live weights, by the names that they are saved under."""
    bad = not_finite(views)
    if bad:
        first = next(iter(bad))
        raise NotFinite(
            f"{first} is not finite {when}",
            f"{bad[first]}; {len(bad)} tensors in all",
            hint="the weights are lost: go on from the last checkpoint, with a lower lr",
        )


def _gradients(optimizer: AdamW, views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradient by the same names: laid out as the live weights are, whose views say where each lies."""
    if optimizer.is_sharded:
        return optimizer.named(optimizer.grad)
    return {
        name: optimizer.grad[view.storage_offset() : view.storage_offset() + view.numel()]
        for name, view in views.items()
        if view.untyped_storage().data_ptr() == optimizer.live.untyped_storage().data_ptr()
    }


def place_in(samples: Sequence[Sample], rows: Rows, token: int, *, after: int = 0) -> str:
    """A token of a forward in words; `after`: how much further the one that is meant lies in its rollout."""
    token = token if rows.kept_N is None else int(rows.kept_N[token])
    ends = np.cumsum(rows.lengths)
    of = int(np.searchsorted(ends, token, side="right"))
    return f"rollout {samples[of].rollout_id} at position {token - int(ends[of]) + rows.lengths[of] + after}"

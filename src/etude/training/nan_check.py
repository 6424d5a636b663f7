"""Stop training on NaN or infinity, and name the layer, operator, parameter, rollout and step.

One step after training on a NaN, every weight is NaN, and its origin is lost. So sampled values, logits, loss, gradient
and new weights are checked, each with one sum. After a failed check the origin is traced: a forward pass is repeated
with a hook on every operator; for a gradient, the parameter that the backward pass reached first is named.

All checks raise `NotFinite`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from etude.errors import NotFinite
from etude.models.finite import describe_non_finite, find_non_finite, first_non_finite, is_finite
from etude.models.hooks import ForwardHook
from etude.records import Sample
from etude.training.flat_batch import FlatBatch
from etude.training.losses import PolicyLoss
from etude.training.optimizer import AdamW

Views = Callable[[], Mapping[str, torch.Tensor]]
"""A function that returns the trained tensors by the names under which they are saved."""

HINT = "the weights are those of the previous step: resume with a lower lr, or inspect the named tensor"


def check_sampled(samples: Sequence[Sample], rows: FlatBatch, *, step: int) -> None:
    """Check that the engines' log-probabilities and the advantages are finite. Raises `NotFinite`."""
    for what, numbers_R in (("log-probability", rows.sampler_logprobs_R), ("advantage", rows.advantages_R)):
        if not is_finite(numbers_R):
            at = int((~torch.isfinite(numbers_R)).int().argmax())
            raise NotFinite(
                f"a sampled token's {what} is {float(numbers_R[at])} at step {step}",
                f"in {describe_row(samples, rows, at)}",
                hint="the engine or the grader returned NaN or infinity: see the engine's log and the trace",
            )


def check_logits(
    logits_RV: torch.Tensor,
    again: Callable[[ForwardHook], object] | None,
    rows_R: torch.Tensor | None = None,
    *,
    step: int,
    place: Callable[[int], str],
) -> None:
    """Check that the logits [R, V] of a forward pass are finite. Raises `NotFinite`.

    `again` repeats the forward pass with a hook, to find the operator; None if other ranks take part, so that it cannot
    be repeated. `rows_R`: the tokens that have logits (None: all). `place` describes a token in the error."""
    if is_finite(logits_RV):
        return
    if again is None:
        row = int((~torch.isfinite(logits_RV)).any(-1).int().argmax())
        facts = f"{describe_non_finite(logits_RV)}, the first in {place(row if rows_R is None else int(rows_R[row]))}"
        hint = f"{HINT}; on one rank etude also finds the operator"
        raise NotFinite(f"the logits of step {step} are not finite", facts, hint=hint)
    where = first_non_finite(again)
    if where is None:
        facts = f"{describe_non_finite(logits_RV)}; in a repeated forward pass all numbers are finite"
        hint = "the same forward pass gave two results: test the machine's memory, or use another machine"
        raise NotFinite(f"the logits of step {step} are not finite", facts, hint=hint)
    token = where.row if rows_R is None or where.name not in ("norm", "logits") else int(rows_R[where.row])
    facts = f"{where.facts}, the first in {place(token)}; all operators before it are finite"
    raise NotFinite(f"{where.name} is not finite at step {step}", facts, hint=HINT)


def check_loss(
    policy: PolicyLoss,
    loss: torch.Tensor,
    samples: Sequence[Sample],
    rows: FlatBatch,
    log_ratio_R: torch.Tensor,
    *,
    step: int,
) -> None:
    """Check that the loss and every ratio [R] are finite, including ratios that the loss clips. Raises `NotFinite`.

    `samples`, `rows`: the input of the forward pass, to name the token in the error."""
    if is_finite(loss) and is_finite(policy.ratio_R):
        return
    at = int(log_ratio_R.abs().argmax())
    place = describe_row(samples, rows, at)
    what = "the loss" if not is_finite(loss) else "a token's ratio"
    number = float(loss.detach() if not is_finite(loss) else policy.ratio_R[at])
    raise NotFinite(
        f"{what} of step {step} is {number}",
        f"the largest log-ratio is {float(log_ratio_R[at]):.4g}, in {place}",
        hint="engine and learner differ too much: set learner.correction, or compare them with etude parity",
    )


PropagateErrors = Callable[[str], AbstractContextManager[None]]
"""See `process_group.ProcessGroup.propagate_errors`."""


def checked_step(
    optimizer: AdamW,
    views: Views,
    *,
    lr: float,
    step: int,
    propagate_errors: PropagateErrors = lambda what: nullcontext(),
) -> float:
    """Apply the gradient, and check it and the new weights for NaN and infinity. Returns the norm before clipping.

    `views`: returns the trained tensors by name. `step`: for the errors. `propagate_errors`: makes a context manager in
    which an error of one rank is raised on all (`ProcessGroup.propagate_errors`). A gradient that is not finite changes
    no weight and raises `NotFinite` on every rank, with the parameter's name."""
    try:
        norm = optimizer.step(lr)
    except NotFinite as error:
        with propagate_errors("gradient"):
            bad = find_non_finite(_gradients(optimizer, views()))
            if bad:
                first = list(bad)[-1]  # a backward pass goes from the last layer to the first
                raise NotFinite(
                    f"the gradient of {first} is not finite at step {step}",
                    f"{bad[first]}; the backward pass reached it first, and spread it to {len(bad)} tensors in all",
                    hint=HINT,
                ) from None
        raise NotFinite(f"the gradient of step {step} overflows", error.facts, hint=HINT) from None  # of its squares
    with propagate_errors("weights"):
        if not all(map(is_finite, optimizer.lives())):
            check_weights(views(), f"after step {step}")
    return norm


def check_weights(views: Mapping[str, torch.Tensor], when: str) -> None:
    """Check that live weights are finite. Raises `NotFinite`, which names the first tensor that is not.

    `views`: the tensors by the names under which they are saved. `when`: the end of the error, such as "after step 3".
    """
    bad = find_non_finite(views)
    if bad:
        first = next(iter(bad))
        raise NotFinite(
            f"{first} is not finite {when}",
            f"{bad[first]}; {len(bad)} tensors in all",
            hint="the weights are lost: resume from the last checkpoint, with a lower lr",
        )


def _gradients(optimizer: AdamW, views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradient, split by the names of `views`.

    It has the layout of the live weights, whose views give the slices."""
    if optimizer.is_sharded:
        return optimizer.by_parameter(optimizer.grad)
    return {
        name: optimizer.grad[view.storage_offset() : view.storage_offset() + view.numel()]
        for name, view in views.items()
        if view.untyped_storage().data_ptr() == optimizer.live.untyped_storage().data_ptr()
    }


def describe_token(samples: Sequence[Sample], rows: FlatBatch, token: int) -> str:
    """Describe a token of a forward pass for an error: its rollout and position."""
    of, position = rows.place(token)
    return f"rollout {samples[of].rollout_id} at position {position}"


def describe_row(samples: Sequence[Sample], rows: FlatBatch, row: int) -> str:
    """Describe the sampled token of a row for an error: its rollout and position."""
    of, position = rows.place(int(rows.rows_R[row]), int(rows.sample_R[row]))
    return f"rollout {samples[of].rollout_id} at position {position + 1}"

"""Training of multi-token prediction heads (`models.mtp`) beside the trunk, which does not change by it.

Heads read detached outputs of the trunk, and have an optimiser of their own, with its own gradient norm. So the trunk's
weights have the same bytes with and without heads. A loss that reaches the trunk would also lower its entropy.

With `MtpLoss.DISTILL` a head learns the distribution that the trunk has at the next position, where the predicted token
is the next one: the loss is KL(trunk ‖ head). This is what drafts need, since a draft is accepted as often as both
distributions draw the same token. In RL the heads follow the policy in this way.

Shapes: P positions of all paths, R rows with loss, V vocabulary size, D width."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from etude.models.attention import Packed
from etude.models.mtp import apply_head, head_logits, trunk_output
from etude.models.transformer import Transformer
from etude.models.weight_views import hf_views
from etude.training.config import MtpLoss
from etude.training.nan_check import checked_step
from etude.training.optimizer import AdamW


class MtpTrainer:
    """Trains the MTP heads of a model. It does nothing for a model without heads, and with `MtpLoss.OFF`.

    `make_optimizer`: makes the optimiser of the heads. `balance`: the coefficient of their load-balancing loss."""

    def __init__(
        self, model: Transformer, loss: MtpLoss, make_optimizer: Callable[[nn.Module], AdamW], *, balance: float = 0.0
    ) -> None:
        self._model, self._loss, self._balance = model, loss, balance
        trained = len(model.mtp) > 0 and loss is not MtpLoss.OFF
        self.optimizer = make_optimizer(model.mtp) if trained else None
        self.loss_sum = 0.0  # of the accumulated gradient; the heads' mean loss if the normalisers of all passes agree

    def add(
        self,
        stream_PD: torch.Tensor,
        tokens_P: torch.Tensor,
        lengths: Sequence[int],
        rows_R: torch.Tensor,
        logits_RV: torch.Tensor,
        targets_R: torch.Tensor,
        *,
        normaliser: float,
        share: float = 0.0,
    ) -> None:
        """Accumulate the gradient of the heads' loss in one forward pass.

        - `stream_PD`: the trunk's residual stream at each position of each path, path after path.
        - `tokens_P`, `lengths`: the tokens, and their number in each path.
        - `rows_R`: int64, the positions with loss. `logits_RV`: the trunk's logits there. `targets_R`: the next tokens.
        - `normaliser`: the loss is divided by it: the number of rows with loss in the batch.
        - `share`: the pass's share of the batch's tokens, by which its load-balancing loss is weighted."""
        if self.optimizer is None or not len(rows_R):
            return
        loss = mtp_loss(self._model, self._loss, stream_PD, tokens_P, lengths, rows_R, logits_RV, targets_R)
        (loss.prediction / normaliser + self._balance * share * loss.balance).backward()  # type: ignore[no-untyped-call]
        self.loss_sum += float(loss.prediction.detach()) / normaliser

    def step(self, lr: float, *, step: int) -> float:
        """Apply and clear the gradient. Returns the loss of the accumulated passes, in nats per row.

        Raises `NotFinite`, which names the training step `step`."""
        if self.optimizer is not None:
            checked_step(self.optimizer, lambda: hf_views(self._model), lr=lr, step=step)
        loss, self.loss_sum = self.loss_sum, 0.0
        return loss

    def clear(self) -> None:
        """Discard the accumulated gradient."""
        self.loss_sum = 0.0
        if self.optimizer is not None:
            self.optimizer.clear()


class _Loss:
    """The sum of the heads' losses of prediction over their rows, and the mean of their load-balancing losses."""

    def __init__(self, prediction: torch.Tensor, balance: torch.Tensor) -> None:
        self.prediction, self.balance = prediction, balance


def mtp_loss(
    model: Transformer,
    kind: MtpLoss,
    stream_PD: torch.Tensor,
    tokens_P: torch.Tensor,
    lengths: Sequence[int],
    rows_R: torch.Tensor,
    logits_RV: torch.Tensor,
    targets_R: torch.Tensor,
) -> _Loss:
    """Return the loss of a model's heads in one forward pass, without a gradient in the trunk.

    Head k predicts the token after a row from the position k + 1 before it. Rows that have no such position in their
    path have no loss. The arguments are those of `MtpTrainer.add`."""
    ops = model.operators
    sizes = torch.tensor(lengths, device=tokens_P.device)
    first_P = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)  # where the path of each position begins
    teacher_RV = ops.log_softmax(logits_RV.detach()) if kind is MtpLoss.DISTILL else None
    before_PD = trunk_output(model, stream_PD)
    total, balances = before_PD.new_zeros((), dtype=torch.float32), []
    for number in range(len(model.mtp)):
        cache = Packed(lengths, ops, device=tokens_P.device)
        following_P = tokens_P.roll(-number - 1)  # the last positions of a path get others, and have no loss
        before_PD, choice = apply_head(model, number, before_PD, following_P, cache)
        if choice is not None and choice.balance is not None:
            balances.append(choice.balance)
        from_R = rows_R - number - 1
        has_R = from_R >= first_P[rows_R]
        logits = head_logits(model, F.embedding(from_R[has_R], before_PD))
        if teacher_RV is None:
            total = total + F.cross_entropy(logits, targets_R[has_R], reduction="sum")
        else:
            teacher = teacher_RV[has_R]
            total = total + (teacher.exp() * (teacher - ops.log_softmax(logits))).sum()
    balance = torch.stack(balances).mean() if balances else total.new_zeros(())
    return _Loss(total / len(model.mtp), balance)

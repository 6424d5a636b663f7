"""The core of training: trained weights with their optimiser, and the ranks that share a step, whatever its loss.

RL (`training.learner`) and mid-training (`training.mid_training`) have one each. They decide which texts a forward pass
has, and what its loss is. The core has what is the same for both: forward passes, the order in which gradients are
added, the optimiser step, loading and saving."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from etude.errors import ConfigError
from etude.models.checkpoint_files import load_tensors, save_tensors
from etude.models.hooks import ForwardHook, no_hook
from etude.models.transformer import Forward, Transformer, resize_heads
from etude.training.balance import ExpertBalancer
from etude.training.config import MtpLoss, OptimizerKind
from etude.training.mtp import MtpTrainer
from etude.training.muon import Muon
from etude.training.nan_check import check_weights, checked_step
from etude.training.optimizer import AdamW
from etude.training.process_group import ProcessGroup
from etude.training.token_batch import TokenBatch
from etude.training.trainable import LoadRequest

MTP_STATE = "learner.mtp"
"""The optimiser state of MTP heads in a checkpoint, beside that of the trunk."""
Row = Sequence[list[int]]
"""The texts of one row of a batch, as indices: for each share those that it forwards together (`training.packing`)."""


class TrainingCore:
    """The trained weights of a checkpoint, or this rank's part of them, with optimiser and router biases.

    It continues from the state of a learner that saved the checkpoint (`LoadRequest.resumed`), and starts at none
    otherwise. All calls are collective: each rank of `group` makes the same ones.

    - `weight_decay`: of the optimiser.
    - `mtp_heads`: the number of MTP heads that the model gets; None: as many as the checkpoint has.
    - `mtp`: trains the heads beside the trunk, with an optimiser of their own. `mtp_loss`: their loss in the last step,
      in nats per row.

    Raises `CheckpointError` when the checkpoint cannot be loaded, and `ConfigError` for new heads where each rank holds
    a part of the model only."""

    def __init__(
        self, request: LoadRequest, *, group: ProcessGroup, weight_decay: float = 0.0, mtp_heads: int | None = None
    ) -> None:
        config = request.config
        self.config, self.group, self.device = config, group, request.device
        self.trainable = group.load(request)
        if mtp_heads is not None and mtp_heads != len(self.model.mtp):
            if group.size > 1 and not request.replicated:
                raise ConfigError(
                    f"mtp_heads = {mtp_heads} is not possible on {group.size} ranks that share the weights",
                    "MTP heads are trained where a rank holds the full model",
                    hint="train in one process: learner.ranks = 1; or without new heads",
                )
            resize_heads(self.model, mtp_heads, seed=request.seed)
        make = functools.partial(Muon, exchange=group) if config.optimizer is OptimizerKind.MUON else AdamW

        def make_optimizer(module: nn.Module) -> AdamW:
            return make(
                module,
                weights=config.weights,
                weight_decay=weight_decay,
                grad_clip=config.grad_clip,
                norm=group.global_norm,
                masters=config.masters,
                moments=config.moments,
                offload=config.offload,
                seed=request.seed,
                first_row=group.first_row,
            )

        self.optimizer: AdamW = make_optimizer(self.trainable.module)
        kind = MtpLoss.OFF if config.lora_rank else config.mtp
        self.mtp, self.mtp_loss = MtpTrainer(self.model, kind, make_optimizer, balance=config.balance), 0.0
        if request.resumed:
            group.restore_optimizer(request.path, self.optimizer)
            if self.mtp.optimizer is not None and (request.path / MTP_STATE).is_file():
                self.mtp.optimizer.restore(load_tensors(request.path / MTP_STATE))
        self.trainable.sync_model()
        self.balance = ExpertBalancer(self.trainable.model, speed=config.balance_bias)

    @property
    def model(self) -> Transformer:
        """The live model."""
        return self.trainable.model

    def forward(
        self,
        rows: TokenBatch,
        *,
        routes_NLK: torch.Tensor | None = None,
        plausible: float = 0.0,
        counts_N: torch.Tensor | None = None,
        hook: ForwardHook = no_hook,
    ) -> Forward:
        """Run a forward pass of these tokens, which are this rank's part (`ProcessGroup.local_tokens`) on its device.

        `routes_NLK`, `plausible`, `counts_N`: the arguments `routes`, `plausible` and `counts` of `Transformer.run`.
        `hook`: called at each named tensor (`models.hooks`)."""
        return self.model.train().run(
            rows.tokens_N,
            self.group.cache(rows, self.model.operators),
            routes_NLK,
            rows.rows_R,
            plausible=plausible,
            counts=counts_N,
            hook=hook,
        )

    def accumulate(self, rows: Sequence[Row], backward: Callable[[int, list[int]], None]) -> None:
        """Add the gradient of a batch, packed into rows, to the accumulated gradient.

        `backward(number, texts)` runs the backward pass of one share of a row: `number` counts the shares of this rank,
        and `texts` are the indices of the share's texts. Call `clear` if it raises an error."""
        for row in rows:
            own = self.group.own_shares(len(row))
            accumulator = self.group.accumulator(self.optimizer, len(own))
            for number, share in enumerate(own):
                backward(number, row[share])
                if accumulator is not None:
                    accumulator.add_share()
            if accumulator is not None:
                accumulator.finish_row()

    def step(self, *, lr: float, step: int) -> float:
        """Apply and clear the gradient and the expert loads. Returns the gradient norm before clipping.

        `step`: the number of this step, for errors. Raises `NotFinite` for a gradient that is not finite, before
        anything has changed, and for new weights that are not finite."""
        group = self.group
        with group.collective("optimiser step"):
            norm = checked_step(
                self.optimizer, self.trainable.views, lr=lr, step=step, propagate_errors=group.propagate_errors
            )
        self.mtp_loss = self._step_heads(lr=lr, step=step)
        self.trainable.sync_model()
        if self.balance.load_LE.numel():
            group.all_reduce(self.balance.load_LE)
        self.balance.update()
        return norm

    def _step_heads(self, *, lr: float, step: int) -> float:
        """Apply and clear the gradient of the MTP heads, summed over all ranks. Returns their loss."""
        if self.mtp.optimizer is None:
            return 0.0
        if self.group.size > 1:
            self.group.all_reduce(self.mtp.optimizer.grad)
        return sum(self.group.all_gather(self.mtp.step(lr, step=step)))

    def clear(self) -> None:
        """Discard the accumulated gradient, also after an interrupted forward or backward pass."""
        self.mtp.clear()
        self.group.reset(self.model)
        self.optimizer.clear()
        self.balance.clear()

    def save(self, path: Path, files: Mapping[str, str], *, when: str) -> None:
        """Write a checkpoint directory with the trained weights and the optimiser state, all or nothing.

        `files`: further files, as name → content. `when`: the end of an error about weights that are not finite, such
        as "at step 3". Raises `CheckpointError` and `NotFinite`."""
        with self.group.propagate_errors("weights"):
            check_weights(self.trainable.views(), when)
        with self.group.checkpoint_directory(path) as folder:
            self.trainable.write(folder)
            self.group.save_optimizer(folder, self.optimizer)
            with self.group.propagate_errors("files"):  # the others read the directory when these are written
                if self.group.rank == 0:
                    if self.mtp.optimizer is not None:
                        save_tensors(self.mtp.optimizer.state(), folder / MTP_STATE)
                    for name, content in files.items():
                        (folder / name).write_text(content)

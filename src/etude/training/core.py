"""The core of training: trained weights with their optimiser, and the ranks that share a step, whatever its loss.

RL (`training.learner`) and mid-training (`training.mid_training`) have one each. They decide which texts a forward pass
has, and what its loss is. The core has what is the same for both: forward passes, the order in which gradients are
added, the optimiser step, loading and saving."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from etude.models.hooks import ForwardHook, no_hook
from etude.models.transformer import Forward, Transformer
from etude.training.balance import ExpertBalancer
from etude.training.config import OptimizerKind
from etude.training.muon import Muon
from etude.training.nan_check import check_weights, checked_step
from etude.training.optimizer import AdamW
from etude.training.process_group import ProcessGroup
from etude.training.token_batch import TokenBatch
from etude.training.trainable import LoadRequest

Row = Sequence[list[int]]
"""The texts of one row of a batch, as indices: for each share those that it forwards together (`training.packing`)."""


class TrainingCore:
    """The trained weights of a checkpoint, or this rank's part of them, with optimiser and router biases.

    It continues from the state of a learner that saved the checkpoint (`LoadRequest.resumed`), and starts at none
    otherwise. All calls are collective: each rank of `group` makes the same ones. `weight_decay`: of the optimiser.

    Raises `CheckpointError` when the checkpoint cannot be loaded."""

    def __init__(self, request: LoadRequest, *, group: ProcessGroup, weight_decay: float = 0.0) -> None:
        config = request.config
        self.config, self.group, self.device = config, group, request.device
        self.trainable = group.load(request)
        make = functools.partial(Muon, exchange=group) if config.optimizer is OptimizerKind.MUON else AdamW
        self.optimizer: AdamW = make(
            self.trainable.module,
            weights=config.weights,
            weight_decay=weight_decay,
            grad_clip=config.grad_clip,
            norm=group.global_norm,
        )
        if request.resumed:
            group.restore_optimizer(request.path, self.optimizer)
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
        self.trainable.sync_model()
        if self.balance.load_LE.numel():
            group.all_reduce(self.balance.load_LE)
        self.balance.update()
        return norm

    def clear(self) -> None:
        """Discard the accumulated gradient, also after an interrupted forward or backward pass."""
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
            if self.group.rank == 0:
                for name, content in files.items():
                    (folder / name).write_text(content)

"""AdamW over one flat vector, with master weights and live weights, which may be rounded to bf16.

The live weights are those that forward passes read and that are published. The optimiser adds its updates to the master
weights, which are float32 copies or the live weights themselves. With rounded live weights the learner computes with
exactly the bytes that it publishes, so an engine that reads bf16 and computes in float32 has the same numbers. Float32
master weights keep what rounding would lose, so small updates add up. Masters in bf16 are the live weights themselves;
small updates add up because they are rounded stochastically.

One vector has all weights and one all gradients. A step is one fused pass over them, and data-parallel ranks exchange
one buffer. Under FSDP2 live weights are this rank's shards. Its gradients, which FSDP2 rounds as the weights are, move
into the vector as soon as they are there, so that sums over backward passes are float32 and no gradient is kept twice.

Results do not depend on which rank has which numbers. The kernel computes the last few numbers of a vector with other
instructions, so vectors end in padding; and the gradient norm is an exact sum over rows, rounded once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from etude.errors import CheckpointError, NotFinite
from etude.models.lora import local_part
from etude.training.config import LiveWeights, Masters, Moments
from etude.training.exact_sum import exact_norm
from etude.training.optimizer_state import BlockState, FlatState, OptimizerState, Parameters, Update, padded, zeros

COUNT = "num_steps"
"""The key of the number of steps in the state of an optimiser."""


class AdamW:
    """AdamW with decoupled weight decay (arXiv 1711.05101).

    It takes over the memory of the model's parameters and gradients, or writes to this rank's shards under FSDP2.

    - `weights`: the precision of the live weights.
    - `grad_clip`: the largest gradient norm; 0: no limit.
    - `norm`: computes the gradient norm from squares by parameter (`process_group.ProcessGroup.global_norm`).
    - `masters`, `moments`, `offload`: as in `LearnerConfig`; what is kept is in `optimizer_state`.
    - `seed`: of the stochastic rounding. `first_row`: returns the index of this rank's first row.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> optimizer = AdamW(layer, weights=LiveWeights.F32)
    >>> before = layer.weight.sum().item()
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> norm = optimizer.step(lr=0.1)
    >>> round(norm, 3), round(layer.weight.sum().item() - before, 3), layer.weight.grad.sum().item()
    (1.414, -0.2, 0.0)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weights: LiveWeights,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        norm: Callable[[Mapping[str, torch.Tensor]], float] = exact_norm,
        masters: Masters = Masters.F32,
        moments: Moments = Moments.F32,
        offload: bool = False,
        seed: int = 0,
        first_row: Callable[[str], int] = lambda name: 0,
    ) -> None:
        self.betas, self.eps, self.weight_decay, self.grad_clip = betas, eps, weight_decay, grad_clip
        self.num_steps, self._norm, self._model = 0, norm, model
        self.parameters = dict(model.named_parameters())
        self.excluded = turned = tuple(self._excluded_names(model))
        self.shapes = {name: local_part(p).shape for name, p in self.parameters.items()}
        self.slices, excluded_size, self._size = layout(self.shapes, turned)
        one = local_part(next(iter(self.parameters.values())))
        self._device, self._rounds = one.device, weights is LiveWeights.BF16
        self._grad = zeros(self._size, self._device)
        self._live: torch.Tensor | None = None
        if self.is_sharded:
            for name, p in self.parameters.items():
                move = functools.partial(self._move_gradient, name)
                p.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]
        else:
            self._live = torch.zeros(padded(self._size), dtype=one.dtype, device=self._device)
            self._take_over()
        self._layout = Parameters(
            slices=self.slices,
            shapes=self.shapes,
            excluded=turned,
            excluded_size=excluded_size,
            size=self._size,
            live=self.live_of,
            flat_live=self._live,
            grad=self._grad,
            first_row=first_row,
            device=self._device,
        )
        bf16, codes = masters is Masters.BF16, moments is Moments.INT8
        own = bf16 or not self._rounds
        self.kept: OptimizerState = (
            BlockState(self._layout, live_is_master=own, rounds=bf16, quantised=codes, offload=offload, seed=seed)
            if bf16 or codes
            else FlatState(self._layout, live_is_master=own, offload=offload)
        )
        self._write_live()

    def _excluded_names(self, model: nn.Module) -> Sequence[str]:
        """Return the parameters that a subclass updates by another rule.

        They are first in the vectors and have no second moment."""
        return ()

    @torch.no_grad()
    def _take_over(self) -> None:
        for name, p in self.parameters.items():
            live = self.live[self.slices[name]].view(self.shapes[name])
            live.copy_(p)
            p.data = live
            if live.dtype is not torch.float32:
                p.grad_dtype = torch.float32  # else the sum over backward passes would be rounded after each
            p.grad = self.grad[self.slices[name]].view(self.shapes[name])

    @property
    def is_sharded(self) -> bool:
        """Whether this rank has only some rows of the parameters."""
        return any(map(_is_sharded, self.parameters.values()))

    @property
    def live(self) -> torch.Tensor:
        """All live weights in one vector. Only for a learner whose weights are not sharded."""
        assert self._live is not None, "the live weights are shards"
        return self._live[: self._size]

    @property
    def grad(self) -> torch.Tensor:
        """All gradients, float32, in one vector."""
        return self._grad[: self._size]

    def live_of(self, name: str) -> torch.Tensor:
        """Return the live weights of a parameter. With sharded weights these are this rank's rows."""
        return local_part(self.parameters[name]).detach()

    def lives(self) -> list[torch.Tensor]:
        """Return all live weights: one vector, or with sharded weights this rank's rows of each parameter."""
        return [self.live] if self._live is not None else list(map(self.live_of, self.parameters))

    def by_parameter(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split a vector with the layout of `grad` into one view per parameter."""
        return self._layout.split(vector)

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Apply the gradient and clear it. Returns the gradient norm before clipping.

        A zero gradient changes nothing and does not count as a step, since the momentum would still move the weights.
        Raises `NotFinite` for a NaN or infinite norm, and then changes nothing."""
        norm = self._norm(_squares(self.by_parameter(self.grad)))
        if not norm < float("inf"):
            raise NotFinite(
                f"the gradient of step {self.num_steps + 1} is not finite",
                f"its norm is {norm}",
                hint="lower the learning rate (lr)",
            )
        if norm == 0.0:
            self.clear()
            return norm
        self.num_steps += 1
        divisor = norm / self.grad_clip if norm > self.grad_clip > 0 else None
        update = Update(lr, self.num_steps, divisor, self.betas, self.eps, self.weight_decay)
        self._update_excluded(update)
        self.kept.adamw(update)
        self._write_live()
        self.clear()
        return norm

    def _update_excluded(self, update: Update) -> None:
        """Update the masters of `_excluded_names`."""

    def clear(self) -> None:
        """Discard the accumulated gradient."""
        self.grad.zero_()

    @torch.no_grad()
    def _move_gradient(self, name: str, p: torch.Tensor) -> None:
        """Add the gradient of a shard to `grad`, and free it. FSDP2 calls this after each backward pass of a layer."""
        if p.grad is not None:
            self.grad[self.slices[name]].view(self.shapes[name]).add_(local_part(p.grad))
            p.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Return the optimiser state for a checkpoint, as views. The accumulated gradient is not part of it."""
        return {**self.kept.tensors(), COUNT: torch.tensor([self.num_steps], dtype=torch.int64)}

    @torch.no_grad()
    def restore(self, state: Mapping[str, torch.Tensor], *, live: bool = True) -> None:
        """Continue from the result of `state`.

        Raises `CheckpointError` when it does not fit the model or, with `live`, when its float32 weights do not match
        the live weights."""
        own = self.state()
        for name, tensor in own.items():
            found = state.get(name)
            if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise CheckpointError(
                    f"the optimiser's {name!r} does not fit the model", hint="load a whole learner checkpoint"
                )
        for name in own.keys() - {COUNT}:
            own[name].copy_(state[name])
        self.num_steps = int(state[COUNT])
        changed = self._write_live(count=live)
        if changed:
            raise CheckpointError(
                "the optimiser's master weights do not match the model's weights in the same checkpoint",
                f"{changed} of {self._size} numbers differ",
                hint="load a complete learner checkpoint, and use the setting `weights` with which it was saved",
            )

    @torch.no_grad()
    def _write_live(self, *, count: bool = False) -> int:
        """Write the masters into the live weights, rounded where these are. Returns with `count` how many changed."""
        if self.is_sharded:
            self._model.reshard()  # type: ignore[operator]  # or the next forward would take what it has gathered
        changed = 0
        for name in self.parameters:
            live, master = self.live_of(name), self.kept.master(name)
            new = live if master is None else master
            new = new.bfloat16() if self._rounds else new
            changed += int((live != new.to(live.device)).sum()) if count else 0
            if new is not live:
                live.copy_(new)
        return changed


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")  # without importing torch.distributed


def layout(shapes: Mapping[str, torch.Size], first: Sequence[str]) -> tuple[dict[str, slice], int, int]:
    """Lay out parameters in a flat vector. Returns (slice of each parameter, start of the others, length).

    The parameters in `first` are at the start; the others begin at a multiple of `optimizer_state.PADDING`."""
    found, at = {}, 0
    for name in first:
        found[name] = slice(at, at := at + shapes[name].numel())
    at = begin = padded(at)
    for name in shapes:
        if name not in found:
            found[name] = slice(at, at := at + shapes[name].numel())
    return {name: found[name] for name in shapes}, begin, at


def _squares(gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the squared norm of each row of each gradient, float64. Ranks with different rows can add them up."""
    norms = [torch.linalg.vector_norm(g.flatten(1), dim=1) if g.ndim > 1 else g.abs() for g in gradients.values()]
    squares = torch.cat(norms).double().square_()
    return dict(zip(gradients, torch.split(squares, [len(rows) for rows in norms]), strict=True))

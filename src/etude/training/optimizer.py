"""AdamW over one flat vector, with float32 weights behind live weights that may be rounded to bf16.

With rounded live weights the learner computes with exactly the bytes that it publishes, so an engine that reads bf16
and computes in float32 has the same numbers. The float32 master weights keep what rounding would lose, so small updates
add up.

One vector has all weights and one all gradients. A step is one fused pass over them, and data-parallel ranks exchange
one buffer. Under FSDP2 the vectors have this rank's rows, copied from its gradients and to its shards.

Results do not depend on which rank has which numbers. The kernel computes the last few numbers of a vector with other
instructions, so vectors end in padding; and the gradient norm is an exact sum over rows, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.optim.adamw import adamw

from etude.errors import CheckpointError, NotFinite
from etude.models.lora import local_part
from etude.training.config import LiveWeights
from etude.training.exact_sum import exact_norm

PADDING = 64
"""Vectors hold a multiple of this many numbers: more than any processor computes at once."""


class AdamW:
    """AdamW with decoupled weight decay (arXiv 1711.05101).

    It takes over the memory of the model's parameters and gradients, or of this rank's shards under FSDP2. `weights`:
    the precision of the live weights. `grad_clip`: the largest gradient norm; 0: no limit. `norm`: computes the
    gradient norm from squares by parameter (`process_group.ProcessGroup.global_norm`).

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
    ) -> None:
        self.betas, self.eps, self.weight_decay, self.grad_clip = betas, eps, weight_decay, grad_clip
        self.num_steps, self._norm, self._model = 0, norm, model
        self.parameters = dict(model.named_parameters())
        self.excluded = turned = tuple(self._excluded_names(model))
        self.shapes = {name: local_part(p).shape for name, p in self.parameters.items()}
        self.slices, self._excluded_size, size = layout(self.shapes, turned)
        device = local_part(next(iter(self.parameters.values()))).device
        self._live, self._grad, self._first = (_zeros(size, device) for _ in range(3))
        self._second = _zeros(size - self._excluded_size, device)
        self._master = self._live if weights is LiveWeights.F32 else _zeros(size, device)
        self.live, self.grad, self.first, self.master = (
            padded[:size] for padded in (self._live, self._grad, self._first, self._master)
        )
        self.second = self._second[: size - self._excluded_size]
        self._take_over()
        self.master.copy_(self.live)
        self._round()

    def _excluded_names(self, model: nn.Module) -> Sequence[str]:
        """Return the parameters that a subclass updates by another rule.

        They are first in the vectors and have no second moment."""
        return ()

    @torch.no_grad()
    def _take_over(self) -> None:
        for name, p in self.parameters.items():
            live = self.live[self.slices[name]].view(self.shapes[name])
            live.copy_(local_part(p))
            if not _is_sharded(p):
                p.data, p.grad = live, self.grad[self.slices[name]].view(self.shapes[name])

    @property
    def is_sharded(self) -> bool:
        """Whether the vectors hold only this rank's rows."""
        return any(map(_is_sharded, self.parameters.values()))

    def by_parameter(self, vector: torch.Tensor, *, adamw_only: bool = False) -> dict[str, torch.Tensor]:
        """Split a vector with the layout of `live` (the live weights) into one view per parameter.

        `adamw_only`: the vector has the layout of `second` (the second moment), which lacks parameters that a subclass
        updates by another rule."""
        begin = self._excluded_size if adamw_only else 0
        return {
            name: vector[place.start - begin : place.stop - begin].view(self.shapes[name])
            for name, place in self.slices.items()
            if not (adamw_only and name in self.excluded)
        }

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Apply the gradient and clear it. Returns the gradient norm before clipping.

        A zero gradient changes nothing and does not count as a step, since the momentum would still move the weights.
        Raises `NotFinite` for a NaN or infinite norm, and then changes nothing."""
        self._collect()
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
        self._update_excluded(lr, divisor)
        device, after = self.live.device, self._excluded_size
        adamw(
            [self._master[after:]],
            [self._grad[after:]],
            [self._first[after:]],
            [self._second],
            [],
            [torch.tensor(self.num_steps - 1.0, device=device)],  # counted up by the kernel
            fused=True,
            grad_scale=None if divisor is None else torch.tensor(divisor, device=device),
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )
        self._round()
        self.clear()
        return norm

    def _update_excluded(self, lr: float, divisor: float | None) -> None:
        """Update the masters of `_excluded_names` by the gradient divided by `divisor`."""

    def clear(self) -> None:
        """Discard the accumulated gradient."""
        self.grad.zero_()
        for p in self.parameters.values():
            if _is_sharded(p):
                p.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Return the optimiser state for a checkpoint, as views. The accumulated gradient is not part of it."""
        count = torch.tensor([self.num_steps], dtype=torch.int64)
        return {"master": self.master, "first": self.first, "second": self.second, "num_steps": count}

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
        before = self.live.clone()
        for name in ("master", "first", "second"):
            own[name].copy_(state[name])
        self.num_steps = int(state["num_steps"])
        self._round()
        if live and not torch.equal(before, self.live):
            raise CheckpointError(
                "the optimiser's master weights are not those of the model beside them",
                f"{int((before != self.live).sum())} of {before.numel()} differ",
                hint="load a whole learner checkpoint, with the same `weights` setting",
            )

    def _collect(self) -> None:
        for name, p in self.parameters.items():
            if _is_sharded(p):
                own = self.grad[self.slices[name]].view(self.shapes[name])
                own.zero_() if p.grad is None else own.copy_(local_part(p.grad))

    @torch.no_grad()
    def _round(self) -> None:
        """Write the rounded masters into the live weights and the shards."""
        if self._master is not self._live:
            self.live.copy_(self.master.bfloat16())
        shards = [(name, p) for name, p in self.parameters.items() if _is_sharded(p)]
        if shards:
            self._model.reshard()  # type: ignore[operator]  # or the next forward would take what it has gathered
        for name, p in shards:
            local_part(p).copy_(self.live[self.slices[name]].view(self.shapes[name]))


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")  # without importing torch.distributed


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(_padded(size), device=device)


def _padded(size: int) -> int:
    return -(-size // PADDING) * PADDING


def layout(shapes: Mapping[str, torch.Size], first: Sequence[str]) -> tuple[dict[str, slice], int, int]:
    """Lay out parameters in a flat vector. Returns (slice of each parameter, start of the others, length).

    The parameters in `first` are at the start; the others begin at a multiple of `PADDING`."""
    found, at = {}, 0
    for name in first:
        found[name] = slice(at, at := at + shapes[name].numel())
    at = begin = _padded(at)
    for name in shapes:
        if name not in found:
            found[name] = slice(at, at := at + shapes[name].numel())
    return {name: found[name] for name in shapes}, begin, at


def _squares(gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the squared norm of each row of each gradient, float64. Ranks with different rows can add them up."""
    norms = [torch.linalg.vector_norm(g.flatten(1), dim=1) if g.ndim > 1 else g.abs() for g in gradients.values()]
    squares = torch.cat(norms).double().square_()
    return dict(zip(gradients, torch.split(squares, [len(rows) for rows in norms]), strict=True))

"""What an optimiser keeps beside gradients: master weights and moments, and how a step updates them.

`FlatState` has float32 masters and moments in flat vectors, which torch's fused kernel updates. `BlockState` has bf16
masters, 8-bit moments, or both; it updates a parameter some blocks at a time, so a step needs little memory beside what
is stored. Both can keep their tensors in host memory (`offload`): a step then copies some numbers at a time to the
device of the gradients, updates them there, and copies them back, with the same bits as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.optim.adamw import adamw

from etude.training.moments import Moment, chunks
from etude.training.rounding import Noise, noise, noise_key, round_to_bf16

PADDING = 64
"""Vectors hold a multiple of this many numbers: more than any processor computes at once."""
CHUNK = 1 << 24
"""Numbers of an offloaded vector that are on the device at a time; a multiple of `PADDING`."""


@dataclass(frozen=True)
class Update:
    """The settings of one step. `divisor`: the gradient is divided by it; None: it is not divided. `number`: the number
    of the step, from 1."""

    lr: float
    number: int
    divisor: float | None
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class OptimizerState(Protocol):
    """Masters and moments of the parameters of an optimiser, or of this rank's rows of them."""

    def adamw(self, update: Update) -> None:
        """Update all parameters but the excluded ones by their gradients with AdamW."""

    def momentum(self, update: Update, momentum: float) -> None:
        """Add the gradients of the excluded parameters to their momentum, and replace these gradients by
        Nesterov's: gradient + `momentum` x new momentum."""

    def descend(self, update: Update) -> None:
        """Subtract lr times the gradients of the excluded parameters from their masters, after weight decay."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors that a checkpoint needs, as views, by name."""

    def by_parameter(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, torch.Tensor]]:
        """Split tensors that have the names and shapes of `self.tensors()` by parameter.

        Returns {name of a part: (name of its parameter, the part)}. With sharded weights, parts have this rank's
        rows."""

    def master(self, name: str) -> torch.Tensor | None:
        """Return the float32 master of a parameter; None if the live weights are the masters."""


def zeros(size: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    """Return a padded vector of zeros, float32."""
    return torch.zeros(padded(size), device=device, pin_memory=pinned)


def padded(size: int) -> int:
    """Return the smallest multiple of `PADDING` that is at least `size`."""
    return -(-size // PADDING) * PADDING


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model (with sharded weights: this rank's rows), and where they are in flat vectors.

    - `slices`, `shapes`: by name, the place of a parameter in the flat vectors, and its shape.
    - `excluded`: the names of the parameters that AdamW does not update, and that have no second moment. They are the
      first `excluded_size` numbers of the vectors.
    - `size`: the length of the vectors without the padding at their end.
    - `live`: returns the live weights of a parameter by its name. `flat_live`: all live weights in one padded vector;
      None with sharded weights.
    - `grad`: all gradients in one padded vector, float32.
    - `first_row`: returns, by name, the index of the first row of a parameter that this rank has.
    - `device`: the device of weights and gradients."""

    slices: Mapping[str, slice]
    shapes: Mapping[str, torch.Size]
    excluded: Sequence[str]
    excluded_size: int
    size: int
    live: Callable[[str], torch.Tensor]
    flat_live: torch.Tensor | None
    grad: torch.Tensor
    first_row: Callable[[str], int]
    device: torch.device

    def split(self, vector: torch.Tensor, *, adamw_only: bool = False) -> dict[str, torch.Tensor]:
        """Split a flat vector into one view per parameter. `adamw_only`: the vector does not have
        the excluded parameters."""
        begin = self.excluded_size if adamw_only else 0
        return {
            name: vector[place.start - begin : place.stop - begin].view(self.shapes[name])
            for name, place in self.slices.items()
            if not (adamw_only and name in self.excluded)
        }


class FlatState:
    """An `OptimizerState` of float32 vectors.

    `live_is_master`: whether the live weights are the masters. With sharded weights there is no vector of live weights,
    so the masters are a vector of their own in any case."""

    def __init__(self, parameters: Parameters, *, live_is_master: bool, offload: bool) -> None:
        self._parameters, device = parameters, parameters.device
        self._device = device
        where, pinned = _place(device, offload)
        size, begin = parameters.size, parameters.excluded_size
        self._first, self._second = (zeros(n, where, pinned=pinned) for n in (size, size - begin))
        flat = parameters.flat_live
        self._live_is_master = live_is_master and flat is not None
        self._master = flat if live_is_master and flat is not None else zeros(size, where, pinned=pinned)
        self.vectors = {
            "master": self._master[:size],
            "first": self._first[:size],
            "second": self._second[: size - begin],
        }
        if not self._live_is_master:
            for name, own in parameters.split(self.vectors["master"]).items():
                own.copy_(parameters.live(name))

    def adamw(self, update: Update) -> None:
        begin, size = self._parameters.excluded_size, len(self._master)
        grads, device = self._parameters.grad, self._device
        divisor = None if update.divisor is None else torch.tensor(update.divisor, device=device)
        for master, first, second, grad in self._chunks(
            slice(begin, size), self._master, self._first, self._second, grads, second_from=begin
        ):
            adamw(
                [master],
                [grad],
                [first],
                [second],
                [],
                [torch.tensor(update.number - 1.0, device=device)],  # counted up by the kernel
                fused=True,
                grad_scale=divisor,
                beta1=update.betas[0],
                beta2=update.betas[1],
                lr=update.lr,
                weight_decay=update.weight_decay,
                eps=update.eps,
                amsgrad=False,
                maximize=False,
            )

    def momentum(self, update: Update, momentum: float) -> None:
        for first, grad in self._chunks(self._excluded, self._first, self._parameters.grad):
            if update.divisor is not None:
                grad.div_(update.divisor)
            first.mul_(momentum).add_(grad)
            grad.add_(first, alpha=momentum)

    def descend(self, update: Update) -> None:
        for master, ahead in self._chunks(self._excluded, self._master, self._parameters.grad):
            master.mul_(1 - update.lr * update.weight_decay).sub_(ahead, alpha=update.lr)

    @property
    def _excluded(self) -> slice:
        return slice(0, self._parameters.excluded_size)

    def _chunks(self, span: slice, *vectors: torch.Tensor, second_from: int = 0) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield parts of vectors on the device, whose new values are then stored. They are whole where nothing is
        offloaded. Vectors shorter than the others begin at `second_from`."""
        step = span.stop - span.start if self._first.device == self._device else CHUNK
        longest = max(map(len, vectors))
        for start in range(span.start, span.stop, max(1, step)):
            stop = min(span.stop, start + step)
            stored = [
                v[start:stop] if len(v) == longest else v[start - second_from : stop - second_from] for v in vectors
            ]
            parts = [one.to(self._device, non_blocking=True) for one in stored]
            yield tuple(parts)
            for one, part in zip(stored, parts, strict=True):
                if part is not one:
                    one.copy_(part, non_blocking=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.vectors)

    def by_parameter(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, torch.Tensor]]:
        return {
            f"{key}.{name}": (name, own)
            for key in self.vectors
            for name, own in self._parameters.split(tensors[key], adamw_only=key == "second").items()
        }

    def master(self, name: str) -> torch.Tensor | None:
        if self._live_is_master:
            return None
        return self.vectors["master"][self._parameters.slices[name]].view(self._parameters.shapes[name])


class BlockState:
    """An `OptimizerState` with bf16 masters, 8-bit moments, or both.

    `live_is_master`: whether the live weights are the masters. `rounds`: whether masters are rounded to bf16.
    `quantised`: whether moments are 8-bit codes. `seed`: the seed of the stochastic rounding."""

    def __init__(
        self,
        parameters: Parameters,
        *,
        live_is_master: bool,
        rounds: bool,
        quantised: bool,
        offload: bool,
        seed: int,
    ) -> None:
        self._parameters, self._rounds, self._seed = parameters, rounds, seed
        self._device = parameters.device
        where, pinned = _place(self._device, offload)
        self._masters: dict[str, torch.Tensor] = {}
        self._moments: dict[str, list[Moment]] = {}
        for name, shape in parameters.shapes.items():
            self._moments[name] = [
                Moment(shape, signed=signed, quantised=quantised, device=where, pinned=pinned)
                for signed in ([True] if name in parameters.excluded else [True, False])
            ]
            if not live_is_master:
                self._masters[name] = torch.empty(shape, device=where, pin_memory=pinned)
                self._masters[name].copy_(parameters.live(name))

    def adamw(self, update: Update) -> None:
        (beta1, beta2), number = update.betas, update.number
        for name, moments in self._moments.items():
            if name in self._parameters.excluded:
                continue
            first, second = moments
            for blocks, grad, bits in self._blocks(name, number):
                if update.divisor is not None:
                    grad = grad / update.divisor
                m = first.read(blocks, self._device).mul_(beta1).add_(grad * (1 - beta1))
                v = second.read(blocks, self._device).mul_(beta2).add_((grad * grad).mul_(1 - beta2))
                step = (v / (1 - beta2**number)).sqrt_().add_(update.eps)
                step = (m / (1 - beta1**number)).div_(step)
                self._subtract(name, blocks, step, update, bits)
                first.write(blocks, m, bits.first if first.is_quantised else None)
                second.write(blocks, v, bits.second if second.is_quantised else None)

    def momentum(self, update: Update, momentum: float) -> None:
        for name in self._parameters.excluded:
            (first,) = self._moments[name]
            for blocks, grad, bits in self._blocks(name, update.number):
                if update.divisor is not None:
                    grad.div_(update.divisor)
                m = first.read(blocks, self._device).mul_(momentum).add_(grad)
                grad.add_(m * momentum)
                first.write(blocks, m, bits.first if first.is_quantised else None)

    def descend(self, update: Update) -> None:
        for name in self._parameters.excluded:
            for blocks, ahead, bits in self._blocks(name, update.number):
                self._subtract(name, blocks, ahead, update, bits)

    def _blocks(self, name: str, number: int) -> Iterator[tuple[slice, torch.Tensor, Noise]]:
        """Yield blocks of a parameter, with their gradients [B, S] and random bits. Each operation on them rounds each
        number alone, so the bits do not depend on how blocks are divided."""
        parameters, size = self._parameters, self._moments[name][0].size
        grads = parameters.grad[parameters.slices[name]].view(-1, size)
        of_row = parameters.shapes[name][1:].numel() // size
        before, key = parameters.first_row(name) * of_row, noise_key(self._seed, number, name)
        for blocks in chunks(len(grads), size, self._device):
            count = blocks.stop - blocks.start
            yield blocks, grads[blocks], noise(key, before + blocks.start, count, size, self._device)

    def _subtract(self, name: str, blocks: slice, step: torch.Tensor, update: Update, bits: Noise) -> None:
        """Subtract lr times `step` [B, S] from blocks of the masters, after weight decay."""
        size = self._moments[name][0].size
        stored = self._masters.get(name)
        if stored is None:
            stored = self._parameters.live(name)
        own = stored.view(-1, size)[blocks]
        new = own.to(self._device, torch.float32, copy=True)
        if update.weight_decay:
            new.mul_(1 - update.lr * update.weight_decay)
        new.sub_(step * update.lr)
        own.copy_(round_to_bf16(new, bits.weights) if self._rounds else new, non_blocking=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {key: tensor for key, (_, tensor) in self._named().items()}

    def _named(self) -> dict[str, tuple[str, torch.Tensor]]:
        found = {f"master.{name}": (name, master) for name, master in self._masters.items()}
        for name, moments in self._moments.items():
            for kind, moment in zip(("first", "second"), moments, strict=False):
                found |= {key: (name, one) for key, one in moment.tensors(f"{kind}.{name}").items()}
        return found

    def by_parameter(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, torch.Tensor]]:
        return {key: (name, tensors[key]) for key, (name, _) in self._named().items()}

    def master(self, name: str) -> torch.Tensor | None:
        return self._masters.get(name)


def _place(device: torch.device, offload: bool) -> tuple[torch.device, bool]:
    """Return the device on which state is stored, and whether its memory is pinned for fast copies."""
    return (torch.device("cpu"), device.type == "cuda") if offload else (device, False)

"""A model some of whose matrices are merged: W + scale · B A (arXiv 2106.09685), of which W is frozen.

Learner and engine have the same `Adapters`. The learner's are parameters, which an optimiser takes over, merged anew
after each step (`settle`); an engine's are live memory that versions are written to, of which the matrices are derived
(`derived`). What both compute with is the merged matrix, rounded to the dtype that is published: the bits of one
function (`merge`), and those that an exported directory holds.

Names are PEFT's: `base_model.model.` before the module's, `.lora_A.weight` [r, I] and `.lora_B.weight` [O, r] behind.
Where the model holds matrices fused or stacked, their A and B are, too, and named part by part.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from etude.errors import CheckpointError
from etude.models.naming import hf_views, stays_float32
from etude.models.packed import Matrix, matrices
from etude.models.transformer import Transformer
from etude.numerics.adapted import Adapted, Pairs, merge
from etude.records.adapter import A, AdapterConfig, lora_names


@dataclass(frozen=True)
class _Adapter:
    """Of one parameter, fused and stacked as that is."""

    parameter: str  # the merged one's name in the model
    names: tuple[str, ...]  # Hugging Face's, of its rows in order
    base: torch.Tensor
    pairs: Pairs
    rows: slice | None = None  # which of them this rank has, of base and merged matrix; None: all

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """A and B of each name."""
        rank, width = self.pairs.a.shape[-2:]
        rows = list(self.pairs.rows) * (len(self.names) // len(self.pairs.rows))
        a, b = self.pairs.a.detach().view(-1, rank, width), torch.split(self.pairs.b.detach().view(-1, rank), rows)
        named = zip(self.names, a, b, strict=True)
        return {
            name: one for module, down, up in named for name, one in zip(lora_names(module), (down, up), strict=True)
        }


class Adapters(nn.Module):
    """Every adapter of a model, as parameters. The model's own matrices become merged ones, and want no gradient.

    `dtype`: what versions are published in, and merged matrices rounded to; all else that the model computes with is to
    be, too (`rounded`). `held`: what A and B lie in (None: `dtype`). They are zeros, and nothing is written yet.
    `digest`: the model's, where it is known. `device`: of A and B, where the model has no memory yet (`share`). Raises
    `CheckpointError` where the model is not the config's base, or has not its modules.
    """

    def __init__(
        self,
        model: Transformer,
        config: AdapterConfig,
        *,
        dtype: torch.dtype,
        held: torch.dtype | None = None,
        digest: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self._model = (model,)  # no part of this module
        found = digest or base_digest(model, dtype)
        if config.base not in ("", found):
            raise CheckpointError(
                f"an adapter of the base {config.base[:12]}",
                f"the weights here are {found[:12]}, as {str(dtype).removeprefix('torch.')}",
                hint="give the checkpoint that it was trained on: it would be another model on this one",
            )
        self.config = AdapterConfig(config.rank, config.alpha, config.modules, found)
        model.requires_grad_(False)
        chosen = _chosen(model, config.modules)
        own, lies = {id(p): name for name, p in model.named_parameters()}, {"dtype": held or dtype, "device": device}
        self._adapters = [_adapter(own[id(matrix.weight)], matrix, self.config, dtype, lies) for matrix in chosen]
        self.trained = nn.ParameterList([p for one in self._adapters for p in (one.pairs.a, one.pairs.b)])
        if isinstance(model.operators, Adapted):
            for one in self._adapters:
                model.operators.train(functools.partial(model.get_parameter, one.parameter), one.pairs)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Begin: A uniform within 1/√I, each by the seed and its own name, B zero (as PEFT does)."""
        for name, view in self.views.items():
            if name.endswith(A):
                key = hashlib.sha256(f"{seed} {name}".encode()).digest()[:7]
                drawn = torch.Generator().manual_seed(int.from_bytes(key))
                bound = 1 / math.sqrt(view.shape[-1])
                view.copy_(torch.empty(view.shape).uniform_(-bound, bound, generator=drawn))

    def settle(self) -> None:
        """Have the model compute with what A and B are now."""
        for one in self._adapters:
            self._merge(one)

    def share(self, rows: Mapping[str, slice]) -> None:
        """FSDP2 has the model, and left these rows of each adapted parameter here: from now on base and merged matrix
        are those; A and B stay whole."""
        self._adapters = [
            replace(one, base=self._memory(one).to(self.dtype, copy=True), rows=rows[one.parameter])
            for one in self._adapters
        ]

    def _memory(self, one: _Adapter) -> torch.Tensor:
        """Where the merged matrix, or what is here of it, lies."""
        return own_part(self._model[0].get_parameter(one.parameter))

    @property
    def bases(self) -> dict[str, torch.Tensor]:
        """What lies here of each adapted parameter's base, by the model's names."""
        return {one.parameter: one.base for one in self._adapters}

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The names in `views` of each adapted parameter's A and B, by the model's names: in the order of `trained`."""
        return {one.parameter: tuple(one.views) for one in self._adapters}

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """A and B by PEFT's names, as contiguous detached views."""
        return {name: view for one in self._adapters for name, view in one.views.items()}

    @property
    def base(self) -> dict[str, torch.Tensor]:
        """Every weight of the base by Hugging Face's names. What is not adapted is the model's own."""
        found = hf_views(*self._model)
        for one in self._adapters:
            rows = [found[name].shape[0] for name in one.names]
            found |= zip(one.names, torch.split(one.base.flatten(0, -2), rows), strict=True)
        return found

    @property
    def derived(self) -> list[tuple[frozenset[str], Callable[[], None]]]:
        """For each merged parameter the names of its A and B, and what has it hold what they say."""
        return [(frozenset(one.views), functools.partial(self._merge, one)) for one in self._adapters]

    def _merge(self, one: _Adapter) -> None:
        out = self._memory(one)
        if out.numel():
            merge(one.base, one.pairs if one.rows is None else one.pairs.of(one.rows), out, dtype=self.dtype)


def base_digest(model: Transformer, dtype: torch.dtype) -> str:
    """`weights_digest` of a model."""
    return weights_digest(sorted(hf_views(model).items()), dtype)


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> str:
    """SHA-256 over every weight of a model, which come sorted, by name, shape and bytes in `dtype` (some stay float32),
    as hex."""
    digest = hashlib.sha256()
    for name, view in weights:
        kind = torch.float32 if stays_float32(name) else dtype
        digest.update(f"{name} {'bf16' if kind is torch.bfloat16 else 'f32'} {list(view.shape)}\n".encode())
        digest.update(view.to(kind).contiguous().view(torch.uint8).numpy(force=True).data)
    return digest.hexdigest()


@torch.no_grad()
def rounded(model: Transformer, dtype: torch.dtype) -> None:
    """Have every parameter hold a number of `dtype`, in the memory that it has."""
    for parameter in map(own_part, model.parameters()):
        parameter.copy_(parameter.to(dtype))


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: all of one that FSDP2 does not have."""
    whole: Any = tensor
    own: torch.Tensor = whole.to_local() if hasattr(whole, "to_local") else whole
    return own.detach()


def _chosen(model: Transformer, modules: tuple[str, ...]) -> list[Matrix]:
    """The parameters that are adapted. All that one fuses are, or none."""
    chosen = []
    for matrix in matrices(model):
        adapted = {name for name in matrix.rows if module_of(name) in modules}
        if adapted and adapted != matrix.rows.keys():
            rest = sorted({module_of(name) for name in matrix.rows.keys() - adapted})
            raise CheckpointError(
                f"an adapter of {', '.join(sorted(map(module_of, adapted)))[:60]} without {', '.join(rest)}",
                "they are one matrix here",
                hint="adapt all that read the same input, or merge it into its base first",
            )
        if adapted:
            chosen.append(matrix)
    missing = set(modules) - {module_of(name) for matrix in chosen for name in matrix.rows}
    if missing:
        facts = f"the model, a {model.config.family}, has no {', '.join(sorted(missing))}"
        raise CheckpointError("an adapter of another architecture", facts, hint="take the base that it was trained on")
    return chosen


def module_of(name: str) -> str:
    """The last part of a module's name: `q_proj`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _adapter(name: str, matrix: Matrix, config: AdapterConfig, dtype: torch.dtype, lies: Mapping[str, Any]) -> _Adapter:
    weight = matrix.weight
    stack, (out_size, in_size) = weight.shape[:-2], weight.shape[-2:]
    rows = list(matrix.rows.values())[: len(matrix.rows) // math.prod(stack)]
    kind = {**lies, "device": lies["device"] or weight.device}
    a = nn.Parameter(torch.zeros(*stack, len(rows), config.rank, in_size, **kind))
    b = nn.Parameter(torch.zeros(*stack, out_size, config.rank, **kind))
    base = weight.detach().to(dtype, copy=True)
    return _Adapter(name, tuple(matrix.rows), base, Pairs(a, b, tuple(rows), config.scale))

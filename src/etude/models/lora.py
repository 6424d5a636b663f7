"""LoRA adapters of a model: frozen matrices W, computed as merged matrices W + scale · B A (arXiv 2106.09685).

Learner and engine use the same `Adapters`. The learner's A and B are parameters, which an optimiser takes over; `merge`
updates the merged matrices after each step. An engine's A and B are the memory into which it receives new weights, and
merged matrices are derived from them (`derived`). Both compute with the merged matrix, rounded to the published dtype:
the bits of one function (`merge_lora`), which an exported directory has, too.

Names are PEFT's: `base_model.model.` before the module's name, and `.lora_A.weight` [r, I] or `.lora_B.weight` [O, r]
after it. Where the model stores matrices fused or stacked, A and B are stored the same way, and named part by part."""

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
from etude.models.packed_weights import Matrix, quantisable_matrices
from etude.models.transformer import Transformer
from etude.models.weight_views import hf_views, stays_float32
from etude.numerics.lora import LoraOperators, LoraPairs, merge_lora
from etude.records.adapter import A, AdapterConfig, lora_names


@dataclass(frozen=True)
class _Adapter:
    """The adapter of one parameter, fused and stacked like it."""

    parameter: str  # the merged one's name in the model
    names: tuple[str, ...]  # Hugging Face's, of its rows in order
    base: torch.Tensor  # in host memory
    pairs: LoraPairs
    rows: slice | None = None  # this rank's rows of base and merged matrix; None: all

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
    """All adapters of a model, as parameters. The model's own matrices become merged matrices without gradients.

    A and B are zero at first, and nothing is merged yet.

    - `dtype`: the published dtype, to which merged matrices are rounded. The rest of the model must be rounded to it
      too (`round_parameters`).
    - `weight_dtype`: dtype of A and B in memory (None: `dtype`).
    - `digest`: the base model's digest, if known; otherwise it is computed.
    - `device`: the device of A and B, if the model is on the meta device (`share`).

    Raises `CheckpointError` where the model is not the config's base, or lacks its modules."""

    def __init__(
        self,
        model: Transformer,
        config: AdapterConfig,
        *,
        dtype: torch.dtype,
        weight_dtype: torch.dtype | None = None,
        digest: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self._model = (model,)  # in a tuple, so that it is not a submodule
        found = digest or base_digest(model, dtype)
        if config.base not in ("", found):
            raise CheckpointError(
                f"the adapter belongs to the base {config.base[:12]}",
                f"the weights here are {found[:12]}, as {str(dtype).removeprefix('torch.')}",
                hint="use the checkpoint that the adapter was trained on",
            )
        self.config = AdapterConfig(config.rank, config.alpha, config.modules, found)
        model.requires_grad_(False)
        chosen = _chosen(model, config.modules)
        own = {id(p): name for name, p in model.named_parameters()}
        options = {"dtype": weight_dtype or dtype, "device": device}
        self._adapters = [_adapter(own[id(matrix.weight)], matrix, self.config, dtype, options) for matrix in chosen]
        self.trained = nn.ParameterList([p for one in self._adapters for p in (one.pairs.a, one.pairs.b)])
        if isinstance(model.operators, LoraOperators):
            for one in self._adapters:
                model.operators.add_adapter(functools.partial(model.get_parameter, one.parameter), one.pairs)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Initialise A uniformly within ±1/√I, seeded by `seed` and name, and B to zero, as PEFT does."""
        for name, view in self.views.items():
            if name.endswith(A):
                key = hashlib.sha256(f"{seed} {name}".encode()).digest()[:7]
                drawn = torch.Generator().manual_seed(int.from_bytes(key))
                bound = 1 / math.sqrt(view.shape[-1])
                view.copy_(torch.empty(view.shape).uniform_(-bound, bound, generator=drawn))

    def merge(self) -> None:
        """Update the merged matrices from the current A and B."""
        for one in self._adapters:
            self._merge(one)

    def share(self, rows: Mapping[str, slice]) -> None:
        """Adapt to a model that FSDP2 has sharded. Call it once, after the sharding.

        Base and merged matrices then have only this rank's rows, and A and B stay complete on every rank. `rows`:
        parameter name → this rank's rows."""
        self._adapters = [
            replace(one, base=_on_host(self._memory(one), self.dtype), rows=rows[one.parameter])
            for one in self._adapters
        ]

    def _memory(self, one: _Adapter) -> torch.Tensor:
        """Return the memory of the merged matrix, or of this rank's rows of it."""
        return local_part(self._model[0].get_parameter(one.parameter))

    @property
    def bases(self) -> dict[str, torch.Tensor]:
        """The frozen base matrix W, or this rank's rows of it, by name of the adapted parameter in the model.

        They are in host memory."""
        return {one.parameter: one.base for one in self._adapters}

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """PEFT's names of the A and B matrices, by name of the adapted parameter in the model.

        The parameters are in the order of `trained`."""
        return {one.parameter: tuple(one.views) for one in self._adapters}

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """All A and B matrices by their names in PEFT's files, as contiguous, detached views of the trained
        parameters."""
        return {name: view for one in self._adapters for name, view in one.views.items()}

    @property
    def base(self) -> dict[str, torch.Tensor]:
        """Every weight of the base by Hugging Face name. Weights without an adapter share memory with the model; the
        others are in host memory."""
        found = hf_views(*self._model)
        for one in self._adapters:
            rows = [found[name].shape[0] for name in one.names]
            found |= zip(one.names, torch.split(one.base.flatten(0, -2), rows), strict=True)
        return found

    @property
    def derived(self) -> list[tuple[frozenset[str], Callable[[], None]]]:
        """For each merged parameter, the names of its A and B matrices, and a function that merges them into the
        parameter."""
        return [(frozenset(one.views), functools.partial(self._merge, one)) for one in self._adapters]

    def _merge(self, one: _Adapter) -> None:
        out = self._memory(one)
        if out.numel():
            merge_lora(one.base, one.pairs if one.rows is None else one.pairs.of(one.rows), out, dtype=self.dtype)


def base_digest(model: Transformer, dtype: torch.dtype) -> str:
    """Return the SHA-256 by which adapters name their base model: the `weights_digest` of a model without adapters.

    `dtype`: the one in which the weights are hashed."""
    return weights_digest(sorted(hf_views(model).items()), dtype)


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> str:
    """Return the SHA-256 (64 hex characters) over every weight of a model: name, shape and bytes in `dtype`.

    Router biases stay float32. `weights` must be sorted by name."""
    digest = hashlib.sha256()
    for name, view in weights:
        kind = torch.float32 if stays_float32(name) else dtype
        digest.update(f"{name} {'bf16' if kind is torch.bfloat16 else 'f32'} {list(view.shape)}\n".encode())
        digest.update(view.to(kind).contiguous().view(torch.uint8).numpy(force=True).data)
    return digest.hexdigest()


@torch.no_grad()
def round_parameters(model: Transformer, dtype: torch.dtype) -> None:
    """Round every parameter to numbers of `dtype`, in place."""
    for parameter in map(local_part, model.parameters()):
        parameter.copy_(parameter.to(dtype))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, detached: for an FSDP2 shard the rank's rows, for any other tensor all of
    it."""
    dtensor: Any = tensor
    own: torch.Tensor = dtensor.to_local() if hasattr(dtensor, "to_local") else dtensor
    return own.detach()


def _chosen(model: Transformer, modules: tuple[str, ...]) -> list[Matrix]:
    """Return the parameters that are adapted. Of fused matrices all must be adapted, or none."""
    chosen = []
    for matrix in quantisable_matrices(model, mtp=False):
        adapted = {name for name in matrix.rows if module_name(name) in modules}
        if adapted and adapted != matrix.rows.keys():
            rest = sorted({module_name(name) for name in matrix.rows.keys() - adapted})
            raise CheckpointError(
                f"the adapter has {', '.join(sorted(map(module_name, adapted)))[:60]}, but not {', '.join(rest)}",
                "etude computes them as one matrix",
                hint="adapt all matrices with the same input, or merge the adapter into its base first",
            )
        if adapted:
            chosen.append(matrix)
    missing = set(modules) - {module_name(name) for matrix in chosen for name in matrix.rows}
    if missing:
        facts = f"the model, a {model.config.family}, has no {', '.join(sorted(missing))}"
        raise CheckpointError(
            "the adapter does not belong to this model", facts, hint="use the base that it was trained on"
        )
    return chosen


def module_name(name: str) -> str:
    """Return the last part of a module's name without `.weight`, such as `q_proj`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _adapter(
    name: str, matrix: Matrix, config: AdapterConfig, dtype: torch.dtype, options: Mapping[str, Any]
) -> _Adapter:
    weight = matrix.weight
    stack, (out_size, in_size) = weight.shape[:-2], weight.shape[-2:]
    rows = list(matrix.rows.values())[: len(matrix.rows) // math.prod(stack)]
    kind = {**options, "device": options["device"] or weight.device}
    a = nn.Parameter(torch.zeros(*stack, len(rows), config.rank, in_size, **kind))
    b = nn.Parameter(torch.zeros(*stack, out_size, config.rank, **kind))
    base = weight.detach() if weight.is_meta else _on_host(weight.detach(), dtype)
    return _Adapter(name, tuple(matrix.rows), base, LoraPairs(a, b, tuple(rows), config.scale))


def _on_host(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy a frozen matrix to host memory, where `merge_lora` computes: it takes no memory of an accelerator."""
    return weight.to("cpu", dtype, copy=True)

"""A model's large matrices as packed bytes in a quantised format, in files and in the memory of learner and engines.

The learner has unrounded weights and publishes `pack_weights`. An engine keeps the published bytes in memory, under the
same names. The model beside them has the decoded values. During the pause of a weight update, each matrix that changed
is decoded again (`PackedWeights.decoders`). So a digest of an engine's memory is a digest of the published bytes.

Matrices that the model stores fused (query, key and value; gate and up; all experts) are packed together, and named
part by part."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Container
from dataclasses import dataclass

import torch

from etude.models.quantised_storage import is_quantised, stored_format, stored_parts
from etude.models.transformer import Transformer
from etude.models.weight_views import hf_views, views
from etude.numerics.config import Quantise
from etude.numerics.formats import FORMATS, Format
from etude.numerics.quantisation import Packed, pack, unpack


@dataclass(frozen=True)
class Matrix:
    """One parameter, [O, I] or [E, O, I], that stores several matrices of a checkpoint.

    `rows`: Hugging Face name → number of rows of each of these matrices, in order."""

    weight: torch.Tensor
    rows: dict[str, int]

    def packed(self, format: Format) -> Packed:
        """Return the parameter in a quantised format. Each of its matrices has its own global scale."""
        one = pack(self.weight.detach().float(), format, matrix=True)
        outer = one.global_scale
        if outer is not None:
            outer = outer.reshape(-1).repeat_interleave(len(self.rows) // outer.numel())
        return Packed(one.codes.flatten(0, -2), one.scales.flatten(0, -2), outer)

    def stored(self, format: Format) -> dict[str, torch.Tensor]:
        """Return the tensors that store the parameter in a quantised format, by name."""
        return {part: one for own in _named(self, self.packed(format), format).values() for part, one in own.items()}

    def decode(self, packed: Packed, format: Format) -> None:
        """Write the values of packed bytes, made by `packed` in the same format, into the parameter."""
        outer = packed.global_scale
        if outer is not None:
            outer = outer.repeat_interleave(torch.tensor(list(self.rows.values())).to(outer.device))
        values = unpack(Packed(packed.codes, packed.scales, outer), format)
        self.weight.detach().copy_(values.view(self.weight.shape))


def pack_weights(model: Transformer, format: Format) -> dict[str, torch.Tensor]:
    """Return every tensor of a model as it is stored in a quantised format.

    Quantised matrices have the names of `stored_parts`; all others are live views. Raises `ConfigError` where a width
    is not a multiple of the block size."""
    return PackedWeights(model, format).tensors


class PackedWeights:
    """The packed bytes of a model's current weights, in `tensors` by the names under which they are stored.

    After writing into them, call the matching function of `decoders` to update the model."""

    def __init__(self, model: Transformer, format: Format) -> None:
        self.format = format
        self._matrices = [(matrix, matrix.packed(format)) for matrix in quantisable_matrices(model)]
        named: dict[str, dict[str, torch.Tensor]] = {}
        for matrix, bytes_ in self._matrices:
            named |= _named(matrix, bytes_, format)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, view in hf_views(model).items():
            self.tensors |= named.get(name, {name: view})

    def decode(self) -> None:
        """Decode all packed bytes into the model's parameters."""
        for matrix, bytes_ in self._matrices:
            matrix.decode(bytes_, self.format)

    @property
    def decoders(self) -> list[tuple[frozenset[str], Callable[[], None]]]:
        """For each parameter, the names of the tensors with its packed bytes, and a function that decodes them into the
        parameter.

        Call the function after any of these tensors was written."""
        return [
            (
                frozenset(part for own in _named(matrix, bytes_, self.format).values() for part in own),
                functools.partial(matrix.decode, bytes_, self.format),
            )
            for matrix, bytes_ in self._matrices
        ]


def read_stored(
    name: str, shape: tuple[int, ...], names: Container[str], read: Callable[[str], torch.Tensor]
) -> torch.Tensor:
    """Read one tensor of a checkpoint. A packed tensor is dequantised to float32; any other is returned as stored.

    `names`: the checkpoint's tensors; `read` returns one of them. The caller has checked dtypes and shapes."""
    kind = stored_format(name, names)
    if kind is Quantise.NONE:
        return read(name)
    codes, scales, *outer = (read(part).contiguous() for part in stored_parts(name, shape, kind))
    bytes_ = Packed(codes.view(torch.uint8), scales.view(torch.uint8), outer[0].reshape(()) if outer else None)
    return unpack(bytes_, FORMATS[kind])


def _named(matrix: Matrix, bytes_: Packed, format: Format) -> dict[str, dict[str, torch.Tensor]]:
    """Return Hugging Face name → the tensors that store it, as views of the parameter's bytes."""
    found, start = {}, 0
    for i, (name, rows) in enumerate(matrix.rows.items()):
        own = [bytes_.codes[start : start + rows], bytes_.scales[start : start + rows]]
        own += [] if bytes_.global_scale is None else [bytes_.global_scale[i : i + 1]]
        described = stored_parts(name, (rows, matrix.weight.shape[-1]), format.name)
        found[name] = {
            part: tensor.view(torch.float8_e4m3fn) if kind == "F8_E4M3" else tensor
            for (part, (kind, _)), tensor in zip(described.items(), own, strict=True)
        }
        start += rows
    return found


def quantisable_matrices(model: Transformer, *, mtp: bool = True) -> list[Matrix]:
    """Return the parameters of a model that contain quantisable matrices; with `mtp` False without MTP heads."""
    parameters = sorted(model.parameters(), key=torch.Tensor.data_ptr)
    starts = [parameter.data_ptr() for parameter in parameters]
    storages = [parameter.untyped_storage() for parameter in parameters]  # identify parameters on the meta device
    without = {id(storage): at for at, storage in enumerate(storages)} if model.embedding.is_meta else {}
    outside, size = model.config.architecture.hf_name, model.config.num_layers
    heads = tuple(f"model.layers.{layer}." for layer in range(size, size + len(model.mtp)))
    found: dict[int, Matrix] = {}
    for name, view in views(model).items():
        if is_quantised(name) and (mtp or not name.startswith(heads)):
            at = without[id(view.untyped_storage())] if without else bisect_right(starts, view.data_ptr()) - 1
            found.setdefault(at, Matrix(parameters[at], {})).rows[outside(name)] = view.shape[0]
    return list(found.values())

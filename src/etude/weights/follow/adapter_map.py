"""Merges LoRA adapters into engines that hold merged weights.

The matrices A and B are published, and kept in memory of their own. The engine's matrices are derived from them: W +
scale * B A, summed in float32 and rounded once to the published dtype. W is read from the mapped checkpoint that the
engine was started from, so no second copy is in memory (engines pack and rearrange the weights that they loaded). A
learner computes with its base rounded to the published dtype. If the checkpoint has another dtype, the tensors without
an adapter are rounded and written once, too. numpy computes the product on the host. Its last bit may differ from the
learner's, so this is for engines that do not promise the learner's exact bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from etude.errors import WeightsError
from etude.records.adapter import PUBLISHED, AdapterConfig, adapted_modules, lora_names
from etude.weights.follow.live import Call
from etude.weights.follow.runtime_map import Derived, Map, Pieces, named
from etude.weights.tensors import DTYPES, Codes, Spec, Tensor

Floats = npt.NDArray[np.float32]


def adapter_map(
    pieces: Callable[[Mapping[str, Spec]], Pieces],
    base: Mapping[str, Tensor],
    published: Mapping[str, Tensor],
    packing: Mapping[str, Call],
) -> Map:
    """Create the map of an engine to which a LoRA adapter is published.

    `pieces` is called with the specs of checkpoint tensors, and returns where each of them is in the engine's memory.
    `base`: the tensors of the checkpoint. `published`: the tensors of the first published version. `packing`: tensor
    name -> function to call after this tensor was written. Raises `WeightsError` if the checkpoint is not the base of
    the adapter, or the engine has no place for an adapted matrix.
    """
    config = published_config(published)
    dtype = next(tensor.dtype for name, tensor in published.items() if name != PUBLISHED)
    _check_base(base, config, dtype)
    live = {name: np.zeros(one.shape, DTYPES[one.dtype].codes) for name, one in published.items()}
    specs = {name: Spec(dtype, base[name].shape) for name in adapted_modules(published)}
    rest = {name: Spec(_kept(name, dtype), one.shape) for name, one in base.items() if one.dtype != _kept(name, dtype)}
    rest = {name: spec for name, spec in rest.items() if name not in specs}
    places = pieces(specs | rest)
    for name in specs:
        if not places.get(name):
            hint = "adapt only modules that the engine has, or publish all weights"
            raise WeightsError(f"the engine has no place for {name!r}", "an adapter of it is published", hint=hint)
    for name, spec in (specs | rest).items():
        for piece in places.get(name, ()):
            piece.check(name, spec)

    def write_base() -> None:  # for the first version, and for one that is written in full
        if live[PUBLISHED].tobytes() != published[PUBLISHED].codes.tobytes():
            hint = "restart the engine: it then starts with the newest version"
            raise WeightsError("the settings of the published adapter changed", f"{config}", hint=hint)
        for name, spec in rest.items():
            for piece in places.get(name, ()):
                piece.fill(spec, codes_of(floats(base[name]), spec.dtype).reshape(-1))

    def write(name: str, spec: Spec) -> None:
        a, b = (floats(Tensor(dtype, live[one].shape, live[one].reshape(-1))) for one in lora_names(name))
        merged = rounded(base[name], dtype) + np.matmul(b * np.float32(config.scale), a, dtype=np.float32)
        for piece in places[name]:
            piece.fill(spec, codes_of(merged, dtype).reshape(-1))

    derived = [Derived(frozenset({PUBLISHED}), write_base)]
    derived += [Derived(frozenset(lora_names(name)), partial(write, name, spec)) for name, spec in specs.items()]
    calls: dict[Call, set[str]] = {}
    for name in specs.keys() & packing.keys():
        calls.setdefault(packing[name], set()).update(lora_names(name))
    for name in rest.keys() & packing.keys():
        calls.setdefault(packing[name], set()).add(PUBLISHED)
    derived += [Derived(frozenset(sources), call) for call, sources in calls.items()]
    return Map(named(live), derived=derived)


def published_config(tensors: Mapping[str, Tensor]) -> AdapterConfig:
    """Return the settings that are published with an adapter. Raises `WeightsError` if they are missing or invalid."""
    try:
        return AdapterConfig.from_bytes(tensors[PUBLISHED].codes.tobytes())
    except (KeyError, ValueError) as error:
        hint = "publish it with the same version of etude"
        raise WeightsError("the published adapter cannot be used", str(error), hint=hint) from None


def floats(tensor: Tensor) -> Floats:
    """Return the values of a tensor as float32, in its shape. Raises `WeightsError` unless it is bf16, f16 or f32."""
    codes = tensor.codes.reshape(tensor.shape)
    match tensor.dtype:
        case "bf16":
            return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
        case "f16":
            return codes.view(np.float16).astype(np.float32)
        case "f32":
            return codes.view(np.float32)
    hint = "start the engine from the base in bf16"
    raise WeightsError(f"a base in {tensor.dtype} does not support adapters", hint=hint)


def rounded(tensor: Tensor, dtype: str) -> Floats:
    """Return the values of a tensor, each rounded to `dtype` ("f32" or "bf16"), as float32."""
    numbers = floats(tensor)
    if tensor.dtype == dtype:
        return numbers
    return floats(Tensor(dtype, tensor.shape, codes_of(numbers, dtype).reshape(-1)))


def codes_of(numbers: Floats, dtype: str) -> Codes:
    """Encode numbers as the raw bits of "f32" or, rounded to nearest with ties to even, of "bf16".

    >>> codes_of(np.array([1.0, 1.00390625], np.float32), "bf16").tolist()
    [16256, 16256]
    """
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    if dtype == "f32":
        return bits
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def _kept(name: str, dtype: str) -> str:
    """Return the dtype in which a learner that publishes `dtype` keeps a tensor of its base."""
    return "f32" if name.endswith("e_score_correction_bias") else dtype


def _check_base(base: Mapping[str, Tensor], config: AdapterConfig, dtype: str) -> None:
    """Compare the digest of the base with the one that the learner computed (`models.lora.base_digest`)."""
    digest = hashlib.sha256()
    for name, tensor in sorted(base.items()):
        kind = _kept(name, dtype)
        digest.update(f"{name} {kind} {list(tensor.shape)}\n".encode())
        digest.update(np.ascontiguousarray(codes_of(floats(tensor), kind)).data)
    if digest.hexdigest() != config.base:
        raise WeightsError(
            f"the adapter was trained on the base {config.base[:12]}",
            f"this engine's checkpoint is {digest.hexdigest()[:12]}, as {dtype}",
            hint="start the engine from the checkpoint that the adapter was trained on, as `etude export` writes it",
        )

"""Adapters in engines that hold whole weights: A and B are live memory of their own, and what they change of the
engine's is derived: W + scale · B A, summed in float32, rounded once to what is published, written through its pieces.

W is read from the checkpoint that the engine was started from, mapped, so that no second copy is held: engines pack and
rearrange what they loaded. A learner computes with a base rounded to what is published: where the checkpoint is of
another dtype, what no adapter changes is written once so, too. The product is numpy's, on the host: its last bit may be
another than a learner's, so this is for engines that are not promised the learner's bits.
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
    """The map of an engine to which an adapter is published.

    `pieces`: where each of these tensors of the checkpoint is in the engine. `base`: the checkpoint's. `packing`: by a
    tensor's name what is to be called once it was written. Raises `WeightsError` where the checkpoint is not the
    adapter's base, or the engine has no place for a matrix.
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
            hint = "adapt modules that it has, or publish all weights"
            raise WeightsError(f"the engine has no place for {name!r}", "an adapter of it is published", hint=hint)
    for name, spec in (specs | rest).items():
        for piece in places.get(name, ()):
            piece.check(name, spec)

    def settle() -> None:  # with the first version, and with one that is written whole
        if live[PUBLISHED].tobytes() != published[PUBLISHED].codes.tobytes():
            hint = "restart the engine: it then starts with the newest version"
            raise WeightsError("an adapter of other settings is published than at the start", f"{config}", hint=hint)
        for name, spec in rest.items():
            for piece in places.get(name, ()):
                piece.fill(spec, codes_of(floats(base[name]), spec.dtype).reshape(-1))

    def write(name: str, spec: Spec) -> None:
        a, b = (floats(Tensor(dtype, live[one].shape, live[one].reshape(-1))) for one in lora_names(name))
        merged = rounded(base[name], dtype) + np.matmul(b * np.float32(config.scale), a, dtype=np.float32)
        for piece in places[name]:
            piece.fill(spec, codes_of(merged, dtype).reshape(-1))

    derived = [Derived(frozenset({PUBLISHED}), settle)]
    derived += [Derived(frozenset(lora_names(name)), partial(write, name, spec)) for name, spec in specs.items()]
    calls: dict[Call, set[str]] = {}
    for name in specs.keys() & packing.keys():
        calls.setdefault(packing[name], set()).update(lora_names(name))
    for name in rest.keys() & packing.keys():
        calls.setdefault(packing[name], set()).add(PUBLISHED)
    derived += [Derived(frozenset(sources), call) for call, sources in calls.items()]
    return Map(named(live), derived=derived)


def published_config(tensors: Mapping[str, Tensor]) -> AdapterConfig:
    """What is published beside an adapter's A and B. Raises `WeightsError`."""
    try:
        return AdapterConfig.from_bytes(tensors[PUBLISHED].codes.tobytes())
    except (KeyError, ValueError) as error:
        hint = "publish it with this build's learner"
        raise WeightsError("the published adapter cannot be used", str(error), hint=hint) from None


def floats(tensor: Tensor) -> Floats:
    """A tensor's numbers, in its shape. Raises `WeightsError` for a dtype that is not bf16, f16 or f32."""
    codes = tensor.codes.reshape(tensor.shape)
    match tensor.dtype:
        case "bf16":
            return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
        case "f16":
            return codes.view(np.float16).astype(np.float32)
        case "f32":
            return codes.view(np.float32)
    hint = "start the engine from the base in bf16"
    raise WeightsError(f"a base in {tensor.dtype} takes no adapter", hint=hint)


def rounded(tensor: Tensor, dtype: str) -> Floats:
    """Its numbers, each rounded to one of `dtype`."""
    numbers = floats(tensor)
    if tensor.dtype == dtype:
        return numbers
    return floats(Tensor(dtype, tensor.shape, codes_of(numbers, dtype).reshape(-1)))


def codes_of(numbers: Floats, dtype: str) -> Codes:
    """Numbers as codes of "f32" or, to nearest and ties to even, "bf16".

    >>> codes_of(np.array([1.0, 1.00390625], np.float32), "bf16").tolist()
    [16256, 16256]
    """
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    if dtype == "f32":
        return bits
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def _kept(name: str, dtype: str) -> str:
    """The dtype in which a learner that publishes `dtype` holds a tensor of its base."""
    return "f32" if name.endswith("e_score_correction_bias") else dtype


def _check_base(base: Mapping[str, Tensor], config: AdapterConfig, dtype: str) -> None:
    """By the digest that a learner takes of its base (`models.lora.base_digest`)."""
    digest = hashlib.sha256()
    for name, tensor in sorted(base.items()):
        kind = _kept(name, dtype)
        digest.update(f"{name} {kind} {list(tensor.shape)}\n".encode())
        digest.update(np.ascontiguousarray(codes_of(floats(tensor), kind)).data)
    if digest.hexdigest() != config.base:
        raise WeightsError(
            f"an adapter of the base {config.base[:12]}",
            f"the checkpoint here is {digest.hexdigest()[:12]}, as {dtype}",
            hint="start the engine from the checkpoint that the adapter was trained on, as `etude export` writes it",
        )

"""New weights into live memory: everything that takes time is done before the pause, inside it only writes.

Where few values of a tensor changed, a patch holds their places and values; where many did, the whole tensor, which
is then the faster copy. Values are absolute, so writing twice (tied tensors) is harmless. `differing` compares the
live memory with what it should hold: an update that raised no error has proven nothing.

All of it is a few numpy calls a tensor over the bits of live memory, straight from the published codes: with a hundred
small tensors the calls are what costs, and the steps wait for each while it holds the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from etude.errors import WeightsError
from etude.records.completion import Version
from etude.weights import Tensor, content_digest, tensor_digest

Array = np.ndarray[Any, np.dtype[Any]]
DENSE = 1 / 16  # share of changed values from which the whole tensor is copied

_LIVE = {torch.float32: ("f32", torch.int32), torch.bfloat16: ("bf16", torch.int16)}
_HELD_EXACTLY = {("f32", "f32"), ("bf16", "f32"), ("f16", "f32"), ("bf16", "bf16")}  # published, live
_BF16_BELOW_F32 = np.uint32(16)  # bits


@dataclass(frozen=True)
class Patch:
    """What to write, ready to be written. Arrays are flat; live ones are the bits of the model's own memory."""

    version: Version
    whole: list[tuple[Array, Tensor]]  # live bits; all that goes there
    sparse: list[tuple[Array, Array, Array]]  # live bits; int64 places; the bits that go there

    def apply(self) -> None:
        """Write. Nothing in here can fail for a reason that `prepare` has not ruled out."""
        for live, tensor in self.whole:
            _write(tensor.dtype, tensor.codes, live)
        for live, places, bits in self.sparse:
            live[places] = bits


def prepare(
    views: Mapping[str, torch.Tensor],
    tensors: Mapping[str, Tensor],
    *,
    version: Version,
    changed: Mapping[str, tuple[Array, Array]],
    replaced: Iterable[str],
) -> Patch:
    """The patch that takes a model to `version`, whose full content is `tensors`.

    `changed` maps a name to its flat places (int64) and the new codes there; `replaced` names tensors that are new
    as a whole. Raises `WeightsError` when the version is of another architecture; the model is then untouched.
    """
    _check_fit(views, tensors)
    patch = Patch(version, [], [])
    whole = set(replaced)
    for name, (places, codes) in changed.items():
        live = _bits(views[name])
        if len(places) > DENSE * live.size:
            whole.add(name)
        else:
            patch.sparse.append((live, places, _written(tensors[name].dtype, codes, live)))
    patch.whole.extend((_bits(views[name]), tensors[name]) for name in sorted(whole))
    return patch


def initial_version(views: Mapping[str, torch.Tensor]) -> Version:
    """The name of weights from a checkpoint, not a chain: step 0, no incarnation, digest of the f32 content."""
    codes = {n: v.detach().float().contiguous().numpy().view(np.uint32).ravel() for n, v in views.items()}
    digests = {n: tensor_digest(Tensor("f32", tuple(views[n].shape), c)) for n, c in codes.items()}
    return Version(step=0, incarnation="00000000", digest=content_digest(digests))


def differing(views: Mapping[str, torch.Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """Names whose live content is not, bit for bit, what `tensors` says."""
    return [n for n, view in views.items() if not _holds(_bits(view), tensors[n])]


def _holds(live: Array, tensor: Tensor) -> bool:
    return np.array_equal(live, _written(tensor.dtype, tensor.codes, live))


def _check_fit(views: Mapping[str, torch.Tensor], tensors: Mapping[str, Tensor]) -> None:
    ours = {name: tuple(view.shape) for name, view in views.items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    different = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    if different:
        name = different[0]
        raise WeightsError(
            "the published weights do not fit this engine's model",
            f"{name} is {theirs.get(name, 'absent')} there and {ours.get(name, 'absent')} here, "
            f"one of {len(different)} that differ",
            hint="start the engine from a checkpoint of the same run",
        )
    for name, view in views.items():
        published, live = tensors[name].dtype, _LIVE[view.dtype][0]
        if (published, live) not in _HELD_EXACTLY:
            raise WeightsError(
                f"weights of dtype {published!r} cannot be held exactly by an engine that computes in {live!r}",
                name,
                hint="engines that compute in f32 read bf16, f16 and f32 renditions; in bf16, bf16 ones",
            )


def _bits(view: torch.Tensor) -> Array:
    """The memory of a contiguous tensor as flat unsigned integers: what is written there is written to the tensor."""
    bits: Array = view.detach().view(-1).view(_LIVE[view.dtype][1]).numpy()
    return bits.view(f"u{bits.itemsize}")


def _written(dtype: str, codes: Array, live: Array) -> Array:
    """What `_write` would write, elsewhere."""
    bits = np.empty(codes.shape, live.dtype)
    _write(dtype, codes, bits)
    return bits


def _write(dtype: str, codes: Array, live: Array) -> None:
    """Codes of a published dtype as the bits of a live one, which holds each of their values exactly."""
    if codes.dtype == live.dtype:
        np.copyto(live, codes)
    elif dtype == "bf16":
        np.copyto(live, codes)
        np.left_shift(live, _BF16_BELOW_F32, out=live)
    else:
        np.copyto(live.view(np.float32), codes.view(np.float16))

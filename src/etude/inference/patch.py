"""New weights into live memory: everything that takes time is done before the pause, inside it only writes.

Where few values of a tensor changed, a patch holds their places and values; where many did, the whole tensor, which
is then the faster copy. Values are absolute, so writing twice (tied tensors) is harmless. `differing` compares the
live memory with what it should hold: an update that raised no error has proven nothing.
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


@dataclass(frozen=True)
class Patch:
    """What to write, ready to be written."""

    version: Version
    whole: list[tuple[torch.Tensor, torch.Tensor]]  # live view, its new content
    sparse: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # live view, flat; int64 places; values

    @torch.no_grad()
    def apply(self) -> None:
        """Write. Nothing in here can fail for a reason that `prepare` has not ruled out."""
        for view, content in self.whole:
            view.copy_(content)
        for view, places, content in self.sparse:
            view.index_copy_(0, places, content)


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
        view = views[name]
        if len(places) > DENSE * view.numel() or not view.is_contiguous():
            whole.add(name)
        else:
            content = torch.from_numpy(_floats(tensors[name].dtype, codes)).to(view.dtype)
            patch.sparse.append((view.view(-1), torch.from_numpy(np.array(places)), content))
    patch.whole.extend((views[name], _content(tensors[name], views[name])) for name in sorted(whole))
    return patch


def initial_version(views: Mapping[str, torch.Tensor]) -> Version:
    """The name of weights from a checkpoint, not a chain: step 0, no incarnation, digest of the f32 content."""
    codes = {n: v.detach().float().contiguous().numpy().view(np.uint32).ravel() for n, v in views.items()}
    digests = {n: tensor_digest(Tensor("f32", tuple(views[n].shape), c)) for n, c in codes.items()}
    return Version(step=0, incarnation="00000000", digest=content_digest(digests))


def differing(views: Mapping[str, torch.Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """Names whose live content is not, bit for bit, what `tensors` says."""
    return [n for n, view in views.items() if not _same_bits(view, _content(tensors[n], view))]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(bits), b.view(bits))


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


def _content(tensor: Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(_floats(tensor.dtype, tensor.codes)).to(like.dtype).view(like.shape)


def _floats(dtype: str, codes: Array) -> Array:
    """Values of codes as float32 (every bf16 and f16 value is one); the array is a new one."""
    if dtype == "bf16":
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "f16":
        return codes.view(np.float16).astype(np.float32)
    if dtype == "f32":
        return codes.view(np.float32).copy()
    raise WeightsError(f"weights of dtype {dtype!r}", hint="engines read bf16, f16 and f32 renditions")

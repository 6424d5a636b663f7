"""Encodes and applies complete delta objects in device memory: what `codec.py` does, for weights on a GPU.

The bytes are the same as those of the CPU codec. Only the changes are copied to the host, and no second copy of the
model is kept: the old side of a decode is the live memory. So the result cannot be verified before it is written. The
caller verifies the object by its SHA-256 first, and the live memory by the manifest's digests (`Target.differing`) if
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
import torch

from etude.errors import WeightsError
from etude.weights.delta import codec, layout, streams
from etude.weights.delta.choices import Mode, choose
from etude.weights.delta.layout import DELTA, JOINED, WHOLE, Header, Kernels
from etude.weights.delta.streams import damaged
from etude.weights.gpu.kernels import DeviceKernels
from etude.weights.gpu.memory import Items, fetched
from etude.weights.tensors import DTYPES, Codes, Spec

BATCH_ITEMS = 1 << 28
"""Number of items that the programs process at a time: large enough to hide launch costs. Tables and lists take a tenth
of a bit to a byte per item, depending on the number of changes, until the batch is done."""

_NOTHING = Items(torch.empty(0, dtype=torch.uint8), 0)


def encode(
    new: Mapping[str, torch.Tensor],
    old: Mapping[str, torch.Tensor],
    specs: Mapping[str, Spec],
    mode: Mode = "best",
    kernels: DeviceKernels | None = None,
) -> bytes:
    """Encode the delta from `old` to `new`, torch tensors on one device. Return the bytes that `codec.encode` returns.

    `specs`: dtype and shape of each tensor by name; the delta has the tensors in this order. A name that is not in
    `old` is stored in full; a tensor whose shape or dtype changed must not be in `old`. Waits for the work queued on
    the current stream. Raises `WeightsError` for memory that does not fit its spec.
    """
    kernels = kernels or DeviceKernels()
    after: list[Items | None] = []
    before: list[Items | None] = []
    for name, spec in specs.items():
        n = Items.of(name, new[name], spec)
        o = Items.of(name, old[name], spec) if name in old else None
        same = o is not None and torch.equal(n.codes, o.codes)
        after.append(None if same else n)
        before.append(None if same else o)
    plan = choose(_as_codes(after), _as_codes(before), list(specs.values()), cast(Kernels, kernels), mode)
    payloads = [b""] * plan.num_tiles
    olds, news = ([_NOTHING if items is None else items for items in side] for side in (before, after))
    for kind in DTYPES.values():
        for batch in codec.batches(plan.tiles(kind), BATCH_ITEMS):
            coded = kernels.encode(kind, [tile for _, tile in batch], olds, news)
            for (number, tile), payload in zip(batch, coded, strict=True):
                payloads[number] = codec.shorter(payload, tile, kind, partial(fetched, tile, news, kind))
    for i, (form, (name, spec)) in enumerate(zip(plan.forms, specs.items(), strict=True)):
        if form == WHOLE:
            flat = new[name].detach().view(-1).view(torch.uint8)
            width = DTYPES[spec.dtype].bits // 8
            for number, start, stop in plan.full_tiles(i):
                codes = flat[start * width : stop * width].cpu().numpy().view(DTYPES[spec.dtype].codes)
                payloads[number] = streams.encode_planes(codes)
    return layout.write(plan, payloads)


@dataclass
class Prepared:
    """An update that is ready on the device. `prepare` returns one.

    Call `write` in the engine's pause. Afterwards delete the object, or call `undo`, also in a pause.

    `num_bytes`: device memory of the lists of changes, without tensors that are stored in full. `writes`, `undoes`: the
    functions that `write` and `undo` call.
    """

    num_bytes: int = 0
    writes: list[Callable[[], object]] = field(default_factory=list)
    undoes: list[Callable[[], object]] | None = None

    def write(self) -> None:
        """Queue all writes on the current stream."""
        for write in self.writes:
            write()

    def undo(self) -> None:
        """Queue writing back the old codes on the current stream. Raises `WeightsError` if they were not kept."""
        if self.undoes is None:
            raise WeightsError(
                "an update in device memory cannot be undone",
                "it was prepared with undoable=False",
                hint="apply an anchor, a full snapshot of the version that you want",
            )
        for write in self.undoes:
            write()


def prepare(
    data: bytes,
    specs: Mapping[str, Spec],
    live: Mapping[str, torch.Tensor],
    *,
    undoable: bool = True,
    kernels: DeviceKernels | None = None,
) -> Prepared:
    """Prepare an update before the engine's pause: do everything that takes time or can fail. Nothing is written.

    `data`: the delta object. `specs`: dtype and shape of its tensors by name, in its order. `live`: the engine's
    tensors by name, which hold the base version, and memory for each new tensor. Nothing may write them until the
    update is written. `undoable`: keep the old codes. Raises `WeightsError`.
    """
    kernels = kernels or DeviceKernels()
    header, held = _held(data, specs, live)
    update = Prepared()
    undoes: list[Callable[[], object]] = []
    for kind, tiles, payloads in codec.changed_tiles(header, data, BATCH_ITEMS):
        for lists in kernels.lists(kind, tiles, held, payloads):
            update.writes.append(kernels.writer(lists, held))
            update.num_bytes += lists.num_bytes
            if undoable:
                before = kernels.read(lists, held)
                undoes.append(kernels.writer(before, held))
                update.num_bytes += before.num_bytes - before.places.nbytes  # shared by both lists
    for memory, codes in _wholes(header, data, held):
        update.writes.append(partial(memory.copy_, codes.to(memory.device)))
        if undoable:
            undoes.append(partial(memory.copy_, memory.clone()))
    update.undoes = undoes if undoable else None
    return update


def apply(
    data: bytes,
    specs: Mapping[str, Spec],
    live: Mapping[str, torch.Tensor],
    *,
    kernels: DeviceKernels | None = None,
) -> None:
    """Decode a delta object directly into live memory, a batch at a time and without lists.

    For updates of most weights, or if memory is short. Cannot be undone. If it raises `WeightsError`, `live` may be
    partly written. The arguments are those of `prepare`.
    """
    kernels = kernels or DeviceKernels()
    header, held = _held(data, specs, live)
    for kind, tiles, payloads in codec.changed_tiles(header, data, BATCH_ITEMS):
        kernels.apply(kind, tiles, held, held, payloads)
    for memory, codes in _wholes(header, data, held):
        memory.copy_(codes)


def _held(data: bytes, specs: Mapping[str, Spec], live: Mapping[str, torch.Tensor]) -> tuple[Header, list[Items]]:
    header = codec.parse_object(data, list(specs.values()))
    held = []
    for form, (name, spec) in zip(header.layout.forms, specs.items(), strict=True):
        if form in (DELTA, JOINED, WHOLE) and name not in live:
            raise damaged(f"{name!r} has no live memory")
        held.append(Items.of(name, live[name], spec) if name in live else _NOTHING)
    return header, held


def _wholes(header: Header, data: bytes, held: Sequence[Items]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for i, form in enumerate(header.layout.forms):
        if form == WHOLE:
            memory = held[i].codes
            codes = codec.decode_full(header, data, i).view(np.uint8)
            found.append((memory, torch.from_numpy(codes).view(memory.dtype)))
    return found


def _as_codes(items: list[Items | None]) -> list[Codes | None]:
    """Cast the type for `choose`, which only uses sizes and passes the rest to the kernels."""
    return cast("list[Codes | None]", items)

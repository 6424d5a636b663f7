"""Whole objects from and into device memory: what `codec.py` does, where both snapshots, or the live one, are a GPU's.

The bytes are the same, whoever made them. Only what changed crosses to the host; no second image is held anywhere: the
old side of a decode is the live memory. So nothing here can prove the result before it is written: the caller proves
the object by its SHA-256 first, and the live memory by its manifest's digests (`Target.differing`) where it wants to.
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
"""Items that the programs pass over at a time: far more than launching them costs. Their tables and lists take about
a tenth of a bit to a byte an item, by how many change, until the batch is done."""

_NOTHING = Items(torch.empty(0, dtype=torch.uint8), 0)


def encode(
    new: Mapping[str, torch.Tensor],
    old: Mapping[str, torch.Tensor],
    specs: Mapping[str, Spec],
    mode: Mode = "best",
    kernels: DeviceKernels | None = None,
) -> bytes:
    """The object that turns `old` into `new`: the bytes of `codec.encode` over the specs, in their order.

    `specs` says what the memory holds; a name without an old tensor goes in whole. A name that changed its shape or
    dtype is not to be among `old`. Waits for what is queued on the current stream. Raises `WeightsError` for memory
    that is not what its spec says.
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
    """An update that is on the device. `write` inside the pause; then let it go, or `undo`, also inside."""

    num_bytes: int = 0
    """Device memory of the lists, beside the live weights and tensors that are new as a whole."""
    writes: list[Callable[[], object]] = field(default_factory=list)
    undoes: list[Callable[[], object]] | None = None

    def write(self) -> None:
        """Queue all writes on the current stream."""
        for write in self.writes:
            write()

    def undo(self) -> None:
        """Queue writing back what was there when it was prepared. Raises `WeightsError` where that was not kept."""
        if self.undoes is None:
            raise WeightsError(
                "an update in device memory cannot be undone", "it was prepared without", hint="adopt an anchor"
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
    """All of an update that takes time or can fail, before the pause; nothing is written.

    `live` holds the version that the object applies to, and a place for each new tensor; nobody writes it until the
    update is written. Writes are absolute: of names that share memory each says the same. Raises `WeightsError`.
    """
    kernels = kernels or DeviceKernels()
    header, held = _held(data, specs, live)
    update = Prepared()
    undoes: list[Callable[[], object]] = []
    for kind, tiles, payloads in codec.changing(header, data, BATCH_ITEMS):
        for lists in kernels.lists(kind, tiles, held, payloads):
            update.writes.append(kernels.writer(lists, held))
            update.num_bytes += lists.num_bytes
            if undoable:
                before = kernels.read(lists, held)
                undoes.append(kernels.writer(before, held))
                update.num_bytes += before.num_bytes - before.places.nbytes  # which both share
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
    """Decode into live memory at once, a batch at a time and without lists: where most weights change, or memory is
    short. Not to be undone; where it raises `WeightsError`, `live` is neither old nor new."""
    kernels = kernels or DeviceKernels()
    header, held = _held(data, specs, live)
    for kind, tiles, payloads in codec.changing(header, data, BATCH_ITEMS):
        kernels.apply(kind, tiles, held, held, payloads)
    for memory, codes in _wholes(header, data, held):
        memory.copy_(codes)


def _held(data: bytes, specs: Mapping[str, Spec], live: Mapping[str, torch.Tensor]) -> tuple[Header, list[Items]]:
    """The header, and the memory of each tensor that the object says something of."""
    header = codec.opened(data, list(specs.values()))
    held = []
    for form, (name, spec) in zip(header.layout.forms, specs.items(), strict=True):
        if form in (DELTA, JOINED, WHOLE) and name not in live:
            raise damaged(f"{name!r} has no live memory")
        held.append(Items.of(name, live[name], spec) if name in live else _NOTHING)
    return header, held


def _wholes(header: Header, data: bytes, held: Sequence[Items]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The memory of tensors that are new as a whole, and their codes in host memory."""
    found = []
    for i, form in enumerate(header.layout.forms):
        if form == WHOLE:
            memory = held[i].codes
            codes = codec.whole(header, data, i).view(np.uint8)
            found.append((memory, torch.from_numpy(codes).view(memory.dtype)))
    return found


def _as_codes(items: list[Items | None]) -> list[Codes | None]:
    """For `choose`, which looks at sizes and hands the rest to the kernels."""
    return cast("list[Codes | None]", items)

"""Rows that ranks have, as whole tensors that each is one rank's: for what wants a matrix whole.

Publishing does (a tensor's digest, a delta against what was published under another cut), saving in Hugging Face's
format, and Muon. Each dense parameter has one rank that gets it whole, chosen so that all get as many numbers; rows
travel once, in one all-to-all, and no rank holds the model. Stacked experts are whole where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import distributed

from etude.training.sharded.fsdp import ShardSpec, chunk_bounds
from etude.training.sharded.mesh import Mesh


class FullTensors:
    """`Together` for these ranks."""

    def __init__(self, cuts: Mapping[str, ShardSpec], mesh: Mesh) -> None:
        self._cuts, self._mesh = cuts, mesh
        self.owner: dict[str, int] = {}
        load = [0] * mesh.size
        dense = [name for name, cut in cuts.items() if not cut.expert]
        for name in sorted(dense, key=lambda n: (-torch.Size(cuts[n].shape).numel(), n)):
            self.owner[name] = lightest = load.index(min(load))
            load[lightest] += torch.Size(cuts[name].shape).numel()

    def gather(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Collective, with the same names on each rank."""
        mesh, by_owner = self._mesh, self._by_owner(rows)
        sent = [torch.cat([*(rows[n].flatten() for n in names), _empty(rows)]) for names in by_owner]
        mine = by_owner[mesh.rank]
        received = [sum(self._numel(name, rank) for name in mine) for rank in range(mesh.size)]
        came = self._exchanged(sent, received)
        found = {name: own for name, own in rows.items() if self._cuts[name].expert}
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in mine}
        for rank, flat in enumerate(came):
            for name, part in zip(mine, torch.split(flat, [self._numel(n, rank) for n in mine]), strict=True):
                parts[name].append(part)
        return found | {name: torch.cat(parts[name]).view(self._cuts[name].shape) for name in mine}

    def shard(self, wholes: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Collective. `like`: what `together` was given."""
        mesh, by_owner = self._mesh, self._by_owner(like)
        mine = by_owner[mesh.rank]
        sent = []
        for rank in range(mesh.size):
            rows = [wholes[n][slice(*chunk_bounds(self._cuts[n].shape[0], rank, mesh.size))].flatten() for n in mine]
            sent.append(torch.cat([*rows, _empty(like)]))
        received = [sum(like[name].numel() for name in names) for names in by_owner]
        found = {name: whole for name, whole in wholes.items() if self._cuts[name].expert}
        for names, flat in zip(by_owner, self._exchanged(sent, received), strict=True):
            for name, part in zip(names, torch.split(flat, [like[n].numel() for n in names]), strict=True):
                found[name] = part.view(like[name].shape)
        return found

    def _by_owner(self, names: Mapping[str, torch.Tensor]) -> list[list[str]]:
        dense = [name for name in names if name in self.owner]
        return [[name for name in dense if self.owner[name] == rank] for rank in range(self._mesh.size)]

    def _numel(self, name: str, rank: int) -> int:
        shape = self._cuts[name].shape
        start, stop = chunk_bounds(shape[0], rank, self._mesh.size)
        return (stop - start) * torch.Size(shape[1:]).numel()

    def _exchanged(self, sent: Sequence[torch.Tensor], received: Sequence[int]) -> list[torch.Tensor]:
        """One flat tensor from each rank for one to each."""
        flat = torch.cat(list(sent))
        out = flat.new_empty(sum(received))
        size = flat.itemsize  # as bytes: gloo does not know every dtype
        distributed.all_to_all_single(
            out.view(torch.uint8),
            flat.view(torch.uint8),
            [n * size for n in received],
            [len(one) * size for one in sent],
        )
        return list(torch.split(out, list(received)))


def _empty(rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """No numbers, of these tensors' dtype: something to join where there is nothing."""
    return next(iter(rows.values())).new_empty(0)

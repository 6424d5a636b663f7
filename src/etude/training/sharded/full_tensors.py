"""Exchange between rows, which each rank has, and full tensors, each on one rank.

Publishing needs full tensors (digests, and deltas against versions with another sharding), and so do saving in Hugging
Face's format and Muon. Each dense parameter is assigned to one rank, so that all ranks get about as many numbers. Rows
travel once, in one all-to-all, and no rank has the full model. Experts are full tensors on their rank already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import distributed

from etude.training.sharded.fsdp import ShardSpec, chunk_bounds
from etude.training.sharded.mesh import Mesh


class FullTensors:
    """The `ShardExchange` of a sharded model. `owner`: the rank that gets each dense parameter."""

    def __init__(self, specs: Mapping[str, ShardSpec], mesh: Mesh) -> None:
        self._specs, self._mesh = specs, mesh
        self.owner: dict[str, int] = {}
        load = [0] * mesh.size
        dense = [name for name, spec in specs.items() if not spec.expert]
        for name in sorted(dense, key=lambda n: (-torch.Size(specs[n].shape).numel(), n)):
            self.owner[name] = lightest = load.index(min(load))
            load[lightest] += torch.Size(specs[name].shape).numel()

    def gather(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the full parameters that this rank gets from all ranks' rows.

        A collective call, with the same names on each rank."""
        mesh, by_owner = self._mesh, self._by_owner(rows)
        sent = [torch.cat([*(rows[n].flatten() for n in names), _empty(rows)]) for names in by_owner]
        mine = by_owner[mesh.rank]
        received = [sum(self._numel(name, rank) for name in mine) for rank in range(mesh.size)]
        came = self._exchanged(sent, received)
        found = {name: own for name, own in rows.items() if self._specs[name].expert}
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in mine}
        for rank, flat in enumerate(came):
            for name, part in zip(mine, torch.split(flat, [self._numel(n, rank) for n in mine]), strict=True):
                parts[name].append(part)
        return found | {name: torch.cat(parts[name]).view(self._specs[name].shape) for name in mine}

    def shard(
        self, full_tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return this rank's rows of the full parameters that all ranks have. `like`: the argument of `gather`.

        A collective call."""
        mesh, by_owner = self._mesh, self._by_owner(like)
        mine = by_owner[mesh.rank]
        sent = []
        for rank in range(mesh.size):
            rows = [
                full_tensors[n][slice(*chunk_bounds(self._specs[n].shape[0], rank, mesh.size))].flatten() for n in mine
            ]
            sent.append(torch.cat([*rows, _empty(like)]))
        received = [sum(like[name].numel() for name in names) for names in by_owner]
        found = {name: full for name, full in full_tensors.items() if self._specs[name].expert}
        for names, flat in zip(by_owner, self._exchanged(sent, received), strict=True):
            for name, part in zip(names, torch.split(flat, [like[n].numel() for n in names]), strict=True):
                found[name] = part.view(like[name].shape)
        return found

    def _by_owner(self, names: Mapping[str, torch.Tensor]) -> list[list[str]]:
        dense = [name for name in names if name in self.owner]
        return [[name for name in dense if self.owner[name] == rank] for rank in range(self._mesh.size)]

    def _numel(self, name: str, rank: int) -> int:
        shape = self._specs[name].shape
        start, stop = chunk_bounds(shape[0], rank, self._mesh.size)
        return (stop - start) * torch.Size(shape[1:]).numel()

    def _exchanged(self, sent: Sequence[torch.Tensor], received: Sequence[int]) -> list[torch.Tensor]:
        """Send one flat tensor to each rank, and receive one from each."""
        flat = torch.cat(list(sent))
        out = flat.new_empty(sum(received))
        size = flat.itemsize  # sent as bytes: gloo does not support every dtype
        distributed.all_to_all_single(
            out.view(torch.uint8),
            flat.view(torch.uint8),
            [n * size for n in received],
            [len(one) * size for one in sent],
        )
        return list(torch.split(out, list(received)))


def _empty(rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return next(iter(rows.values())).new_empty(0)

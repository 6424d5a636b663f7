"""Optimiser state as a torch distributed checkpoint: each rank writes its rows, any number of ranks reads them.

Entries are named by parameter and stored as parts of a `DTensor`, so ranks of another mesh, and single processes, find
their rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from etude.errors import CheckpointError
from etude.models.checkpoint_files import open_safetensors
from etude.training.optimizer import COUNT, AdamW, layout
from etude.training.optimizer_state import FlatState
from etude.training.sharded.fsdp import ShardSpec

NOTHING: Mapping[str, ShardSpec] = {}


def _described(
    state: Mapping[str, torch.Tensor], optimizer: AdamW, specs: Mapping[str, ShardSpec]
) -> dict[str, torch.Tensor]:
    """Return a state's vectors by parameter, each as a part of the full one."""
    found = {COUNT: state[COUNT]}
    for key, (name, own) in optimizer.kept.by_parameter(state).items():
        if specs:
            spec = specs[name]
            own = replace(spec, shape=(spec.shape[0], *own.shape[1:])).distributed(own)
        found[key] = own
    return found


def save(path: Path, optimizer: AdamW, specs: Mapping[str, ShardSpec], group: distributed.ProcessGroup) -> None:
    """Write the optimiser state of all ranks into the directory `path`. A collective call.

    `specs`: which rows of each parameter this rank has."""
    writer = FileSystemWriter(path, sync_files=True)
    save_shards(_described(optimizer.state(), optimizer, specs), storage_writer=writer, process_group=group)


def restore_from_single(path: Path, optimizer: AdamW, specs: Mapping[str, ShardSpec]) -> None:
    """Restore this rank's rows of the optimiser state that a single process saved.

    `specs`: which rows of each parameter this rank has. Raises `CheckpointError` when the state does not fit."""
    shapes = {name: torch.Size(spec.shape) for name, spec in specs.items()}
    where, begin, size = layout(shapes, optimizer.excluded)
    found = {key: vector.clone() for key, vector in optimizer.state().items()}
    parts, flat = optimizer.kept.by_parameter(found), isinstance(optimizer.kept, FlatState)

    def full_shape(key: str, own: torch.Tensor) -> list[int]:
        if key == COUNT:
            return [1]
        if flat:
            return [size - begin if key == "second" else size]
        return [specs[parts[key][0]].shape[0], *own.shape[1:]]

    with open_safetensors(path) as state:
        for key, vector in found.items():
            stored = state.get_slice(key) if key in state.keys() else None  # noqa: SIM118  not a dict
            if stored is None or stored.get_shape() != full_shape(key, vector):
                raise CheckpointError(
                    f"the optimiser's {key!r} is missing or has another shape",
                    hint="load a complete learner checkpoint of this run",
                )
            if key == COUNT:
                vector.copy_(stored[:])
            elif not flat:
                spec = specs[parts[key][0]]
                vector.copy_(stored[spec.start : spec.stop])
        for key, (name, own) in parts.items() if flat else ():
            vector_key = key.partition(".")[0]
            width = shapes[name][1:].numel()
            start = where[name].start - (begin if vector_key == "second" else 0) + specs[name].start * width
            own.copy_(state.get_slice(vector_key)[start : start + own.numel()].view(own.shape))
    optimizer.restore(found)


def restore(
    path: Path,
    optimizer: AdamW,
    specs: Mapping[str, ShardSpec] = NOTHING,
    group: distributed.ProcessGroup | None = None,
) -> None:
    """Restore the optimiser state in `path`, whichever ranks wrote it. A collective call.

    `specs`: which rows of each parameter this rank has; empty for a single process. Raises `CheckpointError` when the
    state is damaged or does not fit."""
    loaded = {key: torch.zeros_like(vector) for key, vector in optimizer.state().items()}
    try:
        with warnings.catch_warnings():  # reading in a single process is intended
            warnings.simplefilter("ignore", UserWarning)
            load_shards(
                _described(loaded, optimizer, specs),
                storage_reader=FileSystemReader(path),
                process_group=group,
                no_dist=not specs,
            )
    except Exception as error:  # noqa: BLE001  its error types are not public: missing name, other shape, damaged file
        raise CheckpointError(
            f"{path} is not a state of this model's optimiser",
            str(error).splitlines()[-1][:200] if str(error) else type(error).__name__,
            hint="load a complete learner checkpoint of the same model and the same learner.optimizer",
        ) from None
    optimizer.restore(loaded)

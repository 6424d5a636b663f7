"""Some rows of a checkpoint's tensors: what a rank reads of a model that ranks share.

Of a tensor that is stored as it is, those rows alone are read from the disk. One that is stored in a format (fp8,
MXFP4 ...) is read whole, one at a time, and cut then. Knows nothing of how ranks share a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from etude.models.checkpoint import opened, read_json, require_finite, require_tied
from etude.models.config import ModelConfig
from etude.models.headers import EMBEDDING, HEAD, check_weights


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of a tensor by its Hugging Face name, and the memory that they are to be in."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int
    out: torch.Tensor  # [stop - start, *shape[1:]]


@torch.no_grad()
def read_rows(path: Path, wanted: Iterable[Rows]) -> None:
    """Fill memory with rows of a checkpoint directory. Raises `CheckpointError` as `checkpoint.load_model` does."""
    config = ModelConfig.from_hf(read_json(path / "config.json"))
    found = check_weights(path, config)
    embedding, head = map(config.architecture.outside, (EMBEDDING, HEAD))
    tied = config.tie_embeddings and head in found
    with opened(path, found) as tensors:
        for one in wanted:
            one.out.copy_(tensors.rows(one.name, one.shape, one.start, one.stop))
            require_finite({one.name: one.out}, path)
            if tied and one.name == embedding:
                require_tied(path, tensors.rows(head, one.shape, one.start, one.stop), one.out)

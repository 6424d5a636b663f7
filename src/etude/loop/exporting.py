"""A Hugging Face directory of a checkpoint, of a run's result, or of any version that a run published."""

from __future__ import annotations

from pathlib import Path

import torch

from etude.errors import CheckpointError
from etude.models.checkpoint import load_model, save_model
from etude.models.naming import hf_views
from etude.run import RunFolder
from etude.stores import DirectoryStore
from etude.weights import Tensor
from etude.weights.chain import inspect
from etude.weights.chain.plans import rebuild


def export_checkpoint(source: Path, out: Path, *, dtype: str) -> Path:
    """Write a checkpoint (or a run's newest one) anew, with its tokeniser. Raises `CheckpointError`."""
    if (source / "run.json").is_file():
        source = newest_checkpoint(RunFolder.open(source))
    save_model(load_model(source), out, dtype=dtype, assets=source)
    return out


def export_version(run: RunFolder, step: int, out: Path, *, dtype: str) -> Path:
    """Write the version of a run that has this step, rebuilt from its chain and proven by its digests."""
    store = DirectoryStore(run / "weights")
    tensors = rebuild(store, inspect.find(store, str(step)))
    start = run / "checkpoints" / "mid"
    model = load_model(start)
    with torch.no_grad():
        for name, view in hf_views(model).items():
            view.copy_(_values(tensors[name]))
    save_model(model, out, dtype=dtype, assets=start)
    return out


def _values(tensor: Tensor) -> torch.Tensor:
    kinds = {"bf16": (torch.int16, torch.bfloat16), "f32": (torch.int32, torch.float32)}
    if tensor.dtype not in kinds:
        raise CheckpointError(
            f"a version in {tensor.dtype} cannot be exported", hint="export one that was published in bf16 or f32"
        )
    raw, kind = kinds[tensor.dtype]
    signed = tensor.codes.view({torch.int16: "int16", torch.int32: "int32"}[raw]).copy()
    return torch.from_numpy(signed).view(kind).reshape(tensor.shape)


def newest_checkpoint(run: RunFolder) -> Path:
    """The run's result, or how far it has got."""
    final = run / "checkpoints" / "final"
    steps = sorted((run / "checkpoints").glob("step-*"))
    return final if final.is_dir() else steps[-1] if steps else run / "checkpoints" / "mid"

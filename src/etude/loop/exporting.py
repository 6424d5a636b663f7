"""A Hugging Face directory of a checkpoint, of a run's result, or of any version that a run published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from etude.errors import CheckpointError
from etude.loop.places import weights_store
from etude.models.checkpoint import load_model, save_model
from etude.models.headers import tell_left_out
from etude.models.naming import hf_views
from etude.models.packed import stored
from etude.numerics.config import Quantise
from etude.run import RunFolder
from etude.weights import Tensor
from etude.weights.chain import inspect
from etude.weights.chain.plans import rebuild

Said = Callable[[str], None]


def export_checkpoint(
    source: Path, out: Path, *, dtype: str, quantise: Quantise = Quantise.NONE, said: Said = lambda _: None
) -> Path:
    """Write a checkpoint (or a run's newest one) anew, with its tokeniser. `said` is told of layers that are left out,
    by the run's start already. Raises `CheckpointError`."""
    start = source
    if (source / "run.json").is_file():
        run = RunFolder.open(source)
        source, start = newest_checkpoint(run), run / "checkpoints" / "mid"
    model = load_model(source)
    tell_left_out(start, model.config, said)
    save_model(model, out, dtype=dtype, quantise=quantise, assets=source)
    return out


def export_version(
    run: RunFolder,
    step: int,
    out: Path,
    *,
    dtype: str,
    quantise: Quantise = Quantise.NONE,
    said: Said = lambda _: None,
) -> Path:
    """Write the version of a run that has this step, rebuilt from its chain and proven by its digests. `said` is told
    of layers of its start that are left out."""
    store = weights_store(run)
    tensors = rebuild(store, inspect.find(store, str(step)))
    start = run / "checkpoints" / "mid"
    model = load_model(start)
    tell_left_out(start, model.config, said)
    with torch.no_grad():
        for name, view in hf_views(model).items():
            view.copy_(stored(name, tuple(view.shape), tensors, lambda part: _values(tensors[part])))
    save_model(model, out, dtype=dtype, quantise=quantise, assets=start)
    return out


_KINDS = {
    "bf16": ("int16", torch.bfloat16),
    "f32": ("int32", torch.float32),
    "f8_e4m3": ("uint8", torch.float8_e4m3fn),
    "u8": ("uint8", torch.uint8),
}


def _values(tensor: Tensor) -> torch.Tensor:
    if tensor.dtype not in _KINDS:
        raise CheckpointError(
            f"a version in {tensor.dtype} cannot be exported",
            f"its tensors must be in {', '.join(_KINDS)}",
            hint="export one that a learner published",
        )
    numpys, kind = _KINDS[tensor.dtype]
    return torch.from_numpy(tensor.codes.view(numpys).copy()).view(kind).reshape(tensor.shape)


def newest_checkpoint(run: RunFolder) -> Path:
    """The run's result, or how far it has got."""
    final = run / "checkpoints" / "final"
    steps = sorted((run / "checkpoints").glob("step-*"))
    return final if final.is_dir() else steps[-1] if steps else run / "checkpoints" / "mid"

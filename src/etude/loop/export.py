"""Exports a checkpoint, a run's result, or any version of the weights that a run published as a Hugging Face
directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from etude.errors import CheckpointError
from etude.loop.checkpoints import newest_checkpoint
from etude.loop.exported_settings import settings_files, summaries_of_checkpoint, summaries_of_run
from etude.loop.locations import weights_store
from etude.models.adapter_config import ADAPTER_CONFIG, next_base
from etude.models.adapter_files import merge_adapter, read_adapter, write_adapter
from etude.models.checkpoint import load_model, save_model
from etude.models.checkpoint_files import atomic_directory
from etude.models.headers import report_unused_layers
from etude.models.lora import Adapters
from etude.models.packed_weights import read_stored
from etude.models.transformer import Transformer
from etude.models.weight_views import hf_views
from etude.numerics.config import Quantise
from etude.records.adapter import PUBLISHED, adapted_modules
from etude.run import RunFolder
from etude.weights import Tensor
from etude.weights.chain import inspect
from etude.weights.chain.plans import rebuild
from etude.weights.follow.adapter_map import published_config

Log = Callable[[str], None]


def export_checkpoint(
    source: Path, out: Path, *, dtype: str, quantise: Quantise = Quantise.NONE, log: Log = lambda _: None
) -> Path:
    """Write a checkpoint, or the newest one of a run, as a new Hugging Face directory with its tokeniser.

    `source` is the folder of the checkpoint or the run, and `out` the new folder, which is returned. `log` is called
    with a line on layers that were left out when the run started. Raises `CheckpointError`."""
    start = source
    if (source / "run.json").is_file():
        run = RunFolder.open(source)
        source, start = newest_checkpoint(run), run / "checkpoints" / "mid"
        summaries = summaries_of_run(run)
    else:
        summaries = summaries_of_checkpoint(source)
    model = load_model(source)
    report_unused_layers(start, model.config, log)
    save_model(model, out, dtype=dtype, quantise=quantise, assets=source, files=settings_files(summaries))
    return out


def export_version(
    run: RunFolder,
    step: int,
    out: Path,
    *,
    dtype: str,
    quantise: Quantise = Quantise.NONE,
    log: Log = lambda _: None,
) -> Path:
    """Write the weights that a run published at a training step as a Hugging Face directory. Returns `out`.

    They are rebuilt from the stored deltas and verified by their digests. `log` is called with a line on layers that
    were left out when the run started."""
    store = weights_store(run, readonly=True)
    tensors = rebuild(store, inspect.find(store, str(step)))
    start = run / "checkpoints" / "mid"
    model = load_model(start)
    report_unused_layers(start, model.config, log)
    if adapted_modules(tensors):
        _adapted(model, tensors)
    else:
        with torch.no_grad():
            for name, view in hf_views(model).items():
                view.copy_(read_stored(name, tuple(view.shape), tensors, lambda part: _values(tensors[part])))
    files = settings_files(summaries_of_run(run))
    save_model(model, out, dtype=dtype, quantise=quantise, assets=start, files=files)
    return out


def export_adapter(source: Path, out: Path) -> Path:
    """Write the LoRA adapter of a checkpoint, or of a run's newest one, in the format of peft and vLLM. Returns `out`.

    `source` is the folder of the checkpoint or the run. The dtype is that of training. Raises `CheckpointError`."""
    source = newest_checkpoint(RunFolder.open(source)) if (source / "run.json").is_file() else source
    if not (source / ADAPTER_CONFIG).is_file():
        hint = "export it without --adapter; learner.lora_rank trains adapters"
        raise CheckpointError(f"{source} is not an adapter", f"it has no {ADAPTER_CONFIG}", hint=hint)
    config, tensors = read_adapter(source)
    with atomic_directory(out) as folder:
        write_adapter(folder, tensors, config, next_base(source), dtype=next(iter(tensors.values())).dtype)
    return out


def export_version_adapter(run: RunFolder, step: int, out: Path) -> Path:
    """Write the LoRA adapter that a run published at a training step, in the format of peft and vLLM. Returns `out`.

    Raises `CheckpointError` if the run does not train an adapter."""
    store, start = weights_store(run, readonly=True), run / "checkpoints" / "mid"
    tensors = rebuild(store, inspect.find(store, str(step)))
    if not adapted_modules(tensors):
        raise CheckpointError(f"step {step} of {run.path} is not an adapter", hint="export it without --adapter")
    adapters = _adapted(load_model(start), tensors)
    with atomic_directory(out) as folder:
        write_adapter(folder, adapters.views, adapters.config, start, dtype=adapters.dtype)
    return out


def _adapted(model: Transformer, tensors: Mapping[str, Tensor]) -> Adapters:
    """Merge a published adapter into its base model; returns the adapter."""
    pairs = {name: _values(tensor) for name, tensor in tensors.items() if name != PUBLISHED}
    return merge_adapter(model, published_config(tensors), pairs, "the published version")


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
            hint="export a version that a learner published",
        )
    numpys, kind = _KINDS[tensor.dtype]
    return torch.from_numpy(tensor.codes.view(numpys).copy()).view(kind).reshape(tensor.shape)

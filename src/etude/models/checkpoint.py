"""Read and write checkpoints as Hugging Face directories, with config, weights and tokeniser files.

A write is all or nothing (`checkpoint_files.atomic_directory`). A read checks names, shapes, dtypes and the number of
weights before it builds a model, and every byte where the directory has checksums."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from etude import progress
from etude.errors import CheckpointError, ConfigError
from etude.file_checksums import verify_files
from etude.models.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, base_of, next_base
from etude.models.adapter_files import merge_adapter, read_adapter
from etude.models.checkpoint_files import ASSETS, atomic_directory, save_tensors
from etude.models.config import ModelConfig
from etude.models.family_lookup import text_config
from etude.models.finite import find_non_finite
from etude.models.headers import (
    EMBEDDING,
    HEAD,
    HINT_DAMAGED,
    check_weights,
    mtp_copies,
    read_json,
    read_model_config,
    shard_names,
    text_names,
)
from etude.models.packed_weights import pack_weights, read_stored
from etude.models.quantised_storage import (
    FP8_SCALE,
    INT4_SCALE,
    dequantise,
    dequantise_int4,
    is_int4,
    quantization_config,
)
from etude.models.stacked_experts import (
    BLOCKS,
    as_stored,
    expert_part,
    has_biases,
    read_expert,
    read_plain,
    stacked_views,
)
from etude.models.tensor_parallel import full_shape, shard_tensor
from etude.models.transformer import Transformer
from etude.models.weight_views import hf_views, stays_float32, views
from etude.numerics.config import Quantise
from etude.numerics.exact.operators import Exact
from etude.numerics.formats import FORMATS
from etude.numerics.operators import Operators
from etude.numerics.parallel import SINGLE_RANK, Parallel
from etude.weights.files.checkpoint import INDEX, WEIGHTS

SHARD_BYTES = 5_000_000_000
"""More bytes of weights than this are written as shards."""

_DTYPES = {"bf16": (torch.bfloat16, "bfloat16"), "f32": (torch.float32, "float32")}


def save_model(
    model: Transformer,
    path: Path | str,
    *,
    dtype: str,
    quantise: Quantise = Quantise.NONE,
    assets: Path | str | None = None,
    files: Mapping[str, str] = MappingProxyType({}),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model as a checkpoint directory, all or nothing. An existing directory is replaced.

    - `dtype`: "bf16" or "f32".
    - `quantise`: the format of the large matrices.
    - `assets`: a directory whose tokeniser files, and special tokens in config.json, are copied.
    - `files`: further files, as name → content.
    - `shard_bytes`: weights of more bytes than this are split into several files, with an index.

    Raises `CheckpointError` for disk errors, and `ConfigError` for widths that are not multiples of the format's block
    size."""
    with atomic_directory(path) as folder:
        write_model(model, folder, dtype=dtype, quantise=quantise, assets=assets, shard_bytes=shard_bytes)
        for name, content in files.items():
            (folder / name).write_text(content)


def write_model(
    model: Transformer,
    folder: Path,
    *,
    dtype: str,
    quantise: Quantise = Quantise.NONE,
    assets: Path | str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the files of `save_model` into the existing `folder`, which the caller then syncs and renames into place.

    The other arguments are those of `save_model`."""
    stacks = model.config.architecture.stacks_experts
    if stacks and quantise is not Quantise.NONE:
        raise ConfigError(
            f"a {model.config.architecture.model_type} model cannot be written in {quantise}",
            "its checkpoints have the experts of a layer in one tensor, and compressed-tensors has no such tensors",
            hint="write it without quantisation",
        )
    write_config_files(model.config, folder, dtype=dtype, quantise=quantise, assets=assets)
    if stacks:
        tensors = stacked_views(model)
    else:
        tensors = hf_views(model) if quantise is Quantise.NONE else pack_weights(model, FORMATS[quantise])
        if model.config.architecture.copies_for_mtp:
            tensors = tensors | {copy: tensors[name] for copy, name in mtp_copies(model.config).items()}
    _write_weights(tensors, folder, _DTYPES[dtype][0], shard_bytes)


def write_config_files(
    model: ModelConfig,
    folder: Path,
    *,
    dtype: str,
    quantise: Quantise = Quantise.NONE,
    assets: Path | str | None = None,
) -> None:
    """Write all files of a checkpoint directory but its weights. The arguments are those of `save_model`."""
    name = _DTYPES[dtype][1]
    config = {**model.to_hf(), **_carried(assets), "dtype": name, "torch_dtype": name}
    if quantise is not Quantise.NONE:
        router = model.architecture.hf_name(".mlp.gate.").strip(".")
        config["quantization_config"] = quantization_config(quantise, router=router)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if assets is not None:
        copy_assets(Path(assets), folder)


def copy_assets(assets: Path, folder: Path) -> None:
    """Copy the tokeniser files that `assets` has into `folder`."""
    for asset in ASSETS:
        if (assets / asset).is_file():
            shutil.copyfile(assets / asset, folder / asset)


def _carried(assets: Path | str | None) -> dict[str, object]:
    """Return keys of a config.json that etude does not need and other tools read: ids of special tokens."""
    if assets is None or not (Path(assets) / "config.json").is_file():
        return {}
    raw = text_config(read_json(Path(assets) / "config.json"))
    return {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in raw}


def _write_weights(views: Mapping[str, torch.Tensor], folder: Path, kind: torch.dtype, shard_bytes: int) -> None:
    """Write one file, or shards of at most `shard_bytes` (a larger tensor has its own shard) with their index."""
    kinds = {n: view.dtype if view.itemsize == 1 or stays_float32(n) else kind for n, view in views.items()}
    sizes = {name: view.numel() * kinds[name].itemsize for name, view in views.items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if filled and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else [WEIGHTS]
    for file, names in zip(files, shards, strict=True):
        save_tensors({name: as_stored(name, views[name].to(kinds[name])) for name in names}, folder / file)
    if len(shards) > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_index(where, sum(sizes.values()), folder)


def write_index(where: Mapping[str, str], num_bytes: int, folder: Path) -> None:
    """Write the index of a directory with several weight files (shards). `where`: tensor name → file name. `num_bytes`:
    the size of all weights."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    operators: Operators | None = None,
    weight_dtype: torch.dtype | None = None,
    parallel: Parallel = SINGLE_RANK,
    device: torch.device | None = None,
) -> Transformer:
    """Load the model of a checkpoint directory, or one rank's part of it. An adapter directory is merged into its base.

    - `operators`: the arithmetic of the model; None: exact, in `dtype`.
    - `weight_dtype`: dtype of the weights in memory (None: `Operators.storage_dtype`).
    - `parallel`: the rank whose part is loaded.
    - `device`: weights are copied there tensor by tensor (None: the CPU); an adapter is merged on the CPU before.

    Raises `ConfigError` for an adapter on several ranks, and `CheckpointError` for a missing or damaged file, an
    unsupported architecture, weights that do not fit the config, weights with NaN or infinities, and a stored output
    head that differs from tied embeddings."""
    path, device = Path(path), device or torch.device("cpu")
    if (path / ADAPTER_CONFIG).is_file():
        return _load_merged(path, dtype=dtype, operators=operators, weight_dtype=weight_dtype, parallel=parallel).to(
            device
        )
    config = read_model_config(path)
    found = check_weights(path, config)  # before an invalid config makes us allocate memory
    verify_weights(path)
    operators = Exact(dtype) if operators is None else operators
    with device:
        model = Transformer(config, seed=None, operators=operators, parallel=parallel)
    own, outside = views(model.to(device)), config.architecture.hf_name
    with open_tensors(path, found) as tensors, torch.no_grad():
        for name, view in own.items():
            full = tensors.full(outside(name), full_shape(name, view, parallel))
            view.copy_(shard_tensor(name, full, parallel))
        if model.head is None and outside(HEAD) in found:
            require_tied(path, tensors.stored(outside(HEAD)), own[EMBEDDING])
    require_finite(hf_views(model.cast(weight_dtype or operators.storage_dtype)), path)
    return model


def _load_merged(
    folder: Path,
    *,
    dtype: torch.dtype,
    operators: Operators | None,
    weight_dtype: torch.dtype | None,
    parallel: Parallel = SINGLE_RANK,
) -> Transformer:
    """Load the base model of an adapter directory and merge the adapter into its weights.

    The other arguments are those of `load_model`. Every parameter of the result requires a gradient. Raises
    `CheckpointError`, and `ConfigError` if `parallel` has several ranks."""
    if parallel is not SINGLE_RANK:
        raise ConfigError(
            f"{folder} cannot be loaded on several ranks",
            "it is an adapter",
            hint="export the merged model, and use that",
        )
    base_of(folder)  # checks that the chain of bases ends
    config, tensors = read_adapter(folder)
    model = load_model(next_base(folder), dtype=dtype, operators=operators, weight_dtype=weight_dtype)
    merge_adapter(model, config, tensors, str(folder / ADAPTER_WEIGHTS))
    return model.requires_grad_()


def iter_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, float32 tensor) of every weight of a checkpoint directory, sorted by name.

    Only one tensor at a time is in memory. Raises `CheckpointError` for a missing or damaged file."""
    config = read_model_config(path)
    found = check_weights(path, config)
    verify_weights(path)
    with torch.device("meta"):
        named = hf_views(Transformer(config, seed=None))
    with open_tensors(path, found) as tensors:
        for name in sorted(named):
            yield name, tensors.full(name, tuple(named[name].shape)).float()


def rounded_weights(path: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, tensor) of every weight on the CPU, in the dtype that `load_model(weight_dtype=dtype)`
    keeps it in.

    That is float32 for names of `stays_float32`, else `dtype`. Raises `CheckpointError`."""
    for name, tensor in iter_weights(path):
        yield name, tensor if stays_float32(name) else tensor.to(dtype)


def verify_weights(path: Path, *, part: int = 0, parts: int = 1) -> None:
    """Verify checksums of a checkpoint directory's config and weights, where it has them.

    This takes about one second per 1 to 2 GB. To share the work, each of `parts` callers verifies its own `part` of the
    files, counted from 0. Raises `CheckpointError` for a wrong checksum."""
    is_sharded = (path / INDEX).is_file()
    names = ["config.json", *([INDEX, *shard_names(path / INDEX)] if is_sharded else [WEIGHTS])]
    verify_files(path, names[part::parts], kind=CheckpointError)


def require_tied(path: Path, head: torch.Tensor, embedding: torch.Tensor) -> None:
    """Raise `CheckpointError` when a stored output head differs from the embedding that it is tied to."""
    if not torch.equal(head.to(embedding), embedding):
        raise CheckpointError(
            f"{HEAD} of {path} differs from the embedding",
            "its config.json has tie_word_embeddings = true, so both must be equal",
            hint="set tie_word_embeddings to false if the head was trained separately; else delete the tensor",
        )


def require_finite(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise `CheckpointError` when a weight has NaN or infinities in its dtype in memory. `path`: for the message."""
    bad = find_non_finite(tensors)
    if bad:
        first = next(iter(bad))
        raise CheckpointError(
            f"{first} of {path} is not finite in {str(tensors[first].dtype).removeprefix('torch.')}",
            f"{bad[first]}; {len(bad)} tensors in all",
            hint="use a checkpoint from before training diverged, or a dtype with a wider range",
        )


class Tensors:
    """The tensors of a checkpoint directory by name, read from disk one at a time. `open_tensors` makes it."""

    def __init__(self, found: Container[str], where: Mapping[str, tuple[Any, str]]) -> None:
        self._found, self._where = found, where  # the open file of each tensor, and its name there

    def stored(self, name: str) -> torch.Tensor:
        """Read a tensor in the dtype of the file."""
        progress.tick()
        file, stored = self._where[name]
        tensor: torch.Tensor = file.get_tensor(stored)
        return tensor

    def full(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read a tensor's values, dequantised if it is quantised. `shape`: the shape of the dequantised tensor.

        The tensor of an expert may be a part of a stack of them."""
        if is_int4(name, self._found):
            stem = name.removesuffix(".weight")
            return dequantise_int4(self.stored(f"{stem}.weight_packed"), self.stored(stem + INT4_SCALE))
        part = None if name in self._found else expert_part(name)
        if part is not None and part.stack in self._found and not has_biases(part, self._found):
            return read_plain(part, self._one_of)
        if part is not None and any(one in self._found for one in (part.stack, part.stack + BLOCKS)):
            return read_expert(part, packed=part.stack not in self._found, read=self._one_of)
        tensor = read_stored(name, shape, self._found, self.stored)
        return dequantise(tensor, self.stored(name + FP8_SCALE)) if tensor.dtype == torch.float8_e4m3fn else tensor

    def _one_of(self, name: str, index: int) -> torch.Tensor:
        """Read one index of a tensor's first dimension."""
        progress.tick()
        file, stored = self._where[name]
        some: torch.Tensor = file.get_slice(stored)[index : index + 1]
        return some[0]

    def rows(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        """Read rows [start, stop) of a tensor with this full shape.

        Only these rows are read from disk, unless the tensor is packed."""
        if name in self._where and name + FP8_SCALE not in self._found:
            progress.tick()
            file, stored = self._where[name]
            some: torch.Tensor = file.get_slice(stored)[start:stop]
            return some
        return self.full(name, shape)[start:stop]


@contextlib.contextmanager
def open_tensors(path: Path, found: Container[str]) -> Iterator[Tensors]:
    """Open the files of a checkpoint directory; they are closed at the end of the `with` block.

    `found`: names of the stored tensors. Raises `CheckpointError`, also for read errors inside the block."""
    files = [path / name for name in (shard_names(path / INDEX) if (path / INDEX).is_file() else [WEIGHTS])]
    where: dict[str, tuple[Any, str]] = {}
    inside = text_names(path)
    with contextlib.ExitStack() as stack:
        try:
            for file in files:
                opened = stack.enter_context(safe_open(file, "pt"))
                where |= {inside(name): (opened, name) for name in opened.keys()}  # noqa: SIM118
            yield Tensors(found, where)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} is damaged", str(error), hint=HINT_DAMAGED) from None


@dataclass(frozen=True)
class RowRange:
    """A request to read rows [start, stop) of a tensor, named as in Hugging Face checkpoints, into given memory.

    `shape`: the shape of the full tensor. `out`: the memory for the rows, [stop - start, *shape[1:]]."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    out: torch.Tensor


@torch.no_grad()
def read_rows(path: Path, ranges: Iterable[RowRange]) -> None:
    """Read rows of tensors of a checkpoint directory into memory, for one rank of a sharded model.

    Of plain tensors only these rows are read from disk; quantised tensors are read in full, one at a time. Raises the
    `CheckpointError` of `load_model`."""
    config = read_model_config(path)
    found = check_weights(path, config)
    embedding, head = map(config.architecture.hf_name, (EMBEDDING, HEAD))
    tied = config.tie_embeddings and head in found
    with open_tensors(path, found) as tensors:
        for one in ranges:
            one.out.copy_(tensors.rows(one.name, one.shape, one.start, one.stop))
            require_finite({one.name: one.out}, path)
            if tied and one.name == embedding:
                require_tied(path, tensors.rows(head, one.shape, one.start, one.stop), one.out)

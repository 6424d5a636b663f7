"""Check a checkpoint directory against its config.json, from the headers of its files alone. Torch-free.

A safetensors file begins with the length of its header (u64, little endian) and the header in JSON: name → dtype,
shape, [start, stop) in the data behind it. So truncated files, missing tensors and wrong shapes are found in
milliseconds, whatever the model's size. Damaged data is found when loading."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import CheckpointError, ConfigError
from etude.models.adapter_config import base_of
from etude.models.components import Scores, Shape
from etude.models.config import ModelConfig
from etude.models.quantised_storage import (
    FP8_DTYPE,
    FP8_SCALE,
    ignored_parts,
    is_quantised,
    scale_shape,
    stored_format,
    stored_parts,
)
from etude.numerics.config import Quantise
from etude.numerics.formats import FORMATS

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MAX_HEADER_BYTES = 100 << 20
"""The limit of the format itself."""

READABLE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_BYTES = READABLE_BYTES | {FP8_DTYPE: 1, "U8": 1}
HINT_DAMAGED = "copy the checkpoint again; or, if it is a run's newest, delete it: --resume uses the one before"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as described by its file's header. `dtype`: the header's name, such as "BF16"."""

    file: Path
    dtype: str
    shape: Shape


def check_weights(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Check that a checkpoint directory has exactly the tensors of a model, and return its tensors by name.

    Raises `CheckpointError`, which names file, tensor, and found and expected shape."""
    found = read_headers(folder)
    known = {config.architecture.hf_name(HEAD)}  # some writers repeat a tied one: the loader compares it
    for name, shape in hf_weight_shapes(config):
        known |= _check_tensor(name, found, shape, folder)
    extra = sorted(found.keys() - known - config.architecture.unused(found, config))
    if extra:
        raise CheckpointError(
            f"{found[extra[0]].file} has a tensor {extra[0]!r}",
            f"one of {len(extra)} that do not belong to the model of {folder / 'config.json'}",
            hint="config and weights are of different models: take both from one checkpoint",
        )
    return found


def check_blocks(config: ModelConfig, kind: Quantise) -> None:
    """Raise `ConfigError` when a large matrix has a width that is not a multiple of a format's block size."""
    outside = config.architecture.hf_name
    for name, shape in weight_shapes(config):
        if is_quantised(name) and kind is not Quantise.NONE and shape[-1] % FORMATS[kind].block:
            block = FORMATS[kind].block
            raise ConfigError(
                f"numerics.quantise = {str(kind)!r} is not possible",
                f"the width of {outside(name)} {list(shape)} is not a multiple of the block size {block}",
                hint=f'use model widths that are multiples of {block}, or set numerics.quantise = "none"',
            )


def check_rank(config: ModelConfig, rank: int) -> None:
    """Raise `ConfigError` when a LoRA adapter of this rank would have more numbers than the adapted matrix."""
    outside = config.architecture.hf_name
    for name, shape in weight_shapes(config):
        if is_quantised(name) and rank > (most := math.prod(shape) // sum(shape)):
            raise ConfigError(
                f"learner.lora_rank = {rank} is too large",
                f"{outside(name)} is {list(shape)}: an adapter of rank above {most} is not smaller than the matrix",
                hint="lower it: 1 to 32 are usual; or set learner.lora_rank = 0 to train all weights",
            )


def unused_layers(folder: Path, config: ModelConfig) -> dict[str, int]:
    """Return the layers in a directory that etude does not compute with, with their number of tensors.

    They are lost when the weights are saved again. Raises `CheckpointError` when a header cannot be read."""
    names = config.architecture.unused(read_headers(folder), config)
    return dict(Counter(sorted(".".join(name.split(".", 3)[:3]) for name in names)))


def report_unused_layers(folder: Path, config: ModelConfig, report: Callable[[str], None]) -> None:
    """Call `report` with a message if the directory has layers that are dropped (`unused_layers`)."""
    if layers := unused_layers(folder, config):
        named = ", ".join(f"{layer} ({tensors} tensors)" for layer, tensors in layers.items())
        report(
            f"{folder}: dropped, since etude does not support multi-token prediction: {named}. They are not trained, "
            f"and not part of checkpoints and exports"
        )


def _check_tensor(name: str, found: Mapping[str, StoredTensor], shape: Shape, folder: Path) -> set[str]:
    """Check one tensor, and return the names under which it is stored."""
    low = stored_format(name, found)
    if low is not Quantise.NONE:
        return _check_parts(name, found, shape, low)
    tensor = found.get(name)
    if tensor is None:
        raise CheckpointError(
            f"{folder} has no tensor {name!r}", f"its config.json expects {list(shape)}", hint=HINT_DAMAGED
        )
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.file}: {name!r} has shape {list(tensor.shape)}",
            f"{folder / 'config.json'} expects {list(shape)}",
            hint="config and weights are of different models: take both from one checkpoint",
        )
    if tensor.dtype == FP8_DTYPE and len(shape) == 2:
        scale = found.get(name + FP8_SCALE)
        if scale is None or scale.shape != scale_shape(shape) or scale.dtype != "F32":
            raise CheckpointError(
                f"{tensor.file}: {name!r} is {FP8_DTYPE} without its scales",
                f"{name + FP8_SCALE!r} must be F32 {list(scale_shape(shape))}, {_described(scale)}",
                hint="etude reads only DeepSeek's blocks of 128 × 128: convert the checkpoint to bf16 first",
            )
    elif tensor.dtype not in READABLE_BYTES:
        raise CheckpointError(
            f"{tensor.file}: {name!r} is {tensor.dtype}",
            f"etude reads {', '.join(READABLE_BYTES)}, {FP8_DTYPE} matrices with their block scales, and matrices in "
            f"{', '.join(FORMATS)} as compressed-tensors stores them",
            hint="convert the checkpoint to bf16 first",
        )
    return {name, name + FP8_SCALE} if tensor.dtype == FP8_DTYPE else {name}


def _check_parts(name: str, found: Mapping[str, StoredTensor], shape: Shape, low: Quantise) -> set[str]:
    expected = stored_parts(name, shape, low) if len(shape) == 2 and shape[1] % FORMATS[low].block == 0 else {}
    for part, (dtype, its_shape) in expected.items():
        tensor = found.get(part)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, its_shape):
            raise CheckpointError(
                f"{part!r} does not fit {name!r} {list(shape)} in {low}",
                f"it must be {dtype} {list(its_shape)}, {_described(tensor)}",
                hint="export it again, or convert the checkpoint to bf16 first",
            )
    if not expected:
        raise CheckpointError(
            f"{name!r} {list(shape)} cannot be in {low}",
            f"its width is not a multiple of the block size {FORMATS[low].block}",
            hint="config and weights are of different models: take both from one checkpoint",
        )
    return {*expected, *ignored_parts(name, low)}


def _described(tensor: StoredTensor | None) -> str:
    return "but it is missing" if tensor is None else f"but is {tensor.dtype} {list(tensor.shape)}"


def weight_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield etude's name (`weight_views.views`) and shape of every weight of a model.

    It is an iterator, since an invalid config may have very many."""
    d, moe = config.hidden_size, set(config.moe_layers)
    attention = config.attention.shapes(config)
    yield EMBEDDING, (config.vocab_size, d)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (d,)
        yield from ((f"{at}self_attn.{name}.weight", shape) for name, shape in attention.items())
        yield at + "post_attention_layernorm.weight", (d,)
        yield from _expert_shapes(config, at) if layer in moe else _mlp_shapes(at + "mlp.", d, config.dense_width)
    yield "model.norm.weight", (d,)
    if not config.tie_embeddings:
        yield HEAD, (config.vocab_size, d)


def hf_weight_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the name in the family's Hugging Face checkpoints and the shape of every weight of a model."""
    outside = config.architecture.hf_name
    return ((outside(name), shape) for name, shape in weight_shapes(config))


def _expert_shapes(config: ModelConfig, at: str) -> Iterator[tuple[str, Shape]]:
    d, hidden = config.hidden_size, config.expert_size
    yield at + "mlp.gate.weight", (config.num_experts, d)
    if config.routing.scores is Scores.SIGMOID:
        yield at + "mlp.gate.e_score_correction_bias", (config.num_experts,)
    for e in range(config.num_experts):
        yield from _mlp_shapes(f"{at}mlp.experts.{e}.", d, hidden)
    if config.num_shared:
        yield from _mlp_shapes(at + "mlp.shared_experts.", d, config.num_shared * hidden)


def _mlp_shapes(at: str, width: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield at + "gate_proj.weight", (hidden, width)
    yield at + "up_proj.weight", (hidden, width)
    yield at + "down_proj.weight", (width, hidden)


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Read the headers of all tensors of a directory, in one file or in shards with an index.

    For an adapter directory, read those of its base. Raises `CheckpointError` for a missing or damaged file."""
    folder = base_of(folder)
    if not (folder / INDEX).is_file():
        return read_header(folder / WEIGHTS)
    tensors: dict[str, StoredTensor] = {}
    for shard in shard_names(folder / INDEX):
        tensors |= read_header(folder / shard, listed_in=folder / INDEX)
    return tensors


def shard_names(index: Path) -> list[str]:
    """Return the names of the files that an index file lists, sorted.

    Raises `CheckpointError` when the index is missing or damaged."""
    try:
        content = json.loads(index.read_bytes())
        shards = content["weight_map"].values()
        plain = all(isinstance(shard, str) and Path(shard).name == shard for shard in shards)
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read", str(error.strerror), hint=HINT_DAMAGED) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is not JSON", str(error), hint=HINT_DAMAGED) from None
    except (KeyError, TypeError, AttributeError):
        facts = 'it has no "weight_map" from tensor names to file names'
        raise CheckpointError(f"{index} names no shards", facts, hint=HINT_DAMAGED) from None
    if not plain:
        raise CheckpointError(f"{index} names no shards", "a name in it is not a file name", hint=HINT_DAMAGED)
    return sorted(set(shards))


def read_header(path: Path, *, listed_in: Path | None = None) -> dict[str, StoredTensor]:
    """Read the header of one safetensors file: tensor name → dtype and shape.

    `listed_in`: the index that lists the file, for a shard. Raises `CheckpointError` for a missing, truncated or
    damaged file."""
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, num_bytes - 8):
                raise ValueError(f"it has {num_bytes} bytes, its header would have {length}")
            raw = json.loads(file.read(length))
        if not isinstance(raw, dict):
            raise ValueError("its header is not a JSON object")
        return {
            str(name): _stored(path, name, entry, num_bytes - 8 - length)
            for name, entry in raw.items()
            if name != "__metadata__"
        }
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        hint = "a checkpoint directory has config.json and model.safetensors, or its shards with their index"
        if listed_in is not None:
            facts, hint = f"{listed_in} lists it", "copy or download that shard again"
            raise CheckpointError(f"no shard at {path}", facts, hint=hint) from None
        raise CheckpointError(f"no weights at {path}", hint=hint) from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read", str(error.strerror), hint="check the file's permissions"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged", str(error), hint=HINT_DAMAGED) from None


def _stored(path: Path, name: str, entry: Any, data_bytes: int) -> StoredTensor:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{name!r} is not a tensor")
    dtype, shape, offsets = entry.get("dtype"), _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"{name!r} has no dtype, shape and offsets")
    start, stop = offsets
    if not start <= stop <= data_bytes:
        raise ValueError(f"{name!r} is at bytes {start} to {stop} of {data_bytes}: the file was cut off")
    if dtype in _BYTES and stop - start != math.prod(shape) * _BYTES[dtype]:
        raise ValueError(f"{name!r} has {stop - start} bytes, but {list(shape)} in {dtype} needs another number")
    return StoredTensor(path, dtype, shape)


def _counts(values: Any) -> tuple[int, ...] | None:
    """Return at most 64 integers from 0 to 2^62; None for anything else, whose product could take very long."""
    good = isinstance(values, list) and len(values) <= 64 and all(type(v) is int and 0 <= v < 1 << 62 for v in values)
    return tuple(values) if good else None

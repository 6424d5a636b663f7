"""Whether a checkpoint directory holds the weights that its config.json asks for: by headers alone, without torch.

A safetensors file begins with the length of its header (u64, little endian) and the header, JSON: name → dtype, shape,
[start, stop) in the data behind it. So a truncated file, a missing tensor and a shape that does not fit are found in
milliseconds, however large the model is. Damage inside the data is found by whoever loads it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import CheckpointError
from etude.models.config import ModelConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20
"""The limit of the format itself."""

READABLE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
HINT_DAMAGED = "copy the checkpoint again; or, if it is a run's newest, delete it: --resume goes on from the one before"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor as its file's header describes it."""

    file: Path
    dtype: str
    shape: Shape


def check_weights(folder: Path, config: ModelConfig) -> None:
    """Raises `CheckpointError` that names file, tensor, and the shape that was found and wanted."""
    found = read_headers(folder)
    known = {"lm_head.weight"}  # some writers repeat a tied one
    for name, shape in hf_shapes(config):
        _check_tensor(name, found.get(name), shape, folder)
        known.add(name)
    extra = sorted(found.keys() - known)
    if extra:
        raise CheckpointError(
            f"{found[extra[0]].file} has a tensor {extra[0]!r}",
            f"one of {len(extra)} that {folder / 'config.json'} has no place for",
            hint="the config is of another model than the weights: take both from one checkpoint",
        )


def _check_tensor(name: str, tensor: Stored | None, shape: Shape, folder: Path) -> None:
    if tensor is None:
        raise CheckpointError(
            f"{folder} has no tensor {name!r}", f"its config.json wants {list(shape)}", hint=HINT_DAMAGED
        )
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.file}: {name!r} has shape {list(tensor.shape)}",
            f"{folder / 'config.json'} wants {list(shape)}",
            hint="the config is of another model than the weights: take both from one checkpoint",
        )
    if tensor.dtype not in READABLE_BYTES:
        raise CheckpointError(
            f"{tensor.file}: {name!r} is {tensor.dtype}",
            f"readable are {', '.join(READABLE_BYTES)}",
            hint="convert the checkpoint to bf16 first: quantised weights cannot be trained",
        )


def hf_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Every Hugging Face name of a model's weights and its shape; one after another, as a wild config names many."""
    d, hidden = config.hidden_size, config.expert_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    block: dict[str, Shape] = {
        "input_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (queries, d),
        "self_attn.k_proj.weight": (keys, d),
        "self_attn.v_proj.weight": (keys, d),
        "self_attn.o_proj.weight": (d, queries),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate.weight": (config.num_experts, d),
    }
    for e in range(config.num_experts):
        block[f"mlp.experts.{e}.gate_proj.weight"] = block[f"mlp.experts.{e}.up_proj.weight"] = (hidden, d)
        block[f"mlp.experts.{e}.down_proj.weight"] = (d, hidden)
    yield "model.embed_tokens.weight", (config.vocab_size, d)
    for layer in range(config.num_layers):
        yield from ((f"model.layers.{layer}.{name}", shape) for name, shape in block.items())
    yield "model.norm.weight", (d,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, d)


def read_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of a directory, in one file or in shards with an index. Raises `CheckpointError`."""
    if not (folder / INDEX).is_file():
        return read_header(folder / WEIGHTS)
    tensors: dict[str, Stored] = {}
    for shard in shard_names(folder / INDEX):
        tensors |= read_header(folder / shard)
    return tensors


def shard_names(index: Path) -> list[str]:
    """The files that an index names, sorted. Raises `CheckpointError`."""
    try:
        content = json.loads(index.read_bytes())
        shards = content["weight_map"].values()
        plain = all(isinstance(shard, str) and Path(shard).name == shard for shard in shards)
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read", str(error.strerror), hint=HINT_DAMAGED) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} names no shards", repr(error), hint=HINT_DAMAGED) from None
    if not plain:
        raise CheckpointError(f"{index} names no shards", "a name in it is no file name", hint=HINT_DAMAGED)
    return sorted(set(shards))


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file. Raises `CheckpointError` for a missing, truncated or damaged one."""
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, num_bytes - 8):
                raise ValueError(f"it has {num_bytes} bytes, its header would have {length}")
            raw = json.loads(file.read(length))
        if not isinstance(raw, dict):
            raise ValueError("its header is no object")
        return {
            str(name): _stored(path, name, entry, num_bytes - 8 - length)
            for name, entry in raw.items()
            if name != "__metadata__"
        }
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        hint = "a checkpoint directory holds config.json and model.safetensors, or its shards with their index"
        raise CheckpointError(f"no weights at {path}", hint=hint) from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read", str(error.strerror), hint="give the user that runs this the right to read it"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged", str(error), hint=HINT_DAMAGED) from None


def _stored(path: Path, name: str, entry: Any, data_bytes: int) -> Stored:
    """A header's entry. Raises `ValueError`."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"{name!r} is no tensor")
    dtype, shape, offsets = entry.get("dtype"), _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"{name!r} has no dtype, shape and offsets")
    start, stop = offsets
    if not start <= stop <= data_bytes:
        raise ValueError(f"{name!r} is at bytes {start} to {stop} of {data_bytes}: the file was cut off")
    if dtype in READABLE_BYTES and stop - start != math.prod(shape) * READABLE_BYTES[dtype]:
        raise ValueError(f"{name!r} has {stop - start} bytes, {list(shape)} in {dtype} has others")
    return Stored(path, dtype, shape)


def _counts(values: Any) -> tuple[int, ...] | None:
    """Whole numbers from 0 on; None for anything else."""
    good = isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)
    return tuple(values) if good else None

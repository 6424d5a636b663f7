"""Reads and writes checkpoints as Hugging Face directories: config.json, weights in one file or in shards, and the
tokeniser's files.

A write is all or nothing: everything goes into a hidden sibling directory with its checksums (`etude.sums`), is
fsynced, and is renamed into place. A read checks everything: names, shapes, dtypes and the number of weights before a
model is built, and every byte where the directory has checksums.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from etude import progress
from etude.errors import CheckpointError
from etude.models.adapter_config import ADAPTER_CONFIG
from etude.models.config import ModelConfig
from etude.models.finite import not_finite
from etude.models.headers import EMBEDDING, HEAD, HINT_DAMAGED, INDEX, WEIGHTS, check_weights, shard_names
from etude.models.low import quantization_config
from etude.models.naming import hf_views, stays_float32, views
from etude.models.packed import packed, stored
from etude.models.parallel import share, whole_shape
from etude.models.quantised import SCALE, dequantised
from etude.models.transformer import Transformer
from etude.numerics.config import Quantise
from etude.numerics.exact.operators import Exact
from etude.numerics.formats import FORMATS
from etude.numerics.operators import Operators
from etude.numerics.parallel import ALONE, Parallel
from etude.sums import prove, write_sums

ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that travel with the weights from checkpoint to checkpoint."""

SHARD_BYTES = 5_000_000_000
"""More weights than this are written as shards."""

_DTYPES = {"bf16": (torch.bfloat16, "bfloat16"), "f32": (torch.float32, "float32")}


def save_model(
    model: Transformer,
    path: Path | str,
    *,
    dtype: str,
    quantise: Quantise = Quantise.NONE,
    assets: Path | str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint directory, complete or absent. `dtype` is "bf16" or "f32"; `assets` is a directory whose
    tokeniser files are copied, and what its config.json says of tokens. More than `shard_bytes` of weights become
    shards with an index; `quantise` stores the large matrices in that format. An existing directory is replaced.
    Raises `CheckpointError`, and `ConfigError` for widths that the format has no whole blocks of."""
    with whole_directory(path) as folder:
        write_model(model, folder, dtype=dtype, quantise=quantise, assets=assets, shard_bytes=shard_bytes)


def write_model(
    model: Transformer,
    folder: Path,
    *,
    dtype: str,
    quantise: Quantise = Quantise.NONE,
    assets: Path | str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the same files into `folder`, which the caller then syncs and renames into place."""
    write_about(model.config, folder, dtype=dtype, quantise=quantise, assets=assets)
    tensors = hf_views(model) if quantise is Quantise.NONE else packed(model, FORMATS[quantise])
    _write_weights(tensors, folder, _DTYPES[dtype][0], shard_bytes)


def write_about(
    model: ModelConfig,
    folder: Path,
    *,
    dtype: str,
    quantise: Quantise = Quantise.NONE,
    assets: Path | str | None = None,
) -> None:
    """All of such a directory but its weights."""
    name = _DTYPES[dtype][1]
    config = {**model.to_hf(), **_carried(assets), "dtype": name, "torch_dtype": name}
    if quantise is not Quantise.NONE:
        router = model.architecture.outside(".mlp.gate.").strip(".")
        config["quantization_config"] = quantization_config(quantise, router=router)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for asset in ASSETS:
        if assets is not None and (Path(assets) / asset).is_file():
            shutil.copyfile(Path(assets) / asset, folder / asset)


def _carried(assets: Path | str | None) -> dict[str, object]:
    """What a config.json says that no computation asks for and others read: the ids of special tokens."""
    if assets is None or not (Path(assets) / "config.json").is_file():
        return {}
    raw = read_json(Path(assets) / "config.json")
    return {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in raw}


def _write_weights(views: Mapping[str, torch.Tensor], folder: Path, kind: torch.dtype, shard_bytes: int) -> None:
    """One file, or shards of at most `shard_bytes` (a larger tensor has one of its own) and their index."""
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
        save_tensors({name: views[name].to(kinds[name]) for name in names}, folder / file)
    if len(shards) > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_index(where, sum(sizes.values()), folder)


def write_index(where: Mapping[str, str], num_bytes: int, folder: Path) -> None:
    """Which shard has which tensor."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(where.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file, with the mode that the umask says. Views that share memory are written as separate
    tensors."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file({name: t.clone() for name, t in tensors.items()}, path, metadata={"format": "pt", **(metadata or {})})
    path.chmod(mode)  # safetensors makes a file of its own, with 0600, and renames it
    progress.tick()


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    operators: Operators | None = None,
    held: torch.dtype | None = None,
    parallel: Parallel = ALONE,
    device: torch.device | None = None,
) -> Transformer:
    """The model in a checkpoint directory, computed by `operators` (None: exact, in `dtype`), its weights in `held`
    (None: as the operators like them), on a device (None: the CPU), where they go tensor by tensor; or a rank's share
    of it. Of an adapter's directory its base, merged.

    Raises `CheckpointError` for a missing or damaged file, another architecture, weights that do not fit the config,
    weights that are NaN or infinite, and a head beside embeddings that are tied to it and others than it holds.
    """
    path, device = Path(path), device or torch.device("cpu")
    if (path / ADAPTER_CONFIG).is_file():
        from etude.models.adapter_files import load_merged  # which loads its base by this

        return load_merged(path, dtype=dtype, operators=operators, held=held, parallel=parallel).to(device)
    config = ModelConfig.from_hf(read_json(path / "config.json"))
    found = check_weights(path, config)  # before a wild config makes us allocate
    prove_weights(path)
    operators = Exact(dtype) if operators is None else operators
    with device:
        model = Transformer(config, seed=None, operators=operators, parallel=parallel)
    own, outside = views(model.to(device)), config.architecture.outside
    with opened(path, found) as tensors, torch.no_grad():
        for name, view in own.items():
            whole = tensors.whole(outside(name), whole_shape(name, view, parallel))
            view.copy_(share(name, whole, parallel))
        if model.head is None and outside(HEAD) in found:
            require_tied(path, tensors.stored(outside(HEAD)), own[EMBEDDING])
    require_finite(hf_views(model.cast(held or operators.held)), path)
    return model


def each_weight(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of a checkpoint directory's model by Hugging Face's name, sorted, one at a time, float32. Raises
    `CheckpointError`."""
    config = ModelConfig.from_hf(read_json(path / "config.json"))
    found = check_weights(path, config)
    prove_weights(path)
    with torch.device("meta"):
        named = hf_views(Transformer(config, seed=None))
    with opened(path, found) as tensors:
        for name in sorted(named):
            yield name, tensors.whole(name, tuple(named[name].shape)).float()


def prove_weights(path: Path, *, part: int = 0, parts: int = 1) -> None:
    """Compare the bytes of a checkpoint directory's config and weights with its checksums, where it has any; a second
    for one or two GB. `part` of `parts`: the others are compared elsewhere. Raises `CheckpointError`."""
    is_sharded = (path / INDEX).is_file()
    names = ["config.json", *([INDEX, *shard_names(path / INDEX)] if is_sharded else [WEIGHTS])]
    prove(path, names[part::parts], kind=CheckpointError)


def require_tied(path: Path, head: torch.Tensor, embedding: torch.Tensor) -> None:
    """Raises `CheckpointError` where a head that is stored is not the embedding that it is tied to."""
    if not torch.equal(head.to(embedding), embedding):
        raise CheckpointError(
            f"{HEAD} of {path} is not the embedding",
            "its config.json has tie_word_embeddings = true, by which the head is the embedding",
            hint="set tie_word_embeddings to false, if the head was trained apart; else delete the tensor",
        )


def require_finite(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raises `CheckpointError` where what was read is NaN or infinite in the dtype that it is held in."""
    bad = not_finite(tensors)
    if bad:
        first = next(iter(bad))
        raise CheckpointError(
            f"{first} of {path} is not finite in {str(tensors[first].dtype).removeprefix('torch.')}",
            f"{bad[first]}; {len(bad)} tensors in all",
            hint="take a checkpoint from before its training diverged, or a dtype of a wider range",
        )


class Tensors:
    """A directory's tensors by name, read one at a time."""

    def __init__(self, found: Container[str], where: Mapping[str, Any]) -> None:
        self._found, self._where = found, where

    def stored(self, name: str) -> torch.Tensor:
        """A tensor in the dtype that the file has."""
        progress.tick()
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        return tensor

    def whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor's values, whatever it is stored as."""
        tensor = stored(name, shape, self._found, self.stored)
        return dequantised(tensor, self.stored(name + SCALE)) if tensor.dtype == torch.float8_e4m3fn else tensor

    def rows(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        """Some rows of a tensor. No others are read, unless the tensor is stored in a packed format."""
        if name in self._where and name + SCALE not in self._found:
            progress.tick()
            some: torch.Tensor = self._where[name].get_slice(name)[start:stop]
            return some
        return self.whole(name, shape)[start:stop]


@contextlib.contextmanager
def opened(path: Path, found: Container[str]) -> Iterator[Tensors]:
    """A directory's tensors, of which `found` are there. Raises `CheckpointError`."""
    files = [path / name for name in (shard_names(path / INDEX) if (path / INDEX).is_file() else [WEIGHTS])]
    where: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        try:
            for file in files:
                opened = stack.enter_context(safe_open(file, "pt"))
                where |= dict.fromkeys(opened.keys(), opened)
            yield Tensors(found, where)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} is damaged", str(error), hint=HINT_DAMAGED) from None


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of one safetensors file. Raises `CheckpointError`."""
    with opened_file(path) as file:
        prove(path.parent, [path.name], kind=CheckpointError)
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict


@contextlib.contextmanager
def opened_file(path: Path) -> Iterator[Any]:
    """Open one safetensors file, to be read tensor by tensor. Raises `CheckpointError`."""
    if not path.is_file():
        raise CheckpointError(
            f"no weights at {path}", hint="a checkpoint directory holds config.json and *.safetensors"
        )
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged", str(error), hint=HINT_DAMAGED) from None


def read_json(path: Path) -> dict[str, object]:
    """A JSON object in a file. Raises `CheckpointError`."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint at {path.parent}", str(error), hint="give a checkpoint directory"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged", str(error), hint=HINT_DAMAGED) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged", "not a JSON object", hint=HINT_DAMAGED)
    return content


@contextlib.contextmanager
def whole_directory(path: Path | str) -> Iterator[Path]:
    """A hidden directory to fill, which becomes `path` when the block ends well and vanishes when it does not.

    A reader finds the old directory, none for an instant, or the new one; never a half. Raises `CheckpointError` when
    the disk refuses.
    """
    path = Path(path)
    hidden = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        hidden.mkdir(parents=True)
        yield hidden
        write_sums(hidden)
        sync(hidden)
        complete(hidden, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {path} could not be written", str(error), hint="free disk space or choose another place"
        ) from None
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def sync(folder: Path) -> None:
    """Have what is written in a directory survive the machine."""
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def complete(hidden: Path, path: Path) -> None:
    """Give a directory that is whole its name."""
    _rename(hidden, path)
    _sync(path.parent)


def _rename(hidden: Path, path: Path) -> None:
    old = hidden.with_name(hidden.name + ".old")
    if path.exists():
        path.rename(old)
    hidden.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

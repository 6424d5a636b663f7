"""Checkpoints as Hugging Face directories: config.json, model.safetensors, and the tokeniser's files beside them.

Writing is all or nothing: everything goes into a hidden sibling directory, is fsynced, and is renamed into place.
Reading believes nothing: names, shapes, dtypes and the number of weights are checked before a model is built.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from etude.errors import CheckpointError
from etude.models.config import ModelConfig
from etude.models.headers import HINT_DAMAGED, INDEX, WEIGHTS, check_weights, shard_names
from etude.models.naming import hf_views
from etude.models.transformer import Transformer
from etude.numerics.operators import Exact, Operators

ASSETS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""Files that travel with the weights from checkpoint to checkpoint."""

_DTYPES = {"bf16": (torch.bfloat16, "bfloat16"), "f32": (torch.float32, "float32")}


def save_model(model: Transformer, path: Path | str, *, dtype: str, assets: Path | str | None = None) -> None:
    """Write a checkpoint directory, complete or absent. `dtype` is "bf16" or "f32"; `assets` is a directory whose
    tokeniser files are copied. An existing directory is replaced. Raises `CheckpointError`."""
    with whole_directory(path) as folder:
        write_model(model, folder, dtype=dtype, assets=assets)


def write_model(model: Transformer, folder: Path, *, dtype: str, assets: Path | str | None = None) -> None:
    """The same into a directory that somebody else makes whole."""
    kind, name = _DTYPES[dtype]
    save_tensors({n: view.to(kind) for n, view in hf_views(model).items()}, folder / WEIGHTS)
    config = {**model.config.to_hf(), "dtype": name, "torch_dtype": name}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for asset in ASSETS:
        if assets is not None and (Path(assets) / asset).is_file():
            shutil.copyfile(Path(assets) / asset, folder / asset)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """One safetensors file. Views of shared memory are written as tensors of their own."""
    save_file({name: t.clone() for name, t in tensors.items()}, path, metadata={"format": "pt"})


def load_model(
    path: Path | str, *, dtype: torch.dtype = torch.float32, operators: Operators | None = None
) -> Transformer:
    """The model in a checkpoint directory: weights in `dtype`, computed by `operators` (None: exact, in `dtype`).

    Raises `CheckpointError` for a missing or damaged file, another architecture, and weights that do not fit the
    config.
    """
    path = Path(path)
    config = ModelConfig.from_hf(read_json(path / "config.json"))
    check_weights(path, config)  # before a wild config makes us allocate
    tensors = _read_weights(path)
    model = Transformer(config, seed=None, operators=Exact(dtype) if operators is None else operators)
    with torch.no_grad():
        for name, view in hf_views(model).items():
            view.copy_(tensors[name])
    return model.to(dtype)


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory, in one file or in shards with an index."""
    tensors: dict[str, torch.Tensor] = {}
    for file in shard_names(path / INDEX) if (path / INDEX).is_file() else [WEIGHTS]:
        tensors |= load_tensors(path / file)
    return tensors


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of one safetensors file. Raises `CheckpointError`."""
    if not path.is_file():
        raise CheckpointError(
            f"no weights at {path}", hint="a checkpoint directory holds config.json and *.safetensors"
        )
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
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
        for file in hidden.iterdir():
            _sync(file)
        _sync(hidden)
        _rename(hidden, path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {path} could not be written", str(error), hint="free disk space or choose another place"
        ) from None
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


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

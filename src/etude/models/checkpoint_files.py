"""Read and write the files of a checkpoint directory: tensors, JSON, and the directory as a whole.

A write is all or nothing: it goes into a hidden sibling directory with checksums (`etude.file_checksums`), which is
fsynced and renamed into place."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from etude import progress
from etude.errors import CheckpointError
from etude.file_checksums import verify_files, write_sums
from etude.models.headers import HINT_DAMAGED

ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that are copied with the weights from checkpoint to checkpoint."""


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file, with the permissions of the umask.

    Views that share memory are written as separate tensors. `metadata`: further metadata of the file."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file({name: t.clone() for name, t in tensors.items()}, path, metadata={"format": "pt", **(metadata or {})})
    path.chmod(mode)  # safetensors writes a new file with 0600 and renames it
    progress.tick()


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of one safetensors file, and verify its checksum if there is one.

    Raises `CheckpointError` when the file is missing or damaged."""
    with open_safetensors(path) as file:
        verify_files(path.parent, [path.name], kind=CheckpointError)
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open one safetensors file, to read it tensor by tensor inside the `with` block.

    Raises `CheckpointError` when the file is missing or damaged, also for read errors inside the block."""
    if not path.is_file():
        raise CheckpointError(f"no weights at {path}", hint="a checkpoint directory has config.json and *.safetensors")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged", str(error), hint=HINT_DAMAGED) from None


@contextlib.contextmanager
def atomic_directory(path: Path | str) -> Iterator[Path]:
    """Yield a hidden directory to fill. It becomes `path` when the block succeeds, and is deleted when it fails.

    Readers see the old directory, for an instant no directory, or the new one; never an incomplete one. Raises
    `CheckpointError` for disk errors."""
    path = Path(path)
    hidden = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        hidden.mkdir(parents=True)
        yield hidden
        write_sums(hidden)
        fsync_directory(hidden)
        rename_into_place(hidden, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {path} could not be written", str(error), hint="free disk space or choose another place"
        ) from None
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def fsync_directory(folder: Path) -> None:
    """Sync a directory and its files to disk."""
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def rename_into_place(hidden: Path, path: Path) -> None:
    """Rename the complete directory `hidden` to its final name `path`, replacing an existing directory."""
    old = hidden.with_name(hidden.name + ".old")
    if path.exists():
        path.rename(old)
    hidden.rename(path)
    shutil.rmtree(old, ignore_errors=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

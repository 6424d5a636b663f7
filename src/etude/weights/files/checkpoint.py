"""Reads and writes checkpoints: the safetensors files of a directory, as a set of tensors.

A checkpoint is one file, or shards with an index, as Hugging Face, vLLM and SGLang load them. Files are read by memory
mapping, so a checkpoint of a terabyte needs no memory. They are written under temporary names and then renamed, so a
directory has a complete checkpoint or none.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from etude.errors import CheckpointError, NoCheckpoint
from etude.file_checksums import SUMS, verify_files
from etude.weights.files.disk import store_errors, sync_folder, write_synced
from etude.weights.files.safetensors_file import Place, map_file, parse_header, read_header, write_header
from etude.weights.tensors import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 << 30
MAX_INDEX_BYTES = 1 << 30

_HINT_INDEX = "copy the directory again: index and shards are of different checkpoints, or damaged"


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: its tensors by name, and the files that they are in. From `read_checkpoint`.

    `headers`: file name -> text of its header. `places`: tensor name -> file name, and location in the file. `tensors`:
    views of the mapped files, by name. `index`: the text of the index; None if there is none.
    """

    path: Path
    headers: Mapping[str, str]
    places: Mapping[str, tuple[str, Place]]
    tensors: Mapping[str, Tensor]
    index: str | None

    def file(self, name: str) -> Path:
        """Return the path of a file, given its name in `headers`."""
        return self.path / name if self.path.is_dir() else self.path


def is_checkpoint(path: Path) -> bool:
    """Return whether a path has files that `read_checkpoint` would read. They may be damaged."""
    return path.is_file() if path.suffix == ".safetensors" else path.is_dir() and bool(_names(path))


def read_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint in a directory, or in one .safetensors file. Its tensors are views of mapped files.

    If the directory has a SHA256SUMS file, every file is verified by it. Raises `NoCheckpoint` if there is none,
    `CheckpointError` if it is damaged.
    """
    if not is_checkpoint(path):
        hint = "give a local directory with *.safetensors, or one such file"
        raise NoCheckpoint(f"no checkpoint at {path}", hint=hint)
    index: str | None = None
    files: dict[str, str] = {}
    if path.is_file():
        names = [WEIGHTS]
        verify_files(path.parent, [path.name], kind=CheckpointError)
    else:
        names = _names(path)
        if (path / INDEX).is_file():
            index, files = read_index(path / INDEX)
        verify_files(path, [*names, *([INDEX] if index is not None else [])], kind=CheckpointError)
    headers: dict[str, str] = {}
    places: dict[str, tuple[str, Place]] = {}
    tensors: dict[str, Tensor] = {}
    for name in names:
        file = path if path.is_file() else path / name
        headers[name], found = read_header(file)
        for tensor in found:
            if tensor in places:
                raise CheckpointError(
                    f"{path} has {tensor!r} twice",
                    f"in {places[tensor][0]} and in {name}",
                    hint=f"the directory has two checkpoints: keep one, or add {INDEX}",
                )
            places[tensor] = name, found[tensor]
        tensors |= map_file(file, found)
    if index is not None:
        _check_index(path, files, places)
    return Checkpoint(path, headers, places, dict(sorted(tensors.items())), index)


def layout(tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES) -> dict[str, str]:
    """Distribute tensors over files of at most `shard_bytes` each; a larger tensor gets a file of its own.

    Return file name -> text of the file's header, for `CheckpointWriter`.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name in sorted(tensors):
        if shards[-1] and size + tensors[name].num_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name]
        size += tensors[name].num_bytes
    names = (
        [WEIGHTS]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    return {
        name: write_header({key: tensor.spec for key, tensor in shard.items()}, {"format": "pt"})
        for name, shard in zip(names, shards, strict=True)
    }


def index_of(headers: Mapping[str, str]) -> str | None:
    """Return the text of the index for files with these headers (file name -> text); None for a single file."""
    if len(headers) < 2:
        return None
    found = {file: parse_header(text) for file, text in headers.items()}
    total = sum(place.stop - place.start for places in found.values() for place in places.values())
    weight_map = {name: file for file, places in found.items() for name in places}
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"
    )


def copy_other_files(source: Path, target: Path) -> list[str]:
    """Copy the files that are not weights (config, tokeniser, templates) to another directory. Return their names."""
    copied = []
    for file in sorted(source.iterdir()):
        weights = file.suffix in (".safetensors", ".tmp") or file.name in (INDEX, SUMS)
        if file.is_file() and not weights and not file.name.startswith("."):
            shutil.copyfile(file, target / file.name)
            copied.append(file.name)
    return copied


class CheckpointWriter:
    """Writes the files of a checkpoint to `folder`, tensor by tensor in any order. A context manager.

    At the end of the block, the files are synced to disk and renamed into place together. An error in the block leaves
    the old files.

    `headers`: file name -> header text (`layout`). `index`: the text of the index, if there is one. Raises
    `CheckpointError` for a tensor that is in no header or has another spec, and for a tensor that was not written;
    `StoreError` if the disk refuses a write.
    """

    def __init__(self, folder: Path, headers: Mapping[str, str], index: str | None = None) -> None:
        self._folder, self._index = folder, index
        self._headers = dict(headers)
        self._places = {
            name: (file, place) for file, text in headers.items() for name, place in parse_header(text).items()
        }
        self._left = set(self._places)
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Self:
        with store_errors(f"{self._folder} cannot be written"):
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                for name, text in self._headers.items():
                    data = text.encode()
                    beside = self._folder / f"{name}.tmp"
                    beside.unlink(missing_ok=True)  # if it is a link, its target must not be changed
                    file = self._files[name] = beside.open("xb")
                    file.write(len(data).to_bytes(8, "little") + data)
            except BaseException:
                self._abandon()
                raise
        return self

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one tensor to its file. Raises the errors that the class names."""
        file, place = self._places.get(name, (None, None))
        if file is None or place is None or place.spec != tensor.spec:
            where = f"the header has {place.dtype} {list(place.shape)}" if place else "no header has it"
            raise CheckpointError(
                f"tensor {name!r} does not fit the checkpoint's headers",
                f"it is {tensor.dtype} {list(tensor.shape)}; {where}",
                hint="make the headers from the tensors that are written: `layout`",
            )
        with store_errors(f"{self._folder} cannot be written"):
            self._files[file].seek(place.start)
            self._files[file].write(tensor.codes.data.cast("B") if tensor.codes.size else b"")
        self._left.discard(name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._abandon()
            return
        try:
            if self._left:
                raise CheckpointError(
                    f"{min(self._left)!r} was not written",
                    hint="write every tensor of the headers before the block ends",
                )
            with store_errors(f"{self._folder} cannot be written"):
                for file in self._files.values():
                    file.flush()
                    os.fsync(file.fileno())
                    file.close()
                for name in self._headers:
                    os.replace(self._folder / f"{name}.tmp", self._folder / name)
                if self._index is not None:
                    write_synced(self._folder / INDEX, self._index.encode())
                sync_folder(self._folder)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        for name, file in self._files.items():
            with suppress(OSError):  # the disk has no space for the rest of its buffer
                file.close()
            (self._folder / f"{name}.tmp").unlink(missing_ok=True)


def _names(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        return sorted(set(read_index(folder / INDEX)[1].values()))
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    return sorted(file.name for file in folder.glob("*.safetensors"))


def read_index(path: Path, *, hint: str = _HINT_INDEX) -> tuple[str, dict[str, str]]:
    """Read an index, which may only name files of its own directory. Return its text, and tensor name -> file name.

    `hint`: the hint of errors. Raises `CheckpointError`.
    """
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        text = path.read_text("utf-8")
        files: dict[str, str] = json.loads(text)["weight_map"]
        plain = all(isinstance(file, str) and Path(file).name == file for file in files.values())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read", str(error.strerror), hint=hint) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON", str(error), hint=hint) from None
    except (KeyError, TypeError, AttributeError):
        facts = 'it has no "weight_map" from tensor names to file names'
        raise CheckpointError(f"{path} names no shards", facts, hint=hint) from None
    if not plain:
        raise CheckpointError(f"{path} names no shards", "a value of its weight_map is not a file name", hint=hint)
    return text, files


def _check_index(path: Path, weight_map: Mapping[str, str], places: Mapping[str, tuple[str, Place]]) -> None:
    for name, file in weight_map.items():
        found = places[name][0] if name in places else "no file"
        if found != file:
            raise CheckpointError(f"{path / INDEX} lists {name!r} in {file}", f"it is in {found}", hint=_HINT_INDEX)

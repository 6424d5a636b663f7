"""Deltas between two checkpoints on disk, streamed: neither the checkpoints nor the delta need to fit in memory.

The note of the delta file stores the layout of the target's files, so the weight files that `apply_delta` writes are
equal to the target's, byte for byte. `docs/formats/delta_file.md` describes the note.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from etude.errors import CheckpointError, EtudeError, InputError, StoreError, WeightsError
from etude.weights.delta import deltas
from etude.weights.delta.choices import Mode
from etude.weights.delta.delta_file import MAGIC, DeltaFile, damaged, read
from etude.weights.files.checkpoint import (
    INDEX,
    WEIGHTS,
    Checkpoint,
    CheckpointWriter,
    copy_other_files,
    read_checkpoint,
)
from etude.weights.files.disk import check_file, check_output, store_errors, sync_folder
from etude.weights.files.safetensors_file import Place, parse_header


@dataclass(frozen=True)
class Applied:
    """The result of applying a delta file.

    `num_tensors`, `target_bytes`: number and size of the target's tensors. `num_changed`: how many of them the delta
    has data of. `copied`: names of copied files that are not weights.
    """

    num_tensors: int
    num_changed: int
    target_bytes: int
    copied: tuple[str, ...]


def encode_delta(a: Path, b: Path, out: Path, mode: Mode = "best") -> int:
    """Write the delta from checkpoint `a` to checkpoint `b` to the file `out`. Return its size in bytes.

    `mode`: "best", or "fast" if time matters more than size. Raises `InputError` if `out` is part of a checkpoint or an
    existing file other than a delta file, `CheckpointError`, `StoreError`.
    """
    check_file(out, (a, b), MAGIC, "delta file")
    old, new = read_checkpoint(a), read_checkpoint(b)
    beside = out.with_name(out.name + ".tmp")
    with store_errors(f"{out} cannot be written"):
        try:
            with beside.open("wb") as file:
                for part in deltas.parts(old.tensors, new.tensors, mode=mode, note=_write_note(old, new)):
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
                num_bytes = file.tell()
            os.replace(beside, out)
            sync_folder(out.parent)
        finally:
            beside.unlink(missing_ok=True)
    return num_bytes


def apply_delta(a: Path, delta: Path, out: Path) -> Applied:
    """Apply a delta file to checkpoint `a`, and write the new checkpoint to `out`, which must not exist.

    The files of `a` that are not weights are copied. `out` is complete and synced, or not there. Raises `WeightsError`
    for another base or a damaged delta, `InputError`, `CheckpointError`, `StoreError`.
    """
    if out.exists():
        raise InputError(f"{out} exists", hint="name a directory that does not exist yet")
    check_output(out, (a, delta))
    base = read_checkpoint(a)
    with open_delta(delta) as file:
        deltas.fit_base(file, base.tensors)
        headers, index = _read_note(file, base)
        if out.suffix == ".safetensors" and [*headers] != [WEIGHTS]:
            raise CheckpointError(
                f"the new checkpoint has {len(headers)} files", hint=f"name a directory, not {out.name}"
            )
        _check_free_space(file, out.parent)
        held = deltas.check_base(file, base.tensors)
        beside = out.with_name(out.name + ".tmp")
        with store_errors(f"{out} cannot be written"):
            shutil.rmtree(beside, ignore_errors=True)  # left by a killed process
            try:
                with CheckpointWriter(beside, headers, index) as writer:
                    for entry in file.entries:
                        if entry.new and not entry.coded:
                            writer.put(entry.name, held[entry.name])
                    for made in deltas.decode_tensors(file, held):
                        for name, tensor in made.items():
                            writer.put(name, tensor)
                copied = copy_other_files(a, beside) if a.is_dir() else []
                if out.suffix == ".safetensors":
                    os.replace(beside / WEIGHTS, out)
                else:
                    os.rename(beside, out)
                sync_folder(out.parent)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
        num_coded = sum(entry.coded for entry in file.entries)
        return Applied(
            sum(entry.new is not None for entry in file.entries), num_coded, file.target_bytes, tuple(copied)
        )


def verify_delta(delta: Path, a: Path) -> Applied:
    """Check that a delta file can be applied to checkpoint `a`, without writing anything.

    The delta is decoded, and the checksums of base and target are compared. Raises the errors of `apply_delta`.
    """
    base = read_checkpoint(a)
    with open_delta(delta) as file:
        deltas.fit_base(file, base.tensors)
        _read_note(file, base)
        held = deltas.check_base(file, base.tensors)
        num_coded = sum(len(made) for made in deltas.decode_tensors(file, held))
        return Applied(sum(entry.new is not None for entry in file.entries), num_coded, file.target_bytes, ())


@contextmanager
def open_delta(path: Path) -> Iterator[DeltaFile]:
    """Map and parse a delta file; a context manager that yields it.

    Raises `InputError` if the file cannot be read, `WeightsError` if it is damaged.
    """
    hint = "name a file that `etude weights encode` wrote"
    try:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except OSError as error:
        raise InputError(f"{path} cannot be read", str(error.strerror), hint=hint) from None
    except ValueError:
        raise WeightsError(f"{path} is not a delta file", "it is empty", hint=hint) from None
    try:
        found = read(memoryview(memory))
    except EtudeError as error:
        raise WeightsError(f"{path}: {error.what}", error.facts, hint=error.hint) from None
    yield found


def _check_free_space(file: DeltaFile, folder: Path) -> None:
    with store_errors(f"{folder} cannot be written"):
        free = shutil.disk_usage(folder).free
    if file.target_bytes > free:
        raise StoreError(
            f"the delta's target needs {file.target_bytes} bytes",
            f"{free} are free",
            hint="free disk space and try again",
        )


def _write_note(old: Checkpoint, new: Checkpoint) -> bytes:
    before = {**old.headers, INDEX: old.index}
    after = {**new.headers, **({INDEX: new.index} if new.index is not None else {})}
    files = {name: None if before.get(name) == text else text for name, text in after.items()}
    return json.dumps({"files": files}, ensure_ascii=False, separators=(",", ":")).encode()


def _read_note(file: DeltaFile, base: Checkpoint) -> tuple[dict[str, str], str | None]:
    try:
        files = json.loads(file.note)["files"]
        texts = {name: base.index if name == INDEX and text is None else text for name, text in files.items()}
        index = texts.pop(INDEX, None)
        for name in texts:
            if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
                raise ValueError(f"{name!r} is no file name")
        if not all(text is None or isinstance(text, str) for text in (index, *texts.values())):
            raise ValueError("a header or an index is no text")
        "".join((*texts, *(text for text in (index, *texts.values()) if text))).encode()  # raises for lone surrogates
        shared = [name for name, text in texts.items() if text is None]
        absent = next((name for name in shared if name not in base.headers), None)
        if absent is not None:
            raise deltas.wrong_base(f"its tensors are not in a file {absent}", "its files are laid out otherwise")
        headers = {name: base.headers[name] if text is None else text for name, text in texts.items()}
        places: dict[str, Place] = {}
        for text in headers.values():
            places |= parse_header(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(f"its note lays out no files: {error!r}") from None
    specs = {entry.name: entry.new for entry in file.entries if entry.new}
    if {name: place.spec for name, place in places.items()} != specs:
        if shared:
            raise deltas.wrong_base(f"other tensors are in its {shared[0]}", "its files are laid out otherwise")
        raise damaged("its note lays out other tensors than it makes")
    return headers, index

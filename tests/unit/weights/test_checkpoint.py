"""Checkpoints are read as they are on disk, and written so that safetensors' own library reads them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from etude.errors import CheckpointError, StoreError
from etude.weights import Tensor
from etude.weights.files.checkpoint import (
    INDEX,
    WEIGHTS,
    CheckpointWriter,
    copy_other_files,
    index_of,
    is_checkpoint,
    layout,
    read_checkpoint,
)
from etude.weights.files.safetensors_file import _BITS, parse_header, read_header
from etude.weights.tensors import DTYPES, same_bits

TORCH = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "f8_e4m3",
    torch.float8_e5m2: "f8_e5m2",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}


def write(folder: Path, tensors: dict[str, Tensor], shard_bytes: int = 1 << 30) -> Path:
    headers = layout(tensors, shard_bytes)
    with CheckpointWriter(folder, headers, index_of(headers)) as writer:
        for name, tensor in tensors.items():
            writer.put(name, tensor)
    return folder


def write_some(folder: Path, tensors: dict[str, Tensor], puts: dict[str, Tensor]) -> None:
    with CheckpointWriter(folder, layout(tensors)) as writer:
        for name, tensor in puts.items():
            writer.put(name, tensor)


def header_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_every_dtype_that_torch_saves_is_read_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    value = (torch.arange(-6, 6).float() / 3).to(dtype).view(3, 4)
    save_file({"w": value, "empty": value[:0]}, tmp_path / WEIGHTS)
    found = read_checkpoint(tmp_path).tensors
    assert found["w"].codes.tobytes() == value.contiguous().view(torch.uint8).numpy().tobytes()
    if TORCH[dtype] in DTYPES:
        assert found["w"].spec.dtype == TORCH[dtype]
        assert (found["w"].shape, found["empty"].shape) == ((3, 4), (0, 4))


@pytest.mark.parametrize("dtype", _BITS)
def test_every_dtype_of_the_format_is_read_as_what_it_is_or_as_bytes(tmp_path: Path, dtype: str) -> None:
    data = bytes(range(48))
    shape = [2, 48 * 8 // _BITS[dtype] // 2]
    header_file(tmp_path / WEIGHTS, {"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, 48]}}, data)
    tensor = read_checkpoint(tmp_path).tensors["w"]
    assert tensor.codes.tobytes() == data


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_has_the_tensors_that_were_put(tmp_path: Path, dtype: str) -> None:
    codes = np.frombuffer(bytes(range(64)), DTYPES[dtype].codes).copy()
    tensors = {"w": Tensor(dtype, (2, codes.size // 2), codes), "odd": Tensor("u8", (3,), np.arange(3, dtype=np.uint8))}
    found = read_checkpoint(write(tmp_path, tensors)).tensors
    assert all(same_bits(found[name], tensors[name]) for name in tensors)
    assert found["w"].codes.flags.aligned


def test_safetensors_own_library_reads_what_is_written(tmp_path: Path) -> None:
    codes = np.arange(6, dtype=np.uint16) + np.uint16(0x3F80)
    write(tmp_path, {"ü": Tensor("bf16", (2, 3), codes), "a": Tensor("f32", (), np.zeros(1, np.uint32))})
    loaded = load_file(tmp_path / WEIGHTS)
    assert loaded["ü"].dtype == torch.bfloat16
    assert loaded["ü"].view(torch.int16).flatten().tolist() == codes.tolist()
    assert loaded["a"].shape == ()


def test_shards_are_one_set_and_the_index_says_which_is_where(tmp_path: Path) -> None:
    tensors = {f"w{i}": Tensor("u8", (100,), np.full(100, i, np.uint8)) for i in range(7)}
    found = read_checkpoint(write(tmp_path, tensors, shard_bytes=250))
    assert [*found.headers] == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert all(same_bits(found.tensors[name], tensors[name]) for name in tensors)
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == 700
    (tmp_path / "other.safetensors").write_bytes(b"not named by the index")
    assert read_checkpoint(tmp_path).tensors.keys() == tensors.keys()


def test_an_index_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    tensors = {f"w{i}": Tensor("u8", (100,), np.full(100, i, np.uint8)) for i in range(3)}
    write(tmp_path, tensors, shard_bytes=150)
    index = json.loads((tmp_path / INDEX).read_text())
    for bad in ({**index["weight_map"], "lost": "model-00001-of-00003.safetensors"}, {"w0": "../x"}, {"w0": 3}, [], 7):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": bad}))
        with pytest.raises(CheckpointError):
            read_checkpoint(tmp_path)


def test_files_without_an_index_are_one_set_but_for_names_twice(tmp_path: Path) -> None:
    one = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    header_file(tmp_path / "a.safetensors", {"x": one}, b"x")
    header_file(tmp_path / "b.safetensors", {"y": one}, b"y")
    assert [*read_checkpoint(tmp_path).tensors] == ["x", "y"]
    header_file(tmp_path / "c.safetensors", {"y": one}, b"y")
    with pytest.raises(CheckpointError, match="has 'y' twice"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"", b"", "its header would have 0"),
        (b"[]", b"", "is no object"),
        (b'{"a":', b"", "Expecting"),
        (b'{"\xff":1}', b"", "decode"),
        (b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{}}', b"x", "a name twice"),
        ({"w": 3}, b"", "is no tensor"),
        ({"w": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"x", "no dtype, shape and offsets"),
        ({"w": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"x", "no dtype, shape and offsets"),
        ({"w": {"dtype": "U9", "shape": [1], "data_offsets": [0, 1]}}, b"x", "'U9', which the format does not have"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 3]}}, b"xyz", "has 3 bytes"),
        ({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, b"xyz", "its header describes"),
        ({"w": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}, b"xyz", "the data before it ends"),
        ({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"xyz", "its header describes"),
        ({"w": {"dtype": "U8", "shape": [1] * 9, "data_offsets": [0, 1]}}, b"x", "is not allowed"),
        ({"w": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}}, b"x", "no dtype, shape"),
        ({"w": {"dtype": "U8", "shape": [0, 1 << 70], "data_offsets": [0, 0]}}, b"", "no dtype, shape"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(tmp_path: Path, header, data, says) -> None:
    header_file(tmp_path / WEIGHTS, header, data)
    with pytest.raises(CheckpointError) as refused:
        read_checkpoint(tmp_path)
    assert says in str(refused.value)
    assert "hint: copy the file again" in str(refused.value)


@given(st.binary(max_size=120))
def test_any_header_is_refused_or_describes_a_file_without_gaps(data: bytes) -> None:
    template = b'{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    for text in (data, template[: len(data)] + data, data + template):
        try:
            places = parse_header(text.decode("utf-8"))
        except (ValueError, RecursionError):
            continue
        assert all(place.start <= place.stop for place in places.values())


def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / "none.safetensors"):
        assert not is_checkpoint(path)
        with pytest.raises(CheckpointError, match="no checkpoint at"):
            read_checkpoint(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "none")


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    old = {"w": Tensor("u8", (2,), np.array([1, 2], np.uint8))}
    new = {"w": Tensor("u8", (2,), np.array([3, 4], np.uint8))}
    write(tmp_path, old)
    held = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for puts, says in (({}, "'w' was not written"), ({"x": new["w"]}, "'x' does not fit")):
        with pytest.raises(CheckpointError, match=says):
            write_some(tmp_path, new, puts)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == held


def test_a_folder_that_cannot_be_made_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(StoreError, match="cannot be written"),
        CheckpointWriter(tmp_path / "file" / "x", layout({"w": Tensor("u8", (0,), np.empty(0, np.uint8))})),
    ):
        pass


def test_config_and_tokeniser_are_copied_and_weights_are_not(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    write(source, {f"w{i}": Tensor("u8", (9,), np.zeros(9, np.uint8)) for i in range(2)}, shard_bytes=10)
    (source / "config.json").write_text("{}")
    (source / "tokenizer.json").write_text("[]")
    target.mkdir()
    assert copy_other_files(source, target) == ["config.json", "tokenizer.json"]
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "tokenizer.json"]

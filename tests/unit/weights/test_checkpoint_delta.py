"""Deltas between checkpoint directories: encode, apply, and compare the result byte by byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from etude.errors import InputError, StoreError, WeightsError
from etude.weights import Spec, Tensor, encode
from etude.weights.delta.checksums import checksum
from etude.weights.delta.delta_file import DIGEST_BYTES, Entry, read, write_head, write_object_head
from etude.weights.delta.measure import measure
from etude.weights.files.checkpoint import INDEX, WEIGHTS, CheckpointWriter, index_of, layout
from etude.weights.files.checkpoint_delta import apply_delta, encode_delta, verify_delta
from etude.weights.files.safetensors_file import write_header


def tensors(step: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(1)
    codes = rng.integers(0x3C00, 0x3E00, (6, 500)).astype(np.uint16)
    codes += (np.random.default_rng(step).random(codes.shape) < 0.05).astype(np.uint16) * np.uint16(step > 0)
    made = {f"layers.{i}.w": Tensor("bf16", (50, 10), row) for i, row in enumerate(codes)}
    return {**made, "ids": Tensor("u8", (7,), np.arange(7, dtype=np.uint8))}


def checkpoint(folder: Path, held: dict[str, Tensor], shard_bytes: int = 1 << 30) -> Path:
    headers = layout(held, shard_bytes)
    with CheckpointWriter(folder, headers, index_of(headers)) as writer:
        for name, tensor in held.items():
            writer.put(name, tensor)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("old_shards", "new_shards"), [(1 << 30, 1 << 30), (1 << 30, 2500), (2500, 1 << 30), (2500, 2500)]
)
def test_an_applied_delta_gives_every_byte_of_every_file_of_the_target(
    tmp_path: Path, old_shards: int, new_shards: int
) -> None:
    a, b = checkpoint(tmp_path / "a", tensors(0), old_shards), checkpoint(tmp_path / "b", tensors(1), new_shards)
    before = contents(a)
    num_bytes = encode_delta(a, b, tmp_path / "d.etd")
    assert (tmp_path / "d.etd").stat().st_size == num_bytes
    assert verify_delta(tmp_path / "d.etd", a).num_changed == 6
    applied = apply_delta(a, tmp_path / "d.etd", tmp_path / "made")
    assert (applied.num_tensors, applied.num_changed, applied.copied) == (7, 6, ("config.json",))
    assert contents(tmp_path / "made") == contents(b)
    assert contents(a) == before
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b", "d.etd", "made"}


def test_tensors_that_come_and_go_arrive_too(tmp_path: Path) -> None:
    target = tensors(1)
    del target["layers.3.w"]
    target["bias"] = Tensor("f32", (2,), np.array([1, 2], np.uint32))
    a, b = checkpoint(tmp_path / "a", tensors(0)), checkpoint(tmp_path / "b", target)
    encode_delta(a, b, tmp_path / "d")
    apply_delta(a, tmp_path / "d", tmp_path / "made")
    assert contents(tmp_path / "made") == contents(b)


def test_a_delta_of_two_single_files_is_applied(tmp_path: Path) -> None:
    a, b = (checkpoint(tmp_path / name, tensors(step)) / WEIGHTS for name, step in (("a", 0), ("b", 1)))
    encode_delta(a, b, tmp_path / "d")
    apply_delta(a, tmp_path / "d", tmp_path / "made.safetensors")
    assert (tmp_path / "made.safetensors").read_bytes() == b.read_bytes()


def test_an_unchanged_layout_costs_a_few_bytes(tmp_path: Path) -> None:
    a, b = checkpoint(tmp_path / "a", tensors(0), 2500), checkpoint(tmp_path / "b", tensors(1), 2500)
    encode_delta(a, b, tmp_path / "d")
    note = json.loads(read((tmp_path / "d").read_bytes()).note)["files"]
    assert INDEX in note
    assert set(note.values()) == {None}


def test_another_base_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    a, b = checkpoint(tmp_path / "a", tensors(0)), checkpoint(tmp_path / "b", tensors(1))
    encode_delta(a, b, tmp_path / "d")
    for work in (lambda: verify_delta(tmp_path / "d", b), lambda: apply_delta(b, tmp_path / "d", tmp_path / "made")):
        with pytest.raises(WeightsError, match="this delta is for another base"):
            work()
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b", "d"}


def test_a_target_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    a, b = checkpoint(tmp_path / "a", tensors(0)), checkpoint(tmp_path / "b", tensors(1))
    encode_delta(a, b, tmp_path / "d")
    with pytest.raises(InputError, match="exists"):
        apply_delta(a, tmp_path / "d", b)
    assert contents(b) == contents(checkpoint(tmp_path / "again", tensors(1)))


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"files": 3}',
        b'{"files": {"model.safetensors": 3}}',
        b'{"files": {"../model.safetensors": null}}',
        b'{"files": {"model.safetensors": "{}"}}',
        b'{"files": {}}',
        b'{"files": {"model.safetensors": null, "model.safetensors.index.json": 3}}',
        b'{"files": {"model.safetensors": null, "model.safetensors.index.json": "\\ud800"}}',
        b'{"files": {"mo\\u0000del.safetensors": "{}"}}',
    ],
)
def test_a_note_that_lays_out_other_files_is_refused(tmp_path: Path, note: bytes) -> None:
    a, b = checkpoint(tmp_path / "a", tensors(0)), checkpoint(tmp_path / "b", tensors(1))
    encode_delta(a, b, tmp_path / "d")
    data = (tmp_path / "d").read_bytes()
    true = read(data).note
    at = data.index(true)
    body = data[:20] + len(note).to_bytes(4, "little") + data[24:at] + note + data[at + len(true) : -DIGEST_BYTES]
    (tmp_path / "d").write_bytes(body + hashlib.sha256(body).digest())
    with pytest.raises(WeightsError, match="damaged"):
        apply_delta(a, tmp_path / "d", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_target_that_the_disk_cannot_hold_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    a = checkpoint(tmp_path / "a", tensors(0))
    huge = Spec("f64", (1 << 40,))
    note = json.dumps({"files": {WEIGHTS: write_header({"w": huge}, {})}}).encode()
    entries = [Entry("w", None, None, huge, "ab" * 16)]
    entries += [Entry(name, one.spec, checksum(one.codes), None, None) for name, one in tensors(0).items()]
    body = write_head(sorted(entries, key=lambda e: e.name), note, 1) + write_object_head(4, 1) + b"none"
    (tmp_path / "d").write_bytes(body + hashlib.sha256(body).digest())
    with pytest.raises(StoreError, match="the delta's target needs 8796093022208 bytes"):
        apply_delta(a, tmp_path / "d", tmp_path / "made")


def test_a_file_that_is_no_delta_is_refused_by_name(tmp_path: Path) -> None:
    a = checkpoint(tmp_path / "a", tensors(0))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_bytes(b"x" * 200)
    (tmp_path / "bare").write_bytes(encode({}, {}))
    for name in ("empty", "text", "bare"):
        with pytest.raises(WeightsError):
            verify_delta(tmp_path / name, a)
    with pytest.raises(InputError, match="none cannot be read"):
        verify_delta(tmp_path / "none", a)


def test_costs_add_up_and_stay_above_their_bounds() -> None:
    costs = measure(tensors(0), tensors(1))
    rows, total = costs.tensors, costs.total
    assert (costs.deltas, costs.full_tensors) == (total, None)
    assert [row.name for row in rows] == sorted(tensors(1))
    assert total.num_elements == sum(row.num_elements for row in rows) == 3007
    assert 0 < total.bound_bytes <= total.delta_bytes
    assert all(row.bound_bytes <= row.delta_bytes for row in rows if row.num_changed)
    unchanged = next(row for row in rows if row.name == "ids")
    assert (unchanged.density, unchanged.delta_bytes, unchanged.bits_per_weight) == (0, 0, 0)


def noise() -> Tensor:
    return Tensor("u8", (100,), np.random.default_rng(0).integers(0, 256, 100, np.uint8))


def test_a_tensor_without_an_old_one_costs_about_its_bytes_and_has_no_bound() -> None:
    costs = measure({}, {"w": noise()})
    (row,) = costs.tensors
    assert (row.density, row.bound_bytes, row.share_of_bound, row.bound_bits_per_weight) == (1.0, None, None, None)
    assert costs.deltas is None
    assert costs.full_tensors is not None
    assert 100 <= costs.full_tensors.delta_bytes == costs.total.delta_bytes


def test_whole_tensors_add_bytes_and_leave_the_others_share_of_the_bound_as_it_is() -> None:
    alone = measure(tensors(0), tensors(1)).total
    old = tensors(0) | {"shape": Tensor("u8", (10, 10), noise().codes), "dtype": Tensor("i8", (100,), noise().codes)}
    costs = measure(old, tensors(1) | {"new": noise(), "shape": noise(), "dtype": noise()})
    assert costs.num_whole == 3
    assert costs.deltas is not None
    assert costs.full_tensors is not None
    assert (costs.deltas.delta_bytes, costs.deltas.bound_bytes) == (alone.delta_bytes, alone.bound_bytes)
    assert costs.full_tensors.num_elements == costs.full_tensors.num_changed == 300
    assert 300 <= costs.full_tensors.delta_bytes < 340
    assert costs.total.delta_bytes == costs.deltas.delta_bytes + costs.full_tensors.delta_bytes
    assert (costs.full_tensors.share_of_bound, costs.total.share_of_bound) == (None, None)


def test_of_packed_numbers_each_is_a_weight_of_its_own() -> None:
    old = Tensor("f4_e2m1x2", (4,), np.array([0x21, 0x43, 0x65, 0x77], np.uint8))
    new = Tensor("f4_e2m1x2", (4,), np.array([0x22, 0x43, 0x65, 0x66], np.uint8))
    rows = measure({"w": old}, {"w": new}).tensors
    assert (rows[0].num_elements, rows[0].num_changed) == (8, 3)


@pytest.mark.parametrize("shards", [1 << 30, 2500])
def test_a_base_of_other_shapes_or_files_is_another_base_and_not_a_damaged_file(tmp_path: Path, shards: int) -> None:
    a, b = checkpoint(tmp_path / "a", tensors(0), shards), checkpoint(tmp_path / "b", tensors(1), shards)
    encode_delta(a, b, tmp_path / "d.etdf")
    shapes = {name: Tensor(t.dtype, t.shape[::-1], t.codes) for name, t in tensors(0).items()}
    other = checkpoint(tmp_path / "shapes", shapes)
    for use in (verify_delta, lambda delta, base: apply_delta(base, delta, tmp_path / "made")):
        with pytest.raises(WeightsError, match="this delta is for another base") as found:
            use(tmp_path / "d.etdf", other)
        assert "'layers.0.w' is bf16 [10, 50], the delta is for bf16 [50, 10]" in str(found.value)


def test_a_base_whose_files_are_laid_out_otherwise_is_named_as_such(tmp_path: Path) -> None:
    a, b = checkpoint(tmp_path / "a", tensors(0), 2500), checkpoint(tmp_path / "b", tensors(1), 2500)
    encode_delta(a, b, tmp_path / "d.etdf")
    with pytest.raises(WeightsError, match="this delta is for another base") as found:
        verify_delta(tmp_path / "d.etdf", checkpoint(tmp_path / "one", tensors(0)))
    assert "model-00001-of-00003.safetensors" in str(found.value)

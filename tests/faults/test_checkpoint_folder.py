"""A checkpoint folder whose keeper is killed anywhere holds the old version or the new one, proven, never half."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from etude.errors import InputError, StoreError, WeightsError
from etude.records.completion import Version
from etude.weights import Tensor, content_digest, tensor_digest
from etude.weights.files.checkpoint import INDEX, CheckpointWriter, index_of, layout, read_checkpoint
from etude.weights.files.folder import JOURNAL, LOCK, NEXT, STATE, CheckpointFolder
from etude.weights.files.journal import Change, Journal, read_journal, write_journal
from etude.weights.tensors import same_bits

Tensors = dict[str, Tensor]
STEPS = ["journal", "file model-00001-of-00003.safetensors", "files", "version", "end"]


def tensors(step: int, *, grown: bool = False) -> Tensors:
    rng = np.random.default_rng(1)
    made = {}
    for i in range(3):
        codes = rng.integers(0x3C00, 0x3E00, 1000).astype(np.uint16)
        codes += (np.random.default_rng(10 * step + i).random(1000) < 0.05).astype(np.uint16) * np.uint16(step > 0)
        made[f"w{i}"] = Tensor("bf16", (10, 100), codes)
    made["dense"] = Tensor("f32", (5,), np.arange(5, dtype=np.uint32) + np.uint32(step))
    if grown:
        made["new"] = Tensor("u8", (4,), np.full(4, step, np.uint8))
    return made


def version(step: int, held: Tensors) -> Version:
    return Version(step, "0a1b2c3d", content_digest({name: tensor_digest(one) for name, one in held.items()}))


def sharded(folder: Path, held: Tensors) -> Path:
    headers = layout(held, 2050)
    with CheckpointWriter(folder, headers, index_of(headers)) as writer:
        for name, tensor in held.items():
            writer.put(name, tensor)
    (folder / "config.json").write_text("{}")
    return folder


def adopt(path: Path, step: int, *, grown: bool = False) -> int:
    held = tensors(step, grown=grown)
    with CheckpointFolder(path) as folder:
        return folder.adopt(version(step, held), held)


def assert_holds(path: Path, step: int, *, grown: bool = False) -> None:
    expected = tensors(step, grown=grown)
    with CheckpointFolder(path) as folder:
        assert folder.version == version(step, expected)
        folder.verify()
    found = read_checkpoint(path).tensors
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], expected[name]) for name in expected)
    assert not (path / JOURNAL).exists()
    assert not (path / NEXT).exists()
    assert (path / "config.json").read_text() == "{}"


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_checkpoint_folder import tensors, version
from etude.weights.files.folder import CheckpointFolder

path, step, grown, at = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True", sys.argv[5]
held = tensors(step, grown=grown)
kill = lambda now: os.kill(os.getpid(), signal.SIGKILL) if now == at else None
CheckpointFolder(path).adopt(version(step, held), held, after=kill)
"""


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("at", STEPS)
def test_a_writer_killed_after_its_journal_is_complete_has_adopted_the_version(
    tmp_path: Path, at: str, grown: bool
) -> None:
    if grown and at.startswith("file "):
        at = "files"  # files that are moved are not written
    folder = sharded(tmp_path / "m", tensors(0))
    adopt(folder, 1)
    assert_holds(folder, 1)
    argv = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(folder), "2", str(grown), at]
    assert subprocess.run(argv, timeout=300).returncode == -signal.SIGKILL
    assert_holds(folder, 2, grown=grown)
    assert_holds(folder, 2, grown=grown)
    adopt(folder, 3)
    assert_holds(folder, 3)


def test_a_keeper_killed_before_its_journal_is_whole_holds_the_old_version(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", tensors(0))
    adopt(folder, 1)
    (folder / (JOURNAL + ".tmp")).write_bytes(b"half")
    (folder / NEXT).mkdir()
    (folder / NEXT / "model.safetensors.tmp").write_bytes(b"half")
    assert_holds(folder, 1)
    assert not (folder / (JOURNAL + ".tmp")).exists()


def test_every_half_written_file_is_healed_by_the_journal(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", tensors(0))
    adopt(folder, 1)
    before = {file.name: file.read_bytes() for file in folder.glob("model-*")}
    held, kept = tensors(2), {}

    def keep(step: str) -> None:
        if step == "journal":
            kept[step] = (folder / JOURNAL).read_bytes()

    with CheckpointFolder(folder) as keeper:
        keeper.adopt(version(2, held), held, after=keep)
    after = {file.name: file.read_bytes() for file in folder.glob("model-*")}
    rng = np.random.default_rng(0)
    for _ in range(20):  # any mixture of pages from before and after
        for name in before:
            mixed = np.where(rng.random(len(before[name])) < 0.5, list(before[name]), list(after[name]))
            (folder / name).write_bytes(bytes(mixed.astype(np.uint8)))
        (folder / JOURNAL).write_bytes(kept["journal"])
        assert_holds(folder, 2)


def test_a_folder_is_filled_from_nothing_and_only_what_changed_is_written_later(tmp_path: Path) -> None:
    held = tensors(0)
    with CheckpointFolder(tmp_path / "new") as folder:
        assert folder.version is None
        assert dict(folder.tensors) == {}
        assert folder.adopt(version(0, held), held) == sum(one.num_bytes for one in held.values())
        inode = (tmp_path / "new" / "model.safetensors").stat().st_ino
        written = folder.adopt(version(1, tensors(1)), tensors(1))
        assert 0 < written < 600
        assert (tmp_path / "new" / "model.safetensors").stat().st_ino == inode
        assert all(same_bits(folder.tensors[name], one) for name, one in tensors(1).items())


def test_a_layout_that_shrinks_leaves_no_old_shard_and_no_index(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", tensors(0))
    assert (folder / INDEX).exists()
    adopt(folder, 1, grown=True)
    assert sorted(file.name for file in folder.glob("*model*")) == ["model.safetensors"]
    assert_holds(folder, 1, grown=True)


def test_a_folder_has_one_keeper(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path), pytest.raises(WeightsError, match="is used by another process"):
        CheckpointFolder(tmp_path)
    CheckpointFolder(tmp_path).close()


def test_files_that_something_else_wrote_are_found_by_their_digest(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", tensors(0))
    adopt(folder, 1)
    file = folder / "model-00001-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with CheckpointFolder(folder) as keeper, pytest.raises(WeightsError, match=r"does not contain v000001-0a1b2c3d"):
        keeper.verify()


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: data[:40] + b"x" + data[41:], lambda data: b""])
def test_a_journal_that_the_disk_altered_is_not_followed(tmp_path: Path, spoil) -> None:
    folder = sharded(tmp_path / "m", tensors(0))
    good = write_journal(Journal(version(1, tensors(1)), [], ["model.safetensors"], ["config.json"]))
    (folder / JOURNAL).write_bytes(spoil(good))
    with pytest.raises(StoreError, match="is damaged"):
        CheckpointFolder(folder)
    assert (folder / "config.json").exists()


@pytest.mark.parametrize("part", ["changes", "moves", "removes"])
@pytest.mark.parametrize("name", ["../theirs", "..", ""])
def test_a_journal_with_paths_outside_the_folder_is_not_followed(tmp_path: Path, part: str, name: str) -> None:
    folder = sharded(tmp_path / "m", tensors(0))
    (folder / NEXT).mkdir()
    for place in (folder / "theirs", tmp_path / "theirs"):
        place.write_text(str(place))
    parts = {
        "changes": Journal(version(1, {}), [Change(name, 0, None, np.zeros(2, np.uint16))]),
        "moves": Journal(version(1, {}), [], [name]),
        "removes": Journal(version(1, {}), [], [], [name]),
    }
    (folder / JOURNAL).write_bytes(write_journal(parts[part]))
    with pytest.raises(StoreError, match="is damaged") as caught:
        CheckpointFolder(folder)
    assert "no file of the folder itself" in caught.value.facts
    assert all(place.read_text() == str(place) for place in (folder / "theirs", tmp_path / "theirs"))


@pytest.mark.parametrize("places", [[5], [-1], [1, 0], [1 << 40]])
def test_a_journal_that_names_places_a_file_does_not_have_is_not_followed(tmp_path: Path, places: list[int]) -> None:
    folder = sharded(tmp_path / "m", tensors(0))
    (folder / "short").write_bytes(b"12345678")
    change = Change("short", 0, np.array(places, np.int64), np.zeros(len(places), np.uint16))
    (folder / JOURNAL).write_bytes(write_journal(Journal(version(1, {}), [change])))
    with pytest.raises(StoreError, match="is damaged"):
        CheckpointFolder(folder)
    assert (folder / "short").read_bytes() == b"12345678"


def test_weights_that_are_links_are_refused_and_what_they_lead_to_stays(tmp_path: Path) -> None:
    cache = sharded(tmp_path / "cache", tensors(0))
    before = {file.name: file.read_bytes() for file in cache.iterdir()}
    (tmp_path / "m").mkdir()
    for name in before:
        (tmp_path / "m" / name).symlink_to(cache / name)
    with pytest.raises(InputError, match="is a link") as caught:
        adopt(tmp_path / "m", 1)
    assert "cp -rL" in caught.value.hint
    change = Change("model-00001-of-00003.safetensors", 0, None, np.zeros(4, np.uint16))
    (tmp_path / "m" / JOURNAL).write_bytes(write_journal(Journal(version(1, {}), [change])))
    with pytest.raises(StoreError, match="cannot be recovered"):
        CheckpointFolder(tmp_path / "m")
    assert {file.name: file.read_bytes() for file in cache.iterdir()} == before


def test_no_link_where_a_keeper_writes_is_followed(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", tensors(0))
    elsewhere = sharded(tmp_path / "elsewhere", tensors(3))
    before = {file.name: file.read_bytes() for file in elsewhere.iterdir()}
    (folder / NEXT).symlink_to(elsewhere)
    (folder / f"{STATE}.tmp").symlink_to(elsewhere / "config.json")
    (folder / f"{JOURNAL}.tmp").symlink_to(elsewhere / "config.json")
    (folder / JOURNAL).write_bytes(write_journal(Journal(version(0, tensors(0)), [], ["config.json"])))
    adopt(folder, 1)
    assert_holds(folder, 1)
    assert {file.name: file.read_bytes() for file in elsewhere.iterdir()} == before
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / LOCK).symlink_to(tmp_path / "made")
    with pytest.raises(StoreError, match="cannot be kept") as caught:
        CheckpointFolder(tmp_path / "n")
    assert "it is a link" in caught.value.hint
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"format": 1}', b'{"a": "\xff"}', b"[" * 5000])
def test_a_version_that_the_disk_altered_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / STATE).write_bytes(text)
    with pytest.raises(StoreError, match="is damaged"):
        CheckpointFolder(tmp_path)


@pytest.mark.parametrize("grown", [False, True])
def test_a_disk_that_takes_no_more_is_named_and_the_old_version_stays(tmp_path: Path, grown: bool) -> None:
    folder = sharded(tmp_path / "m", tensors(0))
    adopt(folder, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(StoreError, match="cannot be written"):
            adopt(folder, 2, grown=grown)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_holds(folder, 1)


def test_a_journal_comes_back_as_it_was_written() -> None:
    rng = np.random.default_rng(0)
    for itemsize in (1, 2, 4, 8):
        codes = rng.integers(0, 200, 7).astype(f"u{itemsize}")
        changes = [Change("a", 9, None, codes), Change("b", 0, np.arange(7, dtype=np.int64), codes)]
        changes.append(Change("c", 1, np.empty(0, np.int64), codes[:0]))
        found = read_journal(write_journal(Journal(version(0, {}), changes, ["x"], ["y"])))
        assert (found.version, found.moves, found.removes) == (version(0, {}), ["x"], ["y"])
        for a, b in zip(found.changes, changes, strict=True):
            assert (a.file, a.start, a.codes.dtype, a.codes.tolist()) == (
                b.file,
                b.start,
                codes.dtype,
                b.codes.tolist(),
            )
            assert (a.places is None) == (b.places is None)
            assert a.places is None or a.places.tolist() == b.places.tolist()

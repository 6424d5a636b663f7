"""Images: one version's tensors in sealed shared memory."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from etude.errors import WeightsError
from etude.records import Version
from etude.weights import Tensor, Update
from etude.weights.follow import image
from etude.weights.follow.image import Image, read_image, write_image
from etude.weights.tensors import same_bits

VERSION = Version(step=3, incarnation="0a1b2c3d", digest="0" * 64)
TENSORS = {
    "empty": Tensor("f32", (0, 4), np.empty(0, np.uint32)),
    "large": Tensor("bf16", (50, 20), np.arange(1000, dtype=np.uint16)),
    "one": Tensor("f32", (), np.array([7], np.uint32)),
    "small": Tensor("u8", (5,), np.arange(5, dtype=np.uint8)),
}
UPDATE = Update(
    version=VERSION,
    changed={"large": (np.array([3, 999]), TENSORS["large"].codes[[3, 999]])},
    replaced={"one": TENSORS["one"]},
    removed=("gone",),
    fetch_s=0.25,
    fetched_bytes=77,
    healed=("a delta was torn",),
)


def through(update: Update) -> Image:
    fd, table_at = write_image(update, TENSORS)
    try:
        return read_image(fd, table_at)
    finally:
        os.close(fd)


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_an_image_gives_back_every_tensor_and_what_the_update_said(dtype: type[np.integer]) -> None:
    places, codes = UPDATE.changed["large"]
    made = through(replace(UPDATE, changed={"large": (places.astype(dtype), codes)}))
    assert made.tensors.keys() == TENSORS.keys()
    assert all(same_bits(made.tensors[name], tensor) for name, tensor in TENSORS.items())
    places, codes = made.update.changed["large"]
    assert (places.tolist(), codes.tolist()) == ([3, 999], [3, 999])
    assert made.update.replaced.keys() == {"one"}
    assert replace(made.update, changed={}, replaced={}) == replace(UPDATE, changed={}, replaced={})


def test_a_list_of_changes_longer_than_its_tensor_is_not_kept() -> None:
    every = np.arange(0, 1000, 2)
    made = through(replace(UPDATE, changed={"large": (every, TENSORS["large"].codes[every])}, replaced={}))
    assert not made.update.changed
    assert made.update.replaced.keys() == {"large"}


def test_nobody_can_change_an_image() -> None:
    fd, table_at = write_image(UPDATE, TENSORS)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    made = read_image(fd, table_at)
    os.close(fd)
    assert not any(tensor.codes.flags.writeable for tensor in made.tensors.values())
    with pytest.raises(ValueError, match="WRITEABLE"):
        made.tensors["large"].codes.base.flags.writeable = True


@pytest.mark.parametrize("advice", [image._POPULATE_READ, 9999], ids=["this kernel", "a kernel that does not populate"])
def test_every_page_of_an_image_is_mapped_before_the_pause(monkeypatch, advice) -> None:
    monkeypatch.setattr(image, "_POPULATE_READ", advice)
    codes = np.arange(1 << 20, dtype=np.uint16)
    large = {"large": Tensor("bf16", codes.shape, codes)}
    fd, table_at = write_image(replace(UPDATE, changed={}, replaced=large), large)
    read = read_image(fd, table_at)
    os.close(fd)
    _, _, mapping = Path("/proc/self/smaps").read_text().partition("memfd:etude-weights")
    fields = dict(line.split(":") for line in mapping.splitlines()[1:20])
    assert int(fields["Rss"].split()[0]) * 1024 >= codes.nbytes
    assert same_bits(read.tensors["large"], large["large"])


def test_memory_that_is_not_sealed_is_refused() -> None:
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(100))
    with pytest.raises(WeightsError, match="not sealed"):
        read_image(fd, 0)
    os.close(fd)


def test_an_image_that_fails_half_way_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "no space")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="no space"):
        write_image(UPDATE, TENSORS)
    assert len(os.listdir("/proc/self/fd")) == before

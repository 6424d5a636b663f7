"""Untrusted tar archives: those of tar and Python are read, all others are refused with an error."""

from __future__ import annotations

import contextlib
import gzip
import io
import tarfile

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.environments.images.archives import special, tar_of

from etude.environments.images.decompression import decompressed
from etude.environments.images.limits import MIB, BadSource, ImageLimits
from etude.environments.images.tar import members


def read_all(data: bytes, limits: ImageLimits | None = None) -> list[tuple[str, str, bytes, str]]:
    read = decompressed(io.BytesIO(data), limits or ImageLimits())
    return [(m.path.rstrip("/"), m.kind, b"".join(content), m.target) for m, content in members(read)]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_tarfile_writes_is_read_in_every_form(form):
    out = io.BytesIO()
    names = ["a", "d" * 90 + "/" + "e" * 60] + ([] if form == tarfile.USTAR_FORMAT else ["ü" * 140, "f" * 300])
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size, info.uid = 700, 2_000_000
            tar.addfile(info, io.BytesIO(b"x" * 700))
    assert read_all(out.getvalue()) == [(name, "f", b"x" * 700, "") for name in names]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_long_name_that_is_cut_at_a_slash_is_still_a_files(form):
    out, name = io.BytesIO(), "d" * 99 + "/file"
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        info = tarfile.TarInfo(name)
        info.size = 700
        tar.addfile(info, io.BytesIO(b"x" * 700))
    assert read_all(out.getvalue()) == [(name, "f", b"x" * 700, "")]


def test_links_folders_and_second_names_are_told_apart():
    data = tar_of([("d", None), ("d/f", b"1"), ("l", "d/f"), special("h", tarfile.LNKTYPE, "d/f")])
    assert read_all(data) == [
        ("d", "d", b"", ""),
        ("d/f", "f", b"1", ""),
        ("l", "l", b"", "d/f"),
        ("h", "h", b"", "d/f"),
    ]


@pytest.mark.parametrize(
    "pack", [gzip.compress, zstandard.compress, lambda d: gzip.compress(d[:700]) + gzip.compress(d[700:])]
)
def test_packed_archives_are_read_as_plain_ones_are(pack):
    data = tar_of([("f", b"12" * 1000)])
    assert read_all(pack(data)) == read_all(data)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_bomb_ends_at_the_ratio_and_at_the_total(pack):
    bomb = pack(tar_of([("zeros", bytes(80 * MIB))]))
    with pytest.raises(BadSource, match="grows more than"):
        read_all(bomb)
    with pytest.raises(BadSource, match="decompresses to more than"):
        read_all(bomb, ImageLimits(total_bytes=10 * MIB, num_files=10, ratio=1 << 20))


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_packed_archive_that_is_cut_off_is_an_error(pack):
    whole = pack(tar_of([("f", bytes(range(256)) * 100)]))
    for cut in (len(whole) // 2, len(whole) - 3):
        with pytest.raises(BadSource):
            read_all(whole[:cut])


def header(**fields: bytes) -> bytes:
    block = bytearray(tar_of([("f", b"")])[:512])
    for name, value in fields.items():
        at = {"size": 124, "kind": 156, "mode": 100}[name]
        block[at : at + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    "data",
    [
        header(size=b"\x80" + b"\xff" * 11),
        header(size=b"7" * 12),
        header(size=b"99999999999\0"),
        header(kind=b"L", size=b"77777777777\0"),
        header(kind=b"x", size=b"00000000010\0") + b"9 path=a".ljust(512, b"\0"),
        header(kind=b"S"),
        header(kind=b"V"),
        header(mode=b"\xff" * 8),
        b"\1" * 512,
        b"x" * 100,
        (header(kind=b"x", size=b"00000000012\0") + b"10 path=a\n".ljust(512, b"\0")) * 20 + header(),
    ],
)
def test_a_header_that_lies_is_refused(data):
    with pytest.raises(BadSource):
        read_all(data)


@settings(max_examples=150)
@given(data=st.data())
def test_mutated_archives_are_read_or_refused_and_nothing_else(data):
    pax = special("x", tarfile.REGTYPE)
    pax.pax_headers = {"path": "ü" * 120, "comment": "c"}
    whole = bytearray(tar_of([("d", None), pax, ("d/" + "n" * 120, b"content"), ("l", "t" * 120)]))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    packed = data.draw(st.sampled_from([bytes, gzip.compress, zstandard.compress]))(bytes(whole[:cut]))
    try:
        found = read_all(packed)
    except BadSource:
        return
    assert sum(len(content) for _, _, content, _ in found) <= len(whole)


@settings(max_examples=150)
@given(st.binary(max_size=2000), st.sampled_from([b"", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ\0"]))
def test_any_bytes_are_read_or_refused(data, magic):
    with contextlib.suppress(BadSource):
        read_all(magic + data)

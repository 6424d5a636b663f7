"""What others do with two versions of weights, for `benchmarks.weights.delta`: lossless, each with several settings.

These are the one that its users take and those with its best ratio and its best speed.

- XOR of the versions and zstd; the same with each byte of a code in a plane of its own; the same by blosc2, which
  makes planes of bytes or of bits in native code;
- what open trainers send: gaps between the places that change, the new codes there, zstd over both;
- ZipNN's delta (arXiv 2411.05239): its coder is Huffman's alone, with a bit a byte at least, so that its ratio cannot
  be above 8 (of two bytes a code, 8 each);
- programs that know two files: `zstd --patch-from`, xdelta3, bsdiff.

All of them run on one thread. What is not in Python's or Debian's usual places is said to be missing:
`python -m benchmarks.weights.delta_peers` installs the packages into `build/delta_peers`, and names the programs that
are not there. Nothing of it is a dependency of etude.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from etude.weights import Tensor

FOLDER = Path(__file__).parents[2] / "build" / "delta_peers"
PACKAGES = (
    *("zipnn==0.5.4", "bsdiff4==1.3.2", "blosc2==4.14.1"),
    *("ndindex==1.10.1", "numexpr==2.14.2", "threadpoolctl==3.8.0"),  # blosc2's own
)
"""Installed without their dependencies, which etude's own environment has."""
PROGRAMS = {"zstd": "zstd", "xdelta3": "xdelta3"}
"""Programs, and Debian's packages that have them."""
LONG_WINDOW = 27  # the largest that zstd decodes without being asked to

Codes = npt.NDArray[Any]
Side = list[Codes]
"""One version: for each width of codes, all of them one after another."""
Encode = Callable[[Side, Side], list[bytes]]
Decode = Callable[[list[bytes], Side], Side]


@dataclass(frozen=True)
class Peer:
    """`encode(old, new)`, and `decode(coded, old)` that gives `new`. Bytes are those of all parts together.

    `write(coded, live)`: the same in place, where live memory holds the old version. `why_not`: why it is not here,
    empty where it is. `usual`: the setting that its users take, measured at every pair, the others at one. `slow`: so
    slow that its speed is measured once, on the pair as it is.
    """

    name: str
    encode: Encode
    decode: Decode
    why_not: str = ""
    write: Callable[[list[bytes], Side], None] | None = None
    usual: bool = False
    slow: bool = False


def side(tensors: Sequence[Tensor]) -> Side:
    """Tensors as peers take them."""
    widths = sorted({tensor.codes.itemsize for tensor in tensors})
    return [np.concatenate([t.codes for t in tensors if t.codes.itemsize == width]) for width in widths]


# zstd over differences


@dataclass(frozen=True)
class Zstd:
    """zstd at a level, with the level's window or a long one."""

    level: int
    long: bool = False

    @property
    def name(self) -> str:
        return f"zstd-{self.level}{', long window' if self.long else ''}"

    def zip(self, data: bytes | memoryview) -> bytes:
        if not self.long:
            return zstandard.ZstdCompressor(level=self.level).compress(data)
        wide = zstandard.ZstdCompressionParameters.from_level(self.level, window_log=LONG_WINDOW, enable_ldm=True)
        return zstandard.ZstdCompressor(compression_params=wide).compress(data)


def _unzip(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def _xor(old: Side, new: Side) -> list[Codes]:
    return [a ^ b for a, b in zip(old, new, strict=True)]


def _zip_xor(zstd: Zstd, old: Side, new: Side) -> list[bytes]:
    return [zstd.zip(differ.data.cast("B")) for differ in _xor(old, new)]


def _undo_xor(coded: list[bytes], old: Side) -> Side:
    return [np.frombuffer(_unzip(data), a.dtype) ^ a for data, a in zip(coded, old, strict=True)]


def _write_xor(coded: list[bytes], live: Side) -> None:
    for data, a in zip(coded, live, strict=True):
        a ^= np.frombuffer(_unzip(data), a.dtype)


def _zip_planes(zstd: Zstd, old: Side, new: Side) -> list[bytes]:
    parts = [differ.view(np.uint8).reshape(-1, differ.itemsize) for differ in _xor(old, new)]
    return [zstd.zip(np.ascontiguousarray(part.T).data.cast("B")) for part in parts]


def _undo_planes(coded: list[bytes], old: Side) -> Side:
    made = []
    for data, a in zip(coded, old, strict=True):
        planes = np.frombuffer(_unzip(data), np.uint8).reshape(a.itemsize, -1)
        made.append(np.ascontiguousarray(planes.T).view(a.dtype).reshape(-1) ^ a)
    return made


# gaps and new codes


def _zip_gaps(zstd: Zstd, old: Side, new: Side) -> list[bytes]:
    coded = []
    for a, b in zip(old, new, strict=True):
        where = np.flatnonzero(a != b)
        gaps = np.diff(where, prepend=0)
        narrow = gaps.astype(np.uint16 if gaps.max(initial=0) < 1 << 16 else np.uint32)
        data = zstd.zip(narrow.tobytes() + b[where].tobytes())
        coded.append(bytes((narrow.itemsize,)) + where.size.to_bytes(8, "little") + data)
    return coded


def _undo_gaps(coded: list[bytes], old: Side) -> Side:
    made = [a.copy() for a in old]
    _write_gaps(coded, made)
    return made


def _write_gaps(coded: list[bytes], live: Side) -> None:
    for data, a in zip(coded, live, strict=True):
        count, raw = int.from_bytes(data[1:9], "little"), _unzip(data[9:])
        gaps = np.frombuffer(raw, f"u{data[0]}", count)
        a[np.cumsum(gaps, dtype=np.int64)] = np.frombuffer(raw, a.dtype, count, gaps.nbytes)


# blosc2


@dataclass(frozen=True)
class Blosc:
    """blosc2: its filter, codec, level, and the bytes of a block, in which planes are made (0: as it chooses)."""

    filter: str
    codec: str
    level: int
    block_bytes: int = 0

    @property
    def name(self) -> str:
        blocks = f", blocks of {self.block_bytes >> 20} MiB" if self.block_bytes else ""
        return f"XOR + blosc2 {self.filter.lower()}, {self.codec.lower()}-{self.level}{blocks}"

    def encode(self, old: Side, new: Side) -> list[bytes]:
        import blosc2  # type: ignore[import-not-found, import-untyped, unused-ignore]

        return [
            blosc2.compress2(
                differ,
                codec=blosc2.Codec[self.codec],
                clevel=self.level,
                filters=[blosc2.Filter[self.filter]],
                typesize=differ.itemsize,
                blocksize=self.block_bytes,
                nthreads=1,
            )
            for differ in _xor(old, new)
        ]


def _undo_blosc(coded: list[bytes], old: Side) -> Side:
    import blosc2

    made = [np.empty_like(a) for a in old]
    for data, differ, a in zip(coded, made, old, strict=True):
        blosc2.decompress2(data, dst=differ, nthreads=1)
        differ ^= a
    return made


def _write_blosc(coded: list[bytes], live: Side) -> None:
    import blosc2

    for data, a in zip(coded, live, strict=True):
        differ = np.empty_like(a)
        blosc2.decompress2(data, dst=differ, nthreads=1)
        a ^= differ


# ZipNN


def _zipnn(width: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from zipnn import ZipNN  # type: ignore[import-not-found]
    kinds = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}
    return ZipNN(input_format="byte", bytearray_dtype=kinds[width], delta_compressed_type="byte", threads=1)


def _zipnn_delta(old: Side, new: Side) -> list[bytes]:
    pairs = zip(old, new, strict=True)
    return [bytes(_zipnn(a.itemsize).compress(b.tobytes(), delta_second_data=a.tobytes())) for a, b in pairs]


def _undo_zipnn(coded: list[bytes], old: Side) -> Side:
    pairs = zip(coded, old, strict=True)
    return [
        np.frombuffer(_zipnn(a.itemsize).decompress(data, delta_second_data=a.tobytes()), a.dtype) for data, a in pairs
    ]


# two files


def _in_memory() -> str | None:
    """Where files cost no disk."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


Program = Callable[[Path, Path, Path], list[str]]
"""The command line for old file, file to read and file to write."""


def _each_file(program: Program, old: Side, read: Iterable[bytes | Codes]) -> list[bytes]:
    """What a program makes of each part, with the old version's file beside it."""
    made = []
    with tempfile.TemporaryDirectory(dir=_in_memory()) as scratch:
        before, source, target = (Path(scratch) / name for name in ("old", "read", "made"))
        for a, data in zip(old, read, strict=True):
            a.tofile(before)
            source.write_bytes(data if isinstance(data, bytes) else data.data.cast("B"))
            subprocess.run(program(before, source, target), check=True)
            made.append(target.read_bytes())
    return made


def _by_program(encode: Program, decode: Program) -> tuple[Encode, Decode]:
    def undo(coded: list[bytes], old: Side) -> Side:
        made = _each_file(decode, old, coded)
        return [np.frombuffer(data, a.dtype) for data, a in zip(made, old, strict=True)]

    return partial(_each_file, encode), undo


def _patch_from(*level: str) -> tuple[Encode, Decode]:
    def line(*mode: str) -> Program:
        base = ["zstd", "-q", "-f", "--single-thread", "--long=31", *mode]
        return lambda old, read, made: [*base, f"--patch-from={old}", str(read), "-o", str(made)]

    return _by_program(line(*level), line("-d"))


def _xdelta(*mode: str) -> tuple[Encode, Decode]:
    def window(old: Path) -> list[str]:
        return ["-B", str(1 << max(20, old.stat().st_size.bit_length()))]  # all of the old file

    def encode(old: Path, read: Path, made: Path) -> list[str]:
        largest = ["-W", str(1 << 24)]
        return ["xdelta3", "-e", "-q", "-f", *mode, *largest, *window(old), "-s", str(old), str(read), str(made)]

    def decode(old: Path, read: Path, made: Path) -> list[str]:
        return ["xdelta3", "-d", "-q", "-f", *window(old), "-s", str(old), str(read), str(made)]

    return _by_program(encode, decode)


def _bsdiff(old: Side, new: Side) -> list[bytes]:
    import bsdiff4  # type: ignore[import-not-found]

    return [bytes(bsdiff4.diff(a.tobytes(), b.tobytes())) for a, b in zip(old, new, strict=True)]


def _undo_bsdiff(coded: list[bytes], old: Side) -> Side:
    import bsdiff4

    pairs = zip(coded, old, strict=True)
    return [np.frombuffer(bsdiff4.patch(a.tobytes(), data), a.dtype) for data, a in pairs]


def peers() -> list[Peer]:
    """All of them, those that are not here among them."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # last: etude's own packages come first
    zstds = [Zstd(1), Zstd(3), Zstd(9), Zstd(19), Zstd(19, long=True)]
    found = []
    for zstd in zstds:
        usual, slow = zstd.level == 1, zstd.level == 19
        xor, planes, gaps = (partial(zips, zstd) for zips in (_zip_xor, _zip_planes, _zip_gaps))
        found += [
            Peer(f"XOR + {zstd.name}", xor, _undo_xor, write=_write_xor, usual=usual, slow=slow),
            Peer(f"XOR + planes + {zstd.name}", planes, _undo_planes, usual=usual, slow=slow),
            Peer(f"gaps + codes + {zstd.name}", gaps, _undo_gaps, write=_write_gaps, usual=usual),
        ]
    bloscs = [
        *(Blosc("SHUFFLE", "ZSTD", level) for level in (1, 5)),
        *(Blosc("BITSHUFFLE", "ZSTD", level) for level in (1, 5)),
        *(Blosc(planes, "ZSTD", 9, 1 << 22) for planes in ("SHUFFLE", "BITSHUFFLE")),
        *(Blosc("BITSHUFFLE", "LZ4", level) for level in (1, 9)),
    ]
    no_blosc, no_zipnn, no_bsdiff = map(_no_module, ("blosc2", "zipnn", "bsdiff4"))
    no_zstd, no_xdelta = map(_no_program, ("zstd", "xdelta3"))
    found += [
        Peer(b.name, b.encode, _undo_blosc, no_blosc, _write_blosc, usual=b is bloscs[3], slow=b.level == 9)
        for b in bloscs
    ]
    found.append(Peer("ZipNN delta", _zipnn_delta, _undo_zipnn, no_zipnn, usual=True))
    found.append(Peer("zstd --patch-from", *_patch_from(), no_zstd, usual=True))
    found += [
        Peer(f"zstd --patch-from {' '.join(level)}", *_patch_from(*level), no_zstd, slow=level != ("-1",))
        for level in (("-1",), ("-9",), ("-19",), ("--ultra", "-22", "--zstd=targetLength=4096"))
    ]
    found += [
        Peer(f"xdelta3 {' '.join(mode)}", *_xdelta(*mode), no_xdelta, slow=True)
        for mode in (("-1", "-S", "none"), ("-9", "-S", "lzma"))
    ]
    found.append(Peer("bsdiff", _bsdiff, _undo_bsdiff, no_bsdiff, slow=True))
    return found


def _no_module(name: str) -> str:
    return "" if importlib.util.find_spec(name) else f"the package `{name}` is not installed"


def _no_program(name: str) -> str:
    return "" if shutil.which(name) else f"there is no program `{name}`"


def versions() -> dict[str, str]:
    """Of what is here."""
    peers()
    packages = ("zstandard", *(package.partition("==")[0] for package in PACKAGES))
    found = {"zstd in zstandard": ".".join(map(str, zstandard.ZSTD_VERSION))}
    for name in packages:
        if importlib.util.find_spec(name):
            found[name] = importlib.metadata.version(name)
    for name in filter(shutil.which, PROGRAMS):
        done = subprocess.run([name, "-V"], capture_output=True, text=True, check=False)
        found[f"program {name}"] = (done.stdout + done.stderr).strip().splitlines()[0]
    return found


def install(folder: Path = FOLDER) -> None:
    """Install the packages into a folder of their own."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    subprocess.run([*pip, "--no-deps", "--target", str(folder), *PACKAGES], check=True)


def main() -> None:
    install()
    for program, package in PROGRAMS.items():
        if why := _no_program(program):
            print(f"{why}: apt-get install {package}", file=sys.stderr)
    for name, version in versions().items():
        print(f"{name}: {version}")


if __name__ == "__main__":
    main()

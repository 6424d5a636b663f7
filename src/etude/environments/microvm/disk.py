"""Make a reproducible ext4 filesystem from a folder with `mkfs.ext4 -d`.

It has no journal, since the disk of a machine never outlives its memory. Times that mkfs takes from the clock and from
the inodes of the folder are overwritten afterwards.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from etude.environments.microvm.packages import require, run

_UUID = "6c7a1f6e-3d0b-4f54-9a8e-5f1c2b7d9e01"
_SUPERBLOCK = 1024
_FEATURES = (
    "^has_journal,^metadata_csum,^uninit_bg,^resize_inode,^orphan_file,extent,64bit,dir_index,huge_file,filetype"
)
_TIMES = (0x08, 0x0C, 0x10)  # of an inode: access, change, modification
_EXTRA = range(0x84, 0x98, 4)  # nanoseconds of the three, and the time of creation


def make_disk(root: Path, path: Path, *, num_bytes: int, epoch: int) -> None:
    """Write the content of the folder `root` to `path`, as a sparse ext4 image of `num_bytes`.

    `epoch`: Unix time in seconds, for all times in the image. Raises `MachineError` if the content does not fit or
    mkfs.ext4 is missing.
    """
    require({"mkfs.ext4": "e2fsprogs"})
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(num_bytes)
    options = ["-q", "-F", "-b", "4096", "-I", "256", "-m", "0", "-U", _UUID, "-O", _FEATURES]
    extended = f"hash_seed={_UUID},root_owner=0:0,lazy_itable_init=0,nodiscard"
    command = ["mkfs.ext4", *options, "-E", extended, "-d", str(root), str(path)]
    as_root = [] if os.geteuid() == 0 else ["unshare", "--map-root-user"]
    env = {"SOURCE_DATE_EPOCH": str(epoch), "E2FSPROGS_FAKE_TIME": str(epoch)}
    run([*as_root, *command], f"making a filesystem of {root}", deadline_s=600.0, env=env)
    _set_times(path, epoch)


def _set_times(path: Path, epoch: int) -> None:
    with path.open("r+b") as file:
        file.seek(_SUPERBLOCK)
        head = file.read(1024)
        (num_blocks, first) = struct.unpack_from("<I12xI", head, 4)
        per_group, inodes_per_group = struct.unpack_from("<I4xI", head, 32)
        inode_bytes, descriptor_bytes = struct.unpack_from("<H", head, 88)[0], struct.unpack_from("<H", head, 254)[0]
        file.seek(4096 * (first + 1))
        groups = -(-num_blocks // per_group)
        descriptors = file.read(descriptor_bytes * groups)
        for group in range(groups):
            low, high = struct.unpack_from("<I28xI", descriptors, group * descriptor_bytes + 8)
            _set_times_of_table(file.fileno(), (high << 32 | low) * 4096, inodes_per_group, inode_bytes, epoch)
        for at in (44, 48, 64, 264):  # mounted, written, checked, made
            file.seek(_SUPERBLOCK + at)
            file.write(struct.pack("<I", 0 if at == 44 else epoch))


def _set_times_of_table(fd: int, at: int, inodes: int, inode_bytes: int, epoch: int) -> None:
    table = bytearray(os.pread(fd, inodes * inode_bytes, at))
    for start in range(0, len(table), inode_bytes):
        if not any(table[start : start + 128]):
            continue
        for field in _TIMES:
            struct.pack_into("<I", table, start + field, epoch)
        for field in _EXTRA:
            struct.pack_into("<I", table, start + field, epoch if field == 0x90 else 0)
    os.pwrite(fd, table, at)

"""Open paths inside another root folder with openat2(2), which Python does not offer.

Links, even absolute ones, are resolved as by a process with that root folder, and never lead out of it. The kernel
guarantees this even while the tree is being changed; a check of names before the call could not.
"""

from __future__ import annotations

import ctypes
import errno
import os

from etude.errors import MachineError

_OPENAT2 = 437  # the same number on every architecture
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _IN_ROOT = 1, 2, 4, 16
_libc = ctypes.CDLL(None, use_errno=True)


def open_in(root: int, path: str, flags: int, *, follow: bool = True, one_mount: bool = False) -> int:
    """Open `path` as a process with the root folder `root` would, and return the new file descriptor.

    `root` is a folder's descriptor and `flags` are those of `os.open`. `follow` False refuses all links on the way. A
    link at the end is not followed if `flags` has O_NOFOLLOW. `one_mount` refuses to cross mount points. Raises
    `OSError`, and `MachineError` on a kernel without openat2."""
    resolve = _IN_ROOT | _NO_MAGICLINKS | (0 if follow else _NO_SYMLINKS) | (_NO_XDEV if one_mount else 0)
    how = (ctypes.c_uint64 * 3)(flags | os.O_CLOEXEC, 0, resolve)
    _libc.syscall.restype = ctypes.c_long
    while True:
        fd: int = _libc.syscall(
            ctypes.c_long(_OPENAT2), root, os.fsencode(path), how, ctypes.c_size_t(ctypes.sizeof(how))
        )
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number == errno.ENOSYS:
            raise MachineError(
                "images cannot be made here", "this kernel has no openat2", hint="use Linux 5.6 or later"
            )
        if number not in (errno.EAGAIN, errno.EINTR):  # EAGAIN: something was renamed on the way
            raise OSError(number, os.strerror(number), path)

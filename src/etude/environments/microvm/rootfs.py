"""Unpack Debian packages into a root filesystem, without running their scripts.

So this needs no root privileges, and the result depends only on the packages. The few files that the scripts would
create for a machine without network and services are written here. /bin, /sbin and /lib are links to /usr, as in
Debian.
"""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path, PurePosixPath

from etude.environments.images.limits import ImageLimits
from etude.environments.images.listing import Owner
from etude.environments.images.openat import open_in
from etude.environments.images.tree import Tree
from etude.environments.microvm.packages import Package, run
from etude.errors import MachineError

EPOCH = 1_700_000_000  # modification time of all files
WORK = "/workspace"
_CHUNK_BYTES = 1 << 20
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_LEFT_OUT = tuple(f"usr/share/{name}/" for name in ("doc", "man", "locale", "info", "lintian", "bug", "doc-base"))
_FOLDERS = {
    "dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "tmp": 0o1777, "root": 0o700, "home": 0o755,
    "var/tmp": 0o1777, "etc": 0o755, "mnt": 0o755, "opt": 0o755, "srv": 0o755, "usr/local/bin": 0o755,
    "var/lib": 0o755, "var/log": 0o755, "var/cache": 0o755, WORK[1:]: 0o755,
}  # fmt: skip
_FILES = {
    "etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:{WORK}:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    "etc/hostname": "machine\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/machine-id": "",
}
_LINKS = {
    "usr/bin/python": "python3",
    "usr/bin/awk": "mawk",
    "usr/bin/pager": "less",
    "var/run": "/run",
    "etc/mtab": "/proc/self/mounts",
}


def unpack(packages: Iterable[Package], root: Path) -> None:
    """Create the folder `root` with the files of the packages and the files that each machine needs.

    Links never lead out of it. Raises `OSError` if the disk is full, `BadSource` for invalid files in a package.
    """
    root.mkdir(parents=True)
    with Tree(root, ImageLimits(), keep_setuid=True) as tree:
        for name in _MERGED:
            tree.folder(f"usr/{name}")
            tree.link(name, f"usr/{name}", Owner(0o777))
        for package in packages:
            _unpack_one(package, tree)
        for name, mode in _FOLDERS.items():
            _folder(tree, name, mode)
        for name, text in _FILES.items():
            tree.file(name, Owner(0o644), (text.encode(),))
        for name, target in _LINKS.items():
            if not _is_link(tree, name):
                tree.link(name, target, Owner(0o777))


def _unpack_one(package: Package, tree: Tree) -> None:
    command = ["dpkg-deb", "--fsys-tarfile", str(package.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as unpacking:
        assert unpacking.stdout is not None
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as tar:
            for member in tar:
                name = install_path(member.name)
                if name and not f"{name}/".startswith(_LEFT_OUT):
                    _put(tar, member, tree, name)
        unpacking.stdout.read()
    if unpacking.returncode:
        raise MachineError(f"{package.path.name} cannot be unpacked", "dpkg-deb failed", hint="delete it and try again")


def install_path(name: str) -> str:
    """Return the path where a file of a package is installed; "" for the root, and for names with "..".

    >>> install_path("./bin/sh"), install_path("./usr/bin/git"), install_path("./")
    ('usr/bin/sh', 'usr/bin/git', '')
    """
    parts = [part for part in PurePosixPath(name).parts if part not in (".", "/")]
    if not parts or ".." in parts:
        return ""
    return "/".join(["usr", *parts] if parts[0] in _MERGED else parts)


def _put(tar: tarfile.TarFile, member: tarfile.TarInfo, tree: Tree, name: str) -> None:
    if member.isdir():
        _folder(tree, name, member.mode)
    elif member.issym():
        tree.link(name, member.linkname, Owner(0o777))
    elif member.islnk():
        tree.hard_link(name, install_path(member.linkname))
    elif member.isreg():
        content = tar.extractfile(member)
        assert content is not None
        tree.file(name, Owner(member.mode), iter(partial(content.read, _CHUNK_BYTES), b""))


def _folder(tree: Tree, name: str, mode: int) -> None:
    """Make a folder, but keep a link to a folder, as dpkg does."""
    if not (_is_link(tree, name) and tree.is_folder(name)):
        tree.folder(name, Owner(mode))


def _is_link(tree: Tree, name: str) -> bool:
    try:
        fd = open_in(tree.root, name, os.O_PATH | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return stat.S_ISLNK(os.fstat(fd).st_mode)
    finally:
        os.close(fd)


def finish(root: Path) -> None:
    """Create the library cache and Python's compiled modules in the folder `root`, and set all times to `EPOCH`.

    The result depends only on the files in it.
    """
    changing_root = ["chroot", str(root)] if os.geteuid() == 0 else ["unshare", "--map-root-user", "chroot", str(root)]
    env = {"PATH": "/usr/bin:/usr/sbin", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    run([*changing_root, "ldconfig"], "ldconfig in the image", deadline_s=60.0, env=env)
    compiling = ["python3", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "/usr/lib/python3"]
    folders = [f"/usr/lib/{path.name}" for path in sorted((root / "usr/lib").glob("python3.*"))]
    run([*changing_root, *compiling, *folders], "compiling Python's modules", deadline_s=600.0, env=env)
    with Tree(root, ImageLimits(), keep_setuid=True) as tree:
        tree.remove("var/cache/ldconfig")
    for folder, folders_in, names in os.walk(root, topdown=False):
        for name in [*names, *folders_in]:
            os.utime(os.path.join(folder, name), (EPOCH, EPOCH), follow_symlinks=False)
    os.utime(root, (EPOCH, EPOCH))
